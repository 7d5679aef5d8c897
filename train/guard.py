"""When a loss is not a number, or jumps: notice it, decide, and remember the decision.

A step is judged by its global loss and gradient norm, which every rank holds, so all decide alike. What was
decided is kept beside the checkpoints at once (`guard.json`) and not only in the next checkpoint: a run that
was sent back, or killed just after, must not meet the same samples again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from shards.errors import DatasyncError
from train.config import GuardConfig

Kind = Literal["nan", "spike"]


class BadStepError(DatasyncError):
    """The loss is not a number or jumped, and the policy (or its limit) says stop."""


class Guard:
    """Judges steps by `c`.

    `events` holds what happened: step, number of the batch, kind, loss, ids of its samples. `skipped` are
    the numbers of the batches that are never to be drawn again.
    """

    def __init__(self, c: GuardConfig) -> None:
        self.c = c
        self.recent: deque[float] = deque(maxlen=c.window)
        self.events: list[dict[str, Any]] = []

    @property
    def skipped(self) -> set[int]:
        """Numbers of the batches to leave out."""
        return {event["batch"] for event in self.events} if self.c.policy == "rewind" else set()

    def judge(self, loss: float, norm: float) -> Kind | None:
        """What is wrong with a step, if anything; a good step joins the recent ones."""
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return "nan"
        if self.c.spike > 0 and len(self.recent) >= max(self.c.window // 2, 2):
            mean = sum(self.recent) / len(self.recent)
            spread = math.sqrt(sum((x - mean) ** 2 for x in self.recent) / len(self.recent))
            if loss > mean + self.c.spike * max(spread, 1e-3 * abs(mean)):
                return "spike"
        self.recent.append(loss)
        return None

    def record(self, *, step: int, batch: int, kind: Kind, loss: float, samples: Sequence[str]) -> None:
        """Note a bad step.

        Raises:
            BadStepError: The policy is to stop, or it happened too often.
        """
        event = {
            "step": step,
            "batch": batch,
            "kind": kind,
            "loss": None if math.isnan(loss) else loss,
            "samples": list(samples),
        }
        # a restart from before this step meets it again: the same event
        self.events = [known for known in self.events if known["batch"] != batch] + [event]
        what = "the loss is not a number" if kind == "nan" else f"the loss jumped to {loss:.3f}"
        shown = ", ".join(samples[:8]) + (f" and {len(samples) - 8} more" if len(samples) > 8 else "")
        if self.c.policy == "stop":
            raise BadStepError(
                f"step {step}: {what}; samples {shown}",
                mend="look at the samples; lower optim.lr, or set guard.policy to skip or rewind",
            )
        if len(self.events) > self.c.limit:
            raise BadStepError(
                f"step {step}: {what}, the {len(self.events)}th bad step; guard.limit is {self.c.limit}",
                mend="no single bad batch: lower optim.lr or look at the data; guard.limit allows more",
            )

    def state(self) -> dict[str, Any]:
        """For the checkpoint."""
        return {"recent": list(self.recent), "events": self.events}

    def load(self, state: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> None:
        """From the checkpoint, and the events kept beside it, which may be newer."""
        self.recent = deque(state.get("recent", ()), maxlen=self.c.window)
        self.events = [dict(event) for event in (events or state.get("events", ()))]
