"""A decoder-only transformer over one sequence of text, image patches and audio frames.

    tokens (B, T) ── embedding ──► x (B, T, D) ── blocks ──► RMSNorm ── head ──► logits (B, T, V)
    images, audio ── encoders ───► rows of x at their placeholder positions

Each block is x + Attention(RMSNorm(x)), then x + SwiGLU(RMSNorm(x)): RMSNorm (Zhang and Sennrich 2019),
rotary positions (Su et al. 2021), grouped queries (Ainslie et al. 2023), SwiGLU (Shazeer 2020), and by
choice a norm on queries and keys (Dehghani et al. 2023).

Shapes: B rows, T positions, D width, H query heads, K key heads, E head width, F MLP width, V vocabulary,
N media positions (patches or audio frames) in the whole batch.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train.config import ModelConfig
from train.model.media import AudioEncoder, PatchEncoder, VisionTransformer

IGNORE = -100
"""The target of a position that carries no loss."""

Past = tuple[Tensor, Tensor, int]
"""One block's part of the cache: keys and values (B, K, T, E), and how many positions of them are filled."""


class RMSNorm(nn.Module):
    """x / rms(x) * weight, over the last dimension."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


def rope_table(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines (B, 1, T, E) for positions (B, T); angles repeat in the two halves of a head."""
    frequencies = theta ** (
        -torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    )
    angles = positions[:, None, :, None].float() * frequencies  # (B, 1, T, E/2)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + E/2) of x (B, heads, T, E) by the angle of its position."""
    a, b = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-b, a], dim=-1) * sin).to(x.dtype)


@dataclass(slots=True)
class KVCache:
    """Keys and values of the positions already seen, for generation: two tensors (B, K, T, E) a layer."""

    layers: list[tuple[Tensor, Tensor]]
    length: int = 0

    def of(self, layer: int) -> Past:
        """What one block needs of it."""
        return (*self.layers[layer], self.length)


class Attention(nn.Module):
    """Causal self-attention in which several query heads share a key head."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = c.heads, c.kv_heads, c.head_dim
        self.q = nn.Linear(c.dim, c.heads * c.head_dim, bias=False)
        self.k = nn.Linear(c.dim, c.kv_heads * c.head_dim, bias=False)
        self.v = nn.Linear(c.dim, c.kv_heads * c.head_dim, bias=False)
        self.o = nn.Linear(c.heads * c.head_dim, c.dim, bias=False)
        self.q_norm = RMSNorm(c.head_dim, c.norm_eps) if c.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(c.head_dim, c.norm_eps) if c.qk_norm else nn.Identity()

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None, past: Past | None
    ) -> Tensor:
        B, T, _ = x.shape
        q = rotate(
            self.q_norm(self.q(x).view(B, T, self.heads, self.head_dim)).transpose(1, 2), *rope
        )  # (B, H, T, E)
        k = rotate(
            self.k_norm(self.k(x).view(B, T, self.kv_heads, self.head_dim)).transpose(1, 2), *rope
        )  # (B, K, T, E)
        v = self.v(x).view(B, T, self.kv_heads, self.head_dim).transpose(1, 2)
        if past is not None:
            keys, values, start = past
            keys[:, :, start : start + T], values[:, :, start : start + T] = k, v
            k, v = keys[:, :, : start + T], values[:, :, : start + T]
        causal = mask is None and (past is None or T > 1)  # one new position sees all that are cached
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=self.heads != self.kv_heads
        )
        return self.o(y.transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(c.dim, c.hidden, bias=False)
        self.up = nn.Linear(c.dim, c.hidden, bias=False)
        self.down = nn.Linear(c.hidden, c.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention, then MLP, each on a normalised input and added to the stream.

    It does not know its own number: torch.compile then makes one program for all blocks.
    """

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.dropout = c.dropout
        self.attention_norm = RMSNorm(c.dim, c.norm_eps)
        self.attention = Attention(c)
        self.mlp_norm = RMSNorm(c.dim, c.norm_eps)
        self.mlp = MLP(c)

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None = None, past: Past | None = None
    ) -> Tensor:
        y = self.attention(self.attention_norm(x), rope, mask, past)
        x = x + F.dropout(y, self.dropout, self.training)
        y = self.mlp(self.mlp_norm(x))
        return x + F.dropout(y, self.dropout, self.training)


class Decoder(nn.Module):
    """The whole model.

    Args:
        config (ModelConfig): Sizes.
        vocab (int): Tokens known.
        media (Collection[str]): Which of ``image`` and ``audio`` the model can see.
    """

    def __init__(self, config: ModelConfig, vocab: int, media: Collection[str] = ()) -> None:
        super().__init__()
        c = self.config = config
        self.vocab = vocab
        # not initialised: on the meta device that would import the compiler, a second at each start
        self.embedding = nn.Embedding.from_pretrained(torch.empty(vocab, c.dim), freeze=False)
        encoders: dict[str, nn.Module] = {}
        if "image" in media:
            encoders["image"] = (VisionTransformer if c.image.encoder == "vit" else PatchEncoder)(
                c.image, c.dim
            )
        if "audio" in media:
            encoders["audio"] = AudioEncoder(c.audio, c.dim)
        self.encoders = nn.ModuleDict(encoders)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = RMSNorm(c.dim, c.norm_eps)
        self.head = None if c.tied else nn.Linear(c.dim, vocab, bias=False)
        self.recompute = False

    def forward(
        self,
        tokens: Tensor,
        *,
        targets: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        media: dict[str, tuple[Tensor, Tensor]] | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Logits (B, T, V), or with `targets` the sum of the loss over the positions that have one.

        Args:
            tokens (Tensor): (B, T) token ids; anything at the positions of media.
            targets (Tensor | None): (B, T) the next token, or IGNORE.
            positions (Tensor | None): (B, T) position in the document. Default: 0, 1, 2, … on from the cache.
            documents (Tensor | None): (B, T) which document of its row a position belongs to; it sees no
            other.
                Default: one document a row.
            media (dict | None): For ``image`` and ``audio``: what the encoder takes, and (N,) the places of
            its
                N outputs in the B*T positions.
            cache (KVCache | None): Generate: keys and values so far, extended in place.
        """
        B, T = tokens.shape
        x = self.embedding(tokens)  # (B, T, D)
        for name, encoder in self.encoders.items():
            values, places = (media or {}).get(name, (None, None))
            if values is None:
                if self.training:  # every rank must have a gradient for every weight, with and without media
                    x = x + 0.0 * encoder(encoder.blank(x.device)).sum()
                continue
            y = encoder(values).reshape(-1, x.shape[-1]).to(x.dtype)  # (N, D)
            x = x.reshape(B * T, -1).index_copy(0, places, y).view(B, T, -1)
        if positions is None:
            start = cache.length if cache is not None else 0
            positions = torch.arange(start, start + T, device=x.device).expand(B, T)
        rope = rope_table(positions, self.config.head_dim, self.config.rope_theta)
        mask = document_mask(documents) if documents is not None else None
        for layer, block in enumerate(self.blocks):
            if self.recompute and self.training:
                from torch.utils.checkpoint import checkpoint

                x = checkpoint(block, x, rope, mask, use_reentrant=False)
            else:
                x = block(x, rope, mask, None if cache is None else cache.of(layer))
        if cache is not None:
            cache.length += T
        x = self.norm(x)
        logits = F.linear(x, self.embedding.weight) if self.head is None else self.head(x)  # (B, T, V)
        if targets is None:
            return logits
        return F.cross_entropy(
            logits.view(B * T, -1).float(), targets.reshape(-1), ignore_index=IGNORE, reduction="sum"
        )

    def new_cache(self, rows: int, length: int) -> KVCache:
        """Room for `length` positions in each of `rows` sequences."""
        weight, c = self.embedding.weight, self.config
        shape = (rows, c.kv_heads, length, c.head_dim)
        return KVCache([(weight.new_zeros(shape), weight.new_zeros(shape)) for _ in self.blocks])


def document_mask(documents: Tensor) -> Tensor:
    """(B, 1, T, T): true where a position may look: back, and inside its own document."""
    T = documents.shape[1]
    same = documents[:, :, None] == documents[:, None, :]
    return (same & torch.ones(T, T, dtype=torch.bool, device=documents.device).tril())[:, None]


@torch.no_grad()
def init_weights(model: Decoder, seed: int) -> None:
    """Set every weight as a function of the seed and its own name alone.

    So the weights are the same on one rank and on many, whole or sharded, and no rank ever holds more than
    one whole tensor besides its share. Norms start at one, biases at zero, the last matrix of each branch is
    scaled by the depth.
    """
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            whole = torch.zeros(parameter.shape)
        elif "norm" in name:
            whole = torch.ones(parameter.shape)
        else:
            deep = name.endswith(("attention.o.weight", "mlp.down.weight"))
            std = 0.02 / math.sqrt(2 * model.config.layers) if deep else 0.02
            generator = torch.Generator().manual_seed(name_seed(seed, name))
            whole = torch.empty(parameter.shape).normal_(0.0, std, generator=generator)
        assign(parameter, whole)


def assign(parameter: Tensor, whole: Tensor) -> None:
    """Copy a whole tensor into a parameter, or its share of it into a sharded one."""
    if hasattr(parameter, "device_mesh"):
        from torch.distributed.tensor import distribute_tensor

        whole = whole.to(parameter.device)
        whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(whole)


def name_seed(*parts: object) -> int:
    """A 63-bit seed from a hash of the parts: never a sum, so that neighbouring seeds share nothing."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little") >> 1
