"""AdamW (Loshchilov and Hutter 2017) and its schedule, as plain functions over named tensors.

    state: {name: (m, v)}     one step: m ← β₁m + (1-β₁)g,  v ← β₂v + (1-β₂)g²,  w ← w - lr·(m̂/(√v̂ + ε) +
                              λw)

Written out because a run must start in seconds (torch.optim imports the compiler, two and a half seconds on
a small machine) and because the state should be nothing but tensors that a checkpoint can shard and reshard.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from train.config import OptimConfig


def learning_rate(c: OptimConfig, step: int, steps: int) -> float:
    """The rate of step `step` (from 0) of `steps`."""
    if step < c.warmup:
        return c.lr * (step + 1) / c.warmup
    done = (step - c.warmup) / max(steps - c.warmup, 1)
    if c.schedule == "constant":
        share = 1.0
    elif c.schedule == "linear":
        share = 1.0 - done
    elif c.schedule == "wsd":
        share = min(1.0, (1.0 - done) / 0.2)
    else:
        share = 0.5 * (1.0 + math.cos(math.pi * done))
    return c.lr * (c.final + (1.0 - c.final) * share)


class AdamW:
    """Decoupled weight decay on matrices, none on norms and biases.

    Args:
        model (nn.Module): Its trainable parameters, whole or sharded (DTensor).
        c (OptimConfig): Betas, epsilon, decay.
    """

    def __init__(self, model: nn.Module, c: OptimConfig) -> None:
        self.c = c
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.m = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self.v = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        matrices = [name for name, p in self.parameters.items() if p.dim() >= 2]
        vectors = [name for name, p in self.parameters.items() if p.dim() < 2]
        self.groups = [(matrices, c.weight_decay), (vectors, 0.0)]

    @torch.no_grad()
    def step(self, step: int, lr: float) -> None:
        """Update from the gradients; `step` counts from 0 and sets the bias correction."""
        c = self.c
        for names, decay in self.groups:
            names = [name for name in names if self.parameters[name].grad is not None]
            if not names:
                continue
            weights = [local(self.parameters[name]) for name in names]
            grads = [local(self.parameters[name].grad) for name in names]
            m, v = [local(self.m[name]) for name in names], [local(self.v[name]) for name in names]
            torch._foreach_lerp_(m, grads, 1 - c.beta1)
            torch._foreach_mul_(v, c.beta2)
            torch._foreach_addcmul_(v, grads, grads, 1 - c.beta2)
            scale = torch._foreach_sqrt(v)
            torch._foreach_div_(scale, math.sqrt(1 - c.beta2 ** (step + 1)))
            torch._foreach_add_(scale, c.eps)
            torch._foreach_mul_(weights, 1 - lr * decay)
            torch._foreach_addcdiv_(weights, m, scale, -lr / (1 - c.beta1 ** (step + 1)))

    @torch.no_grad()
    def reset(self) -> None:
        """Back to zero moments."""
        for moment in self.state().values():
            moment.zero_()

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for p in self.parameters.values():
            p.grad = None

    def state(self) -> dict[str, Tensor]:
        """The moments, as a checkpoint keeps them: ``m.NAME`` and ``v.NAME``."""
        return {
            f"{kind}.{name}": t
            for kind, moments in (("m", self.m), ("v", self.v))
            for name, t in moments.items()
        }


@torch.no_grad()
def clip_gradients(
    parameters: Iterable[nn.Parameter],
    limit: float,
    total: Callable[[Tensor], Tensor] = lambda squares: squares,
) -> Tensor:
    """Scale gradients down to a global norm of `limit` (0: leave them); returns the norm before, as one
    number.

    `total` sums the squares over ranks where each holds a share of the gradients.
    """
    grads = [local(p.grad) for p in parameters if p.grad is not None]
    norms = torch.stack(torch._foreach_norm(grads))
    norm = total((norms * norms).sum()).sqrt()
    if limit > 0:
        torch._foreach_mul_(grads, torch.clamp(limit / (norm + 1e-6), max=1.0))
    return norm


def local(tensor: Tensor | None) -> Tensor:
    """This rank's share of a sharded tensor, or the tensor itself; the same memory."""
    assert tensor is not None
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
