"""Several ranks: DDP, FSDP and the elastic sum; stopping, dying, hanging, changing their number."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.train.ranks import records, run, start
from train.config import Config
from train.parallel import microbatches


def sets(shapes: Path, folder: Path, *more: str) -> list[str]:
    return [f"data.remote={shapes}", f"run.dir={folder}", *more]


ELASTIC = ("run.deterministic=elastic", "data.micro_batch=2", "model.dropout=0.1")


@pytest.fixture(scope="module")
def one(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run on one rank."""
    folder = tmp_path_factory.mktemp("one") / "run"
    run(1, *sets(shapes, folder))
    return folder


@pytest.fixture(scope="module")
def elastic(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The elastic run on one rank."""
    folder = tmp_path_factory.mktemp("elastic") / "run"
    run(1, *sets(shapes, folder, *ELASTIC))
    return folder


def digest(folder: Path) -> str:
    return str(json.loads((folder / "summary.json").read_text())["digest"])


@pytest.mark.parametrize(
    ("world", "mode"), [(2, "ddp"), (4, "ddp"), (2, "fsdp"), pytest.param(4, "fsdp", marks=pytest.mark.slow)]
)
def test_any_number_of_ranks_trains_on_the_same_samples_to_nearly_the_same_loss(
    shapes: Path, one: Path, tmp_path: Path, world: int, mode: str
) -> None:
    run(world, *sets(shapes, tmp_path / "run", f"parallel.mode={mode}"))
    for a, b in zip(records(one), records(tmp_path / "run"), strict=True):
        assert (a["ledger"], a["targets"], a["batch"]) == (b["ledger"], b["targets"], b["batch"])
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
        assert a["norm"] == pytest.approx(b["norm"], rel=1e-3)


@pytest.mark.parametrize(("world", "mode"), [(4, "ddp"), (2, "fsdp")])
def test_a_killed_rank_is_named_and_the_same_number_goes_on_to_the_same_bits(
    shapes: Path, tmp_path: Path, world: int, mode: str
) -> None:
    more = (f"parallel.mode={mode}", "model.dropout=0.1", "data.micro_batch=2")
    run(world, *sets(shapes, tmp_path / "calm", *more))
    outcomes = start(world, *sets(shapes, tmp_path / "run", *more, "fault.kill=1:5")).wait()
    assert 1 not in outcomes
    assert outcomes[0]["kind"] == "RankError"
    assert "step 5: rank 1 (" in outcomes[0]["error"]
    run(world, *sets(shapes, tmp_path / "run", *more))
    assert digest(tmp_path / "run") == digest(tmp_path / "calm")


@pytest.mark.parametrize("world", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_elastic_gives_the_same_bits_on_any_power_of_two(
    shapes: Path, elastic: Path, tmp_path: Path, world: int
) -> None:
    run(world, *sets(shapes, tmp_path / "run", *ELASTIC))
    assert digest(tmp_path / "run") == digest(elastic)
    keep = ("loss", "norm", "ledger")
    assert [[r[k] for k in keep] for r in records(tmp_path / "run")] == [
        [r[k] for k in keep] for r in records(elastic)
    ]


def test_elastic_gives_the_same_bits_through_changes_of_the_number(
    shapes: Path, elastic: Path, tmp_path: Path
) -> None:
    every = (*ELASTIC, "checkpoint.every=2")
    start(4, *sets(shapes, tmp_path / "run", *every, "fault.kill=2:3")).wait()
    start(1, *sets(shapes, tmp_path / "run", *every, "fault.kill=0:5")).wait()
    run(2, *sets(shapes, tmp_path / "run", *every))
    assert {r["attempt"] for r in records(tmp_path / "run")} == {1, 2, 3}
    assert digest(tmp_path / "run") == digest(elastic)


def test_a_checkpoint_of_sharded_weights_loads_on_fewer_ranks(
    shapes: Path, one: Path, tmp_path: Path
) -> None:
    start(2, *sets(shapes, tmp_path / "run", "parallel.mode=fsdp", "fault.kill=1:5")).wait()
    run(1, *sets(shapes, tmp_path / "run", "parallel.mode=ddp"))
    for a, b in zip(records(one), records(tmp_path / "run"), strict=True):
        assert a["ledger"] == b["ledger"]
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)


def test_a_signal_to_one_rank_stops_all_after_the_same_step(shapes: Path, tmp_path: Path) -> None:
    outcomes = start(2, *sets(shapes, tmp_path / "run", "fault.signal=1:4:SIGUSR1")).wait()
    assert {outcome["code"] for outcome in outcomes.values()} == {138}
    assert len({outcome["error"] for outcome in outcomes.values()}) == 1
    ends = [
        e
        for e in map(json.loads, (tmp_path / "run/attempts.jsonl").read_text().splitlines())
        if e["event"] == "end"
    ]
    assert ends[0]["cause"].startswith("stopped by SIGUSR1")
    assert (tmp_path / "run/checkpoints/latest").read_text() == f"step-{ends[0]['step']:08d}"


def test_a_rank_that_hangs_is_named_by_the_others(shapes: Path, tmp_path: Path) -> None:
    group = start(2, *sets(shapes, tmp_path / "run", "fault.hang=1:3", "run.timeout_s=5"))
    group.processes[0].join(90)
    outcomes = group.wait(0.1) if not group.processes[1].is_alive() else _told(group)
    assert outcomes[0]["kind"] == "RankError"
    assert "step 3: rank 1 (" in outcomes[0]["error"]


def _told(group: object) -> dict[int, dict[str, object]]:
    group.kill()  # type: ignore[attr-defined]
    return group.wait()  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_ranks_that_do_not_divide_the_batch_get_a_sample_more_or_less(
    shapes: Path, one: Path, tmp_path: Path, mode: str
) -> None:
    run(3, *sets(shapes, tmp_path / "run", f"parallel.mode={mode}", "data.micro_batch=2"))
    for a, b in zip(records(one), records(tmp_path / "run"), strict=True):
        assert (a["ledger"], a["targets"], a["batch"]) == (b["ledger"], b["targets"], b["batch"])
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
        assert a["norm"] == pytest.approx(b["norm"], rel=1e-3)


@pytest.mark.parametrize(
    ("batch", "micro", "world", "pieces"),
    [(16, 2, 1, 8), (16, 2, 3, 3), (16, 0, 3, 1), (16, 1, 5, 3), (16, 3, 2, 3), (64, 8, 24, 1), (5, 1, 4, 1)],
)
def test_every_rank_has_as_many_microbatches_and_none_is_empty(
    batch: int, micro: int, world: int, pieces: int
) -> None:
    config = Config.from_tree(
        {"run": {"dir": "r", "steps": 1}, "data": {"remote": "x"}},
        [f"data.batch_size={batch}", f"data.micro_batch={micro}"],
        where="test",
    )[0]
    assert microbatches(config, world) == pieces <= batch // world


def test_a_rank_that_the_elastic_sum_cannot_use_stands_by(
    shapes: Path, elastic: Path, tmp_path: Path
) -> None:
    outcomes = start(3, *sets(shapes, tmp_path / "run", *ELASTIC)).wait()
    assert outcomes[2] == {}
    assert outcomes[0]["digest"] == outcomes[1]["digest"] == digest(elastic)


def test_more_ranks_than_samples_are_refused(shapes: Path, tmp_path: Path) -> None:
    outcomes = start(3, *sets(shapes, tmp_path / "run", "data.batch_size=2")).wait()
    assert "data.batch_size = 2 is less than one sample for each of 3 ranks" in outcomes[0]["error"]
    assert {outcome["code"] for outcome in outcomes.values()} == {2}
