"""Weights in Hugging Face layout: equal logits there and here, and refusals that say what differs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from shards.errors import FormatError, UsageError
from train.config import Config
from train.model import Decoder
from train.model.decoder import init_weights
from train.model.llama import export_weights, import_weights, their_name
from train.plan import build_model

TREE = {"run": {"dir": "r", "steps": 1}, "data": {"remote": "x"}, "model": {"size": "0.2m", "context": 64}}
TOKENS = torch.randint(0, 250, (2, 40), generator=torch.Generator().manual_seed(0))


def make(*sets: str, seed: int = 1, vocab: int = 259) -> Decoder:
    config = Config.from_tree(TREE, sets, where="test")[0]
    model = build_model(config, vocab).to_empty(device="cpu")
    init_weights(model, seed)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4.0 if p.dim() > 1 else 1.1)
    return model.eval()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("qk_norm", [True, False])
def test_transformers_gives_the_same_logits(tmp_path: Path, tied: bool, qk_norm: bool) -> None:
    transformers = pytest.importorskip("transformers")
    model = make(f"model.tied={str(tied).lower()}", f"model.qk_norm={str(qk_norm).lower()}")
    export_weights(model, tmp_path, bos=256, eos=257)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert theirs.config.model_type == ("qwen3" if qk_norm else "llama")
    with torch.no_grad():
        torch.testing.assert_close(theirs(TOKENS).logits, model(TOKENS), rtol=1e-4, atol=1e-4)


def test_weights_that_transformers_wrote_give_the_same_logits(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=250, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False, rms_norm_eps=1e-5,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    model = make("model.tied=false", "model.qk_norm=false")
    import_weights(model, tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS)[..., :250], theirs(TOKENS).logits, rtol=1e-4, atol=1e-4)


def test_export_and_import_keep_every_bit_of_decoder_and_encoders(tmp_path: Path) -> None:
    model, other = make("data.audio=sound"), make("data.audio=sound", seed=2)
    export_weights(model, tmp_path, bos=256, eos=257)
    import_weights(other, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_another_shape_is_refused_with_each_difference(tmp_path: Path) -> None:
    export_weights(make(), tmp_path, bos=256, eos=257)
    with pytest.raises(UsageError) as caught:
        import_weights(make("model.layers=3", "model.rope_theta=5e5"), tmp_path)
    assert "num_hidden_layers is 2, ours 3" in str(caught.value)
    assert "rope_theta is 10000.0, ours 500000.0" in str(caught.value)
    with pytest.raises(UsageError, match="vocab_size is 259, ours 100"):
        import_weights(make(vocab=100), tmp_path)


def test_scaled_rotary_positions_are_refused(tmp_path: Path) -> None:
    export_weights(make(), tmp_path, bos=256, eos=257)
    described = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**described, "rope_scaling": {"rope_type": "llama3"}}))
    with pytest.raises(UsageError, match="scales its rotary positions"):
        import_weights(make(), tmp_path)


def test_a_missing_file_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no model"):
        import_weights(make(), tmp_path)
    export_weights(make(), tmp_path, bos=256, eos=257)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FormatError, match="lacks"):
        import_weights(make(), tmp_path)


def test_names_are_theirs() -> None:
    assert their_name("blocks.3.attention.q.weight") == "model.layers.3.self_attn.q_proj.weight"
    assert their_name("encoders.image.place") is None
