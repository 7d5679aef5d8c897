"""One step's gradients, on whatever there is: one process, DDP, FSDP2, or the elastic sum.

    loss of a step = sum over the samples of all ranks / number of targets on all ranks

The division is by the global count, so a rank whose captions are short weighs no more than the others. DDP
and FSDP2 average over ranks; each microbatch's loss is therefore scaled by the number of ranks first.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shards.errors import UsageError
from train.config import Config
from train.distributed import Team
from train.documents import Batch
from train.elastic import Gradients, put_gradients, sum_over_ranks, take_gradients, tree_sum, usable_ranks
from train.model.decoder import Decoder, init_weights, name_seed
from train.plan import chosen

SHAPES = 64
"""Shapes of a microbatch for which blocks are compiled; more than these run uncompiled."""


class Engine:
    """A model in place on its device, and the way its gradients are made.

    Args:
        config (Config): The run.
        team (Team): The ranks.
        model (Decoder): Built on the meta device; weights are set from the seed here.
    """

    def __init__(self, config: Config, team: Team, model: Decoder) -> None:
        self.config, self.team, self.model = config, team, model
        self.elastic = config.run.deterministic == "elastic"
        size = sum(p.numel() for p in model.parameters())
        self.mode, dtype = chosen(config, size, team.world, team.device.type)
        self.dtype: torch.dtype = getattr(torch, dtype)
        model.recompute = config.parallel.activation_checkpointing
        if config.parallel.compile:
            _compile(model, exact=config.run.deterministic != "off")
        self.sharded = self.mode == "fsdp" and team.distributed
        if self.sharded:
            self._shard()
        model.to_empty(device=team.device)
        self.forward: nn.Module = model
        self.parameters = list(model.parameters())
        self.forward_s = 0.0
        self._spans: list[Span] = []
        self.reset()
        model.train()
        if self.mode == "ddp" and team.world > 1 and not self.elastic:
            self.forward = _ddp(model, team)

    def reset(self) -> None:
        """The initial weights: from the seed, then from `model.weights`."""
        init_weights(self.model, self.config.run.seed)
        if self.config.model.weights:
            from train.model.llama import import_weights

            import_weights(self.model, Path(self.config.model.weights))

    def _shard(self) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32)
        mesh = torch.distributed.init_device_mesh(self.team.device.type, (self.team.world,))
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)

    def backward(self, step: int, batches: Sequence[Batch], targets: int) -> float:
        """Leave this step's gradients in the parameters; returns this rank's part of the loss (a sum).

        With the elastic sum every rank returns the same: the whole loss divided by the number of ranks.
        `forward_s` is then the seconds of the forward passes, in which a rank of DDP waits for nobody.
        """
        self._spans = []
        work = self._backward_elastic if self.elastic else self._backward
        loss = work(step, batches, targets)
        self.forward_s = sum(span.seconds for span in self._spans)
        return loss

    def _backward(self, step: int, batches: Sequence[Batch], targets: int) -> float:
        total = torch.zeros((), device=self.team.device)
        for i, batch in enumerate(batches):
            with self._sync(i == len(batches) - 1):
                loss = self._loss(step, self.team.rank * len(batches) + i, batch)
                (loss * (self.team.world / targets)).backward()
            total += loss.detach()
        return total.item()

    def _backward_elastic(self, step: int, batches: Sequence[Batch], targets: int) -> float:
        first = self.team.rank * len(batches)

        def run(start: int, n: int) -> Gradients:
            total = torch.zeros((), device=self.team.device)
            for i in range(start, start + n):
                loss = self._loss(step, first + i, batches[i])
                loss.backward()
                total += loss.detach()
            return take_gradients(self.parameters, total)

        partial = tree_sum(run, len(batches))
        loss = put_gradients(self.parameters, sum_over_ranks(partial, self.team.world), 1.0 / targets)
        return loss.item() / self.team.world

    def _loss(self, step: int, atom: int, batch: Batch) -> Tensor:
        """The summed loss of one microbatch; its dropout is a function of seed, step and place in the global
        batch."""
        seed_all(name_seed(self.config.run.seed, "step", step, atom))
        span = Span(self.team.device)
        batch = batch.to(self.team.device)
        with self.autocast():
            loss: Tensor = self.forward(batch.tokens, **batch.inputs())
        span.end()
        self._spans.append(span)
        return loss

    def autocast(self) -> AbstractContextManager[Any]:
        """Lower precision for the forward pass, where asked for and not FSDP's own business."""
        if self.dtype == torch.float32 or self.sharded:
            return contextlib.nullcontext()
        return torch.autocast(self.team.device.type, dtype=self.dtype)

    def _sync(self, last: bool) -> AbstractContextManager[Any]:
        """Gradients travel with the last microbatch only."""
        if self.sharded:
            self.model.set_requires_gradient_sync(last)  # type: ignore[operator]
        elif self.forward is not self.model and not last:
            return self.forward.no_sync()  # type: ignore[operator,no-any-return]
        return contextlib.nullcontext()

    def total(self, number: Tensor) -> Tensor:
        """Sum a number over the ranks that share the gradients."""
        if self.sharded:
            torch.distributed.all_reduce(number)
        return number


class Span:
    """From now to `end` on a device, which may be behind with its work; `seconds` once it has caught up."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._from = self._mark()
        self._to = self._from

    def end(self) -> None:
        self._to = self._mark()

    @property
    def seconds(self) -> float:
        if self._cuda:
            return self._from.elapsed_time(self._to) / 1000  # type: ignore[no-any-return]
        return self._to - self._from  # type: ignore[no-any-return]

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def seed_all(seed: int) -> None:
    """Every source of random numbers, so that none has a state to keep."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def working_ranks(config: Config, world: int) -> int:
    """How many of `world` ranks compute; the others stand by.

    Raises:
        UsageError: There are more ranks than samples in a step, or the elastic sum's settings do not fit.
    """
    B, m = config.data.batch_size, config.data.micro_batch
    if config.run.deterministic != "elastic":
        if world > B:
            raise UsageError(
                f"data.batch_size = {B} is less than one sample for each of {world} ranks",
                mend=f"use {world} or more, or fewer ranks",
            )
        return world
    if not m:
        raise UsageError(
            'deterministic = "elastic" needs data.micro_batch, the piece of work that never changes',
            mend=f"for example --set data.micro_batch={max(B // 8, 1)}",
        )
    if B % m:
        raise UsageError(
            f"data.micro_batch = {m} does not divide data.batch_size = {B}", mend="choose a divisor"
        )
    if config.parallel.mode == "fsdp":
        raise UsageError(
            'deterministic = "elastic" keeps the whole model on every rank; "fsdp" does not',
            mend='--set parallel.mode=ddp, or run.deterministic="on"',
        )
    return usable_ranks(B // m, world)


def microbatches(config: Config, world: int) -> int:
    """In how many pieces every rank cuts its samples of a step: as many on all, though ranks that do not
    divide the batch have one sample more or less."""
    least, most = config.data.batch_size // world, -(-config.data.batch_size // world)
    return min(-(-most // (config.data.micro_batch or most)), least)


def _compile(model: Decoder, *, exact: bool) -> None:
    """Each block by itself: one program serves all of them.

    A program for each shape, and none for shapes in general: which one computes a step must not depend on the
    steps before it, or a restart would not give the same bits. `exact` leaves out choices made by timing.
    """
    import torch._dynamo
    import torch._inductor.config as inductor

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, SHAPES)
    if exact and hasattr(inductor, "deterministic"):
        inductor.deterministic = True
    for block in model.blocks:
        block.compile(dynamic=False)


def _ddp(model: nn.Module, team: Team) -> nn.Module:
    """DDP that adds in the same order in its first step as in all others.

    DDP regroups its buckets after the first backward pass, and the order in which a ring adds depends on the
    bucket: with more than two ranks, the first step after a restart would differ in its last bits from the
    same step without one. So a backward pass over nothing comes first.
    """
    from torch.nn.parallel import DistributedDataParallel

    devices = [team.device.index] if team.device.type == "cuda" else None
    wrapped = DistributedDataParallel(model, device_ids=devices)
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=team.device)
    wrapped(tokens, targets=tokens).backward()
    model.zero_grad()
    return wrapped
