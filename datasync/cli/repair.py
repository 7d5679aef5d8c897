"""`datasync repair`: parse, call `datasync.replicate.repair`, print."""

from __future__ import annotations

from typing import Annotated, Any

import typer


def repair(
    names: Annotated[
        list[str], typer.Argument(metavar="NAME|URL...", help="Datasets by name, URLs or folders.")
    ],
    cluster: Annotated[str | None, typer.Option(help="Whose copy of the named datasets.")] = None,
    source: Annotated[
        list[str] | None, typer.Option("--from", help="Replicas to read from. [default: every other cluster]")
    ] = None,
    max_runtime: Annotated[str | None, typer.Option(help="Stop cleanly after this long: 90s, 2h30m.")] = None,
    json_output: Annotated[
        bool, typer.Option("--json", help="One JSON document on standard output.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Fetch bad or missing objects from a replica that proves good.

    \b
      datasync repair emoji --cluster cluster-b
      datasync repair s3://datasets/emoji --from s3://backup/emoji

    \b
    Exit codes: 0 whole, 1 failed, 2 usage, 3 something could not be repaired, 4 stopped, 75 busy.
    """
    import json
    import sys

    from datasync.cli import load_config
    from datasync.cli.several import Several
    from datasync.config_values import Place, duration
    from datasync.ops.targets import destination, is_place, locate, split
    from datasync.ops.targets import replicas as every_replica
    from datasync.replicate import Stop
    from datasync.replicate.control import stop_after, stop_on_signals
    from datasync.replicate.limits import identity
    from datasync.replicate.repair import repair as fetch
    from shards.progress import format_bytes

    seconds = duration(max_runtime, Place("--max-runtime")) if max_runtime is not None else None
    config, stop, several = load_config(), Stop(), Several()
    documents: list[dict[str, Any]] = []
    left = 0

    def tell() -> None:
        """The document with what is known, also of a run that does not end by itself."""
        document = {"repairs": documents, "errors": several.as_json()}
        print(json.dumps(document, indent=1, ensure_ascii=False), flush=True)

    last_words = tell if json_output else None
    with stop_on_signals(stop, last_words=last_words), stop_after(stop, seconds):
        for spec in names:
            with several.each(spec):
                name, place, store = locate(config, spec, cluster)
                if source:
                    # A place given exactly is the dataset itself; a cluster holds it under its name.
                    replicas = [
                        config.resolve(s)
                        if is_place(s) and s not in config.clusters
                        else destination(config, s, name)
                        for s in split(source)
                    ]
                else:
                    replicas = list(every_replica(config, name, {identity(store)}))
                replicas = [replica for replica in replicas if identity(replica) != identity(store)]
                result = fetch(
                    store,
                    replicas,
                    name=name,
                    stop=stop,
                    quiet=quiet or json_output,
                    public=config.signed_by(name),
                )
                left += len(result.left)
                documents.append(
                    {
                        "name": name,
                        "url": result.url,
                        "version": result.version,
                        "damaged": result.damaged,
                        "repaired": result.repaired,
                        "repaired_bytes": result.repaired_bytes,
                        "left": {key: error.message for key, error in result.left.items()},
                        "finished": result.finished,
                    }
                )
                if not json_output:
                    outcome = "whole" if result.finished else "stopped; run again to continue"
                    if result.left:
                        outcome = f"{len(result.left):,} could not be repaired"
                    print(
                        f"{name} {result.version[:6]}… on {place}   {result.damaged:,} bad or missing ·"
                        f" {result.repaired:,} repaired ({format_bytes(result.repaired_bytes)}) · {outcome}"
                    )
                for error in list(result.left.values())[:10]:
                    print(f"error: {error}", file=sys.stderr)
            if stop.event.is_set():
                break
    if json_output:
        tell()
    several.end()
    if left:
        raise typer.Exit(3)
    if stop.event.is_set():
        raise typer.Exit(stop.exit_code)
