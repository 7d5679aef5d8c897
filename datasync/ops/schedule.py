"""`schedule run`: one scheduled run of a policy, from its delay to its log line.

    check ─► jitter ─► attempt ─► failed? wait, again ─► gc ─► log line, state, metrics ─► hooks, heartbeat

Quiet when all is well. What is told to whom:

    standard error     nothing on success; errors on failure, so that cron mails them
    log                one JSON line a run (`log` in the policy, else in the state folder)
    metrics            a Prometheus text file, replaced whole
    on_failure         a command or URL, after a run that failed; gets the JSON line
    on_recovery        the same, after the first good run that follows a failure
    heartbeat          a URL, asked after every good run

State is one small file a policy: when it ran last and how that ended. From it follow recovery, and runs that
were missed because the machine slept.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datasync.errors import DatasyncError, StoreError
from datasync.ops import check
from datasync.ops.cron import Cron
from datasync.ops.targets import targets

if TYPE_CHECKING:
    from datasync.config import Config, Replication
    from datasync.replicate import Outcome, Stop

log = logging.getLogger(__name__)

_HOOK_SECONDS = 60
_HTTP_SECONDS = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What is remembered of a policy.

    Args:
        started, finished (str): Of the last run, ISO 8601 in UTC.
        exit_code (int): Of the last run.
        good (str | None): When a run last succeeded.
        failures (int): Failed runs since then.
    """

    started: str
    finished: str
    exit_code: int
    good: str | None
    failures: int


def state_folder(config: Path | None) -> Path:
    """Where the state of a configuration's policies lies."""
    root = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
    return root / "datasync" / hashlib.sha256(str(config and config.resolve()).encode()).hexdigest()[:16]


def read_state(folder: Path, name: str) -> State | None:
    try:
        return State(**json.loads((folder / f"{name}.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None


def missed(policy: Replication, state: State | None, now: datetime) -> int:
    """Runs that should have been since the last one, without the one that is due now."""
    if policy.schedule is None or state is None:
        return 0
    return max(Cron.parse(policy.schedule).between(local(state.started), now) - 1, 0)


def _utc(when: datetime) -> str:
    """An instant of local time as receipts have it: ISO 8601 in UTC."""
    return when.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def local(stamp: str) -> datetime:
    """The local time, in which schedules are written, of an instant in a log line."""
    when = datetime.fromisoformat(stamp)
    return when if when.tzinfo is None else when.astimezone().replace(tzinfo=None)


def run(
    config: Config, policy: Replication, stop: Stop, *, jitter: bool = True, quiet: bool = True
) -> dict[str, Any]:
    """One scheduled run; returns its log line, whose ``exit_code`` is the command's.

    Exit codes: 0 everything is where it should be; 1 something failed; 2 the configuration is wrong; 4
    stopped at the deadline; 75 another run holds a lease; 143 stopped by SIGTERM.
    """
    before = read_state(state_folder(config.path), policy.name)
    began = datetime.now()
    record = _opened(policy, before, began)
    wrong = check.problem(config, policy)
    if wrong is not None:
        return _closed(config, policy, before, record | _summary(wrong.exit_code, [], wrong, stop), began)
    if jitter and policy.jitter:
        stop.event.wait(random.uniform(0, policy.jitter))
    code, outcomes, problem = _attempts(config, policy, stop, record, quiet=quiet)
    if code == 0 and policy.keep is not None:
        code, problem = _collect(config, policy, outcomes, problem)
    record |= _summary(code, outcomes, problem, stop)
    return _closed(config, policy, before, record, began)


def abandon(config: Config, policy: Replication, stop: Stop, began: datetime) -> None:
    """Log line, state and hooks of a run that is ended from outside because a place does not answer."""
    before = read_state(state_folder(config.path), policy.name)
    record = _opened(policy, before, began)
    problem = DatasyncError("a place is silent or slow, and the run was ended; the next one goes on")
    _closed(config, policy, before, record | _summary(stop.exit_code, [], problem, stop), began)


def _opened(policy: Replication, before: State | None, began: datetime) -> dict[str, Any]:
    return {
        "policy": policy.name,
        "started": _utc(began),
        "missed": missed(policy, before, began),
        "attempts": 0,
    }


def _closed(
    config: Config, policy: Replication, before: State | None, record: dict[str, Any], began: datetime
) -> dict[str, Any]:
    """Tell everybody how a run ended."""
    folder = state_folder(config.path)
    record["finished"] = _utc(datetime.now())
    record["seconds"] = round((datetime.now() - began).total_seconds(), 3)
    # A log that was asked for and cannot be written fails the run, so that the hook hears of it and no
    # heartbeat goes out. The state is this tool's own: without it, recovery and missed runs go unnoticed.
    try:
        if not policy.log:
            folder.mkdir(parents=True, exist_ok=True)
        _write_line(Path(policy.log) if policy.log else folder / f"{policy.name}.jsonl", record)
    except OSError as error:
        if policy.log is None:
            log.warning("the log could not be written: %s", error)
        else:
            unwritten = StoreError(
                f"the log could not be written: {error}", mend="check its folder, permissions and space"
            )
            record["errors"].append(_told(unwritten))
            record["exit_code"] = record["exit_code"] or 1
    _guarded("state", lambda: _remember(folder, policy, before, record))
    if policy.metrics:
        _guarded("metrics", lambda: write_metrics(Path(str(policy.metrics)), policy, record, before))
    _tell(policy, before, record)
    return record


def _attempts(
    config: Config, policy: Replication, stop: Stop, record: dict[str, Any], *, quiet: bool
) -> tuple[int, list[Outcome], DatasyncError | None]:
    code = 1
    outcomes: list[Outcome] = []
    problem: DatasyncError | None = None
    for attempt in range(policy.retries + 1):
        if attempt:
            pause = policy.retry_delay * random.uniform(0.8, 1.2)
            log.info("%s failed; attempt %d in %.0f s", policy.name, attempt + 1, pause)
            stop.event.wait(pause)
        if stop.event.is_set():
            return stop.exit_code, outcomes, problem
        record["attempts"] = attempt + 1
        code, outcomes, problem = _attempt(config, policy, stop, quiet=quiet)
        if code in (0, 2, 75) or stop.event.is_set():
            break
    return code, outcomes, problem


def _attempt(
    config: Config, policy: Replication, stop: Stop, *, quiet: bool
) -> tuple[int, list[Outcome], DatasyncError | None]:
    from datasync.replicate import Options, report
    from datasync.replicate.relay import replicate_all

    options = Options(verify=policy.verify, delete=policy.delete, max_delete=policy.max_delete, quiet=quiet)
    outcomes: list[Outcome] = []
    try:
        for target in targets(config, policy.datasets, to=policy.to, source=policy.source):
            outcomes += replicate_all(target, options, stop, relay=policy.relay, config=config)
            if stop.event.is_set():
                break
    except DatasyncError as error:
        return error.exit_code, outcomes, error
    except Exception as error:  # a defect must reach the log and the hooks too
        log.exception("%s", policy.name)
        return 1, outcomes, DatasyncError(f"{type(error).__name__}: {error}")
    code = report.exit_code(outcomes, stopped=stop.exit_code)
    if stop.event.is_set() and code == 0:
        code = stop.exit_code
    return code, outcomes, None


def _collect(
    config: Config, policy: Replication, outcomes: list[Outcome], problem: DatasyncError | None
) -> tuple[int, DatasyncError | None]:
    from datasync.ops.gc import gc
    from datasync.ops.targets import destination

    assert policy.keep is not None
    for outcome in outcomes:
        try:
            gc(
                destination(config, outcome.destination, outcome.name),
                name=outcome.name,
                keep=policy.keep,
                apply=True,
            )
        except DatasyncError as error:
            return error.exit_code, error
    return 0, problem


def _told(error: DatasyncError, dataset: str | None = None, destination: str | None = None) -> dict[str, Any]:
    """An error in the log line: where, what, and what helps."""
    return {
        "dataset": dataset,
        "destination": destination,
        "message": error.message,
        "mend": error.mend or None,
    }


def error_lines(errors: Sequence[Mapping[str, Any]]) -> list[str]:
    """Errors of a log line for people: one of several places is told once, with all of them."""
    where: dict[tuple[str, str, str], list[str]] = {}
    for error in errors:
        key = error["dataset"] or "", error["message"], error["mend"] or ""
        where.setdefault(key, []).append(error["destination"] or "")
    return [
        (f"{dataset} → {', '.join(places)}: " if dataset else "")
        + message
        + (f"\n  mend: {mend}" if mend else "")
        for (dataset, message, mend), places in where.items()
    ]


def _summary(code: int, outcomes: list[Outcome], problem: DatasyncError | None, stop: Stop) -> dict[str, Any]:
    errors = [
        _told(outcome.error, outcome.name, outcome.destination)
        for outcome in outcomes
        if outcome.error is not None
    ]
    if problem is not None:
        errors.append(_told(problem))
    return {
        "exit_code": code,
        "stopped": stop.reason or None,
        "copied": {
            "objects": sum(outcome.tally.copied for outcome in outcomes),
            "bytes": sum(outcome.tally.copied_bytes for outcome in outcomes),
        },
        "places": [
            {
                "dataset": outcome.name,
                "destination": outcome.destination,
                "state": outcome.state,
                "version": outcome.version,
                "copied": outcome.tally.copied,
                "bytes": outcome.tally.copied_bytes,
            }
            for outcome in outcomes
        ],
        "errors": errors,
    }


def _remember(folder: Path, policy: Replication, before: State | None, record: dict[str, Any]) -> None:
    good = record["exit_code"] == 0
    busy = record["exit_code"] == 75
    failures = 0 if good else (before.failures if before else 0) + (0 if busy else 1)
    state = State(
        started=record["started"],
        finished=record["finished"],
        exit_code=record["exit_code"],
        good=record["finished"] if good else (before.good if before else None),
        failures=failures,
    )
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{policy.name}.{os.getpid()}"
    temporary.write_text(json.dumps(asdict(state)))
    os.replace(temporary, folder / f"{policy.name}.json")


def _write_line(path: Path, record: dict[str, Any]) -> None:
    """Append one line by one write, so that the lines of two runs do not mix."""
    with open(path, "ab", buffering=0) as file:
        file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")


def write_metrics(path: Path, policy: Replication, record: dict[str, Any], before: State | None) -> None:
    """Replace the Prometheus text file of a policy."""
    from prometheus_client import CollectorRegistry, Gauge, write_to_textfile

    registry = CollectorRegistry()

    def gauge(name: str, text: str, value: float) -> None:
        Gauge(f"datasync_{name}", text, ["policy"], registry=registry).labels(policy.name).set(value)

    gauge("last_run_timestamp_seconds", "When the last run ended.", time.time())
    good = time.time() if record["exit_code"] == 0 else _timestamp(before.good if before else None)
    gauge("last_success_timestamp_seconds", "When a run last succeeded; 0 is never.", good)
    gauge("last_exit_code", "Exit code of the last run.", record["exit_code"])
    gauge("last_run_seconds", "How long the last run took.", record["seconds"])
    gauge("last_attempts", "Attempts of the last run.", record["attempts"])
    gauge("last_missed_runs", "Scheduled runs that did not happen before the last one.", record["missed"])
    gauge("last_copied_bytes", "Bytes that the last run copied.", record["copied"]["bytes"])
    gauge("last_copied_objects", "Objects that the last run copied.", record["copied"]["objects"])
    whole = Gauge(
        "datasync_whole",
        "Whether the last run left it whole.",
        ["policy", "dataset", "destination"],
        registry=registry,
    )
    for place in record["places"]:
        value = place["state"] in ("already", "published")
        whole.labels(policy.name, place["dataset"], place["destination"]).set(value)
    write_to_textfile(str(path), registry)


def _timestamp(stamp: str | None) -> float:
    return 0.0 if stamp is None else datetime.fromisoformat(stamp).timestamp()


def _tell(policy: Replication, before: State | None, record: dict[str, Any]) -> None:
    """Hooks and heartbeat. A hook that fails is logged; it does not change how the run ended."""
    code = record["exit_code"]
    recovered = code == 0 and before is not None and before.failures > 0
    if code not in (0, 75, 143) and policy.on_failure:
        _guarded("on_failure", lambda: call_hook(str(policy.on_failure), record))
    if recovered and policy.on_recovery:
        _guarded("on_recovery", lambda: call_hook(str(policy.on_recovery), record))
    if code == 0 and policy.heartbeat:
        _guarded("heartbeat", lambda: _http(str(policy.heartbeat), None))


def _guarded(what: str, action: Any) -> None:
    try:
        action()
    except (OSError, ValueError, subprocess.SubprocessError, urllib.error.URLError) as error:
        log.warning("%s: %s", what, error)


def call_hook(hook: str, record: dict[str, Any]) -> None:
    """POST the log line to a URL, or have the shell run a command with it on standard input."""
    line = json.dumps(record, ensure_ascii=False).encode()
    if hook.startswith(("http://", "https://")):
        _http(hook, line)
        return
    done = subprocess.run(
        ["/bin/sh", "-c", hook], input=line, timeout=_HOOK_SECONDS, check=False, stdout=subprocess.DEVNULL
    )
    if done.returncode != 0:
        raise ValueError(f"{hook!r} ended with {done.returncode}")


def _http(url: str, body: bytes | None) -> None:
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{url!r} is no http URL")
    request = urllib.request.Request(
        url, data=body, headers={"Content-Type": "application/json"} if body else {}
    )
    with urllib.request.urlopen(request, timeout=_HTTP_SECONDS) as answer:
        answer.read(1024)
