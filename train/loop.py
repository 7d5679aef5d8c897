"""One run, from its config to its last step; the same command starts it and continues it.

    restore ─► [ draw a batch ─► vote ─► forward, backward ─► clip ─► judge ─► update ─► save ─► log ] ─► end

Everything that decides a step is restored: weights, moments, step, place in the data, recent losses,
decisions of the guard. Random numbers need no restoring: each is a function of seed, step and place in the
batch. So N steps are the same N steps however often the run was killed between them.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import DistError

from shards.errors import CorruptError, DatasyncError
from shards.progress import format_count
from train.checkpoint import Checkpoints, weights_digest
from train.config import Config
from train.data import Feed, Share, receipts
from train.distributed import Team
from train.documents import Encoder
from train.evaluate import Evaluation
from train.folder import RunFolder, environment
from train.guard import Guard, Kind
from train.metrics import Metrics, memory_bytes, peak_flops, straggler
from train.optim import AdamW, clip_gradients, learning_rate
from train.parallel import Engine, microbatches, working_ranks
from train.plan import build_model, flops_per_position
from train.signals import StopRequest, agreed

if TYPE_CHECKING:
    from datasync.storage import Store

log = logging.getLogger("train")


class StoppedError(DatasyncError):
    """A signal ended the run between two steps; everything is saved."""


def run(config: Config, *, accept: Sequence[str] = (), began: float | None = None) -> dict[str, Any]:
    """Train, or continue, the run that the config describes.

    Args:
        config (Config): The run.
        accept (Sequence[str]): Config keys, and differences of the dataset, that are meant: by default a run
            goes on only with what it was started with.
        began (float | None): When the process started, in seconds since the epoch, so that its imports count
            as time that the run took. Default: now.

    Returns:
        The summary, as in `summary.json`; nothing on a rank that only stood by.

    Raises:
        DatasyncError: What stopped it; with `exit_code` 128 + N after signal N.
    """
    team = Team(config.parallel, config.run.timeout_s, partial(working_ranks, config))
    if team.spare:
        return team.stand_by()
    try:
        return Trainer(config, team, accept, began).train()
    finally:
        team.close()


class Trainer:
    """Everything that a run holds, in one process."""

    def __init__(
        self, config: Config, team: Team, accept: Sequence[str] = (), began: float | None = None
    ) -> None:
        self.spent = {"import": time.time() - began if began else 0.0}
        self.clock = time.perf_counter()
        self.config, self.team, self.accept = config, team, accept
        self.folder = RunFolder(Path(config.run.dir))
        if team.leads:
            self.folder.open(config, accept)
        self.threads = set_up_torch(config, team)
        self.encoder = Encoder(config)
        self.feed = Feed(config, team, self.encoder, microbatches(config, team.world))
        self._lap("data")
        self.engine = Engine(config, team, build_model(config, self.encoder.tokenizer.vocab))
        self.optimizer = AdamW(self.engine.model, config.optim)
        self.guard = Guard(config.guard)
        self.checkpoints = Checkpoints(
            open_store(config), team, config.checkpoint, self.folder.path / "staging"
        )
        self.evaluation = Evaluation(config, team, self.encoder)
        self.flops = flops_per_position(self.engine.model, config.model)
        self.first_place = self.place = self.feed.state()
        self._lap("model")
        self.step, self.saved = 0, -1
        self.loss: float | None = None
        self.eval_loss: float | None = None

    def train(self) -> dict[str, Any]:
        """All steps that are left; returns the summary."""
        stop = StopRequest()
        self.restore()
        if not self.step:
            self._refuse_lost()
        metrics = self._begin() if self.team.leads else None
        cause = "error"
        self._lap()
        try:
            while self.step < self.config.run.steps:
                record = self.one_step(stop)
                if metrics is not None and record is not None:
                    metrics.write(record)
            self.save(wait=True)
            cause = "finished"
            return self._summarise()
        except DatasyncError as error:
            cause = error.message
            raise
        except RuntimeError as error:  # a collective inside the backward pass failed
            if self.team.world > 1 and (isinstance(error, DistError) or "gloo" in str(error)):
                lost = self.team.missing(self.step, error)
                cause = lost.message
                raise lost from error
            if "DataLoader worker" in str(error):
                cause = f"a worker of data.workers = {self.config.data.workers} died: {error}"
                raise DatasyncError(
                    cause,
                    mend="killed from outside is mostly out of memory: lower data.workers or give it more; "
                    "then run the same command again to continue",
                ) from error
            raise
        finally:
            stop.restore()
            self.feed.close(timeout_s=5.0)
            self.checkpoints.finish()
            if metrics is not None:
                metrics.close()
                self.folder.end(cause, step=self.step)
            self.folder.close()

    def one_step(self, stop: StopRequest) -> dict[str, Any] | None:
        """One update of the weights and its record; None where the guard left the batch out."""
        c, team = self.config, self.team
        share = self.feed.next(more=self.step + 1 < c.run.steps)
        targets, positions, *votes = team.vote(self.step, [share.valid, share.positions, *stop.votes])
        if (kind := agreed(votes)) is not None:
            self._stop(kind)
        mine = self.engine.backward(self.step, share.batches, max(targets, 1))
        norm = clip_gradients(self.engine.parameters, c.optim.clip, self.engine.total).item()
        own_s = share.wait_s + self.engine.forward_s
        table = team.gather([mine, own_s, share.wait_s, share.ledger])  # (ranks, 4)
        loss = float(table[:, 0].sum()) / max(targets, 1)
        if (bad := self.guard.judge(loss, norm)) is not None:
            self._leave_out(bad, loss, share)
            return None
        lr = learning_rate(c.optim, self.step, c.run.steps)
        self.optimizer.step(self.step, lr)
        self.optimizer.zero_grad()
        self.step += 1
        self.loss, self.place = loss, self.feed.state()
        evaluated = self._evaluate()
        saving = time.perf_counter()
        if self.step % c.checkpoint.every == 0 and self.step < c.run.steps:
            self.save()
        save_s = time.perf_counter() - saving
        step_s, peak = self._lap(), peak_flops(team.device)
        return {
            "step": self.step,
            "loss": loss,
            "lr": lr,
            "norm": norm,
            "targets": targets,
            "positions": positions,
            "batch": share.number,
            "epoch": share.epoch,
            "samples": (share.number + 1) * c.data.batch_size,
            "ledger": int(table[:, 3].sum()),
            "step_s": step_s,
            "wait_s": float(table[:, 2].max()),
            "save_s": save_s,
            "eval_loss": self.eval_loss if evaluated else None,
            "tokens_per_s": positions / step_s,
            "mfu": positions * self.flops / step_s / (peak * team.world) if peak else None,
            "memory_bytes": memory_bytes(team.device),
            "own_s": [round(seconds, 4) for seconds in table[:, 1].tolist()],
            "slowest": straggler(table[:, 1].tolist()),
            "attempt": self.folder.attempt,
            "time": time.time(),
        }

    def _evaluate(self) -> bool:
        """Validate where it is this step's turn."""
        every = self.config.eval.every
        if not every or (self.step % every and self.step < self.config.run.steps):
            return False
        self.eval_loss = self.evaluation.loss(self.engine)
        return True

    # State

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint shards: weights and moments."""
        return {**self.engine.model.state_dict(), **self.optimizer.state()}

    def save(self, *, wait: bool = False) -> None:
        """Keep the state after the last finished step."""
        if self.saved != self.step:
            self.saved = self.step
            state = {
                "step": self.step, "data": self.place, "datasets": self.feed.describe(),
                "guard": self.guard.state(), "loss": self.loss, "eval_loss": self.eval_loss,
                "threads": self.threads, "world": self.team.world, "config": self.config.to_dict(),
            }  # fmt: skip
            self.checkpoints.save(self.step, self.tensors(), state, wait=wait)
        elif wait:
            self.checkpoints.finish()

    def restore(self) -> None:
        """Go to the newest good checkpoint; without any, to the beginning."""
        state = self.checkpoints.load(self.tensors())
        events = self.checkpoints.read_json("guard.json") or []
        if state is None:
            self.engine.reset()
            self.optimizer.reset()
            state = {"step": 0, "data": self.first_place, "guard": {}, "loss": None, "eval_loss": None}
        elif state["world"] == self.team.world and self.config.run.deterministic != "off":
            torch.set_num_threads(state["threads"])
            self.threads = state["threads"]
        self.step, self.loss, self.eval_loss = state["step"], state["loss"], state["eval_loss"]
        self.saved = self.step if self.step else -1
        self.guard.load(state["guard"], events)
        self.feed.skipped = self.guard.skipped
        self.place = state["data"]
        self.feed.load(self.place, self.accept)

    def _refuse_lost(self) -> None:
        """There is nothing to continue, says the store. If the run folder knows better, do not start afresh.

        Raises:
            CorruptError: An attempt ended with everything saved.
        """
        [saved, made] = self.team.gather_objects(self.folder.progress() if self.team.leads else None)[0]
        if saved:
            raise CorruptError(
                f"{self.folder.path} has saved step {saved}, and there is no checkpoint in "
                f"{self.checkpoints.store.url}",
                mend="copy them back (datasync replicate, a backup), or name another run.dir to start afresh",
            )
        if made and self.team.leads:
            log.error(
                "%s has made %s before and saved none: BEGINNING AGAIN",
                self.folder.path,
                format_count(made, "step"),
            )

    def _stop(self, kind: signal.Signals) -> None:
        """Save what the last finished step left, and leave."""
        self.optimizer.zero_grad()
        self.save(wait=True)
        error = StoppedError(
            f"stopped by {kind.name} after step {self.step} of {self.config.run.steps}; everything is saved",
            mend="run the same command again to continue",
        )
        error.exit_code = 128 + kind.value
        raise error

    def _leave_out(self, kind: Kind, loss: float, share: Share) -> None:
        """Carry out the guard's policy for this batch, and keep the decision at once."""
        self.optimizer.zero_grad()
        ids = [name for names in self.team.gather_objects(share.ids) for name in names]
        self.guard.record(step=self.step + 1, batch=share.number, kind=kind, loss=loss, samples=ids)
        if self.team.leads:
            self.checkpoints.write_json("guard.json", self.guard.events)
            log.error("step %d: %s; batch %d left out (%s): samples %s", self.step + 1, kind, share.number,
                      self.config.guard.policy, ", ".join(ids))  # fmt: skip
        self.team.barrier("keeping the guard's decision")
        if self.config.guard.policy == "rewind":
            self.restore()
        self._lap()  # what was thrown away is no step's time

    def _lap(self, name: str = "") -> float:
        """Seconds since the last call, noted under a name while setting up. Writing a step's record so counts
        in the next step."""
        before, self.clock = self.clock, time.perf_counter()
        if name:
            self.spent[name] = self.clock - before
        return self.clock - before

    # The run folder

    def _begin(self) -> Metrics:
        c, place = self.config, self.step
        described = zip(self.feed.describe(), receipts(self.feed.dataset), strict=True)
        self.folder.write("data.json", [{**entry, "receipt": receipt} for entry, receipt in described])
        facts = {"step": place, "world": self.team.world, **environment()}
        self._lap("restore")
        self.folder.begin(setup_s=sum(self.spent.values()), setup=self.spent, **facts)
        if c.eval.every and not (c.eval.holdout or c.eval.remote or c.eval.split):
            log.warning(
                "validation uses samples that are trained on: set eval.holdout, eval.split or eval.remote"
            )
        size = sum(p.numel() for p in self.engine.parameters)
        where = f"continuing after step {place}" if place else "from the beginning"
        log.info(
            "%s: %s parameters · %s · %s · %s",
            c.run.dir,
            f"{size:,}",
            self.team.device,
            format_count(self.team.world, "rank"),
            where,
        )
        return Metrics(self.folder, c.run.steps, every=c.log.every, tensorboard=c.log.tensorboard)

    def _summarise(self) -> dict[str, Any]:
        """What came out of the run; also kept in the run folder."""
        summary = {
            "run": self.config.run.dir, "step": self.step, "loss": self.loss, "eval_loss": self.eval_loss,
            "samples": self.place["number"] * self.config.data.batch_size, "attempts": self.folder.attempt,
            "left_out": len(self.guard.events),
            "digest": weights_digest(dict(self.engine.model.named_parameters())),
        }  # fmt: skip
        if self.team.leads:
            self.folder.write("summary.json", summary)
        return summary


def set_up_torch(config: Config, team: Team) -> int:
    """Threads and determinism; returns the threads."""
    elastic = config.run.deterministic == "elastic"
    shared = max(len(os.sched_getaffinity(0)) // team.local_world, 1)
    threads = config.run.threads or (1 if elastic else shared)
    torch.set_num_threads(threads)
    if config.run.deterministic != "off":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.set_deterministic_debug_mode("error")  # its other name imports the compiler: a second
        torch.utils.deterministic.fill_uninitialized_memory = False
    torch.set_float32_matmul_precision("high")
    return threads


def open_store(config: Config) -> Store:
    """Where the run keeps its checkpoints."""
    from datasync.config import Config as Clusters

    return Clusters.load(None).resolve(config.checkpoint.url or str(Path(config.run.dir) / "checkpoints"))
