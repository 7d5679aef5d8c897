"""Killed at any instant and run again: the end is that of a clean run, and nothing finished is sent again."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

from datasync.ops import receipts
from datasync.replicate import Stop, destination, replicate, transfer
from datasync.replicate.journal import Begun, Done, Journal, load
from datasync.storage.local import LocalStore
from tests.replicate.kit import QUICK, Spy, data_of, datasync, make_dataset, start, write_tree

SLOW = """
[clusters.a]
url = "a"
[clusters.b]
url = "b"
rate_limit = "{rate} MiB/s"
"""


def config(folder: Path, rate: float = 8) -> None:
    (folder / "datasync.toml").write_text(SLOW.format(rate=rate))


def inodes(folder: Path) -> dict[str, tuple[int, int]]:
    """What tells a file that was written again: its inode and its time."""
    found = {}
    for path in folder.rglob("*"):
        if path.is_file() and "_datasync" not in path.parts and ".datasync-tmp" not in path.parts:
            found[str(path.relative_to(folder))] = path.stat().st_ino, path.stat().st_mtime_ns
    return found


@pytest.mark.parametrize("seed", range(3))
def test_sigkill_at_a_random_instant_and_again(tmp_path, seed):
    config(tmp_path)
    source, b = LocalStore(tmp_path / "a" / "emoji"), LocalStore(tmp_path / "b" / "emoji")
    make_dataset(source, count=60, size=100_000)
    chance = random.Random(seed)
    before: dict[str, tuple[int, int]] = {}
    for _ in range(3):
        process = start("replicate", "a:emoji", "--to", "b", "-q", cwd=tmp_path)
        time.sleep(chance.uniform(0.3, 1.4))
        process.kill()
        process.communicate()
        now = inodes(tmp_path / "b" / "emoji")
        assert all(now[key] == value for key, value in before.items()), "a finished object was sent again"
        before = now
        if "index.json" in now:
            assert data_of(b) == data_of(source)
        else:
            assert receipts.read(b) is None
    datasync("replicate", "a:emoji", "--to", "b", "-q", cwd=tmp_path)
    after = inodes(tmp_path / "b" / "emoji")
    assert all(after[key] == value for key, value in before.items())
    assert data_of(b) == data_of(source)
    assert receipts.read(b).whole
    assert list(b.uploads()) == []
    assert not list((tmp_path / "b" / "emoji" / "_datasync" / "journal").glob("*"))
    assert "nothing to copy" in datasync("replicate", "a:emoji", "--to", "b", cwd=tmp_path).stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_cleanly_and_says_how_to_go_on(tmp_path, number):
    config(tmp_path, rate=4)
    source, b = LocalStore(tmp_path / "a" / "emoji"), LocalStore(tmp_path / "b" / "emoji")
    make_dataset(source, count=100, size=200_000)
    process = start("replicate", "a:emoji", "--to", "b", "-q", cwd=tmp_path)
    while process.poll() is None and len(inodes(tmp_path / "b")) < 3:
        time.sleep(0.05)
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 128 + number, err
    assert "stopped with" in out
    assert "run the same command again" in err
    journalled = load(b).done
    assert set(journalled) == set(data_of(b))
    lease = json.loads(b.read("_datasync/lease.json"))
    assert lease["holder"] is None, "the next run need not wait for the lease to run out"
    os.remove(tmp_path / "datasync.toml")
    (tmp_path / "datasync.toml").write_text(SLOW.format(rate=1000))
    before = inodes(tmp_path / "b" / "emoji")
    datasync("replicate", "a:emoji", "--to", "b", "-q", cwd=tmp_path)
    after = inodes(tmp_path / "b" / "emoji")
    assert all(after[key] == value for key, value in before.items())
    assert data_of(b) == data_of(source)


def test_a_deadline_stops_with_its_own_code(tmp_path):
    config(tmp_path, rate=2)
    make_dataset(LocalStore(tmp_path / "a" / "emoji"), count=60, size=200_000)
    done = datasync("replicate", "a:emoji", "--to", "b", "-q", "--max-runtime", "1s", cwd=tmp_path, check=4)
    assert "--max-runtime" in done.stderr


@pytest.fixture(params=["local", "s3"])
def places(request, tmp_path):
    if request.param == "local":
        return Spy(LocalStore(tmp_path / "a")), Spy(LocalStore(tmp_path / "b"))
    a, b = request.getfixturevalue("s3_a"), request.getfixturevalue("s3_b")
    return Spy(a.store("big")), Spy(b.store("big"))


def test_finished_parts_of_a_large_object_are_not_sent_again(places, monkeypatch):
    source, b = places
    monkeypatch.setattr(transfer, "LARGE_BYTES", 1 << 20)
    make_dataset(source, count=1, size=(64 << 20) + 7)
    stop = Stop()

    def ask(operation: str, key: str) -> None:
        if operation == "part" and b.count("part") == 3:
            stop.ask("by a test")

    b.before = ask
    (outcome,) = replicate(source, {"b": b}, name="big", options=QUICK, stop=stop)
    assert outcome.state == "stopped"
    sent = {key for op, key in b.calls if op == "part"}
    b.before = None
    b.calls.clear()
    (outcome,) = replicate(source, {"b": b}, name="big", options=QUICK)
    assert outcome.state == "published"
    assert outcome.tally.resumed_bytes >= (len(sent) - 1) * (8 << 20)
    assert not sent & {key for op, key in b.calls if op == "part"}
    assert b.count("resume") >= 1
    assert b.count("begin") == 0
    assert data_of(b) == data_of(source)
    assert list(b.inner.uploads()) == []


def test_an_upload_without_a_record_is_adopted_by_its_tags(places, monkeypatch):
    """Killed between the beginning of an upload and the record of it, or of its parts."""
    source, b = places
    monkeypatch.setattr(transfer, "LARGE_BYTES", 1 << 20)
    (name, data), *_ = make_dataset(source, count=1, size=40 << 20).items()
    upload = b.inner.begin(name, bytes=len(data))
    upload.put(1, data[: upload.part_bytes])
    upload.put(2, b"?" * upload.part_bytes)  # not what it should be
    (outcome,) = replicate(source, {"b": b}, name="big", options=QUICK)
    assert outcome.state == "published"
    sent = {key for op, key in b.calls if op == "part"}
    assert f"{name}#1" not in sent
    assert f"{name}#2" in sent
    assert data_of(b) == data_of(source)
    assert list(b.inner.uploads()) == []


def test_an_upload_that_is_no_longer_wanted_is_aborted_and_a_strangers_is_left(places):
    source, b = places
    shards = make_dataset(source, count=2)
    name = next(iter(shards))
    old = b.inner.begin(name, bytes=32 << 20)
    journal = Journal(b.inner, 1)
    journal.upload(
        Begun(key=name, upload_id=old.upload_id, bytes=32 << 20, part_bytes=8 << 20, sha256="00" * 32)
    )
    journal.close()
    stranger = b.inner.begin("somebody/elses.bin", bytes=32 << 20)
    (outcome,) = replicate(source, {"b": b}, name="big", options=QUICK)
    assert outcome.state == "published"
    assert [upload.upload_id for upload in b.inner.uploads()] == [stranger.upload_id]
    stranger.abort()


def test_an_upload_that_nobody_recorded_and_nobody_needs_is_aborted(places, monkeypatch):
    """Killed between the beginning of an upload and its record; meanwhile the object came whole."""
    source, b = places
    shards = make_dataset(source, count=2)
    replicate(source, {"b": b}, name="big", options=QUICK)
    b.inner.begin(next(iter(shards)), bytes=32 << 20)
    make_dataset(source, count=3)
    (outcome,) = replicate(source, {"b": b}, name="big", options=QUICK)
    assert outcome.state == "published"
    assert list(b.inner.uploads()) == []


def test_what_a_killed_probe_left_is_swept_when_it_is_old(s3_a, s3_b, monkeypatch):
    source, b = s3_a.store("emoji"), s3_b.store("emoji")
    make_dataset(source, count=1)
    left = b.begin("_datasync/probe-0123/multipart", bytes=4)
    replicate(source, {"b": b}, name="emoji", options=QUICK)
    assert [upload.upload_id for upload in b.uploads()] == [left.upload_id], "it may be at work"
    monkeypatch.setattr(destination, "_PROBE_SECONDS", -60.0)
    make_dataset(source, count=2)
    replicate(source, {"b": b}, name="emoji", options=QUICK)
    assert list(b.uploads()) == []


def test_a_trees_digests_survive_a_kill_in_the_journal(tmp_path):
    source, b = LocalStore(tmp_path / "a"), Spy(LocalStore(tmp_path / "b"))
    write_tree(tmp_path / "a", {f"f{n:02d}": bytes([n]) * 5000 for n in range(30)})
    stop = Stop()
    b.before = lambda op, key: stop.ask("by a test") if op == "write" and key == "f10" else None
    (outcome,) = replicate(source, {"b": b}, name="tree", options=QUICK, stop=stop)
    assert outcome.state == "stopped"
    finished = set(data_of(b))
    b.before = None
    b.calls.clear()
    spied = Spy(source)
    (outcome,) = replicate(source, {"b": b}, name="tree", options=QUICK)
    assert outcome.state == "published"
    assert not finished & set(b.data_writes())
    assert not finished & {key for op, key in spied.calls if op == "read"}
    assert data_of(b) == data_of(source)


def test_the_journal_reads_back_what_it_wrote_and_ends_at_a_torn_line(tmp_path):
    store = LocalStore(tmp_path)
    journal = Journal(store, 3)
    done = Done(bytes=5, sha256="ab" * 32, crc32c=7, tag="t", adopted=True)
    journal.done("a", done)
    begun = Begun(key="big", upload_id="u1", bytes=100, part_bytes=50, sha256=None)
    journal.upload(begun)
    journal.part("big", "u1", 2, "tag2", 9)
    journal.close()
    past = load(store)
    assert past.done == {"a": done}
    assert past.uploads["u1"].parts == {2: ("tag2", 9)}
    name = past.files[-1]
    store.write(name, store.read(name) + b'{"done": "torn", "by')
    assert load(store).done == past.done
    Journal(store, 4).clear(load(store))
    assert load(store).files == []
