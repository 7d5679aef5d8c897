"""Replication end to end, between folders and between two S3 servers."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import threading
import time
from dataclasses import replace

import pytest

from datasync.errors import (
    BusyError,
    CorruptError,
    DeniedError,
    FormatError,
    NotFoundError,
    StoreError,
    TransientError,
)
from datasync.ops import receipts
from datasync.replicate import Options, Stop, replicate, transfer
from datasync.replicate import lane as lanes
from datasync.replicate.lease import Lease
from datasync.storage import open_store
from datasync.storage.local import LocalStore
from shards.index import Index
from tests.replicate.kit import (
    QUICK,
    Spy,
    data_of,
    make_dataset,
    make_shards,
    publish_dataset,
    shard_bytes,
    shard_info,
    write_tree,
)


@pytest.fixture(params=["local", "s3"])
def places(request, tmp_path):
    """A source and a maker of destinations, as spies."""
    if request.param == "local":
        return Spy(LocalStore(tmp_path / "a" / "emoji")), lambda name: Spy(
            LocalStore(tmp_path / name / "emoji")
        )
    a, b = request.getfixturevalue("s3_a"), request.getfixturevalue("s3_b")
    return Spy(a.store("emoji")), lambda name: Spy(b.store(f"{name}/emoji"))


def run(source, to, options=QUICK, **more):
    name = more.pop("name", "emoji")
    return replicate(source, to if isinstance(to, dict) else {"b": to}, name=name, options=options, **more)


def one(source, to, options=QUICK, **more):
    (outcome,) = run(source, to, options, **more)
    return outcome


def test_a_dataset_arrives_whole_with_a_receipt(places):
    source, make = places
    shards = make_dataset(source)
    b = make("b")
    outcome = one(source, b)
    assert (outcome.state, outcome.tally.copied, outcome.error) == ("published", len(shards), None)
    assert data_of(b) == data_of(source)
    receipt = receipts.read(b)
    assert receipt.whole
    assert receipt.version == outcome.version == Index.parse(b.read("index.json"), where="b").extra["version"]
    assert (receipt.objects, receipt.samples) == (len(shards), 10 * len(shards))
    assert receipt.checked["sha256"] == len(shards)
    assert receipts.read(b, receipt.version) == receipt


def test_a_second_run_moves_nothing_and_reads_two_small_objects(places):
    source, make = places
    make_dataset(source)
    b = make("b")
    one(source, b)
    source.calls.clear()
    b.calls.clear()
    outcome = one(source, b)
    assert (outcome.state, outcome.tally.copied) == ("already", 0)
    (signature,) = set(source.calls) - {("stat", "index.json")}
    assert signature[0] == "stat"  # one that was made later would be copied
    assert signature[1].startswith("_datasync/signatures/")
    assert len(source.calls) == 2
    manifest = ("stat", f"_datasync/manifests/{outcome.version}.parquet")
    assert sorted(b.calls) == [("read", "_datasync/receipt.json"), manifest, ("stat", "index.json")]


def test_the_index_is_published_after_everything_that_it_names(places):
    source, make = places
    shards = make_dataset(source)
    b = make("b")
    one(source, b)
    order = [key for operation, key in b.calls if operation == "write"]
    at = order.index("index.json")
    assert all(order.index(key) < at for key in shards)
    assert any(key.startswith("_datasync/manifests/") for key in order[:at])
    assert all(key.startswith("_datasync/receipt") or key.endswith("lease.json") for key in order[at + 1 :])


def test_a_new_version_copies_what_changed_and_keeps_what_older_readers_need(places):
    source, make = places
    b = make("b")
    old = make_shards(5)
    publish_dataset(source, old)
    one(source, b)
    new = dict(list(old.items())[:-1]) | make_shards(6, seed="more")
    publish_dataset(source, new)
    outcome = one(source, b)
    assert outcome.tally.copied == 6
    assert outcome.to_copy == 6
    assert data_of(b).keys() == {*old, *new, "index.json"}


def test_several_destinations_are_fed_by_one_reading(places):
    source, make = places
    shards = make_dataset(source)
    to = {name: make(name) for name in ("b", "c", "d")}
    outcomes = run(source, to)
    assert [outcome.state for outcome in outcomes] == ["published"] * 3
    assert outcomes[0].source_bytes_read == sum(map(len, shards.values()))
    assert all(data_of(store) == data_of(source) for store in to.values())


def test_a_dead_destination_does_not_hold_up_the_others(places):
    source, make = places
    make_dataset(source, count=20)
    b, dead = make("b"), make("dead")

    def die(operation: str, key: str) -> None:
        if operation == "write" and key.startswith("shards/"):
            raise TransientError("connection refused", mend="start it")

    dead.before = die
    good, bad = run(source, {"b": b, "dead": dead})
    assert good.state == "published"
    assert isinstance(bad.error, TransientError)
    assert receipts.read(dead) is None
    assert "index.json" not in data_of(dead)


def test_a_slow_destination_does_not_hold_up_the_others(places, monkeypatch):
    source, make = places
    monkeypatch.setattr(lanes, "WINDOW_BYTES", 60_000)
    make_dataset(source, count=30)
    b, slow = make("b"), make("slow")
    gate = threading.Event()
    slow.before = lambda operation, key: (
        gate.wait(100) if operation == "write" and key.startswith("shards/") else None
    )
    done = threading.Event()
    results = []

    def go() -> None:
        results.extend(run(source, {"b": b, "slow": slow}))
        done.set()

    threading.Thread(target=go).start()
    for _ in range(600):
        if receipts.read(b.inner) is not None:
            break
        done.wait(0.1)
    assert receipts.read(b.inner) is not None, "the fast one was not published while the slow one stood still"
    assert not done.is_set()
    gate.set()
    assert done.wait(30)
    assert [outcome.state for outcome in results] == ["published", "published"]
    assert data_of(slow) == data_of(source)


def test_a_destination_that_cannot_be_opened_does_not_hold_up_the_others(tmp_path):
    source, b = LocalStore(tmp_path / "a"), LocalStore(tmp_path / "b")
    make_dataset(source)
    dead = open_store(
        "s3://bucket/x", endpoint="http://127.0.0.1:9", access_key="a", secret_key="b", region="x"
    )
    ended: list[float] = []
    found = []

    def go() -> None:
        options = replace(QUICK, retry_seconds=12)
        found.extend(replicate(source, {"dead": dead, "b": b}, name="emoji", options=options))
        ended.append(time.monotonic())

    thread = threading.Thread(target=go)
    thread.start()
    while receipts.read(b) is None and thread.is_alive():
        time.sleep(0.05)
    whole = time.monotonic()
    thread.join()
    assert receipts.read(b).whole
    assert ended[0] - whole > 4, "the copy was published only when the dead one was given up"
    assert [outcome.state for outcome in found] == ["failed", "published"]
    assert "nothing listens" in found[0].error.message


def test_a_destination_that_opens_late_gets_everything_all_the_same(tmp_path):
    source, b = LocalStore(tmp_path / "a"), LocalStore(tmp_path / "b")
    make_dataset(source, count=4)
    waits = [3.0]
    late = Spy(LocalStore(tmp_path / "c"), lambda op, key: time.sleep(waits.pop()) if waits else None)
    outcomes = replicate(source, {"late": late, "b": b}, name="emoji", options=QUICK)
    assert [outcome.state for outcome in outcomes] == ["published", "published"]
    assert data_of(late) == data_of(b) == data_of(source)
    assert outcomes[0].tally.copied == 4
    assert not list(b.list("_datasync/journal/"))


def test_each_destination_has_its_own_progress(tmp_path, monkeypatch):
    from datasync.replicate import run as module

    made = []

    class Seen(module.Progress):
        def __init__(self, label, **options):
            super().__init__(label, **options)
            made.append(self)

    monkeypatch.setattr(module, "Progress", Seen)
    source, b, c = (LocalStore(tmp_path / name) for name in "abc")
    shards = make_dataset(source)
    for name in list(shards)[:2]:
        c.write(name, shards[name])
    first = next(iter(shards))
    c.write(first, b"?" * len(shards[first]))
    replicate(source, {"b": b, "c": c}, name="emoji", options=QUICK)
    total = sum(map(len, shards.values()))
    assert [progress.label for progress in made] == ["emoji → b", "emoji → c"]
    assert [(progress.total_items, progress.items) for progress in made] == [(6, 6), (6, 6)]
    assert [(progress.total_bytes, progress.bytes) for progress in made] == [(total, total)] * 2


def test_a_busy_destination_is_reported_and_the_others_go_on(places):
    source, make = places
    make_dataset(source)
    b, busy = make("b"), make("busy")
    lease = Lease(busy, "another run")
    lease.acquire()
    good, bad = run(source, {"b": b, "busy": busy})
    lease.release()
    assert good.state == "published"
    assert isinstance(bad.error, BusyError)


def test_bytes_that_do_not_match_never_become_visible(places):
    source, make = places
    shards = make_dataset(source)
    bad = next(iter(shards))
    source.inner.write(bad, b"X" + shards[bad][1:])
    b = make("b")
    outcome = one(source, b)
    assert isinstance(outcome.error, CorruptError)
    assert bad in str(outcome.error)
    assert hashlib.sha256(shards[bad]).hexdigest() in str(outcome.error)
    assert bad not in data_of(b)
    assert "index.json" not in data_of(b)
    assert receipts.read(b) is None


def test_a_bad_object_is_fetched_from_another_replica(places):
    source, make = places
    shards = make_dataset(source)
    c = make("c")
    one(source, c)
    bad = next(iter(shards))
    source.inner.write(bad, b"X" + shards[bad][1:])
    outcome = one(source, make("b"), fallbacks=[c])
    assert outcome.state == "published"
    assert outcome.error is None


def test_a_missing_object_fails_the_run_by_name_and_the_rest_is_kept(places):
    source, make = places
    shards = make_dataset(source)
    lost = list(shards)[2]
    source.delete([lost])
    b = make("b")
    outcome = one(source, b)
    assert isinstance(outcome.error, NotFoundError)
    assert lost in outcome.error.message
    source.write(lost, shards[lost])
    b.calls.clear()
    assert one(source, b).state == "published"
    assert set(b.data_writes()) == {lost, "index.json"}


def test_objects_that_are_in_place_are_looked_at_and_not_sent(places):
    source, make = places
    shards = make_dataset(source)
    b = make("b")
    names = list(shards)
    for name in names[:3]:
        b.inner.write(name, shards[name])
    b.inner.write(names[3], b"X" + shards[names[3]][1:])  # right size, wrong bytes
    outcome = one(source, b)
    assert sorted(outcome.tally.adopted) == sorted(names[:3])
    assert set(b.data_writes()) == {*names[3:], "index.json"}
    assert data_of(b) == data_of(source)
    assert outcome.receipt.adopted == 3


def test_an_index_without_a_manifest_is_enough(places):
    source, make = places
    shards = {f"shard.{number:05d}.mds": shard_bytes(number, 9000 + number) for number in range(4)}
    md5 = {name: {"md5": hashlib.md5(data).hexdigest()} for name, data in shards.items()}
    for name, data in shards.items():
        source.write(name, data)
    source.write(
        "index.json", Index([shard_info(name, data, md5[name]) for name, data in shards.items()]).dumps()
    )
    source.write("README.txt", b"not a part of the dataset")
    b = make("b")
    outcome = one(source, b)
    assert (outcome.state, outcome.kind, outcome.tally.copied) == ("published", "mds", 4)
    assert data_of(b) == {**shards, "index.json": source.read("index.json")}
    assert one(source, b).state == "already"

    source.inner.write("shard.00001.mds", shard_bytes("other", 9001))
    c = make("c")
    outcome = one(source, c)
    assert isinstance(outcome.error, CorruptError)
    assert "md5" in str(outcome.error)


def test_a_tree_gets_a_manifest_and_its_second_run_reads_no_object(places):
    source, make = places
    files = {
        "model.pt": shard_bytes(1, 50_000),
        "optim/0.pt": shard_bytes(2, 40_000),
        "empty": b"",
        "ü/ключ": b"x",
    }
    for key, data in files.items():
        source.write(key, data)
    b = make("b")
    outcome = one(source, b)
    assert (outcome.state, outcome.kind, outcome.objects) == ("published", "tree", 4)
    assert data_of(b) == files
    source.calls.clear()
    outcome = one(source, b)
    assert (outcome.state, outcome.tally.copied) == ("already", 0)
    assert source.count("read") == source.count("stream") == 0


def test_a_tree_copies_only_what_changed(places):
    source, make = places
    for key in ("a", "b", "c"):
        source.write(key, shard_bytes(key, 1000))
    b = make("b")
    one(source, b)
    source.write("b", shard_bytes("new", 1000))
    source.write("c", shard_bytes("c", 1000))  # written again, with the same content
    b.calls.clear()
    outcome = one(source, b)
    assert set(b.data_writes()) == {"b"}
    assert outcome.tally.copied == 1
    assert data_of(b) == data_of(source)


def test_full_verification_reads_everything_back_and_catches_a_lying_disk(places):
    source, make = places
    shards = make_dataset(source)
    b = make("b")
    lied = []

    class Lying(Spy):
        def write(self, key, data, **options):
            if key == next(iter(shards)) and not lied:
                lied.append(key)
                return super().write(key, b"X" + bytes(data)[1:])
            return super().write(key, data, **options)

    lying = Lying(b.inner)
    outcome = one(source, lying, replace(QUICK, verify="full"))
    assert outcome.state == "published"
    assert outcome.tally.read_back == len(shards) + 1
    assert data_of(b).items() >= data_of(source).items()
    assert b.read(f"_datasync/quarantine/{lied[0]}")


def test_large_objects_go_in_parts_and_one_reading_serves_all(places, monkeypatch):
    source, make = places
    monkeypatch.setattr(transfer, "LARGE_BYTES", 1 << 20)
    shards = make_dataset(source, count=2, size=(33 << 20) + 5)
    b, c = make("b"), make("c")
    outcomes = run(source, {"b": b, "c": c})
    assert [outcome.error for outcome in outcomes] == [None, None]
    assert outcomes[0].source_bytes_read == sum(map(len, shards.values()))
    assert data_of(b) == data_of(c) == data_of(source)
    assert b.count("begin") == 2
    assert list(b.inner.uploads()) == []


def test_a_large_object_with_wrong_bytes_is_never_completed(places, monkeypatch):
    source, make = places
    monkeypatch.setattr(transfer, "LARGE_BYTES", 1 << 20)
    shards = make_dataset(source, count=1, size=20 << 20)
    name = next(iter(shards))
    source.inner.write(name, b"X" + shards[name][1:])
    b = make("b")
    outcome = one(source, b)
    assert isinstance(outcome.error, CorruptError)
    assert b.count("complete") == 0
    assert name not in data_of(b)
    assert list(b.inner.uploads()) == []


def test_an_object_that_changes_while_it_is_read_starts_again(places):
    source, make = places
    source.write("log.txt", shard_bytes(1, 30_000))
    source.write("other", b"other")
    changed = []

    def change(operation: str, key: str) -> None:
        if operation == "read" and key == "log.txt" and not changed:
            changed.append(key)
            source.inner.write("log.txt", shard_bytes(2, 31_000))

    source.before = change
    b = make("b")
    outcome = one(source, b)
    assert outcome.state == "published"
    assert data_of(b) == {"log.txt": shard_bytes(2, 31_000), "other": b"other"}
    assert outcome.receipt.bytes == 31_005
    source.before = None
    assert one(source, b).state == "already"


def test_a_source_that_never_rests_is_an_error(places):
    source, make = places
    source.write("log.txt", b"0")
    count = iter(range(1, 1000))
    source.before = lambda op, key: (
        source.inner.write("log.txt", b"1" * next(count)) if op == "read" else None
    )
    outcome = one(source, make("b"))
    assert "changes while it is read" in outcome.error.message


def test_an_empty_or_absent_source_is_refused(places):
    source, make = places
    b = make("b")
    with pytest.raises(NotFoundError):
        run(source, b)
    source.write("_datasync/receipts/x.json", b"{}")
    with pytest.raises(NotFoundError, match="nothing"):
        run(source, b)
    assert list(b.inner.list()) == [] if hasattr(b.inner, "bucket") else True


def test_a_listing_that_fails_is_never_taken_for_a_whole_one(places):
    source, make = places
    for number in range(5):
        source.write(f"file-{number}", b"x")
    b = make("b")
    one(source, b, replace(QUICK, delete=True, max_delete=1.0))

    def broken(prefix="", *, after=""):
        yield from list(source.inner.list(prefix, after=after))[:2]
        raise TransientError("listing: connection reset")

    source.list = broken
    with pytest.raises(TransientError):
        run(source, b, replace(QUICK, delete=True, max_delete=1.0, retry_seconds=1))
    assert len(data_of(b)) == 5


def test_keys_that_leave_the_dataset_are_refused_whatever_the_index_says(tmp_path):
    source = LocalStore(tmp_path / "a" / "evil")
    for bad in ("../outside", "_datasync/lease.json", "index.json", "/etc/passwd", "x/../../y"):
        text = json.dumps(
            {
                "version": 2,
                "shards": [
                    json.loads(json.dumps(shard_info("ok.mds", b"abc").to_dict()).replace("ok.mds", bad))
                ],
            }
        )
        source.write("index.json", text.encode())
        with pytest.raises(FormatError):
            run(source, LocalStore(tmp_path / "b" / "evil"))
    assert not (tmp_path / "b").exists() or not any((tmp_path / "b").rglob("*.mds"))


def test_a_damaged_manifest_or_an_index_that_names_more_is_refused(places):
    source, make = places
    shards = make_dataset(source)
    version = Index.parse(source.read("index.json"), where="a").extra["version"]
    index = json.loads(source.read("index.json"))
    data = b"extra"
    source.write("extra.mds", data)
    index["shards"].append(shard_info("extra.mds", data).to_dict())
    source.inner.write("index.json", json.dumps(index).encode())
    with pytest.raises(FormatError, match=r"extra\.mds"):
        run(source, make("b"))
    publish_dataset(source, shards)
    source.inner.write(f"_datasync/manifests/{version}.parquet", b"PAR1 nothing")
    with pytest.raises(FormatError, match="manifest"):
        run(source, make("b"))


def test_an_index_changed_by_somebody_else_meanwhile_is_left_alone(places):
    source, make = places
    make_dataset(source)
    b = make("b")
    b.inner.write("index.json", b'{"version": 2, "shards": []}')
    theirs = b'{"version": 2, "shards": [], "theirs": true}'

    def interfere(operation: str, key: str) -> None:
        if operation == "write" and key.startswith("_datasync/manifests/"):
            b.inner.write("index.json", theirs)

    b.before = interfere
    outcome = one(source, b)
    assert "somebody else" in outcome.error.message
    assert b.read("index.json") == theirs
    assert receipts.read(b) is None


def test_odd_keys_are_copied_or_named_never_skipped(request, tmp_path):
    a, b = request.getfixturevalue("s3_a"), request.getfixturevalue("s3_b")
    source = a.store("odd")
    keys = [
        "space here",
        "plus+sign",
        "per%cent",
        "quo'te\"",
        "üñï/漢字",
        "a=b&c",
        "x;y,z",
        "tilde~",
        "#hash?q",
    ]
    for key in keys:
        source.write(key, key.encode())
    for place in (b.store("odd"), LocalStore(tmp_path / "odd")):
        outcome = one(source, place, name="odd")
        assert outcome.error is None
        assert data_of(place) == {key: key.encode() for key in keys}


def test_a_key_that_a_store_keeps_under_another_name_is_never_published(s3_a, tmp_path):
    """SeaweedFS takes a backslash for a slash."""
    write_tree(tmp_path / "a", {"back\\slash": b"1", "fine": b"2"})
    there = s3_a.store("odd")
    outcome = one(LocalStore(tmp_path / "a"), there, name="odd")
    if outcome.error is None:  # a version that keeps it as it is
        assert data_of(there) == {"back\\slash": b"1", "fine": b"2"}
        return
    assert "'back\\\\slash'" in str(outcome.error)
    assert receipts.read(there) is None


def test_a_source_that_is_published_anew_in_mid_run_gives_one_version_whole(places):
    source, make = places
    old = make_dataset(source, count=12)
    b = make("b")
    changed: list[str] = []

    def publish_anew(operation: str, key: str) -> None:
        if operation == "read" and key.startswith("shards/") and not changed:
            changed.append(key)
            make_dataset(source.inner, count=12, seed="new")

    source.before = publish_anew
    outcome = one(source, b)
    assert changed
    assert (outcome.state, data_of(b).keys() - {"index.json"}) == ("published", old.keys())
    assert receipts.read(b).whole
    again = one(source, b)
    assert (again.state, again.tally.copied) == ("published", 12)
    assert data_of(b) == data_of(source)


def test_a_dry_run_writes_nothing_anywhere(places):
    source, make = places
    shards = make_dataset(source)
    b = make("b")
    outcome = one(source, b, replace(QUICK, dry_run=True))
    assert (outcome.state, outcome.to_copy) == ("planned", len(shards))
    assert outcome.to_copy_bytes == sum(map(len, shards.values()))
    assert not [call for call in b.calls if call[0] in ("write", "delete", "begin", "copy")]


def test_a_denied_destination_says_so(places):
    source, make = places
    make_dataset(source)
    b = make("b")

    def deny(operation: str, key: str) -> None:
        if operation == "write":
            raise DeniedError(f"not allowed to write {key}", mend="ask for the right")

    b.before = deny
    outcome = one(source, b)
    assert isinstance(outcome.error, DeniedError)


def test_a_full_disk_gives_the_destination_up_and_the_rerun_completes(places):
    source, make = places
    shards = make_dataset(source, count=30)
    b = make("b")
    room = [10]

    def fill(operation: str, key: str) -> None:
        if operation == "write" and key.startswith("shards/"):
            room[0] -= 1
            if room[0] < 0:
                raise StoreError(f"{key}: no space left on device", mend="make room")

    b.before = fill
    outcome = one(source, b)
    assert "no space left" in outcome.error.message
    assert receipts.read(b) is None
    b.before = None
    sent = set(b.data_writes())
    b.calls.clear()
    assert one(source, b).state == "published"
    assert data_of(b) == data_of(source)
    assert len(b.data_writes()) <= len(shards) - 10 + 1
    assert sent


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB, and a way to make it larger."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a small disk")
    yield folder, lambda: subprocess.run(["mount", "-o", "remount,size=16m", str(folder)], check=True)
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_that_really_is_full_is_named_and_the_rerun_sends_the_rest(small_disk, tmp_path):
    folder, enlarge = small_disk
    source, b = LocalStore(tmp_path / "a"), LocalStore(folder / "b")
    shards = make_dataset(source, count=30, size=60_000)
    outcome = one(source, b)
    assert "no space left" in str(outcome.error)
    assert "free space" in str(outcome.error)
    assert "index.json" not in data_of(b)
    assert receipts.read(b) is None
    kept = data_of(b)
    assert all(kept[key] == shards[key] for key in kept)
    assert not list((folder / "b").glob(".datasync-tmp/*"))
    enlarge()
    again = one(source, b)
    assert again.state == "published"
    assert again.tally.copied + len(again.tally.adopted) + len(kept) >= len(shards)
    assert again.tally.copied <= len(shards) - len(kept)
    assert data_of(b) == data_of(source)


def test_a_stop_keeps_what_is_done_and_the_next_run_goes_on(places):
    source, make = places
    shards = make_dataset(source, count=40)
    b = make("b")
    stop = Stop()

    def ask(operation: str, key: str) -> None:
        if operation == "write" and key.startswith("shards/") and len(b.data_writes()) == 8:
            stop.ask("by a test")

    b.before = ask
    outcome = one(source, b, stop=stop)
    assert outcome.state == "stopped"
    assert "index.json" not in data_of(b)
    already = set(data_of(b))
    assert 0 < len(already) < len(shards)
    b.before = None
    b.calls.clear()
    assert one(source, b).state == "published"
    assert not already & set(b.data_writes())
    assert data_of(b) == data_of(source)


def test_the_source_may_not_be_the_destination(tmp_path):
    source = LocalStore(tmp_path / "x")
    make_dataset(source)
    with pytest.raises(ValueError, match="source itself"):
        run(source, LocalStore(tmp_path / "x"))


def test_inside_one_endpoint_bytes_do_not_pass_through_here(request):
    server = request.getfixturevalue("s3_a")
    source, b = Spy(server.store("here/emoji")), Spy(server.store("there/emoji"))
    shards = make_dataset(source)
    outcome = one(source, b)
    assert outcome.error is None
    assert outcome.tally.server_copied == len(shards)
    assert data_of(b) == data_of(source)


def test_deleting_needs_a_receipt_and_keeps_to_its_share(places):
    source, make = places
    for number in range(20):
        source.write(f"file-{number:02d}", b"x" * (number + 1))
    b = make("b")
    b.inner.write("theirs.txt", b"put here by a person")
    b.inner.write("file-00", b"x")  # was there before us
    one(source, b)
    source.delete(["file-00", "file-01"])
    options = replace(QUICK, delete=True)
    outcome = one(source, b, options)
    assert outcome.deleted == 1
    assert data_of(b).keys() == {f"file-{n:02d}" for n in range(20) if n != 1} | {"theirs.txt"}
    source.delete([f"file-{n:02d}" for n in range(2, 12)])
    outcome = one(source, b, options)
    assert "may remove 10%" in outcome.error.message
    assert len(data_of(b)) == 20
    assert one(source, b, replace(options, max_delete=0.6)).deleted == 10


def test_files_that_cannot_be_beside_each_other_are_refused_before_copying(request, tmp_path):
    source = request.getfixturevalue("s3_a").store("odd")
    source.write("a", b"file")
    source.write("a/b", b"file in a folder of the same name")
    outcome = one(source, LocalStore(tmp_path / "b"), name="odd")
    assert "cannot both be files" in outcome.error.message
    assert not (tmp_path / "b" / "a").exists()


def test_names_that_differ_by_case_are_refused_where_the_disk_folds_them(request, tmp_path, monkeypatch):
    from datasync.replicate import destination

    source = LocalStore(tmp_path / "a")
    write_tree(tmp_path / "a", {"Readme": b"1", "README": b"2"})
    monkeypatch.setattr(destination, "folds_case", lambda folder: True)
    outcome = one(source, LocalStore(tmp_path / "b"), name="odd")
    assert "'README' and 'Readme'" in outcome.error.message


def test_a_loop_of_links_is_an_error(tmp_path):
    write_tree(tmp_path / "a", {"x/y": b"1"})
    (tmp_path / "a" / "x" / "loop").symlink_to(tmp_path / "a")
    with pytest.raises(StoreError, match="no end"):
        run(LocalStore(tmp_path / "a"), LocalStore(tmp_path / "b"))


def test_a_file_rewritten_in_place_with_its_size_and_time_is_noticed(tmp_path):
    import os

    write_tree(tmp_path / "a", {"x": b"old!", "y": b"y"})
    before = os.stat(tmp_path / "a" / "x")
    one(LocalStore(tmp_path / "a"), LocalStore(tmp_path / "b"))
    with open(tmp_path / "a" / "x", "r+b") as file:
        file.write(b"new!")
    os.utime(tmp_path / "a" / "x", ns=(before.st_atime_ns, before.st_mtime_ns))
    one(LocalStore(tmp_path / "a"), LocalStore(tmp_path / "b"))
    assert (tmp_path / "b" / "x").read_bytes() == b"new!"


def test_options_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="verify"):
        Options(verify="sometimes")


def test_other_stores_through_fsspec_are_sources_and_destinations(tmp_path, monkeypatch):
    from datasync.replicate import lease
    from datasync.replicate.verify import verify

    monkeypatch.setattr(lease, "_SETTLE_SECONDS", 0.1)
    source, there, back = (
        open_store(f"memory://{tmp_path.name}/a"),
        open_store(f"memory://{tmp_path.name}/b"),
        LocalStore(tmp_path / "c"),
    )
    shards = make_dataset(source)
    for start, end in ((source, there), (there, back)):
        outcome = one(start, end)
        assert (outcome.state, outcome.tally.copied) == ("published", len(shards))
        assert data_of(end) == data_of(source)
        assert one(start, end).tally.copied == 0
    assert verify(there, name="emoji", quiet=True).good
