"""Validation: the mean loss over a fixed set of samples, each exactly once.

The set is N samples, evenly spread over a dataset, cut into pieces that do not depend on the ranks. Each rank
takes every R-th piece; the sums are added in the order of the pieces, so any number of ranks gives the same
result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from train.config import Config
from train.data import fixed_samples, open_fixed
from train.distributed import Team
from train.documents import Collate, Encoder
from train.parallel import Engine

if TYPE_CHECKING:
    from datasync import StreamingDataset

PIECE = 16
"""Samples of one piece."""


class Evaluation:
    """The fixed set of a run; None of it is read before the first `loss`."""

    def __init__(self, config: Config, team: Team, encoder: Encoder) -> None:
        self.config, self.team = config, team
        self.collate = Collate(encoder, 1, config.data.pack)
        self.dataset: StreamingDataset | None = None

    @torch.no_grad()
    def loss(self, engine: Engine) -> float:
        """Mean loss of all targets, on every rank."""
        if self.dataset is None:
            self.dataset = open_fixed(self.config)
        numbers = fixed_samples(self.dataset, self.config.eval.samples)
        starts = range(0, len(numbers), PIECE)
        sums: list[tuple[int, float, int]] = []
        engine.model.eval()
        for at in range(0, len(starts), self.team.world):
            mine = at + self.team.rank
            start = starts[
                min(mine, len(starts) - 1)
            ]  # a rank without a piece takes part, and does not count
            samples = [self.dataset[i] for i in numbers[start : start + PIECE]]
            batch = self.collate.batch(samples).to(self.team.device)
            with engine.autocast():
                loss = engine.model(batch.tokens, **batch.inputs()).item()
            if mine < len(starts):
                sums.append((mine, loss, batch.valid))
        engine.model.train()
        everyone = sorted(tuple(entry) for entries in self.team.gather_objects(sums) for entry in entries)
        return sum(entry[1] for entry in everyone) / max(sum(entry[2] for entry in everyone), 1)
