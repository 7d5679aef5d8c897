"""Models: a decoder over text, images and audio, in files that read like their papers."""

from __future__ import annotations

from train.model.decoder import Decoder, KVCache

__all__ = ["Decoder", "KVCache"]
