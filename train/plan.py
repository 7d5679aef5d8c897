"""What a run will cost, from its config alone: parameters, FLOPs, memory. Nothing is allocated (`meta`
device).

FLOPs of training one position: 6 for each weight that multiplies (forward 2, backward 4), and
12·layers·dim·T/2 for causal attention over T positions (Chinchilla's count, halved for the mask). The
embedding is a look-up: none.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from train.config import Config, ModelConfig
from train.model import Decoder
from train.tokens import load_tokenizer

AUTO_FSDP = 500_000_000
"""Parameters from which `parallel.mode = "auto"` shards the model on GPUs."""


def build_model(config: Config, vocab: int) -> Decoder:
    """The model on the meta device: shapes without memory."""
    media = [name for name, column in (("image", config.data.image), ("audio", config.data.audio)) if column]
    with torch.device("meta"):
        return Decoder(config.model, config.model.vocab or vocab, media)


def flops_per_position(model: Decoder, c: ModelConfig) -> float:
    """FLOPs of training one position of a full sequence."""
    return 6.0 * multiplying(model) + 6.0 * c.layers * c.dim * c.context


def multiplying(model: Decoder) -> int:
    """Weights that multiply at every position: all but the embedding (unless it is also the head) and the
    encoders."""
    matrices = sum(p.numel() for p in model.blocks.parameters() if p.dim() >= 2)
    return matrices + model.embedding.weight.numel()  # the head, tied or not, has the embedding's shape


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Bytes are those of one rank.

    Args:
        parameters (int): All weights.
        flops_per_position (float): Training FLOPs of one position.
        flops (float): Of the whole run, with every row full.
        weights, gradients, moments, activations (int): Bytes while training.
        checkpoint (int): Bytes of one checkpoint, all ranks together.
    """

    parameters: int
    flops_per_position: float
    flops: float
    weights: int
    gradients: int
    moments: int
    activations: int
    checkpoint: int

    @property
    def total(self) -> int:
        """Bytes of one rank, all told."""
        return self.weights + self.gradients + self.moments + self.activations


def plan(config: Config, world: int = 1) -> Plan:
    """Estimate a run on `world` ranks."""
    c, data = config.model, config.data
    model = build_model(config, load_tokenizer(data.tokenizer).vocab)
    parameters = sum(p.numel() for p in model.parameters())
    mode, dtype = chosen(config, parameters, world)
    shares = world if mode == "fsdp" else 1
    rows = data.micro_batch or max(data.batch_size // world, 1)
    per_position = flops_per_position(model, c)
    return Plan(
        parameters=parameters,
        flops_per_position=per_position,
        flops=per_position * data.batch_size * c.context * config.run.steps,
        weights=4 * parameters // shares,
        gradients=4 * parameters // shares,
        moments=8 * parameters // shares,
        activations=activation_bytes(config, model.vocab, rows, 2 if dtype == "bfloat16" else 4),
        checkpoint=12 * parameters,
    )


def chosen(config: Config, parameters: int, world: int, device: str = "cuda") -> tuple[str, str]:
    """(mode, dtype) where the config says "auto"; a plan is made for GPUs."""
    mode, dtype = config.parallel.mode, config.parallel.dtype
    large = device == "cuda" and world > 1 and parameters >= AUTO_FSDP
    return (
        ("fsdp" if large else "ddp") if mode == "auto" else mode,
        ("bfloat16" if device == "cuda" else "float32") if dtype == "auto" else dtype,
    )


def activation_bytes(config: Config, vocab: int, rows: int, width: int) -> int:
    """What the backward pass keeps of `rows` full sequences in numbers of `width` bytes: an estimate, good to
    about a third.

    In a block: two norms' inputs and outputs, q k v, the attention's output, and gate, up, their product;
    with recomputation its input alone, plus one whole block at a time. Then the logits with their gradient
    in float32.
    """
    c = config.model
    positions = rows * c.context
    attention = c.dim + 2 * c.kv_heads * c.head_dim + 2 * c.dim
    block = positions * (4 * c.dim + attention + 4 * c.hidden) * width
    kept = positions * c.dim * width
    blocks = c.layers * kept + block if config.parallel.activation_checkpointing else c.layers * block
    return blocks + positions * vocab * (width + 8)
