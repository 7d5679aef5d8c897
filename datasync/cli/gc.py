"""`datasync gc`: parse, call `datasync.ops.gc`, print."""

from __future__ import annotations

from typing import Annotated

import typer


def gc(
    names: Annotated[
        list[str], typer.Argument(metavar="NAME|URL...", help="Datasets by name, URLs or folders.")
    ],
    cluster: Annotated[str | None, typer.Option(help="Whose copy of the named datasets.")] = None,
    keep: Annotated[int, typer.Option(help="How many versions stay.")] = 2,
    apply: Annotated[bool, typer.Option("--apply", help="Remove; without it, only show.")] = False,
    json_output: Annotated[
        bool, typer.Option("--json", help="One JSON document on standard output.")
    ] = False,
) -> None:
    """Remove objects that only old versions of a copy need.

    Shows what would go; removes it with --apply. Only objects that a receipt says datasync wrote are removed.

    \b
      datasync gc emoji --cluster cluster-b --keep 2
      datasync gc emoji --cluster cluster-b --keep 2 --apply
    """
    import json
    from dataclasses import asdict

    from datasync.cli import load_config
    from datasync.cli.several import Several
    from datasync.ops.gc import gc as collect
    from datasync.ops.targets import locate
    from shards.progress import format_bytes, format_count

    config, several = load_config(), Several()
    documents = []
    for spec in names:
        with several.each(spec):
            name, place, store = locate(config, spec, cluster)
            found = collect(store, name=name, keep=keep, apply=apply)
            documents.append(asdict(found))
            if json_output:
                continue
            kept = ", ".join(f"{version[:6]}…" for version in found.kept)
            if not found.removed and not found.keys:
                print(f"{name} on {place}   nothing to remove · kept {kept}")
                continue
            gone = ", ".join(f"{version[:6]}…" for version in found.removed) or "what no version has"
            verb = "removed" if apply else "would remove"
            more = "" if apply else " · run again with --apply"
            size = f"{format_count(found.objects, 'object')} ({format_bytes(found.bytes)})"
            print(f"{name} on {place}   {verb} {gone}: {size} · kept {kept}{more}")
    if json_output:
        document = {"garbage": documents, "errors": several.as_json()}
        print(json.dumps(document, indent=1, ensure_ascii=False))
    several.end()
