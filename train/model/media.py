"""Images and audio as positions of the sequence.

    image (S, S, 3) uint8 ── patches (n, 3·P·P) ── Linear, or a vision transformer and a projector ──► (n, D)
    audio, log-mel frames ── groups of frames (m, frames·mels) ── Linear ──► (m, D)

Shapes: I images, n patches an image, P side of a patch, D width of the decoder, W width of the vision
transformer.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train.config import AudioConfig, ImageConfig


class PatchEncoder(nn.Module):
    """Each patch by one linear map, plus a learned vector for its place in the image."""

    def __init__(self, c: ImageConfig, dim: int) -> None:
        super().__init__()
        self.config = c
        self.project = nn.Linear(3 * c.patch * c.patch, dim)
        self.place = nn.Parameter(torch.zeros(c.tokens, dim))

    def forward(self, patches: Tensor) -> Tensor:
        return self.project(patches) + self.place  # (I, n, D)

    def blank(self, device: torch.device) -> Tensor:
        """One empty image: its gradient is zero."""
        return torch.zeros(1, self.config.tokens, 3 * self.config.patch**2, device=device)


class VisionTransformer(nn.Module):
    """Patches through a small transformer that looks both ways (Dosovitskiy et al. 2020), then a two-layer
    projector."""

    def __init__(self, c: ImageConfig, dim: int) -> None:
        super().__init__()
        self.patches = PatchEncoder(c, c.dim)
        self.blocks = nn.ModuleList(VisionBlock(c.dim, c.heads) for _ in range(c.layers))
        self.norm = nn.LayerNorm(c.dim)
        self.project = nn.Sequential(nn.Linear(c.dim, dim), nn.GELU(), nn.Linear(dim, dim))

    def forward(self, patches: Tensor) -> Tensor:
        x = self.patches(patches)  # (I, n, W)
        for block in self.blocks:
            x = block(x)
        return self.project(self.norm(x))  # (I, n, D)

    def blank(self, device: torch.device) -> Tensor:
        return self.patches.blank(device)


class VisionBlock(nn.Module):
    """Attention without a mask, then an MLP, each on a normalised input."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.mlp_norm = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        I, n, W = x.shape  # noqa: E741 - the shape legend's letter
        q, k, v = (
            self.qkv(self.attention_norm(x)).view(I, n, 3, self.heads, W // self.heads).permute(2, 0, 3, 1, 4)
        )
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).reshape(I, n, W))
        return x + self.mlp(self.mlp_norm(x))


class AudioEncoder(nn.Module):
    """Each group of log-mel frames by one linear map; where it is in time, the decoder's positions say."""

    def __init__(self, c: AudioConfig, dim: int) -> None:
        super().__init__()
        self.config = c
        self.project = nn.Linear(c.frames * c.mels, dim)

    def forward(self, frames: Tensor) -> Tensor:
        return self.project(frames)  # (m, D)

    def blank(self, device: torch.device) -> Tensor:
        """One empty group of frames."""
        return torch.zeros(1, self.config.frames * self.config.mels, device=device)
