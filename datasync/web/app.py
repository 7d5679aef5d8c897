"""The viewer: which cluster has what, and what is in a dataset, as pages for a browser.

    /                      every dataset at every cluster, as `datasync status` has it
    /CLUSTER/DATASET       schema, sizes and samples, as `datasync inspect` has them; ?samples=N

It only reads. Everything that comes from a store is escaped or drawn again (invariant 10), pages carry no
script, and a page is never framed or cached by others.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from datasync.ops.status import Place, status
from datasync.web.dataset_page import STYLE, page
from shards.describe import describe
from shards.errors import DatasyncError
from shards.progress import format_bytes

if TYPE_CHECKING:
    from datasync.config import Config

MOST_SAMPLES = 500

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; img-src data:; style-src 'unsafe-inline';"
    " frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
_HEAD = ("dataset", "cluster", "state", "version", "objects", "size", "missing", "last verified")
_GOOD = ("home", "whole")


def make_app(config: Config) -> Starlette:
    """The application for one configuration."""

    async def overview(request: Request) -> Response:
        return _answer(await run_in_threadpool(lambda: overview_page(status(config)[0])))

    async def dataset(request: Request) -> Response:
        cluster, name = request.path_params["cluster"], request.path_params["dataset"]
        try:
            samples = min(max(int(request.query_params.get("samples", "12")), 0), MOST_SAMPLES)
        except ValueError:
            samples = 12
        try:
            store = config.dataset_store(cluster, name)
            return _answer(await run_in_threadpool(lambda: page(describe(store, samples=samples))))
        except DatasyncError as error:
            return _answer(_frame("Not shown", f"<p>{escape(str(error))}</p>"), code=404)

    return Starlette(routes=[Route("/", overview), Route("/{cluster}/{dataset:path}", dataset)])


def overview_page(places: list[Place]) -> str:
    """The table of datasets and clusters."""
    rows = "".join(_row(place) for place in places)
    head = "".join(f"<th>{name}</th>" for name in _HEAD)
    empty = "<p>No dataset is configured, and none was found at any cluster.</p>"
    return _frame("Datasets", f"<table><tr>{head}</tr>{rows}</table>" if rows else empty)


def _row(place: Place) -> str:
    link = f"/{quote(place.cluster, safe='')}/{quote(place.dataset)}"
    known = place.version is not None
    name = f"<a href='{link}'>{escape(place.dataset)}</a>" if known else escape(place.dataset)
    verified = f"{escape(place.verified['at'])} ({escape(place.verified['mode'])})" if place.verified else "–"
    state = f"<strong class='{'good' if place.state in _GOOD else 'other'}'>{escape(place.state)}</strong>"
    cells = (
        name,
        escape(place.cluster),
        state + (f"<br>{escape(place.error)}" if place.error else ""),
        f"<code>{escape(place.version[:12])}</code>" if place.version else "–",
        f"{place.objects:,}" if place.objects is not None else "–",
        format_bytes(place.bytes) if place.bytes is not None else "–",
        format_bytes(place.missing_bytes) if place.missing_bytes is not None else "–",
        verified,
    )
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _frame(title: str, body: str) -> str:
    style = STYLE + ".good { color: #2a8a4a } .other { color: #c2571a }"
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        f"<title>{escape(title)} · datasync</title>"
        f"<meta name='viewport' content='width=device-width'><style>{style}</style></head>"
        f"<body><h1>{escape(title)}</h1>{body}</body></html>\n"
    )


def _answer(html: str, *, code: int = 200) -> Response:
    return HTMLResponse(html, status_code=code, headers=_HEADERS)


def serve(config: Config, *, host: str, port: int) -> None:
    """Serve until a signal ends it."""
    import uvicorn

    uvicorn.run(make_app(config), host=host, port=port, log_level="warning", proxy_headers=False)
