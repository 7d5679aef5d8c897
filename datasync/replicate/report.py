"""What a person and a program are told about a replication."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from datasync.replicate.catalog import TREE
from datasync.replicate.options import ALREADY, FAILED, PLANNED, PUBLISHED, STOPPED, Outcome
from shards.progress import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from datasync.replicate.relay import Hop


def line(outcome: Outcome, *, cost_per_gib: float = 0.0, dry_run: bool = False) -> str:
    """One line: what, where, how much, and what happened, or would."""
    noun = "file" if outcome.kind == TREE else "shard"
    version = f"{outcome.version[:6]}…" if outcome.version else "new"
    head = f"{outcome.name} {version} → {outcome.destination}"
    if not outcome.kind:
        return f"{head}   {'stopped' if outcome.state == STOPPED else 'failed'}"
    size = f"{format_count(outcome.objects, noun)} · {format_bytes(outcome.bytes)}"
    if outcome.left_out:
        size += f" · {format_count(len(outcome.left_out), 'marker')} of folders left out"
    if dry_run and outcome.state == FAILED:
        return f"{head}   {size} · it would fail"
    return f"{head}   {size} · {_what(outcome, cost_per_gib)}"


def _what(outcome: Outcome, cost_per_gib: float) -> str:
    tally = outcome.tally
    have = outcome.objects - outcome.to_copy
    if outcome.state == ALREADY:
        since = (
            f"whole since {outcome.receipt.finished[:16].replace('T', ' ')} UTC"
            if outcome.receipt
            else "whole"
        )
        return f"nothing to copy, {since}"
    if outcome.state == PLANNED:
        most = "at most " if outcome.to_compare else ""
        parts = [
            f"{most}{outcome.to_copy:,} to copy ({format_bytes(outcome.to_copy_bytes)}),"
            f" {have:,} already there"
        ]
        if outcome.to_compare:
            parts[0] += f", {outcome.to_compare:,} to be compared"
        if outcome.to_delete:
            parts.append(f"{outcome.to_delete:,} to remove")
        if outcome.estimate_seconds is not None:
            parts.append(f"about {format_seconds(outcome.estimate_seconds)}")
        if cost_per_gib:
            rest = ", the rest is read for others" if outcome.paid_bytes < outcome.to_copy_bytes else ""
            parts.append(f"costs {cost(outcome, cost_per_gib):.2f}{rest}")
        return " · ".join(parts)
    if outcome.state == FAILED and not outcome.to_copy:  # it may have failed before anything was compared
        return "failed, not published"
    if outcome.state == STOPPED and not outcome.to_copy:
        return "stopped, not published; run again to continue"
    parts = [
        f"{tally.copied:,} copied ({format_bytes(tally.copied_bytes)}) in {format_seconds(outcome.seconds)},"
        f" {have + len(tally.adopted):,} already there"
    ]
    if tally.resumed_bytes:
        parts.append(f"{format_bytes(tally.resumed_bytes)} kept from an earlier run")
    if outcome.deleted:
        parts.append(f"{outcome.deleted:,} removed")
    if outcome.state == PUBLISHED:
        parts.append("verified, published")
    elif outcome.state == STOPPED:
        left = outcome.to_copy - tally.copied - len(tally.adopted)
        parts.append(f"stopped with {left:,} to go; run again to continue")
    else:
        parts.append("failed, not published")
    return " · ".join(parts)


def cost(outcome: Outcome, cost_per_gib: float) -> float:
    """What a planned destination adds to the price of the run: of what several need, the first pays."""
    return cost_per_gib * outcome.paid_bytes / (1 << 30)


def hop(way: Hop) -> str:
    """One step of a relay, with what it was chosen by."""
    price = f"{way.price:g} a GiB" if way.price else "free to read"
    return f"  {way.source} → {way.to}   {price} · " + (
        f"{format_bytes(way.rate)}/s last time" if way.rate else "not measured yet"
    )


def as_dict(outcome: Outcome, *, cost_per_gib: float = 0.0) -> dict[str, Any]:
    """Everything exactly, for `--json` and the log."""
    tally = outcome.tally
    return {
        "name": outcome.name,
        "kind": outcome.kind,
        "source": outcome.source,
        "destination": outcome.destination,
        "url": outcome.url,
        "state": outcome.state,
        "version": outcome.version,
        "objects": outcome.objects,
        "bytes": outcome.bytes,
        "samples": outcome.samples,
        "to_copy": {"objects": outcome.to_copy, "bytes": outcome.to_copy_bytes},
        "to_compare": outcome.to_compare,
        "to_delete": outcome.to_delete,
        "deleted": outcome.deleted,
        "copied": {
            "objects": tally.copied,
            "bytes": tally.copied_bytes,
            "inside_endpoint": tally.server_copied,
        },
        "adopted": len(tally.adopted),
        "resumed_bytes": tally.resumed_bytes,
        "checked": {
            "sha256": tally.checked_sha256,
            "crc32c": tally.checked_crc32c,
            "read_back": tally.read_back,
        },
        "failed": tally.failed,
        "failures": [{"key": key, "error": error.message} for key, error in tally.failures[:100]],
        "left_out": list(outcome.left_out[:100]),
        "source_bytes_read": outcome.source_bytes_read,
        "seconds": round(outcome.seconds, 3),
        "estimate_seconds": outcome.estimate_seconds,
        "cost": cost(outcome, cost_per_gib),
        "error": None
        if outcome.error is None
        else {"message": outcome.error.message, "mend": outcome.error.mend},
    }


def exit_code(outcomes: list[Outcome], *, stopped: int) -> int:
    """The code of a whole run: failures first, then a stop, then a busy destination."""
    codes = [outcome.error.exit_code for outcome in outcomes if outcome.error is not None]
    failures = [code for code in codes if code != 75]
    if failures:
        return failures[0]
    if any(outcome.state == STOPPED for outcome in outcomes):
        return stopped
    if codes:
        return 75
    return 1 if any(outcome.state == FAILED for outcome in outcomes) else 0
