"""`datasync shard`: a corpus in, a dataset of MDS shards out."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from datasync.config import Config
    from shards.convert import ConvertResult
    from shards.find import Found


def shard(
    places: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE... OUT | NAME",
            help="Files, folders, globs or URLs and where the dataset goes: a folder, a URL, cluster:name. "
            "Or a dataset of datasync.toml.",
            show_default=False,
        ),
    ],
    format: Annotated[str | None, typer.Option(help="Kind of source. [default: found by looking]")] = None,
    columns: Annotated[str | None, typer.Option(help="Columns and encodings: caption:str,image:jpeg")] = None,
    select: Annotated[str | None, typer.Option(help="Take only these columns: text,image")] = None,
    drop: Annotated[str | None, typer.Option(help="Leave these columns out.")] = None,
    rename: Annotated[str | None, typer.Option(help="Rename columns: text=caption")] = None,
    caption: Annotated[
        str | None,
        typer.Option(help="Name of the column made from text files beside media. [default: caption]"),
    ] = None,
    media: Annotated[
        str | None, typer.Option(help="Columns that name files to read: image:path or image:url")
    ] = None,
    media_check: Annotated[
        str | None,
        typer.Option(help="How far media is checked: none, kind, whole, full. [default: whole for files]"),
    ] = None,
    media_info: Annotated[
        bool | None,
        typer.Option("--media-info", help="Add image.width, audio.sample_rate, video.duration, …"),
    ] = None,
    max_image_size: Annotated[
        int | None, typer.Option(help="Shrink images whose longer side has more pixels.")
    ] = None,
    image_format: Annotated[
        str | None, typer.Option(help="Store images as jpeg, png or webp. [default: as they are]")
    ] = None,
    resample: Annotated[
        int | None, typer.Option(help="Store audio as WAV of this rate in Hz. [default: as it is]")
    ] = None,
    transform: Annotated[
        str | None,
        typer.Option(help="MODULE:FUNCTION from a row to a row, None or several."),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(help="Divide by a hash of the key: train=0.98,val=0.02"),
    ] = None,
    key: Annotated[str | None, typer.Option(help="Column that identifies a row, for --split.")] = None,
    shuffle_seed: Annotated[int | None, typer.Option(help="Shuffle all rows.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="bytes, a tokenizer.json, or a tiktoken file.")
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option(help="Tokens in a sample. [default: one sample a document]")
    ] = None,
    packing: Annotated[str | None, typer.Option(help="concat or best-fit. [default: concat]")] = None,
    text: Annotated[str | None, typer.Option(help="The column that is tokenised. [default: text]")] = None,
    eos: Annotated[
        int | None, typer.Option(help="Token behind each document. [default: the tokenizer's]")
    ] = None,
    delimiter: Annotated[
        str | None, typer.Option(help="Separator in CSV. [default: found by looking]")
    ] = None,
    encoding: Annotated[str | None, typer.Option(help="Character set of text. [default: utf-8]")] = None,
    lines: Annotated[bool | None, typer.Option("--lines", help="Text files: one row a line.")] = None,
    max_line_bytes: Annotated[
        str | None, typer.Option(help="Longest line taken as a row. [default: 128mb]")
    ] = None,
    compression: Annotated[
        str | None, typer.Option(help="zstd:LEVEL, gz, bz2, br, snappy or none. [default: zstd:3]")
    ] = None,
    size_limit: Annotated[
        str | None, typer.Option(help="Bytes of a raw shard at most. [default: 64mb]")
    ] = None,
    hashes: Annotated[str | None, typer.Option(help="Digests to keep beside sha256 and xxh3_64.")] = None,
    append: Annotated[
        bool | None,
        typer.Option("--append", help="Add new files to the dataset, as a new version."),
    ] = None,
    overwrite: Annotated[
        bool | None,
        typer.Option("--overwrite", help="Publish in place of another dataset."),
    ] = None,
    on_error: Annotated[
        str | None,
        typer.Option(help="Bad rows: fail, or skip into the quarantine. [default: fail]"),
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Processes. [default: one a CPU]")] = None,
    engine: Annotated[str | None, typer.Option(help="local or ray. [default: local]")] = None,
    address: Annotated[str | None, typer.Option(help="The Ray cluster. [default: one started here]")] = None,
    task: Annotated[
        str | None,
        typer.Option(
            metavar="I/N",
            help="Run share I of N and publish nothing; then datasync merge.",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show columns and size, write nothing.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, one line at the end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.")] = False,
) -> None:
    """Turn a corpus into compressed, checksummed MDS shards with an index.

    Run it again after any interruption: it goes on where it stopped, and the result has the same bytes.

    \b
      datasync shard photos/ datasets/photos              images and captions
      datasync shard photos/ datasets/photos --dry-run    what would come of it
      datasync shard 'crawl/*.jsonl.zst' cluster-a:crawl  or s3://bucket/crawl
      datasync shard books/ datasets/books --tokenizer bytes --seq-len 2048
      datasync shard t.csv datasets/t --split train=0.9,val=0.1 --on-error skip
      datasync shard photos/ datasets/photos --append     what is new in photos/
      datasync shard photos                               a recipe in the config

    Exit code 3: done, but rows were skipped into the quarantine (--on-error skip).
    """
    given = dict(locals())
    from datasync.cli import load_config
    from datasync.cli.shard_options import READERS, read_options, read_share

    config = load_config()
    asked = read_options({name: given[name] for name in READERS}, where="datasync shard")
    sources, out, recipe = _places(config, places)
    options = {**recipe, **asked, "quiet": quiet or as_json, "task": read_share(task)}
    if dry_run:
        raise typer.Exit(_dry_run(config, sources, out, options, as_json))
    result = _convert(config, sources, out, options)
    if as_json:
        print(json.dumps(_as_json(result), indent=2))
    elif quiet:
        print(_line(result))
    else:
        show(result, task=task, out=places[-1])
        if result.published:
            print(f"{'next':<8} {_next_step(config, result, places)}")
    raise typer.Exit(3 if result.skipped else 0)


def _places(config: Config, places: Sequence[str]) -> tuple[list[str], str, dict[str, Any]]:
    """Sources, destination, and the options of a recipe."""
    from datasync.cli.shard_options import read_options
    from shards.errors import UsageError

    if len(places) > 1:
        return list(places[:-1]), places[-1], {}
    (name,) = places
    recipe = config.datasets.get(name)
    if recipe is None:
        known = ", ".join(config.datasets) or "none"
        raise UsageError(
            f"{name} is no dataset of the configuration, and no destination is given",
            mend=f"datasync shard {name} OUT; configured datasets: {known}",
        )
    if recipe.source is None or recipe.home is None:
        missing = "source" if recipe.source is None else "home"
        raise UsageError(
            f"the dataset {name} has no {missing}", mend=f"write {missing} = … into [datasets.{name}]"
        )
    options = read_options(recipe.shard, where=f"[datasets.{name}] shard")
    return [recipe.source], f"{recipe.home}:{name}", options


def _convert(config: Config, sources: list[str], out: str, options: dict[str, Any]) -> ConvertResult:
    from datasync.cli.places import locate
    from shards.convert import convert
    from shards.errors import UsageError

    if os.path.isfile(out):
        raise UsageError(f"{out} is a file", mend="give the folder that the dataset is to have")
    if out.startswith(("http://", "https://")):
        raise UsageError(
            f"{out} is a web address, and nothing can be written there",
            mend="give a folder, s3://bucket/name, gs://bucket/name or cluster:name; "
            "an S3 endpoint goes into [clusters.NAME] of datasync.toml",
        )
    if out.endswith(":") and out[:-1] in config.clusters:
        raise UsageError(
            f"{out} is the root of a cluster, where its datasets lie", mend=f"give it a name: {out}NAME"
        )
    urls, access = locate(config, sources)
    store = config.resolve(out)
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        return convert(urls, store, storage_options=access, **options)
    finally:
        signal.signal(signal.SIGTERM, before)


def _stop(number: int, frame: object) -> None:
    """End as SIGTERM ends a program, with a word; workers end when they are alone."""
    print("stopped; run the same command again to continue", file=sys.stderr, flush=True)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _dry_run(config: Config, sources: list[str], out: str, options: dict[str, Any], as_json: bool) -> int:
    """Show what would come of it."""
    from datasync.cli.places import locate
    from shards.appended import NothingNew, read_known
    from shards.commit import current
    from shards.find import find
    from shards.options import ConvertOptions
    from shards.outcome import prefix_of

    asked = ConvertOptions(**options)
    urls, access = locate(config, sources)
    known = None
    if asked.append:
        store = config.resolve(out)
        known = read_known(store, {split: current(store, prefix_of(split)) for split in asked.split or [""]})
    try:
        found = find(urls, asked, storage_options=access, known=known)
    except NothingNew:
        print(json.dumps({"files": 0}) if as_json else f"{out} has all files of {', '.join(sources)} already")
        return 0
    if as_json:
        print(json.dumps(_found_json(found), indent=2))
        return 0
    from shards.progress import format_bytes

    declared = f"found from {found.sampled:,} rows" if found.sampled else "declared by the format"
    size = format_bytes(found.files.total_bytes)
    print(f"{found.label_url}: {found.kind.name}, {len(found.files):,} files, {size}")
    print(f"{found.tasks:,} tasks, columns {declared}:")
    _print_columns({column.name: column.encoding for column in found.schema.columns})
    for note in found.notes:
        print(f"  {note}")
    return 0


def _print_columns(columns: dict[str, str]) -> None:
    width = max(map(len, map(repr, columns)), default=0)
    for name, encoding in columns.items():
        shown = name if name.isprintable() and name else repr(name)
        print(f"  {shown:<{width}}  {encoding}")


def _found_json(found: Found) -> dict[str, Any]:
    return {
        "source": found.label_url,
        "format": found.kind.name,
        "files": len(found.files),
        "bytes": found.files.total_bytes,
        "tasks": found.tasks,
        "columns": found.schema.encodings,
        "sampled_rows": found.sampled,
        "notes": list(found.notes),
    }


def _as_json(result: ConvertResult) -> dict[str, Any]:
    document = asdict(result)
    document["published"] = [
        {**part, "url": f"{result.url}/{part['prefix']}".rstrip("/")} for part in document["published"]
    ]
    document["examples"] = [{"where": where, "reason": reason} for where, reason in result.examples]
    return document


def _line(result: ConvertResult) -> str:
    """What came of it, in one line."""
    from shards.progress import format_bytes, format_count

    skipped = f" · {result.skipped:,} skipped" if result.skipped else ""
    if not result.published:
        return f"{result.url}: {format_count(result.rows, 'row')}{skipped}"
    rows = format_count(sum(part.samples for part in result.published), "row")
    shards = format_count(sum(part.shards for part in result.published), "shard")
    stored = format_bytes(sum(part.stored_bytes for part in result.published))
    return f"{result.url}: {rows} · {shards} · {stored}{skipped}"


def show(result: ConvertResult, *, task: str | None, out: str) -> None:
    """Print what came of a job, or of share `task` of it."""
    from shards.progress import format_bytes, format_seconds

    if result.finished:
        print(f"{result.url}: nothing to do, it is finished and up to date ({result.rows:,} rows)")
    if not result.published:
        print(f"{result.url}: share {task} is done, {result.rows:,} rows in {result.ran:,} tasks")
        if result.pending:
            print("that was the first of two rounds of the shuffle; when every share is done, run each again")
        else:
            print(f"not published yet; when every share is done: datasync merge {out}")
    for part in result.published:
        rows = [
            ("rows", f"{part.samples:,}"),
            ("shards", f"{part.shards:,}"),
            ("raw", format_bytes(part.raw_bytes)),
            ("stored", f"{format_bytes(part.stored_bytes)} ({_ratio(part.raw_bytes, part.stored_bytes)})"),
            ("version", part.version[:12]),
            ("where", f"{result.url}/{part.prefix}".rstrip("/")),
        ]
        if part is result.published[-1]:
            rows.insert(4, ("time", format_seconds(result.seconds)))
            if result.skipped:
                rows.insert(4, ("skipped", f"{result.skipped:,}"))
        for name, value in rows:
            print(f"{name:<8} {value}")
        if part is not result.published[-1]:
            print()
    for note in result.notes:
        print(f"note     {note}")
    if result.skipped:
        _show_skipped(result)


def _next_step(config: Config, result: ConvertResult, places: Sequence[str]) -> str:
    """The command that people give next: replicate what lies at a cluster, look at what does not."""
    prefix = result.published[0].prefix.rstrip("/")
    recipe = config.datasets.get(places[-1]) if len(places) == 1 else None
    head, colon, name = places[-1].partition(":")
    if recipe is not None:
        head, name = recipe.home or "", recipe.name
    elif not colon or head not in config.clusters or not name:
        return f"datasync inspect {shlex.quote(f'{places[-1]}/{prefix}' if prefix else places[-1])}"
    place = name if recipe is not None and not prefix else f"{head}:{name}/{prefix}".rstrip("/")
    others = [cluster for cluster in config.clusters if cluster != head]
    if not others:
        return f"datasync inspect {shlex.quote(place)}"
    rename = f" --as {shlex.quote(f'{name}/{prefix}')}" if prefix else ""
    return f"datasync replicate {shlex.quote(place)}{rename} --to {others[0]}"


def _show_skipped(result: ConvertResult) -> None:
    were = "row was" if result.skipped == 1 else "rows were"
    print(f"{result.skipped:,} {were} skipped, see {result.quarantine}")
    for where, reason in result.examples:
        print(f"  {where}: {reason}")
    if result.skipped > len(result.examples):
        print(f"  and {result.skipped - len(result.examples):,} more")


def _ratio(raw: int, stored: int) -> str:
    return f"{raw / stored:.2f}x" if stored else "-"
