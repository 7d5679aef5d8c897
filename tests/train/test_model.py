"""The decoder: causality, packing, caching, grouped queries, weights that depend on the seed alone."""

from __future__ import annotations

import itertools

import pytest
import torch

from train.config import Config
from train.documents import Collate, Encoder
from train.model import Decoder
from train.model.decoder import IGNORE, RMSNorm, init_weights, rope_table, rotate
from train.optim import AdamW, clip_gradients, learning_rate
from train.plan import build_model, flops_per_position, plan

TREE = {"run": {"dir": "r", "steps": 10}, "data": {"remote": "x"}, "model": {"size": "0.2m", "context": 64}}


def make(*sets: str) -> tuple[Config, Decoder]:
    config = Config.from_tree(TREE, sets, where="test")[0]
    model = build_model(config, 259).to_empty(device="cpu")
    init_weights(model, seed=3)
    return config, model.eval()


def bigger(model: Decoder) -> None:
    """Weights large enough for attention to matter."""
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(5.0)


@pytest.mark.parametrize("sets", [[], ["model.qk_norm=false"], ["model.tied=false"], ["model.kv_heads=4"]])
def test_a_position_does_not_see_what_comes_after_it(sets: list[str]) -> None:
    _, model = make(*sets)
    bigger(model)
    a = torch.randint(0, 256, (1, 20), generator=torch.Generator().manual_seed(0))
    b = a.clone()
    b[0, 12:] = 7
    assert torch.equal(model(a)[:, :12], model(b)[:, :12])
    assert not torch.allclose(model(a)[:, 12:], model(b)[:, 12:])


def test_packed_documents_equal_separate_ones() -> None:
    config, model = make("data.image=")
    bigger(model)
    encoder = Encoder(config)
    samples = [{"caption": "x" * n + "y" * (n // 2)} for n in (3, 20, 7, 12, 30, 1)]
    packed, apart = Collate(encoder, 1, True).batch(samples), Collate(encoder, 1, False).batch(samples)
    logits, alone = (
        model(packed.tokens, positions=packed.positions, documents=packed.documents),
        model(apart.tokens),
    )
    mine = logits[packed.targets != IGNORE]
    order = torch.argsort(torch.tensor([len(s["caption"]) for s in samples]), stable=True)
    assert len(order) == len(samples)
    theirs = {}
    for row in range(len(samples)):
        keep = apart.targets[row] != IGNORE
        theirs[tuple(apart.tokens[row][keep].tolist())] = alone[row][keep]
    found = 0
    assert packed.documents is not None
    for row in range(len(packed.tokens)):
        for document in packed.documents[row].unique().tolist():
            if document < 0:
                continue
            keep = packed.documents[row] == document
            reference = theirs[tuple(packed.tokens[row][keep].tolist())]
            torch.testing.assert_close(logits[row][keep], reference, rtol=1e-4, atol=1e-5)
            found += 1
    assert found == len(samples)
    assert len(mine) == packed.valid
    loss = model(packed.tokens, **packed.inputs())
    torch.testing.assert_close(loss, model(apart.tokens, **apart.inputs()), rtol=1e-5, atol=1e-3)


def test_a_cache_gives_the_logits_of_the_whole_sequence() -> None:
    _, model = make()
    bigger(model)
    tokens = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(0))
    whole = model(tokens)
    cache = model.new_cache(2, 24)
    parts = [model(tokens[:, :10], cache=cache)]
    parts += [model(tokens[:, i : i + 1], cache=cache) for i in range(10, 24)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-5)


def test_grouped_queries_equal_repeated_heads() -> None:
    _, grouped = make("model.kv_heads=2")
    _, full = make("model.kv_heads=4")
    with torch.no_grad():
        full.load_state_dict(
            {k: v for k, v in grouped.state_dict().items() if ".k." not in k and ".v." not in k}, strict=False
        )
        for a, b in zip(grouped.blocks, full.blocks, strict=True):
            for name in ("k", "v"):
                weight = getattr(a.attention, name).weight.view(2, 16, 64)
                getattr(b.attention, name).weight.copy_(weight.repeat_interleave(2, dim=0).reshape(64, 64))
    tokens = torch.arange(20)[None]
    torch.testing.assert_close(grouped(tokens), full(tokens), rtol=1e-4, atol=1e-5)


def test_rotary_scores_depend_on_distance_alone() -> None:
    q, k = torch.randn(1, 1, 1, 16), torch.randn(1, 1, 1, 16)

    def score(at: int, to: int) -> float:
        a = rotate(q, *rope_table(torch.tensor([[at]]), 16, 10_000.0))
        b = rotate(k, *rope_table(torch.tensor([[to]]), 16, 10_000.0))
        return float((a * b).sum())

    assert score(5, 2) == pytest.approx(score(105, 102), abs=1e-4)
    assert score(5, 2) != pytest.approx(score(5, 3), abs=1e-4)


def test_rms_norm_ignores_scale() -> None:
    norm = RMSNorm(8, 1e-6)
    x = torch.randn(3, 8)
    torch.testing.assert_close(norm(x), norm(100 * x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("encoder", ["patches", "vit"])
def test_an_image_changes_what_follows_it_and_nothing_else(encoder: str) -> None:
    _, model = make(f"model.image.encoder={encoder}")
    bigger(model)
    tokens = torch.full((2, 30), 65)
    places = torch.arange(1, 17) + 30  # in the second row
    one = {"image": (torch.zeros(1, 16, 192), places)}
    two = {"image": (torch.ones(1, 16, 192), places)}
    a, b = model(tokens, media=one), model(tokens, media=two)
    assert torch.equal(a[0], b[0])
    assert torch.equal(a[1, :1], b[1, :1])
    assert not torch.allclose(a[1, 20], b[1, 20])


def test_every_weight_has_a_gradient_with_and_without_media() -> None:
    _, model = make("data.audio=sound")
    model.train()
    tokens = torch.full((1, 30), 65)
    model(tokens, targets=tokens).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


def test_weights_depend_on_seed_and_name_alone() -> None:
    _, a = make()
    _, b = make("model.layers=4")
    shared = {
        k: v
        for k, v in b.state_dict().items()
        if k in a.state_dict() and ".o." not in k and ".down." not in k
    }
    assert all(torch.equal(a.state_dict()[k], v) for k, v in shared.items())
    init_weights(b, seed=4)
    assert not torch.equal(a.embedding.weight, b.embedding.weight)


def test_recomputed_activations_give_the_same_gradients() -> None:
    _, model = make("model.dropout=0.2")
    model.train()
    tokens = torch.full((2, 30), 65)
    grads = []
    for recompute in (False, True):
        model.recompute = recompute
        torch.manual_seed(0)
        model.zero_grad()
        model(tokens, targets=tokens).backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters()})
    assert all(torch.equal(grads[0][name], grads[1][name]) for name in grads[0])


def test_adamw_is_that_of_torch() -> None:
    config, model = make("optim.weight_decay=0.1")
    _, twin = make()
    ours = AdamW(model, config.optim)
    c = config.optim
    matrices = [p for p in twin.parameters() if p.dim() >= 2]
    vectors = [p for p in twin.parameters() if p.dim() < 2]
    theirs = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": c.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=1e-2, betas=(c.beta1, c.beta2), eps=c.eps,
    )  # fmt: skip
    tokens = torch.randint(0, 256, (2, 20), generator=torch.Generator().manual_seed(0))
    for step in range(5):
        for m in (model, twin):
            m.zero_grad()
            (m(tokens, targets=tokens) / 40).backward()
        ours.step(step, 1e-2)
        theirs.step()
    for (name, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6, msg=name)


def test_clipping_is_that_of_torch() -> None:
    _, model = make()
    model.train()
    tokens = torch.full((1, 30), 65)
    model(tokens, targets=tokens).backward()
    before = [p.grad.clone() for p in model.parameters()]
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    expected = [p.grad.clone() for p in model.parameters()]
    for p, g in zip(model.parameters(), before, strict=True):
        p.grad = g
    torch.testing.assert_close(clip_gradients(model.parameters(), 1.0), norm)
    for p, g in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, g)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
def test_schedules_warm_up_peak_and_end_where_they_say(schedule: str) -> None:
    config, _ = make(f"optim.schedule={schedule}", "optim.lr=1.0", "optim.warmup=10", "optim.final=0.1")
    rates = [learning_rate(config.optim, step, 100) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == pytest.approx(1.0)
    assert rates[9] == pytest.approx(1.0)
    assert rates[-1] == pytest.approx(1.0 if schedule == "constant" else 0.1, abs=0.06)
    assert all(a >= b - 1e-9 for a, b in itertools.pairwise(rates[10:]))


def test_compiled_blocks_share_one_program_and_give_the_same_gradients() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    _, plain = make("model.layers=3")
    _, compiled = make("model.layers=3")
    counter = CompileCounterWithBackend("aot_eager")  # the compiler itself runs in test_variants.py
    for block in compiled.blocks:
        block.compile(backend=counter, dynamic=False)
    tokens = torch.randint(0, 256, (2, 64), generator=torch.Generator().manual_seed(0))
    losses = []
    for model in (plain, compiled):
        model.train()
        loss = model(tokens, targets=tokens)
        loss.backward()
        losses.append(loss.item())
    assert counter.frame_count == 1
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for (name, a), b in zip(plain.named_parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize(("size", "billions"), [("1b", (1.0, 1.4)), ("7b", (6.5, 7.5))])
def test_large_models_are_planned_without_memory(size: str, billions: tuple[float, float]) -> None:
    tree = {**TREE, "model": {"size": size, "context": 4096, "vocab": 32_000}}
    config = Config.from_tree(tree, ["parallel.mode=fsdp", "data.micro_batch=1"], where="test")[0]
    model = build_model(config, 259)
    assert all(p.is_meta for p in model.parameters())
    one, eight = plan(config), plan(config, world=8)
    assert billions[0] * 1e9 < one.parameters < billions[1] * 1e9
    assert 6 * one.parameters * 0.9 < flops_per_position(model, config.model) < 6 * one.parameters * 1.3
    assert eight.weights == one.weights // 8
    assert one.checkpoint == 12 * one.parameters


@pytest.mark.parametrize(
    ("sets", "published"),
    [
        (["model.size=7b", "model.kv_heads=32", "model.hidden=11008", "model.vocab=32000"], 6_738_415_616),
        (["model.size=7b", "model.vocab=32000"], 7_241_732_096),
        (["model.size=1b", "model.vocab=128256"], 1_235_814_400),
    ],
    ids=["Llama 7B", "Mistral 7B", "Llama 3.2 1B"],
)
def test_known_models_have_their_published_number_of_parameters(sets: list[str], published: int) -> None:
    config = Config.from_tree(
        {**TREE, "model": {"context": 2048, "qk_norm": False}}, [*sets, "data.image="], where="test"
    )[0]
    made = plan(config)
    assert made.parameters == published
    # 6 FLOPs a weight and position (Kaplan et al. 2020), and up to a fifth more for attention
    assert 5.4 * published < made.flops_per_position < 7.2 * published


def test_what_is_left_to_the_machine_is_planned_for_gpus() -> None:
    tree = {**TREE, "model": {"size": "1b", "context": 2048}}
    config = Config.from_tree(tree, ["data.micro_batch=1"], where="test")[0]
    one, eight = plan(config), plan(config, world=8)
    assert eight.weights == one.weights // 8
    exact = Config.from_tree(tree, ["data.micro_batch=1", "parallel.dtype=float32"], where="test")[0]
    assert plan(exact).activations > 1.2 * one.activations


def test_the_count_of_flops_is_torchs_own() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    config, model = make("model.context=64", "data.image=")
    model.train()
    tokens = torch.full((2, 64), 65)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens, targets=tokens).backward()
    whole_attention = (
        6.0 * config.model.layers * config.model.dim * config.model.context
    )  # torch counts no mask
    per_position = counter.get_total_flops() / tokens.numel()
    assert per_position == pytest.approx(flops_per_position(model, config.model) + whole_attention, rel=0.01)
