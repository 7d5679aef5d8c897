"""One judgement of a copy: what its records prove, every command says alike, and what they lost is mended."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from dataclasses import replace

import pytest

from datasync.config import Config
from datasync.errors import BusyError, CorruptError, FormatError
from datasync.ops import receipts
from datasync.ops.judgement import fault
from datasync.ops.status import is_here, status, wait
from datasync.replicate import Outcome, replicate, report
from datasync.replicate.lease import held
from datasync.replicate.repair import repair
from datasync.replicate.verify import verify
from datasync.storage.local import LocalStore
from shards.manifest import Manifest, manifest_key
from tests.replicate.kit import QUICK, Spy, data_of, datasync, make_dataset, write_tree

RECEIPT = "_datasync/receipt.json"


def other_index(b, receipt):
    b.write("index.json", b"{}")


def no_index(b, receipt):
    b.delete(["index.json"])


def no_manifest(b, receipt):
    b.delete([manifest_key(receipt.version)])


def garbled_manifest(b, receipt):
    b.write(manifest_key(receipt.version), b"PAR1 and then nothing")


def shorter_manifest(b, receipt):
    key = manifest_key(receipt.version)
    whole = Manifest.from_parquet(b.read(key), where=key)
    b.write(key, Manifest(whole.table.slice(1)).to_parquet())


def garbled_receipt(b, receipt):
    b.write(RECEIPT, b'{"format": 1, "name": "emo')


def two_garbled_receipts(b, receipt):
    garbled_receipt(b, receipt)
    b.write(f"_datasync/receipts/{receipt.version}.json", b"\0" * 300)


HARMS = [other_index, no_index, no_manifest, garbled_manifest, shorter_manifest, garbled_receipt]
HARMS_TO_ALL = [*HARMS, two_garbled_receipts]


@pytest.fixture(params=["local", "s3"])
def copy(request, tmp_path):
    """A dataset and a copy of it."""
    if request.param == "local":
        source, b = LocalStore(tmp_path / "a" / "emoji"), LocalStore(tmp_path / "b" / "emoji")
    else:
        source = request.getfixturevalue("s3_a").store("emoji")
        b = request.getfixturevalue("s3_b").store("emoji")
    make_dataset(source)
    (outcome,) = replicate(source, {"b": b}, name="emoji", options=QUICK)
    assert fault(b, outcome.receipt) is None
    return source, Spy(b), outcome.receipt


def judged(b) -> str:
    """Why a copy is not whole, as `wait` tells; empty if it is."""
    found, why = wait(b, name="emoji", timeout=0.0)
    assert (found is None) == bool(why)
    return why


def mended(b, receipt) -> None:
    assert judged(b) == ""
    again = receipts.read(b)
    assert (again.version, again.state, again.adopted) == (receipt.version, "whole", 0)
    assert fault(b, again) is None
    assert verify(b, name="emoji", quiet=True).good


@pytest.mark.parametrize("harm", HARMS_TO_ALL)
def test_no_record_may_be_lost_unseen_and_a_replication_writes_it_anew(copy, harm):
    source, b, receipt = copy
    objects = data_of(b)
    harm(b, receipt)
    assert judged(b) != ""
    b.calls.clear()
    (outcome,) = replicate(source, {"b": b}, name="emoji", options=QUICK)
    assert outcome.error is None
    assert outcome.tally.copied == 0
    assert not [key for key in b.data_writes() if key != "index.json"]
    assert data_of(b) == objects
    assert fault(b, receipts.read(b)) is None
    if harm is not two_garbled_receipts:  # with both, who wrote the objects is not known any more
        mended(b, receipt)
    b.calls.clear()
    (outcome,) = replicate(source, {"b": b}, name="emoji", options=QUICK)
    assert outcome.state == "already"
    assert not [operation for operation, _ in b.calls if operation == "write"]


@pytest.mark.parametrize("harm", HARMS)
def test_repair_brings_back_the_records_from_a_replica(copy, harm):
    source, b, receipt = copy
    harm(b, receipt)
    result = repair(b, [source], name="emoji", quiet=True)
    assert (result.damaged, result.repaired, result.left) == (1, 1, {})
    mended(b, receipt)


@pytest.mark.parametrize("harm", [no_manifest, garbled_manifest, shorter_manifest])
def test_verify_tells_of_a_manifest_that_is_not_what_it_was(copy, harm):
    _, b, receipt = copy
    harm(b, receipt)
    report = verify(b, name="emoji", quiet=True)
    assert [finding.key for finding in report.findings] == [manifest_key(receipt.version)]


@pytest.mark.parametrize("harm", [no_manifest, shorter_manifest, garbled_receipt])
def test_an_older_manifest_that_was_lost_costs_no_copying(copy, harm):
    """The next version is replicated over a copy whose records do not tell what it has."""
    source, b, receipt = copy
    harm(b, receipt)
    shards = make_dataset(source, count=8)
    b.calls.clear()
    (outcome,) = replicate(source, {"b": b}, name="emoji", options=QUICK)
    assert outcome.error is None
    assert outcome.tally.copied == 2
    assert judged(b) == ""
    assert set(shards) <= set(data_of(b))
    assert receipts.read(b).adopted == 0


@pytest.mark.parametrize("harm", [no_manifest, garbled_manifest, garbled_receipt])
def test_the_records_of_a_tree_are_mended_without_reading_it_again(tmp_path, harm):
    source, b = Spy(LocalStore(tmp_path / "a")), Spy(LocalStore(tmp_path / "b"))
    write_tree(tmp_path / "a", {f"f{number}": b"x" * 900 + bytes([number]) for number in range(9)})
    (first,) = replicate(source, {"b": b}, name="tree", options=QUICK)
    harm(b, first.receipt)
    assert judged(b) != ""
    source.calls.clear()
    (outcome,) = replicate(source, {"b": b}, name="tree", options=QUICK)
    assert (outcome.error, outcome.tally.copied) == (None, 0)
    assert not [key for operation, key in source.calls if operation in ("read", "stream")]
    assert judged(b) == ""
    assert receipts.read(b).adopted == 0
    delete = replace(QUICK, delete=True, max_delete=1.0)
    source.inner.delete([f"f{number}" for number in range(8)])
    (outcome,) = replicate(source, {"b": b}, name="tree", options=delete)
    assert outcome.deleted == 8


def test_a_receipt_of_a_newer_program_is_left_alone(tmp_path):
    source, b = LocalStore(tmp_path / "a"), LocalStore(tmp_path / "b")
    make_dataset(source)
    replicate(source, {"b": b}, name="emoji", options=QUICK)
    newer = json.loads(b.read(RECEIPT)) | {"format": 99}
    b.write(RECEIPT, json.dumps(newer).encode())
    with pytest.raises(FormatError, match="format 99"):
        receipts.recovered(b)
    (outcome,) = replicate(source, {"b": b}, name="emoji", options=QUICK)
    assert isinstance(outcome.error, FormatError)
    assert json.loads(b.read(RECEIPT)) == newer


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"7", b"null", b'{"format": 1}', b'{"format": "x"}', b"\xff\xfe"]
)
def test_whatever_is_no_receipt_is_damaged(text):
    with pytest.raises(CorruptError, match="is damaged"):
        receipts.parse(text, where="receipt.json")


def test_who_wrote_what_is_not_guessed_when_the_list_of_it_is_lost(tmp_path):
    source, b = LocalStore(tmp_path / "a"), LocalStore(tmp_path / "b")
    write_tree(tmp_path / "a", {f"f{number}": bytes([number]) * 900 for number in range(4)})
    b.write("f0", bytes([0]) * 900)  # somebody else's
    (first,) = replicate(source, {"b": b}, name="tree", options=QUICK)
    assert first.receipt.adopted == 1
    b.delete([f"_datasync/adopted/{first.version}.json"])
    write_tree(tmp_path / "a", {"f9": b"new"})
    (outcome,) = replicate(source, {"b": b}, name="tree", options=QUICK)
    assert outcome.error is None
    assert outcome.receipt.adopted == 4
    source.delete(["f0", "f1", "f9"])
    (outcome,) = replicate(source, {"b": b}, name="tree", options=replace(QUICK, delete=True, max_delete=1.0))
    assert (outcome.error, outcome.deleted) == (None, 1)
    assert set(data_of(b)) == {"f0", "f1", "f2", "f3"}


@pytest.mark.parametrize("harm", [other_index, no_manifest])
def test_the_commands_say_the_same(tmp_path, harm):
    make_dataset(LocalStore(tmp_path / "a" / "emoji"))
    (tmp_path / "datasync.toml").write_text(
        '[clusters.a]\nurl = "a"\n[clusters.b]\nurl = "b"\n[datasets.emoji]\nhome = "a"\n'
    )
    datasync("replicate", "--to", "b", "-q", cwd=tmp_path)
    b = LocalStore(tmp_path / "b" / "emoji")
    harm(b, receipts.read(b))
    status = datasync("status", "emoji", "--cluster", "b", cwd=tmp_path, check=3)
    waited = datasync("wait", "emoji", "--cluster", "b", "--timeout", "0.1s", cwd=tmp_path, check=1)
    why = status.stderr.partition("error: emoji at b: ")[2].strip()
    assert "damaged" in status.stdout
    assert why
    assert f"nothing is whole at b after 0.1s: {why}" in waited.stderr
    verified = datasync("verify", "emoji", "--cluster", "b", "-q", cwd=tmp_path, check=3)
    assert "mend: datasync repair emoji --cluster b" in verified.stderr
    datasync("repair", "emoji", "--cluster", "b", "-q", cwd=tmp_path)
    assert "whole" in datasync("status", "emoji", "--cluster", "b", cwd=tmp_path).stdout
    assert "all good" in datasync("verify", "emoji", "--cluster", "b", "-q", cwd=tmp_path).stdout


def test_the_home_is_judged_by_the_same_records(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "one"}\n')
    (tmp_path / "datasync.toml").write_text('[clusters.a]\nurl = "a"\n[datasets.rows]\nhome = "a"\n')
    datasync("shard", "rows.jsonl", "a:rows", "-q", cwd=tmp_path)
    home = LocalStore(tmp_path / "a" / "rows")
    datasync("status", "rows", cwd=tmp_path)
    found, _ = is_here(home, "rows", None)
    home.delete([manifest_key(found.version)])
    assert "damaged" in datasync("status", "rows", cwd=tmp_path, check=3).stdout
    found, why = is_here(home, "rows", None)
    assert found is None
    assert "manifest" in why


def test_a_published_destination_is_free_while_another_hangs(tmp_path):
    source, b = LocalStore(tmp_path / "a"), LocalStore(tmp_path / "b")
    make_dataset(source)
    published, go_on = threading.Event(), threading.Event()

    def hang(operation: str, key: str) -> None:
        if operation == "write" and key.startswith("shards/"):
            published.set()
            go_on.wait(60)

    c = Spy(LocalStore(tmp_path / "c"), hang)
    run = threading.Thread(
        target=replicate, args=(source, {"b": b, "c": c}), kwargs={"name": "emoji", "options": QUICK}
    )
    run.start()
    try:
        assert published.wait(30)
        found, why = wait(b, name="emoji", timeout=30.0, poll=0.05)
        assert found is not None, why
        for _ in range(100):
            if json.loads(b.read("_datasync/lease.json"))["holder"] is None:
                break
            go_on.wait(0.05)
        with held(b, "gc emoji"):
            assert run.is_alive()
    finally:
        go_on.set()
        run.join()
    assert judged(c) == ""


@pytest.mark.parametrize("text", [b"", b"7", b"[[]]", b"\xff" * 40])
def test_garbage_in_a_record_stops_nobody_for_good(tmp_path, text):
    source, b = LocalStore(tmp_path / "a"), LocalStore(tmp_path / "b")
    write_tree(tmp_path / "a", {f"f{number}": b"x" * 900 + bytes([number]) for number in range(9)})
    b.write("f0", source.read("f0"))  # somebody else's
    (first,) = replicate(source, {"b": b}, name="tree", options=QUICK)
    b.write("f3", b"?" * 901)
    assert not verify(b, name="tree", quiet=True).good
    version = first.version
    journal = "_datasync/journal/00000001"
    b.write(f"_datasync/scrub/{version[:16]}-full-1-0-000001.jsonl", text)
    for key in (f"{journal}-0000-000000.jsonl", f"{journal}-keys-000000.json", "_datasync/leftovers.json"):
        b.write(key, text)
    for key in (f"adopted/{version}.json", f"damage/{version}.json", "lease.json"):
        assert b.stat(f"_datasync/{key}")
        b.write(f"_datasync/{key}", text)
    (outcome,) = replicate(source, {"b": b}, name="tree", options=QUICK)
    assert isinstance(outcome.error, BusyError)  # whoever may hold it has a minute to renew it
    assert "is not a lease: it is damaged" in str(outcome.error)
    long_ago = time.time() - 100
    os.utime(tmp_path / "b" / "_datasync" / "lease.json", (long_ago, long_ago))
    (outcome,) = replicate(source, {"b": b}, name="tree", options=QUICK)
    assert outcome.error is None
    assert outcome.receipt.token > first.receipt.token
    assert data_of(b) == data_of(source)
    assert judged(b) == ""
    b.write(f"_datasync/scrub/{version[:16]}-full-1-0-000001.jsonl", text)
    assert verify(b, name="tree", quiet=True).good


def test_a_dataset_whose_index_is_none_any_more_is_no_tree(tmp_path):
    source, b, c = (LocalStore(tmp_path / place / "emoji") for place in "abc")
    make_dataset(source)
    replicate(source, {"b": b}, name="emoji", options=QUICK)
    (tmp_path / "datasync.toml").write_text('[clusters.a]\nurl = "a"\n[datasets.emoji]\nhome = "a"\n')
    for text in (b"{}", b"[1]"):
        for store in (source, b):
            store.write("index.json", text)
            with pytest.raises(FormatError, match=r"a dataset whose index\.json is none any more"):
                replicate(store, {"c": c}, name="emoji", options=QUICK)
    assert not list((tmp_path / "c").rglob("*.mds"))
    assert "damaged" in datasync("status", "emoji", cwd=tmp_path, check=3).stdout


@pytest.mark.parametrize("content", [b"[]", b"3", b"{}", b'{"format": "x"}', b"{"])
def test_a_receipt_that_is_none_is_told_without_the_words_of_the_program(tmp_path, content):
    with pytest.raises(CorruptError, match="is not a receipt") as caught:
        receipts.parse(content, where="b/receipt.json")
    assert not re.search(r"indices|subscriptable|supported between|argument|'format'", str(caught.value))
    assert "write it anew" in caught.value.mend


def test_a_place_that_was_never_asked_is_not_said_to_have_everything():
    outcome = Outcome(
        name="x", source="a", destination="c", url="c", kind="tree", state="stopped", objects=6, bytes=60
    )
    assert report.line(outcome).endswith("6 files · 60 B · stopped, not published; run again to continue")


def test_a_copy_that_is_being_published_is_not_called_damaged(tmp_path):
    source, b = LocalStore(tmp_path / "a" / "emoji"), LocalStore(tmp_path / "b" / "emoji")
    config = tmp_path / "datasync.toml"
    config.write_text('[clusters.b]\nurl = "b"\n')
    make_dataset(source)
    replicate(source, {"b": b}, name="emoji", options=QUICK)
    before = b.read(RECEIPT)
    make_dataset(source, seed="new")
    (outcome,) = replicate(source, {"b": b}, name="emoji", options=QUICK)
    after = b.read(RECEIPT)
    b.write(RECEIPT, before)  # as it is for an instant: the index is there, its receipt is not
    timer = threading.Timer(0.3, b.write, (RECEIPT, after))
    timer.start()
    try:
        places, _ = status(Config.load(config), ["emoji"])
    finally:
        timer.join()
    assert [(place.state, place.version) for place in places] == [("whole", outcome.version)]
