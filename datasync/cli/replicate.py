"""`datasync replicate`: parse, call `datasync.replicate`, print."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from datasync.replicate import Outcome, Stop
    from datasync.replicate.relay import Hop


def replicate(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME|URL]...", help="Datasets by name, URLs or folders. [default: all configured]"
        ),
    ] = None,
    to: Annotated[
        list[str] | None, typer.Option(help="Destinations: clusters or URLs, with commas or repeated.")
    ] = None,
    source: Annotated[
        str | None, typer.Option("--from", help="The cluster to copy from. [default: the dataset's home]")
    ] = None,
    rename: Annotated[str | None, typer.Option("--as", help="The name at the destination.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be copied; write nothing.")
    ] = False,
    verify: Annotated[str, typer.Option(help="stored: proven on the way. full: also read back.")] = "stored",
    tree: Annotated[
        bool, typer.Option("--tree", help="Copy every file, also where there is an index.json.")
    ] = False,
    delete: Annotated[
        bool,
        typer.Option("--delete", help="Remove from a tree's copy what this tool copied and the source lost."),
    ] = False,
    max_delete: Annotated[str, typer.Option(help="The largest share that --delete may remove.")] = "10%",
    max_runtime: Annotated[str | None, typer.Option(help="Stop cleanly after this long: 90s, 2h30m.")] = None,
    retry_for: Annotated[str, typer.Option(help="How long a failing place is tried: 30s, 10m.")] = "2m",
    relay: Annotated[
        bool, typer.Option("--relay", help="Let a destination that is whole serve as source for the next.")
    ] = False,
    engine: Annotated[
        str, typer.Option(help="Where the copying runs: local, or ray (spread over its nodes).")
    ] = "local",
    json_output: Annotated[
        bool, typer.Option("--json", help="One JSON document on standard output.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Copy datasets and trees to other clusters: what is missing, proven, the index last.

    A second run finds nothing to do. A run that was killed goes on where it was.

    \b
      datasync replicate emoji --to cluster-b
      datasync replicate --to cluster-b,cluster-c          everything configured
      datasync replicate runs/17/step-1000 --to s3://checkpoints --delete
      datasync replicate emoji --to cluster-b --dry-run --json

    \b
    Exit codes: 0 done, 1 failed, 2 usage, 4 stopped by --max-runtime, 75 another run is at work there.
    """
    import contextlib
    import json
    import os

    # numpy comes with pyarrow, and nothing is multiplied here: the threads of its BLAS would only spin.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Arrow's own allocator keeps what it had; among many shards that is a fifth of the peak.
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")

    from datasync.cli import load_config
    from datasync.config_values import Place, duration, share
    from datasync.errors import DatasyncError, UsageError
    from datasync.ops.targets import Target, split, targets
    from datasync.replicate import Options, Stop, report
    from datasync.replicate.control import stop_after, stop_on_signals
    from datasync.replicate.relay import hops_of, replicate_all
    from datasync.storage.retry import patient

    if engine not in ("local", "ray"):
        raise UsageError(f"no engine is called {engine!r}", mend="use local or ray")
    config = load_config()
    options = Options(
        as_tree=tree,
        dry_run=dry_run,
        verify=verify,
        delete=delete,
        max_delete=share(max_delete, Place("--max-delete")),
        retry_seconds=duration(retry_for, Place("--retry-for")),
        quiet=quiet or json_output,
        engine=engine,
    )
    stop = Stop()
    outcomes: list[Outcome] = []
    seconds = duration(max_runtime, Place("--max-runtime")) if max_runtime is not None else None
    documents: list[dict[str, Any]] = []

    def tell() -> None:
        """The document with what is known, also of a run that does not end by itself."""
        total = sum(document["cost"] for document in documents)
        document = {"replications": documents, "cost": total, "stopped": stop.reason or None}
        print(json.dumps(document, indent=1, ensure_ascii=False), flush=True)

    last_words = tell if json_output else None
    with (
        stop_on_signals(stop, last_words=last_words),
        patient(options.retry_seconds),
        stop_after(stop, seconds),
    ):
        chosen = targets(config, names or [], to=split(to or []), source=source, rename=rename)
        for target in chosen:
            hops: list[Hop] = []
            if relay and dry_run and isinstance(target, Target) and len(target.to) > 1:
                with contextlib.suppress(DatasyncError):  # the outcomes tell it
                    hops = hops_of(target, config, as_tree=tree)
            if hops and not json_output:
                print(f"{target.name} by relay: {', '.join(f'{hop.source} → {hop.to}' for hop in hops)}")
                print("\n".join(map(report.hop, hops)))
            ways = {hop.to: hop for hop in hops}
            for outcome in replicate_all(target, options, stop, relay=relay, config=config):
                outcomes.append(outcome)
                feeder = outcome.feeder or target.cluster or ""
                price = config.clusters[feeder].egress_per_gib if feeder in config.clusters else 0.0
                documents.append(report.as_dict(outcome, cost_per_gib=price))
                if outcome.feeder:
                    documents[-1]["relay_from"] = feeder
                if (way := ways.get(outcome.destination)) is not None:
                    documents[-1]["relay"] = {"price_per_gib": way.price, "bytes_per_second": way.rate}
                if not json_output:
                    print(report.line(outcome, cost_per_gib=price, dry_run=dry_run), flush=True)
            if stop.event.is_set():
                break
    total = sum(document["cost"] for document in documents)
    if json_output:
        tell()
    elif dry_run and total and len(outcomes) > 1:
        print(f"in all   costs {total:.2f}")
    _end(outcomes, stop)


def _end(outcomes: list[Outcome], stop: Stop) -> None:
    """Say what failed, and leave with the code of the run."""
    import signal
    import sys

    from datasync.replicate import report

    # An error of the source is told once, not for each destination.
    places: dict[tuple[str, str], list[str]] = {}
    for outcome in outcomes:
        if outcome.error is not None:
            places.setdefault((outcome.name, str(outcome.error)), []).append(outcome.destination)
    for (name, text), failed in places.items():
        where = f"{name} → {', '.join(failed)}: " if len(outcomes) > 1 else ""
        print(f"error: {where}{text}", file=sys.stderr)
    if stop.reason and stop.exit_code != 128 + signal.SIGINT:  # of that, the entry point tells
        print(f"stopped: {stop.reason}; run the same command again to continue", file=sys.stderr)
    code = report.exit_code(outcomes, stopped=stop.exit_code)
    if stop.reason and code == 0:
        code = stop.exit_code
    if code:
        raise typer.Exit(code)
