"""Checkpoints: sharded, in any store, committed last, verified before they are believed.

    step-00000100/__0_0.distcp, __1_0.distcp, …   one file a rank (torch.distributed.checkpoint)
    step-00000100/.metadata                       which tensor is where: any number of ranks can load it
    step-00000100/commit.json                     the commit marker, written when all files are safe: each
                                                  file's bytes and sha256, the rest of the state
    latest                                        the newest committed step; moves after the marker

    save     copy to memory ─► [thread: DCP files ─► digests ─► (marker here ─► upload) ─► marker ─► latest]
    load     newest marker first: digest of the marker, of each file; the first that verifies is loaded, those
             that do not are named loudly. Something was committed and nothing verifies: stop; never start
             afresh in silence.

A save killed at any instant leaves a folder without a marker, which is not a checkpoint. On its way to a
store that is not local it is complete on this machine first: who is killed while it is uploaded, or finds the
store away, goes on from there when started again on the same machines. The tensors' index
(`.metadata`) is a pickle, as torch writes it; it is opened only after its digest has been checked.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from datasync.errors import CorruptError, DatasyncError, NotFoundError, UsageError
from datasync.storage.local import LocalStore
from shards.digests import digest_file
from shards.version import __version__
from train.config import CheckpointConfig
from train.distributed import Team

if TYPE_CHECKING:
    from datasync.storage import Store

log = logging.getLogger("train")

MARKER = "commit.json"
_OURS = re.compile(r"step-\d{8}/(__\d+_\d+\.distcp|\.metadata|commit\.json)")


@dataclass(frozen=True, slots=True)
class Commit:
    """What a marker says.

    Args:
        step (int): Optimizer steps done.
        files (Mapping[str, Mapping]): File name -> ``{"bytes": …, "sha256": …}``.
        state (Mapping[str, Any]): The state beside the tensors.
    """

    step: int
    files: Mapping[str, Mapping[str, Any]]
    state: Mapping[str, Any]

    def dumps(self) -> bytes:
        """The marker's bytes."""
        body = {
            "step": self.step,
            "files": self.files,
            "state": self.state,
            "created_by": f"datasync {__version__}",
        }
        return json.dumps({**body, "digest": _digest(body)}, indent=1).encode()

    @classmethod
    def parse(cls, data: bytes) -> Commit:
        """Read and check a marker; CorruptError where it is not what was written."""
        try:
            body = json.loads(data)
            digest = body.pop("digest")
            commit = cls(body["step"], body["files"], body["state"])
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise CorruptError(f"the commit marker cannot be read: {error!r}") from None
        if digest != _digest(body):
            raise CorruptError("the commit marker does not have the digest it names")
        return commit


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def folder(step: int) -> str:
    """Where the checkpoint of a step lies in its store."""
    return f"step-{step:08d}"


class Checkpoints:
    """The checkpoints of one run.

    Args:
        store (Store): Where they are kept.
        team (Team): All ranks save and load together.
        c (CheckpointConfig): When, how many.
        scratch (Path): A local folder for files on their way to or from a store that is not local.
    """

    def __init__(self, store: Store, team: Team, c: CheckpointConfig, scratch: Path) -> None:
        self.store, self.team, self.c, self.scratch = store, team, c, scratch
        self.busy_s = 0.0
        self._thread: threading.Thread | None = None
        self._failure: str | None = None
        if c.asynchronous:
            _ = team.writers  # made now, by all ranks together

    # Saving

    def save(
        self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any], *, wait: bool = False
    ) -> None:
        """Keep this state. Returns once it is copied to memory, or with `wait` (or if not asynchronous)
        committed.

        Raises:
            DatasyncError: With `wait`: it could not be committed. Without, that is logged, and the next save
            tries again.
        """
        started = time.monotonic()
        self.finish()
        if wait or not self.c.asynchronous:
            self._write(step, dict(tensors), state)
        else:
            copies = {name: _copy(tensor) for name, tensor in tensors.items()}
            self._thread = threading.Thread(target=self._write, args=(step, copies, state), name="checkpoint")
            self._thread.start()
        self.busy_s += time.monotonic() - started
        if wait and self._failure is not None:
            raise DatasyncError(
                f"the checkpoint of step {step} could not be written to {self.store.url}: {self._failure}",
                mend="make the store reachable, with room; run the same command again to continue from the "
                "one before",
            )

    def finish(self) -> None:
        """Wait for the save in the background."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, step: int, tensors: dict[str, Tensor], state: Mapping[str, Any]) -> None:
        """All ranks: files and digests on this machine, upload; then rank 0: marker, `latest`, retention.
        Never raises."""
        self._failure = None
        try:
            merged: dict[str, Any] = {}
            for files in self._agree(lambda: self._write_here(step, tensors)):
                merged |= files
            commit = Commit(step, merged, state)
            if not isinstance(self.store, LocalStore):
                if self.team.local_rank == 0:  # from here on a restart on this machine has it
                    LocalStore(self._place(step)).write(MARKER, commit.dumps())
                self._agree(lambda: self._upload(step, self._mine(self._place(step))))
            self._agree(lambda: self._commit(commit) if self.team.leads else None)
            self._sweep()
        except Exception as error:  # noqa: BLE001 - the run goes on, whatever it is
            self._failure = str(error)
            log.error("checkpoint of step %d NOT written: %s", step, self._failure)

    def _agree(self, work: Callable[[], Any]) -> list[Any]:
        """Do a part of the work on each rank, and return all results; an error of one is an error of all."""
        result, failure = None, ""
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - the others must learn of it, whatever it is
            failure = f"rank {self.team.rank}: {_said(error)}"
        reports = self.team.gather_objects([result, failure], writers=True)
        if failures := [report[1] for report in reports if report[1]]:
            raise DatasyncError("; ".join(failures))
        return [report[0] for report in reports]

    def _write_here(self, step: int, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """This rank's files, and their digests."""
        if self.team.leads:  # what may lie there from an earlier attempt is no checkpoint any more
            self.store.delete([f"{folder(step)}/{MARKER}"])
        place = self._place(step)
        place.mkdir(parents=True, exist_ok=True)
        self._dcp_save(tensors, place)
        return {
            path.name: {"bytes": path.stat().st_size, **digest_file(path, ["sha256"])}
            for path in self._mine(place)
        }

    def _upload(self, step: int, paths: Sequence[Path]) -> None:
        for path in paths:
            self.store.write_file(f"{folder(step)}/{path.name}", path)

    def _commit(self, commit: Commit) -> None:
        self.store.write(f"{folder(commit.step)}/{MARKER}", commit.dumps())
        self.store.write("latest", folder(commit.step).encode())
        self._retain()

    def _sweep(self) -> None:
        """Remove what was on its way to or from the store."""
        if not isinstance(self.store, LocalStore) and self.team.local_rank == 0:
            for place in self.scratch.glob("step-*"):
                shutil.rmtree(place, ignore_errors=True)

    def _dcp_save(self, tensors: dict[str, Tensor], place: Path) -> None:
        dcp = _dcp()
        writer = dcp.FileSystemWriter(place, overwrite=True)
        with _one_line():
            if self.team.distributed:
                dcp.save(tensors, storage_writer=writer, process_group=self.team.writers)
            else:
                dcp.save(tensors, storage_writer=writer, no_dist=True)

    def _mine(self, place: Path) -> list[Path]:
        """The files that this rank wrote."""
        names = sorted(place.glob(f"__{self.team.rank}_*.distcp"))
        return [*names, place / ".metadata"] if self.team.leads else names

    def _place(self, step: int) -> Path:
        """The local folder in which a checkpoint is written or read."""
        root = Path(self.store.root) if isinstance(self.store, LocalStore) else self.scratch
        return root / folder(step)

    # Loading

    def load(self, tensors: Mapping[str, Tensor], *, step: int | None = None) -> Mapping[str, Any] | None:
        """Fill `tensors` from the newest checkpoint that verifies (or that of `step`), and return the rest
        of its state.

        None where nothing was ever committed.

        Raises:
            CorruptError: Checkpoints were committed and none of them (or not that of `step`) verifies.
            UsageError: There is none of `step`.
        """
        self.finish()
        stored, here = self.steps(), self._steps_here()
        if step is not None and step not in {*stored, *here}:
            there = ", ".join(map(str, sorted({*stored, *here})))
            raise UsageError(
                f"{self.store.url} has no checkpoint of step {step}",
                mend=f"there are: {there}" if there else "train first",
            )
        bad = []
        for candidate in sorted({*stored, *here}, reverse=True) if step is None else [step]:
            reasons = [reason for reason in self.team.gather_objects(self._fetch(candidate)) if reason]
            if not reasons:
                commit = self.read(candidate)
                self._dcp_load(dict(tensors), self._place(candidate))
                if candidate not in stored:
                    self._publish(commit)
                self._clear()
                return commit.state
            bad.append(f"{folder(candidate)}: {reasons[0]}")
            if self.team.leads:
                log.error(
                    "WALKING PAST the checkpoint %s in %s: %s", folder(candidate), self.store.url, reasons[0]
                )
        if bad or (step is None and self._exists("latest")):
            raise CorruptError(
                f"no checkpoint in {self.store.url} verifies" + "".join(f"\n  {line}" for line in bad),
                mend="copy them from another cluster (`datasync repair`, `datasync replicate`); or give "
                "run.dir and checkpoint.url another place to start afresh",
            )
        return None

    def steps(self) -> list[int]:
        """Steps with a commit marker, newest first."""
        try:
            keys = [item.key for item in self.store.list("step-")]
        except NotFoundError:  # no bucket or folder yet
            return []
        found = [re.fullmatch(r"step-(\d{8})/commit\.json", key) for key in keys]
        return sorted((int(match[1]) for match in found if match), reverse=True)

    def _steps_here(self) -> set[int]:
        """Steps that some machine of the run saved and could not bring to the store."""
        mine: list[int] = []
        if not isinstance(self.store, LocalStore):
            mine = [int(path.parent.name[5:]) for path in self.scratch.glob(f"step-????????/{MARKER}")]
        return {step for steps in self.team.gather_objects(mine) for step in steps}

    def read(self, step: int) -> Commit:
        """The marker of a step, checked; that of the store if it has one."""
        try:
            return Commit.parse(self.store.read(f"{folder(step)}/{MARKER}"))
        except NotFoundError:
            if not (self.scratch / folder(step) / MARKER).is_file():
                raise
            return Commit.parse((self.scratch / folder(step) / MARKER).read_bytes())

    def _publish(self, commit: Commit) -> None:
        """Bring to the store what an attempt before this one saved on this machine only."""
        if not self.team.leads:
            return
        log.warning("%s was saved here and not in %s yet: uploading", folder(commit.step), self.store.url)
        place = self._place(commit.step)
        self._upload(commit.step, [place / name for name in commit.files])
        self._commit(commit)

    def _fetch(self, step: int) -> str:
        """Bring a checkpoint to this machine and check every byte; returns what is wrong, or nothing."""
        try:
            commit = self.read(step)
            place = self._place(step)
            for number, (name, entry) in enumerate(sorted(commit.files.items())):
                if number % self.team.local_world != self.team.local_rank:
                    continue
                if not isinstance(self.store, LocalStore) and not _is(place / name, entry):
                    place.mkdir(parents=True, exist_ok=True)
                    with (
                        self.store.stream(f"{folder(step)}/{name}") as chunks,
                        (place / name).open("wb") as out,
                    ):
                        for chunk in chunks:
                            out.write(chunk)
                got = (place / name).stat().st_size
                if got != entry["bytes"]:
                    return f"{name} has {got} bytes, the marker says {entry['bytes']}"
                if (digest := digest_file(place / name, ["sha256"])["sha256"]) != entry["sha256"]:
                    return f"{name} has sha256 {digest[:12]}…, the marker says {entry['sha256'][:12]}…"
        except (NotFoundError, FileNotFoundError) as error:
            return f"missing: {error.args[0] if isinstance(error, DatasyncError) else error}"
        except CorruptError as error:
            return error.message
        return ""

    def _dcp_load(self, tensors: dict[str, Tensor], place: Path) -> None:
        dcp = _dcp()
        with _one_line():
            dcp.load(tensors, storage_reader=dcp.FileSystemReader(place), no_dist=not self.team.distributed)

    def _clear(self) -> None:
        """Remove what was fetched, when all ranks have read it."""
        self.team.barrier("reading a checkpoint")
        self._sweep()

    def copy(self, step: int, target: Store) -> None:
        """Copy a checkpoint, checked, to another store; its marker last.

        Raises:
            CorruptError: It does not verify.
        """
        if reason := self._fetch(step):
            raise CorruptError(f"{folder(step)} in {self.store.url}: {reason}", mend="take another step")
        for name in self.read(step).files:
            target.write_file(f"{folder(step)}/{name}", self._place(step) / name)
        target.write(f"{folder(step)}/{MARKER}", self.store.read(f"{folder(step)}/{MARKER}"))
        target.write("latest", folder(step).encode())
        self._clear()

    def read_json(self, key: str) -> Any:
        """A small file that is kept beside the checkpoints; None where there is none."""
        try:
            return json.loads(self.store.read(key))
        except NotFoundError:
            return None

    def write_json(self, key: str, value: Any) -> None:
        """Keep a small file beside the checkpoints."""
        self.store.write(key, json.dumps(value).encode())

    def _exists(self, key: str) -> bool:
        try:
            self.store.stat(key)
        except NotFoundError:
            return False
        return True

    # Retention

    def _retain(self) -> None:
        """Remove checkpoints that no rule keeps: the marker first, then the files; only names that are
        ours."""
        steps = self.steps()
        losses = {}
        if self.c.keep_best:
            losses = {step: self.read(step).state.get("eval_loss") for step in steps}
        for step in doomed(steps, self.c, losses):
            keys = [item.key for item in self.store.list(f"{folder(step)}/")]
            self.store.delete([f"{folder(step)}/{MARKER}"])
            self.store.delete([key for key in keys if _OURS.fullmatch(key)])
            if isinstance(self.store, LocalStore):
                place = self._place(step)
                if place.is_dir() and not any(place.iterdir()):
                    place.rmdir()


def doomed(steps: list[int], c: CheckpointConfig, losses: Mapping[int, float | None]) -> list[int]:
    """Which of `steps` (newest first) no rule of retention keeps. The newest is always kept."""
    kept = set(steps[: c.keep_last] if c.keep_last else steps) | set(steps[:1])
    if c.keep_every:
        kept |= {step for step in steps if step % c.keep_every == 0}
    scored = sorted((loss, step) for step in steps if (loss := losses.get(step)) is not None)
    kept |= {step for _, step in scored[: c.keep_best]}
    return [step for step in steps if step not in kept]


def _is(path: Path, entry: Mapping[str, Any]) -> bool:
    """Whether a file is what a marker says."""
    known = path.is_file() and path.stat().st_size == entry["bytes"]
    return known and digest_file(path, ["sha256"])["sha256"] == entry["sha256"]


def _copy(tensor: Tensor) -> Tensor:
    """A copy in main memory that later steps do not change; a sharded tensor stays sharded."""
    if hasattr(tensor, "device_mesh"):
        from torch.distributed.tensor import DTensor

        copied = _copy(tensor.to_local())
        return DTensor.from_local(
            copied,
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
    return tensor.detach().to("cpu", copy=True)


def _dcp() -> Any:
    """torch.distributed.checkpoint, imported when it is needed, without its warnings about what is done on
    purpose."""
    import torch.distributed.checkpoint as dcp

    warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
    warnings.filterwarnings("ignore", message="Detected an existing checkpoint", category=UserWarning)
    return dcp


def _said(error: Exception) -> str:
    return error.message if isinstance(error, DatasyncError) else f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def _one_line() -> Iterator[None]:
    """What went wrong, as an error of ours: PyTorch's is no `Exception`, and holds tracebacks."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        causes = {f"{type(cause).__name__}: {cause}" for cause, _ in error.failures.values()}
        raise DatasyncError("; ".join(sorted(causes))) from error


def weights_digest(parameters: Callable[[], Mapping[str, Tensor]] | Mapping[str, Tensor]) -> str:
    """sha256 over all weights in the order of their names: two models are the same exactly if these are.

    Every rank must call it: sharded weights are put together one at a time.
    """
    named = parameters() if callable(parameters) else parameters
    total = hashlib.sha256()
    for name in sorted(named):
        tensor = named[name].detach()
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        total.update(f"{name} {whole.dtype} {tuple(whole.shape)}\n".encode())
        total.update(whole.cpu().contiguous().view(torch.uint8).numpy().data)
    return total.hexdigest()
