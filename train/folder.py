"""The run folder: from what a run was made, what it did, and how often it had to start again.

config.json       every key of the config; `datasync train --reproduce RUN` starts from it
data.json         each dataset: where, version or fingerprint, samples, receipt
attempts.jsonl    one line when a process group starts, one when it ends: environment, versions, git state,
                  cause
metrics.jsonl     one line a step (see `metrics.py`)
summary.json      the end: loss, digest of the weights, times
checkpoints/      unless `checkpoint.url` names another store
lock              held by the run's first rank, so that a second start cannot write here
"""

from __future__ import annotations

import difflib
import fcntl
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from datasync.errors import BusyError, DatasyncError, UsageError
from train.config import Config, flatten
from train.settings import leaves

FREE = (
    "run.dir", "run.threads", "run.timeout_s", "data.cache", "data.workers", "data.remote", "checkpoint.",
    "log.", "eval.remote", "eval.split", "eval.every", "eval.samples",
    "parallel.device", "parallel.mode", "parallel.activation_checkpointing",
)  # fmt: skip
"""Keys (or their beginnings) that may change between attempts: they do not change what is computed."""


SHAPES = (
    "model.dim", "model.layers", "model.heads", "model.kv_heads", "model.hidden", "model.vocab", "model.tied",
    "model.qk_norm", "model.image.", "model.audio.mels", "model.audio.frames",
)  # fmt: skip
"""Keys (or their beginnings) that decide what the weights are: nothing can be continued over a change."""


class RunFolder:
    """The folder of one run; made if it is not there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: Any = None
        self._config: Config | None = None
        self.attempt = 0

    def open(self, config: Config, accept: Sequence[str] = ()) -> None:
        """Take the folder for this process and check that the config is the run's.

        It becomes the run's with `begin`: an attempt that fails before its first step changes nothing.

        Raises:
            BusyError: Another process trains here.
            UsageError: The config differs from the run's in a key that changes what is computed.
        """
        check_accept(accept, config)
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = (self.path / "lock").open("a")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BusyError(
                f"another process trains in {self.path}", mend="wait for it, or name another run.dir"
            ) from None
        known = self.read("config.json") if self._has_steps() else None
        if known is not None:
            try:
                check_same(known, config, accept, self.path)
            except UsageError:
                self.close()
                raise
        self._config = config
        for name in ("attempts.jsonl", "metrics.jsonl"):
            _end_line(self.path / name)
        self.attempt = 1 + max((entry["attempt"] for entry in self.lines("attempts.jsonl")), default=0)

    def _has_steps(self) -> bool:
        """Whether there is anything to continue; a run that failed before its first step binds nobody."""
        kept = self.path / "checkpoints"
        return any(self.lines("metrics.jsonl")) or (kept.is_dir() and any(kept.iterdir()))

    def progress(self) -> tuple[int, int]:
        """The last step that an attempt is known to have saved when it ended, and the last step made."""
        ends = [entry for entry in self.lines("attempts.jsonl") if entry["event"] == "end"]
        saved = [entry["step"] for entry in ends if entry["cause"].startswith(("finished", "stopped by"))]
        made = [entry["step"] for entry in self.lines("metrics.jsonl")]
        return max(saved, default=0), max(made, default=0)

    def close(self) -> None:
        """Let another process have the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def begin(self, **facts: Any) -> None:
        """Note that an attempt starts, and with which config."""
        if self._config is not None:
            self.write("config.json", self._config.to_dict())
        self.append(
            "attempts.jsonl", {"attempt": self.attempt, "event": "start", "time": time.time(), **facts}
        )

    def end(self, cause: str, **facts: Any) -> None:
        """Note why it ends; an attempt without this line was killed."""
        self.append(
            "attempts.jsonl",
            {"attempt": self.attempt, "event": "end", "time": time.time(), "cause": cause, **facts},
        )

    def read(self, name: str) -> Any:
        """A JSON file of the folder; None where there is none."""
        try:
            return json.loads((self.path / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise DatasyncError(
                f"{self.path / name} cannot be read: {error}", mend="restore it, or name another run.dir"
            ) from None

    def write(self, name: str, value: Any) -> None:
        """Replace a JSON file of the folder, whole."""
        temporary = self.path / f".{name}.{os.getpid()}"
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(value, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(self.path / name)

    def append(self, name: str, value: Mapping[str, Any]) -> None:
        """Add a line to a JSONL file of the folder."""
        with (self.path / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(value) + "\n")

    def lines(self, name: str) -> Iterator[dict[str, Any]]:
        """The lines of a JSONL file; a line that a kill cut short is left out."""
        return read_lines(self.path / name)


def _end_line(path: Path) -> None:
    """End a line that a kill or a full disk cut short, so that the next one is not lost with it."""
    if path.exists():
        with path.open("rb+") as file:
            if file.seek(0, os.SEEK_END) and file.seek(-1, os.SEEK_END) >= 0 and file.read() != b"\n":
                file.write(b"\n")


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a JSONL file that are whole; nothing where there is no file."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value


def check_accept(accept: Sequence[str], config: Config) -> None:
    """Refuse to accept a change of a key that there is not; names without a dot are the data's."""
    keys = flatten(config)
    for name in accept:
        if "." in name and name not in keys:
            near = difflib.get_close_matches(name, keys, n=1, cutoff=0.6)
            raise UsageError(
                f"--accept {name}: there is no such key",
                mend=f"did you mean {near[0]}?" if near else "datasync train --explain lists them",
            )


def check_same(known: Mapping[str, Any], config: Config, accept: Sequence[str], where: Path) -> None:
    """Refuse to continue a run with a config that computes something else."""
    before, now = dict(leaves(known)), flatten(config)
    different = {
        key: (before.get(key), now.get(key))
        for key in sorted(before.keys() | now.keys())
        if json.dumps(before.get(key)) != json.dumps(now.get(key))
        and not key.startswith(FREE)
        and key not in accept
    }
    shaping = [key for key in before if key.startswith(SHAPES) and before[key] != now.get(key)]
    if not different and shaping:
        key = shaping[0]
        raise UsageError(
            f"{where} holds a model with {key} = {before[key]!r}, its weights do not fit {now.get(key)!r}",
            mend="name another run.dir: the shape of a model cannot change",
        )
    if different:
        lines = "".join(f"\n  {key}: {old!r} → {new!r}" for key, (old, new) in different.items())
        raise UsageError(
            f"{where} holds a run with another config:{lines}",
            mend="name another run.dir; try it beside this by `datasync fork`; or continue with the change: "
            + " ".join(f"--accept {key}" for key in different),
        )


def environment() -> dict[str, Any]:
    """Where this process runs and with what."""
    import numpy
    import torch

    from shards.version import __version__

    names = (
        "OMP_NUM_THREADS",
        "MKL_NUM_THREADS",
        "CUDA_VISIBLE_DEVICES",
        "CUBLAS_WORKSPACE_CONFIG",
        "SLURM_JOB_ID",
    )
    cuda = torch.cuda.is_available()
    return {
        "host": platform.node(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "datasync": __version__,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
        "cpus": os.cpu_count(),
        "command": sys.argv,
        "variables": {name: os.environ[name] for name in names if name in os.environ},
        "git": git_state(Path.cwd()),
    }


def process_start() -> float:
    """When this process started, in seconds since the epoch; now, where the system does not say."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError):
        return time.time()


def git_state(path: Path) -> dict[str, Any] | None:
    """Commit, and whether there are changes that it does not hold; None outside a repository."""
    try:
        head = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=path, capture_output=True, text=True, timeout=10
        )
        if head.returncode:
            return None
        status = subprocess.run(
            ["git", "status", "--porcelain"], cwd=path, capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return {"commit": head.stdout.strip(), "changed": bool(status.stdout.strip())}
