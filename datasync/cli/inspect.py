"""`datasync inspect`: what is in a dataset."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from datasync.config import Config
    from datasync.storage import Store
    from shards.describe import Description


def inspect(
    place: Annotated[
        str,
        typer.Argument(help="A folder, a URL, cluster:name, or the name of a dataset.", show_default=False),
    ],
    samples: Annotated[int, typer.Option("--samples", "-n", min=0, help="How many samples to show.")] = 3,
    everything: Annotated[
        bool, typer.Option("--all", help="Measure columns on every shard. [default: on those of the samples]")
    ] = False,
    html: Annotated[
        Path | None, typer.Option(help="Write a page with thumbnails to this file.", show_default=False)
    ] = None,
    allow_unsafe_types: Annotated[
        bool, typer.Option("--allow-unsafe-types", help="Decode columns whose reading may run code (pkl).")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.")] = False,
) -> None:
    """Show what is in a dataset: schema, counts, sizes, a few samples.

    \b
      datasync inspect datasets/photos
      datasync inspect cluster-a:photos --samples 10
      datasync inspect s3://bucket/photos -n 60 --html photos.html
    """
    from datasync.cli import load_config
    from shards.describe import describe
    from shards.errors import UsageError

    store = _store(load_config(), place)
    found = describe(store, samples=samples, everything=everything, unsafe=allow_unsafe_types)
    if html is not None:
        from datasync.web.dataset_page import page

        try:
            html.write_text(page(found), encoding="utf-8")
        except OSError as error:
            raise UsageError(
                f"{html} cannot be written: {error.strerror}", mend="give a file in a folder that is there"
            ) from error
    if as_json:
        print(json.dumps(_as_json(found), indent=2))
    else:
        _show(found, rows=html is None)
        if html is not None:
            print(f"\n{len(found.rows):,} samples are in {html}")


def _store(config: Config, place: str) -> Store:
    """Where the dataset lies: a path or a URL as it is, a name at its home or where it is first found."""
    from shards.errors import UsageError

    recipe = config.datasets.get(place)
    if recipe is not None and recipe.home is not None:
        return config.resolve(f"{recipe.home}:{place}")
    if any(mark in place for mark in ":/.") or Path(place).exists():
        return config.resolve(place)
    clusters = config.find_dataset(place)
    if not clusters:
        raise UsageError(f"no cluster has a dataset {place}", mend="give its folder, URL or cluster:name")
    return config.dataset_store(clusters[0].name, place)


def _show(found: Description, *, rows: bool) -> None:
    from shards.describe import summarize
    from shards.progress import format_bytes, format_count

    version = f" {found.version[:12]}" if found.version else ""
    print(f"{found.url}{version}")
    print(
        f"{format_count(found.samples, 'sample')} · {format_count(found.shards, 'shard')}"
        f" · {format_bytes(found.stored_bytes)} stored",
        end="",
    )
    print(f" · {format_bytes(found.raw_bytes)} raw · {', '.join(found.compressions)}")
    print(f"digests: {', '.join(found.hashes) or 'none'} · written by {found.created_by or 'another tool'}\n")
    width = max([len(column.name) for column in found.columns] + [6])
    kind = max([len(column.encoding) for column in found.columns] + [8])
    print(f"{'column':<{width}}  {'encoding':<{kind}}  {'bytes':>10}  {'smallest':>12}  {'largest':>12}")
    for column in found.columns:
        name = summarize(column.name, width=width) or repr(column.name)
        sizes = ("-", "-", "-")
        if found.measured_samples:
            sizes = (format_bytes(column.bytes), f"{column.smallest:,}", f"{column.largest:,}")
        print(f"{name:<{width}}  {column.encoding:<{kind}}  {sizes[0]:>10}  {sizes[1]:>12}  {sizes[2]:>12}")
    print(
        f"sizes of {format_count(found.measured_samples, 'sample')}"
        f" in {found.measured:,} of {format_count(found.shards, 'shard')}"
    )
    for number, row in found.rows if rows else ():
        print(f"\nsample {number:,}")
        for name, value in row.items():
            print(f"  {summarize(name, width=width) or repr(name):<{width}}  {summarize(value)}")


def _as_json(found: Description) -> dict[str, Any]:
    from dataclasses import asdict, replace

    from shards.describe import summarize

    document = asdict(replace(found, rows=[]))
    document["rows"] = [
        {"sample": number, "values": {name: summarize(value, width=400) for name, value in row.items()}}
        for number, row in found.rows
    ]
    return document
