"""Checkpoints: committed last, verified before use, walked past loudly, kept by rule."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from datasync.errors import CorruptError, DatasyncError
from datasync.storage import open_store
from train.checkpoint import MARKER, Checkpoints, Commit, doomed, folder, weights_digest
from train.config import CheckpointConfig, ParallelConfig
from train.distributed import Team


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((64, 3), value), "m.w": torch.full((5,), value + 1)}


def kept(where: Path | str, scratch: Path, **options: object) -> Checkpoints:
    c = CheckpointConfig(**{"asynchronous": False, **options})  # type: ignore[arg-type]
    return Checkpoints(open_store(str(where)), Team(ParallelConfig(device="cpu")), c, scratch)


def loaded(checkpoints: Checkpoints) -> tuple[float, dict[str, object] | None]:
    into = tensors(0.0)
    state = checkpoints.load(into)
    assert float(into["m.w"][0]) == float(into["w"][0, 0]) + 1
    return float(into["w"][0, 0]), None if state is None else dict(state)


@pytest.mark.parametrize("url", ["local", "memory"])
def test_what_was_saved_is_loaded(tmp_path: Path, url: str) -> None:
    where = tmp_path / "store" if url == "local" else f"memory://{tmp_path.name}"
    checkpoints = kept(where, tmp_path / "scratch")
    assert loaded(checkpoints) == (0.0, None)
    checkpoints.save(7, tensors(2.5), {"step": 7, "place": [1, 2]})
    assert loaded(kept(where, tmp_path / "scratch")) == (2.5, {"step": 7, "place": [1, 2]})
    assert open_store(str(where)).read("latest") == b"step-00000007"
    assert not (tmp_path / "scratch" / folder(7)).exists()


def test_a_background_save_keeps_the_state_of_its_moment(tmp_path: Path) -> None:
    checkpoints = kept(tmp_path / "c", tmp_path, asynchronous=True)
    live = tensors(1.0)
    checkpoints.save(1, live, {})
    live["w"].fill_(9.0)
    live["m.w"].fill_(10.0)
    checkpoints.finish()
    assert loaded(checkpoints) == (1.0, {})


def test_a_save_without_its_marker_is_no_checkpoint(tmp_path: Path) -> None:
    checkpoints = kept(tmp_path / "c", tmp_path)
    checkpoints.save(1, tensors(1.0), {"step": 1})
    checkpoints.save(2, tensors(2.0), {"step": 2})
    (tmp_path / "c" / folder(2) / MARKER).unlink()
    assert loaded(checkpoints) == (1.0, {"step": 1})


def test_a_first_save_that_was_torn_is_a_fresh_start(tmp_path: Path) -> None:
    checkpoints = kept(tmp_path / "c", tmp_path)
    checkpoints.save(1, tensors(1.0), {})
    (tmp_path / "c" / folder(1) / MARKER).unlink()
    (tmp_path / "c" / "latest").unlink()
    assert loaded(checkpoints) == (0.0, None)


@pytest.mark.parametrize("damage", ["flip", "cut", "missing", "metadata", "marker", "marker cut"])
def test_a_damaged_checkpoint_is_walked_past_loudly(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = kept(tmp_path / "c", tmp_path)
    checkpoints.save(1, tensors(1.0), {"step": 1})
    checkpoints.save(2, tensors(2.0), {"step": 2})
    at = tmp_path / "c" / folder(2)
    victim = at / {"metadata": ".metadata"}.get(damage, MARKER if "marker" in damage else "__0_0.distcp")
    data = bytearray(victim.read_bytes())
    if damage == "missing":
        victim.unlink()
    elif "cut" in damage:
        victim.write_bytes(data[: len(data) // 2])
    elif damage == "marker":
        victim.write_bytes(bytes(data).replace(b'"step": 2', b'"step": 3', 1))
    else:
        data[len(data) // 2] ^= 1
        victim.write_bytes(data)
    with caplog.at_level(logging.ERROR):
        assert loaded(checkpoints) == (1.0, {"step": 1})
    assert "WALKING PAST the checkpoint step-00000002" in caplog.text


def test_nothing_that_verifies_is_an_error_and_never_a_fresh_start(tmp_path: Path) -> None:
    checkpoints = kept(tmp_path / "c", tmp_path)
    checkpoints.save(1, tensors(1.0), {})
    (tmp_path / "c" / folder(1) / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(CorruptError, match="no checkpoint in") as caught:
        loaded(checkpoints)
    assert "step-00000001: __0_0.distcp has 0 bytes" in str(caught.value)


def test_markers_lost_after_a_commit_are_an_error_too(tmp_path: Path) -> None:
    checkpoints = kept(tmp_path / "c", tmp_path)
    checkpoints.save(1, tensors(1.0), {})
    (tmp_path / "c" / folder(1) / MARKER).unlink()
    with pytest.raises(CorruptError):
        loaded(checkpoints)


def test_a_step_saved_again_replaces_the_first(tmp_path: Path) -> None:
    checkpoints = kept(tmp_path / "c", tmp_path)
    checkpoints.save(1, tensors(1.0), {"n": 1})
    checkpoints.save(1, tensors(3.0), {"n": 2})
    assert loaded(checkpoints) == (3.0, {"n": 2})


def test_a_save_that_fails_in_the_background_is_logged_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "c").write_text("a file where the folder should be")
    checkpoints = kept(tmp_path / "c", tmp_path, asynchronous=True)
    checkpoints.save(1, tensors(1.0), {})
    checkpoints.finish()
    assert "checkpoint of step 1 NOT written" in caplog.text
    with pytest.raises(DatasyncError, match="could not be written"):
        checkpoints.save(2, tensors(1.0), {}, wait=True)
    (tmp_path / "c").unlink()
    checkpoints.save(3, tensors(5.0), {}, wait=True)
    assert loaded(checkpoints) == (5.0, {})


def test_what_could_not_be_uploaded_is_taken_from_this_machine_and_uploaded_then(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, scratch = f"memory://{tmp_path.name}", tmp_path / "scratch"
    checkpoints = kept(where, scratch)
    checkpoints.save(1, tensors(1.0), {"step": 1})

    def away(key: str, path: Path) -> None:
        raise OSError("the network is down")

    with monkeypatch.context() as broken:
        broken.setattr(checkpoints.store, "write_file", away)
        with pytest.raises(DatasyncError, match="the network is down"):
            checkpoints.save(2, tensors(2.0), {"step": 2}, wait=True)
    assert kept(where, tmp_path / "another machine").steps() == [1]
    assert loaded(kept(where, tmp_path / "another machine")) == (1.0, {"step": 1})
    assert loaded(kept(where, scratch)) == (2.0, {"step": 2})
    assert "step-00000002 was saved here and not in" in caplog.text
    assert loaded(kept(where, tmp_path / "another machine")) == (2.0, {"step": 2})
    assert not list(scratch.iterdir())


@pytest.mark.parametrize("torn", ["no marker", "cut"])
def test_what_is_not_whole_on_this_machine_is_not_taken(tmp_path: Path, torn: str) -> None:
    where, scratch = f"memory://{tmp_path.name}", tmp_path / "scratch"
    kept(where, scratch).save(1, tensors(1.0), {"step": 1})
    other = kept(scratch, tmp_path)
    other.save(2, tensors(2.0), {"step": 2})
    victim = scratch / folder(2) / (MARKER if torn == "no marker" else "__0_0.distcp")
    victim.write_bytes(victim.read_bytes()[:99]) if torn == "cut" else victim.unlink()
    assert loaded(kept(where, scratch)) == (1.0, {"step": 1})


def test_retention_keeps_last_every_and_best_and_foreign_files(tmp_path: Path) -> None:
    checkpoints = kept(tmp_path / "c", tmp_path, keep_last=2, keep_every=4, keep_best=1)
    for step, loss in enumerate([5.0, 1.0, 3.0, 4.0, 6.0, 7.0, 8.0], start=1):
        if step == 4:
            (tmp_path / "c" / folder(3) / "notes.txt").write_text("mine")
        checkpoints.save(step, tensors(step), {"eval_loss": loss})
    assert checkpoints.steps() == [7, 6, 4, 2]
    assert sorted(p.name for p in (tmp_path / "c").iterdir() if p.is_dir()) == [
        folder(s) for s in (2, 3, 4, 6, 7)
    ]
    assert [p.name for p in (tmp_path / "c" / folder(3)).iterdir()] == ["notes.txt"]


@given(
    st.sets(st.integers(1, 60), min_size=1),
    st.integers(0, 4),
    st.integers(0, 7),
    st.dictionaries(st.integers(1, 60), st.floats(0, 9)),
    st.integers(0, 3),
)
@settings(max_examples=60, deadline=None)
def test_retention_never_dooms_what_a_rule_keeps(
    steps: set[int], last: int, every: int, losses: dict[int, float], best: int
) -> None:
    newest = sorted(steps, reverse=True)
    c = CheckpointConfig(keep_last=last, keep_every=every, keep_best=best)
    gone = set(doomed(newest, c, losses))
    assert newest[0] not in gone
    assert not gone & set(newest[:last] if last else newest)
    assert not any(every and step % every == 0 for step in gone)
    scored = sorted((losses[s], s) for s in steps if s in losses)[:best]
    assert not gone & {s for _, s in scored}


def test_a_copied_checkpoint_loads_and_a_damaged_one_is_not_copied(tmp_path: Path) -> None:
    checkpoints = kept(tmp_path / "c", tmp_path)
    checkpoints.save(4, tensors(4.0), {"step": 4})
    checkpoints.copy(4, open_store(str(tmp_path / "d")))
    assert loaded(kept(tmp_path / "d", tmp_path)) == (4.0, {"step": 4})
    (tmp_path / "c" / folder(4) / ".metadata").write_bytes(b"x")
    with pytest.raises(CorruptError):
        checkpoints.copy(4, open_store(str(tmp_path / "e")))
    assert not (tmp_path / "e").exists()


def test_a_marker_reads_back() -> None:
    commit = Commit(3, {"a": {"bytes": 1, "sha256": "0"}}, {"x": [1.5, None]})
    assert Commit.parse(commit.dumps()) == commit


def test_the_digest_of_weights_sees_every_bit_and_no_order() -> None:
    a, b = torch.ones(3), torch.zeros(2)
    assert weights_digest({"a": a, "b": b}) == weights_digest({"b": b, "a": a})
    assert weights_digest({"a": a, "b": b}) != weights_digest({"a": a, "b": -b})
    assert weights_digest({"a": a.view(3, 1)}) != weights_digest({"a": a})
