"""Scrubbing and repairing: damage is found, named, kept out of the way, and mended from a good replica."""

from __future__ import annotations

import json
import os

import pytest

from datasync.errors import BusyError, DeniedError, NotFoundError
from datasync.ops import receipts
from datasync.replicate import Stop, replicate
from datasync.replicate.lease import held
from datasync.replicate.repair import repair
from datasync.replicate.verify import verify
from datasync.storage.local import LocalStore
from tests.replicate.kit import QUICK, Spy, data_of, datasync, make_dataset


@pytest.fixture(params=["local", "s3"])
def copy(request, tmp_path):
    """A source with its shards, and a copy of it."""
    if request.param == "local":
        source, b = Spy(LocalStore(tmp_path / "a")), Spy(LocalStore(tmp_path / "b"))
    else:
        a_server, b_server = request.getfixturevalue("s3_a"), request.getfixturevalue("s3_b")
        source, b = Spy(a_server.store("emoji")), Spy(b_server.store("emoji"))
    shards = make_dataset(source, count=8)
    replicate(source, {"b": b}, name="emoji", options=QUICK)
    b.calls.clear()
    return source, b, shards


def damage(b, shards):
    """One object is flipped, one cut, one gone."""
    flipped, cut, gone = list(shards)[:3]
    data = bytearray(shards[flipped])
    data[100] ^= 1
    b.inner.write(flipped, bytes(data))
    b.inner.write(cut, shards[cut][:-1])
    b.inner.delete([gone])
    return flipped, cut, gone


def check(store, **options):
    return verify(store, name="emoji", quiet=True, **options)


def test_a_good_copy_is_good_and_its_receipt_says_when(copy):
    _, b, shards = copy
    report = check(b)
    assert report.good
    assert (report.hashed, report.extra) == (len(shards), 0)
    verified = receipts.read(b).verified
    assert (verified["mode"], verified["objects"], verified["bad"], verified["missing"]) == (
        "full",
        len(shards),
        0,
        0,
    )


def test_damage_is_named_quarantined_and_recorded(copy):
    _, b, shards = copy
    flipped, cut, gone = damage(b, shards)
    report = check(b)
    assert {(f.key, f.problem) for f in report.findings} == {
        (flipped, "digest"),
        (cut, "size"),
        (gone, "missing"),
    }
    assert not {flipped, cut, gone} & set(data_of(b))
    assert b.read(f"_datasync/quarantine/{flipped}") != shards[flipped]
    receipt = receipts.read(b)
    assert not receipt.whole
    assert sorted(json.loads(b.read(f"_datasync/damage/{receipt.version}.json"))["damaged"]) == sorted(
        [flipped, cut, gone]
    )


def test_repair_brings_back_exactly_what_is_damaged(copy):
    source, b, shards = copy
    damaged = damage(b, shards)
    check(b)
    b.calls.clear()
    result = repair(b, [source], name="emoji", quiet=True)
    assert (result.damaged, result.repaired, result.left) == (3, 3, {})
    assert set(b.data_writes()) == set(damaged)
    assert data_of(b) == data_of(source)
    assert receipts.read(b).whole
    assert check(b).good


def test_the_next_replication_mends_what_verify_found(copy):
    source, b, shards = copy
    damage(b, shards)
    check(b)
    (outcome,) = replicate(source, {"b": b}, name="emoji", options=QUICK)
    assert (outcome.state, outcome.tally.copied) == ("published", 3)
    assert data_of(b) == data_of(source)
    assert receipts.read(b).whole


def test_repair_takes_no_replica_on_trust(copy):
    source, b, shards = copy
    flipped, *_ = damage(b, shards)
    check(b)
    source.inner.write(flipped, b"?" * len(shards[flipped]))
    result = repair(b, [source], name="emoji", quiet=True)
    assert set(result.left) == {flipped}
    assert not receipts.read(b).whole
    source.inner.write(flipped, shards[flipped])
    assert repair(b, [source], name="emoji", quiet=True).left == {}
    assert receipts.read(b).whole


def test_repair_asks_the_next_replica_when_the_first_is_bad(copy, tmp_path):
    source, b, shards = copy
    other = LocalStore(tmp_path / "third")
    replicate(source, {"c": other}, name="emoji", options=QUICK)
    flipped, *_ = damage(b, shards)
    source.inner.write(flipped, b"?" * len(shards[flipped]))
    check(b)
    assert repair(b, [source, other], name="emoji", quiet=True).left == {}
    assert b.read(flipped) == shards[flipped]


def test_samples_cover_everything_in_turn(copy):
    _, b, shards = copy
    seen: set[str] = set()
    for turn in range(4):
        b.calls.clear()
        report = check(b, mode="sample", share=0.25)
        read = {key for op, key in b.calls if op == "stream" and key.startswith("shards/")}
        assert report.hashed == len(read)
        assert not read & seen
        seen |= read
        assert receipts.read(b).verified["stripe"] == turn
    assert seen == set(shards)


def test_quick_looks_at_names_and_sizes_only(copy):
    _, b, shards = copy
    _, cut, gone = damage(b, shards)
    report = check(b, mode="quick")
    assert {f.key for f in report.findings} == {cut, gone}
    assert not [call for call in b.calls if call[0] == "stream"]


def test_a_stopped_scrub_goes_on_where_it_was(copy, monkeypatch):
    from datasync.replicate import verify as module

    monkeypatch.setattr(module, "_READERS", 1)
    _, b, shards = copy
    stop = Stop()
    b.before = lambda op, key: stop.ask("by a test") if op == "stream" and b.count("stream") == 4 else None
    report = check(b, stop=stop)
    assert not report.finished
    assert receipts.read(b).verified is None
    first = {key for op, key in b.calls if op == "stream"}
    b.before = None
    b.calls.clear()
    report = check(b)
    second = {key for op, key in b.calls if op == "stream"}
    assert report.finished
    assert report.hashed == len(shards)
    assert not first & second
    assert first | second == set(shards)
    assert not list(b.list("_datasync/scrub/"))


def test_a_damaged_index_is_found_and_repaired(copy):
    source, b, _ = copy
    b.inner.write("index.json", b'{"version": 2, "shards": []}')
    report = check(b)
    assert [f.key for f in report.findings] == ["index.json"]
    assert repair(b, [source], name="emoji", quiet=True).left == {}
    assert b.read("index.json") == source.read("index.json")
    (outcome,) = replicate(source, {"b": b}, name="emoji", options=QUICK)
    assert outcome.state == "already"


def test_the_home_is_verified_by_its_own_manifest_and_nothing_is_written_there(copy):
    source, _, shards = copy
    bad = next(iter(shards))
    source.inner.write(bad, b"?" * len(shards[bad]))
    source.calls.clear()
    report = check(source)
    assert [f.key for f in report.findings] == [bad]
    assert not [call for call in source.calls if call[0] in ("write", "delete", "copy")]


def test_objects_that_nobody_knows_are_counted_and_left(copy):
    _, b, _ = copy
    b.inner.write("notes.txt", b"mine")
    report = check(b)
    assert report.good
    assert report.extra == 1
    assert b.read("notes.txt") == b"mine"


def test_nothing_is_verified_during_a_replication(copy):
    _, b, _ = copy
    with held(b, "replicate emoji"), pytest.raises(BusyError):
        check(b)


def test_without_index_and_receipt_there_is_nothing_to_verify_against(tmp_path):
    store = LocalStore(tmp_path)
    store.write("x", b"x")
    with pytest.raises(NotFoundError, match="nothing says"):
        check(store)


def test_a_name_that_is_not_utf8_is_one_more_object_and_hides_no_other(tmp_path):
    source, b = LocalStore(tmp_path / "a"), LocalStore(tmp_path / "b")
    shards = make_dataset(source, count=4)
    replicate(source, {"b": b}, name="x", options=QUICK)
    (tmp_path / "b" / "shards" / os.fsdecode(b"00001\xff")).write_bytes(b"?")
    (tmp_path / "b" / "zzz").write_bytes(b"?")
    b.delete([sorted(shards)[2]])
    report = verify(b, name="x", mode="quick", quiet=True)
    assert report.extra == 2
    assert [(finding.key, finding.problem) for finding in report.findings] == [(sorted(shards)[2], "missing")]


def test_with_keys_that_may_only_read_findings_are_told_and_not_recorded(copy):
    _, b, shards = copy
    flipped, cut, gone = damage(b, shards)
    before = {info.key: b.inner.read(info.key) for info in b.inner.list()}

    def deny(operation: str, key: str) -> None:
        if operation in ("write", "delete", "copy", "begin"):
            raise DeniedError(f"not allowed to write {key}", mend="ask for the right")

    b.before = deny
    report = check(b)
    assert {finding.key for finding in report.findings} == {flipped, cut, gone}
    assert all(finding.quarantined is None for finding in report.findings)
    assert {info.key: b.inner.read(info.key) for info in b.inner.list()} == before


@pytest.mark.parametrize("command", ["verify", "repair", "gc"])
def test_one_dataset_that_fails_does_not_keep_the_others(tmp_path, command):
    (tmp_path / "datasync.toml").write_text('[clusters.a]\nurl = "a"\n[clusters.b]\nurl = "b"\n')
    make_dataset(LocalStore(tmp_path / "a" / "good"))
    datasync("replicate", "good", "--from", "a", "--to", "b", cwd=tmp_path)
    done = datasync(command, "nothing", "good", "--cluster", "b", "--json", cwd=tmp_path, check=1)
    document = json.loads(done.stdout)
    assert list(document.pop("errors")) == ["nothing"]
    ((found,),) = document.values()
    assert found["name"] == "good" or found["url"].endswith("/good")
    assert done.stderr.count("error: ") == 1


def test_a_sample_that_had_nothing_to_read_does_not_say_all_good(tmp_path):
    (tmp_path / "datasync.toml").write_text('[clusters.a]\nurl = "a"\n[clusters.b]\nurl = "b"\n')
    make_dataset(LocalStore(tmp_path / "a" / "one"), count=1)
    datasync("replicate", "one", "--from", "a", "--to", "b", cwd=tmp_path)
    told = [
        datasync("verify", "one", "--cluster", "b", "--sample", "50%", cwd=tmp_path).stdout for _ in range(2)
    ]
    assert sorted("1 read" in line for line in told) == [False, True]
    for line in told:
        assert ("all good" in line) == ("1 read" in line)
        assert ("none due this time" in line) == ("0 read" in line)


def test_a_sample_names_every_object_of_another_size(tmp_path):
    a, b = LocalStore(tmp_path / "a"), LocalStore(tmp_path / "b")
    shards = make_dataset(a, count=8)
    replicate(a, {"b": b}, name="emoji", options=QUICK)
    for key in shards:
        b.write(key, b"short")
    report = verify(b, name="emoji", mode="sample", share=0.05, quiet=True)
    assert {finding.key for finding in report.findings} == set(shards)
    assert {finding.problem for finding in report.findings} == {"size"}
