"""`datasync verify`: parse, call `datasync.replicate.verify`, print."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from datasync.replicate.verify import Report


def verify(
    names: Annotated[
        list[str], typer.Argument(metavar="NAME|URL...", help="Datasets by name, URLs or folders.")
    ],
    cluster: Annotated[str | None, typer.Option(help="Whose copy of the named datasets.")] = None,
    sample: Annotated[
        str | None, typer.Option(help="Read only this share, another one each time: 5%.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Read and hash every object. [the default]")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Look at names and sizes only.")] = False,
    max_runtime: Annotated[str | None, typer.Option(help="Stop cleanly after this long: 90s, 2h30m.")] = None,
    json_output: Annotated[
        bool, typer.Option("--json", help="One JSON document on standard output.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Check that a copy is whole and has the right bytes.

    What is bad is moved to _datasync/quarantine/ and listed for `datasync repair`; the receipt says damaged
    until then. A run that was stopped goes on where it was.

    \b
      datasync verify emoji --cluster cluster-b
      datasync verify emoji --cluster cluster-b --sample 5%      for cron: 20 runs read everything
      datasync verify s3://datasets/emoji --quick

    \b
    Exit codes: 0 good, 1 failed, 2 usage, 3 something is bad or missing, 4 stopped, 75 busy.
    """
    import json
    import sys
    from dataclasses import asdict

    from datasync.cli import load_config
    from datasync.cli.several import Several
    from datasync.config_values import Place, duration, share
    from datasync.errors import UsageError
    from datasync.ops.targets import locate
    from datasync.replicate import Stop
    from datasync.replicate.control import stop_after, stop_on_signals
    from datasync.replicate.verify import FULL, QUICK, SAMPLE, Finding
    from datasync.replicate.verify import verify as check

    if sum((full, quick, sample is not None)) > 1:
        raise UsageError("--full, --quick and --sample exclude each other", mend="give one of them")
    part = share(sample, Place("--sample")) if sample is not None else 1.0
    mode = SAMPLE if sample is not None else QUICK if quick else FULL
    seconds = duration(max_runtime, Place("--max-runtime")) if max_runtime is not None else None
    config, stop, several = load_config(), Stop(), Several()
    reports: list[Report] = []

    def tell_all() -> None:
        """The document with what is known, also of a run that does not end by itself."""
        document = {"reports": [asdict(report) for report in reports], "errors": several.as_json()}
        print(json.dumps(document, indent=1, ensure_ascii=False), flush=True)

    last_words = tell_all if json_output else None
    with stop_on_signals(stop, last_words=last_words), stop_after(stop, seconds):
        for spec in names:
            with several.each(spec):
                name, place, store = locate(config, spec, cluster)

                def tell(finding: Finding, place: str = place) -> None:
                    where = f"quarantined as {finding.quarantined}" if finding.quarantined else f"on {place}"
                    print(f"{finding.message}   ({where})", file=sys.stderr)

                report = check(
                    store,
                    name=name,
                    mode=mode,
                    share=part,
                    stop=stop,
                    quiet=quiet or json_output,
                    on_finding=tell,
                    public=config.signed_by(name),
                )
                reports.append(report)
                if not json_output:
                    print(_line(name, place, report, mode))
                    if report.findings:
                        option = f" --cluster {cluster}" if cluster is not None else ""
                        print(f"  mend: datasync repair {spec}{option}", file=sys.stderr)
            if stop.event.is_set():
                break
    if json_output:
        tell_all()
    several.end()
    if any(report.findings for report in reports):
        raise typer.Exit(3)
    if stop.event.is_set():
        raise typer.Exit(stop.exit_code)


def _line(name: str, place: str, report: Report, mode: str) -> str:
    """One line: what was looked at, and how it is."""
    from datasync.replicate.verify import QUICK
    from shards.progress import format_bytes, format_count

    parts = [
        f"{name} {report.version[:6]}… on {place}   {format_count(report.objects, 'object')}",
        format_bytes(report.bytes),
    ]
    if mode != QUICK:
        parts.append(f"{report.hashed:,} read ({format_bytes(report.hashed_bytes)})")
    if report.findings:
        parts.append(f"{len(report.findings):,} bad or missing")
    elif mode == QUICK or report.hashed or not report.objects:
        parts.append("all good")
    else:
        parts.append("none due this time")
    return " · ".join(parts) + ("" if report.finished else " so far, stopped")
