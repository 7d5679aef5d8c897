"""`datasync status`: parse, call `datasync.ops.status`, print."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from datasync.ops.status import Place


def status(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Datasets. [default: all configured or found]"),
    ] = None,
    cluster: Annotated[list[str] | None, typer.Option(help="Only these clusters.")] = None,
    json_output: Annotated[
        bool, typer.Option("--json", help="One JSON document on standard output.")
    ] = False,
) -> None:
    """Show which cluster has what, and whether it is whole.

    \b
      datasync status
      datasync status emoji --cluster cluster-b --json

    \b
    Exit codes: 0 every cluster answered, 1 one could not be asked, 2 usage, 3 a copy is damaged or
    unsigned.
    """
    import json
    import sys
    from dataclasses import asdict

    from datasync.cli import load_config
    from datasync.errors import UsageError
    from datasync.ops.judgement import DAMAGED, UNSIGNED
    from datasync.ops.status import status as look
    from datasync.ops.targets import split

    config = load_config()
    if not config.clusters:
        raise UsageError(
            "no cluster is configured", mend="write [clusters.NAME] with its url into datasync.toml"
        )
    chosen = split(cluster or [])
    places, silent = look(config, names or [], chosen)
    if json_output:
        document = {"places": [asdict(place) for place in places], "unreachable": silent}
        print(json.dumps(document, indent=1, ensure_ascii=False))
    elif places:
        _table(places)
    elif not silent:
        print("no dataset is configured, and none was found at any cluster")
    for name, why in silent.items():
        print(f"error: {name} could not be asked: {why}", file=sys.stderr)
    damaged = [place for place in places if place.state in (DAMAGED, UNSIGNED)]
    for place in damaged:
        if place.error:
            print(f"error: {place.dataset} at {place.cluster}: {place.error}", file=sys.stderr)
    if silent or damaged:
        raise typer.Exit(1 if silent else 3)


def _table(places: list[Place]) -> None:
    rows: list[tuple[str, ...]] = [
        ("dataset", "cluster", "state", "version", "size", "missing", "age", "verified")
    ]
    rows += map(_row, places)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _row(place: Place) -> tuple[str, ...]:
    from datasync.ops.receipts import age_seconds
    from shards.progress import format_bytes, format_count

    checked = "-"
    if place.verified:
        checked = f"{_age(age_seconds(place.verified['at']))} ago ({place.verified['mode']})"
    return (
        place.dataset,
        place.cluster,
        place.state,
        f"{place.version[:6]}…" if place.version else "-",
        "-"
        if place.bytes is None
        else f"{format_count(place.objects or 0, 'object')} · {format_bytes(place.bytes)}",
        "-" if place.missing_bytes is None else format_bytes(place.missing_bytes),
        "-" if place.age_seconds is None else _age(place.age_seconds),
        checked,
    )


def _age(seconds: float) -> str:
    """``12 s``, ``7 m``, ``5 h``, ``3 d``: one unit is enough to see what is old."""
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
