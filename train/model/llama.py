"""Weights to and from the layout of Hugging Face transformers, as safetensors.

A decoder without a norm on queries and keys is a Llama, one with it is a Qwen3; both are written with a
`config.json` that `AutoModelForCausalLM.from_pretrained` opens. Encoders of images and audio, which those
models do not have, go into a file of their own (`media.safetensors`). Rotary halves are laid out as there,
so nothing is permuted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shards.errors import FormatError, UsageError
from train.config import ModelConfig
from train.model.decoder import Decoder, assign

_BLOCK = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.q.weight": "self_attn.q_proj.weight",
    "attention.k.weight": "self_attn.k_proj.weight",
    "attention.v.weight": "self_attn.v_proj.weight",
    "attention.o.weight": "self_attn.o_proj.weight",
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "mlp.gate.weight": "mlp.gate_proj.weight",
    "mlp.up.weight": "mlp.up_proj.weight",
    "mlp.down.weight": "mlp.down_proj.weight",
}


def their_name(name: str) -> str | None:
    """What transformers calls a parameter of ours; None for one of an encoder."""
    outer = {
        "embedding.weight": "model.embed_tokens.weight",
        "norm.weight": "model.norm.weight",
        "head.weight": "lm_head.weight",
    }
    if name in outer:
        return outer[name]
    part, _, rest = name.partition(".")
    if part != "blocks":
        return None
    layer, _, inner = rest.partition(".")
    return f"model.layers.{layer}.{_BLOCK[inner]}"


def export_weights(model: Decoder, folder: Path, *, bos: int, eos: int) -> None:
    """Write `config.json`, `model.safetensors` and, where there are encoders, `media.safetensors`."""
    from safetensors.torch import save_file

    decoder: dict[str, Tensor] = {}
    media: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        theirs = their_name(name)
        (media if theirs is None else decoder)[theirs or name] = parameter.detach().cpu().contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(decoder, folder / "model.safetensors", metadata={"format": "pt"})
    if media:
        save_file(media, folder / "media.safetensors", metadata={"format": "pt"})
    described = {**describe(model.config, model.vocab), "bos_token_id": bos, "eos_token_id": eos}
    (folder / "config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


def describe(c: ModelConfig, vocab: int) -> dict[str, Any]:
    """The model as transformers describes it."""
    kind = ("Qwen3ForCausalLM", "qwen3") if c.qk_norm else ("LlamaForCausalLM", "llama")
    return {
        "architectures": [kind[0]],
        "model_type": kind[1],
        "vocab_size": vocab,
        "hidden_size": c.dim,
        "intermediate_size": c.hidden,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "max_position_embeddings": c.context,
        "rope_theta": c.rope_theta,
        "rms_norm_eps": c.norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": c.tied,
        "torch_dtype": "float32",
    }


@torch.no_grad()
def import_weights(model: Decoder, folder: Path) -> None:
    """Fill a decoder of the same shape. A larger vocabulary of ours keeps its initial rows beyond theirs.

    Raises:
        UsageError: No such folder, or a model of another shape; the message names each difference.
        FormatError: A tensor is missing.
    """
    check_shape(model, folder)
    parameters = dict(model.named_parameters())
    names = {theirs: name for name in parameters if (theirs := their_name(name)) is not None}
    missing = set(names)
    for theirs, tensor in stored(folder):
        name = names.get(theirs, theirs)
        if name not in parameters:
            continue  # a buffer, or the copy of a tied head
        parameter = parameters[name]
        whole = tensor.float()
        if whole.shape != parameter.shape:
            grown = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            whole = torch.cat([whole, grown[len(whole) :].float().cpu()])
        assign(parameter, whole)
        missing.discard(theirs)
    if missing:
        raise FormatError(
            f"{folder} lacks {', '.join(sorted(missing)[:4])} and so on", mend="download it whole"
        )


def check_shape(model: Decoder, folder: Path) -> None:
    """Compare a folder's `config.json` with our config."""
    try:
        theirs: Mapping[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{folder} holds no model: {error}", mend="name a folder with config.json and safetensors"
        ) from None
    ours = describe(model.config, model.vocab)
    if theirs.get("rope_scaling"):
        raise UsageError(
            f"{folder} scales its rotary positions, which this decoder does not", mend="use another model"
        )
    ignored = (
        "max_position_embeddings",
        "torch_dtype",
        "architectures",
        "vocab_size",
        "head_dim",
        "hidden_act",
    )
    wrong = [
        f"{key} is {theirs[key]}, ours {value}"
        for key, value in ours.items()
        if key in theirs and key not in ignored and theirs[key] != value
    ]
    if theirs.get("vocab_size", 0) > model.vocab:
        wrong.append(f"vocab_size is {theirs['vocab_size']}, ours {model.vocab}")
    if wrong:
        raise UsageError(f"{folder} has another shape: {'; '.join(wrong)}", mend="set the same under [model]")


def stored(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of every safetensors file of a folder."""
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                yield name, file.get_tensor(name)
