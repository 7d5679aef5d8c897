"""A dataset's description as one HTML file: schema, sizes, samples with thumbnails. No script, no network.

All that comes out of the dataset is escaped or re-encoded (invariant 10): text through `html.escape`, images
as thumbnails that are drawn again here.
"""

from __future__ import annotations

import base64
import io
from html import escape
from typing import Any

from shards.describe import Description, summarize
from shards.progress import format_bytes, format_count

_THUMBNAIL = 160

STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 68rem; padding: 0 1rem }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse }
th, td { text-align: left; padding: .3rem .9rem .3rem 0; vertical-align: top }
th { font-weight: 600 } td.n { text-align: right; font-variant-numeric: tabular-nums }
tr + tr > * { border-top: 1px solid #8884 }
.samples { display: grid; grid-template-columns: repeat(auto-fill, minmax(15rem, 1fr)); gap: 1rem }
.sample { border: 1px solid #8886; border-radius: .5rem; padding: .8rem; overflow: hidden }
.sample img { max-width: 100%; image-rendering: auto; background: #8882; border-radius: .25rem }
.sample dt { font-size: .8rem; opacity: .7 } .sample dd { margin: 0 0 .5rem; overflow-wrap: anywhere }
code { font-size: .9em }
"""


def page(description: Description) -> str:
    """The whole file."""
    facts = [
        ("samples", f"{description.samples:,}"),
        ("shards", f"{description.shards:,}"),
        ("raw", format_bytes(description.raw_bytes)),
        ("stored", format_bytes(description.stored_bytes)),
        ("compression", ", ".join(description.compressions)),
        ("digests", ", ".join(description.hashes) or "none"),
        ("version", description.version or "–"),
        ("written by", description.created_by or "another tool"),
    ]
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width'>",
        f"<title>{escape(description.url)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{escape(description.url)}</h1><table>",
        *(f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>" for name, value in facts),
        "</table><h2>Columns</h2>",
        _columns(description),
        "<h2>Samples</h2><div class='samples'>",
        *(_sample(number, row) for number, row in description.rows),
        "</div></body></html>\n",
    ]
    return "\n".join(parts)


def _columns(description: Description) -> str:
    rows = "".join(
        f"<tr><td>{escape(column.name)}</td><td><code>{escape(column.encoding)}</code></td>"
        f"<td class='n'>{format_bytes(column.bytes)}</td><td class='n'>{column.smallest:,}</td>"
        f"<td class='n'>{column.largest:,}</td></tr>"
        for column in description.columns
    )
    head = "<tr><th>name</th><th>encoding</th><th>bytes</th><th>smallest</th><th>largest</th></tr>"
    samples = format_count(description.measured_samples, "sample")
    note = f"<p>Sizes of {samples} in {format_count(description.measured, 'shard')}.</p>"
    return f"<table>{head}{rows}</table>{note}"


def _sample(number: int, row: dict[str, Any]) -> str:
    parts = [f"<div class='sample'><strong>{number:,}</strong><dl>"]
    for name, value in row.items():
        shown = _thumbnail(value) or escape(summarize(value, width=400))
        parts.append(f"<dt>{escape(name)}</dt><dd>{shown}</dd>")
    return "".join(parts) + "</dl></div>"


def _thumbnail(value: Any) -> str:
    """An image as a small PNG in the page; empty for what is none."""
    if not type(value).__module__.startswith("PIL."):
        return ""
    try:
        image = value.convert("RGBA")
        image.thumbnail((_THUMBNAIL, _THUMBNAIL))
    except (OSError, ValueError, SyntaxError):
        return "an image that cannot be decoded"
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return f"<img alt='' src='data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}'>"
