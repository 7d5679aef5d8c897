"""A signed index: what the store cannot forge, replicate can check."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest

from datasync import Stream, StreamingDataset
from datasync.errors import CorruptError, DatasyncError, DeniedError, UsageError
from datasync.ops.signatures import check_signature, make_keys, sign
from datasync.replicate import replicate
from datasync.storage.local import LocalStore
from datasync.streaming.stats import Stats
from shards import ShardWriter
from tests.replicate.kit import QUICK, Spy, datasync, make_dataset


@pytest.fixture
def signed(tmp_path):
    store = LocalStore(tmp_path / "a" / "emoji")
    make_dataset(store)
    private, public = tmp_path / "team.pem", tmp_path / "team.pub.pem"
    make_keys(private, public)
    sign(store, private)
    return store, private, public


def test_a_good_signature_is_checked_and_travels_with_the_index(signed, tmp_path):
    store, _, public = signed
    b = LocalStore(tmp_path / "b" / "emoji")
    (outcome,) = replicate(
        store, {"b": b}, name="emoji", options=replace(QUICK, require_signature=str(public))
    )
    assert outcome.state == "published"
    check_signature(b, b.read("index.json"), public)


def test_an_index_that_was_exchanged_is_refused(signed, tmp_path):
    store, _, public = signed
    make_dataset(store, seed="a stranger's")
    with pytest.raises(CorruptError, match="not signed"):
        replicate(
            store,
            {"b": LocalStore(tmp_path / "b")},
            name="emoji",
            options=replace(QUICK, require_signature=str(public)),
        )
    assert not (tmp_path / "b" / "shards").exists()


def test_a_signature_by_another_key_is_refused(signed, tmp_path):
    store, _, public = signed
    make_keys(tmp_path / "other.pem", tmp_path / "other.pub.pem")
    sign(store, tmp_path / "other.pem")
    with pytest.raises(CorruptError, match="not by"):
        check_signature(store, store.read("index.json"), public)
    check_signature(store, store.read("index.json"), tmp_path / "other.pub.pem")


def test_a_damaged_signature_is_refused(signed):
    store, _, public = signed
    (info,) = store.list("_datasync/signatures/")
    store.write(info.key, store.read(info.key).replace(b'"signature": "', b'"signature": "A'))
    with pytest.raises(CorruptError, match="not by"):
        check_signature(store, store.read("index.json"), public)


def test_keys_are_never_overwritten_and_the_private_one_is_private(signed):
    _, private, public = signed
    assert private.stat().st_mode & 0o077 == 0
    with pytest.raises(UsageError, match="exists already"):
        make_keys(private, public)
    with pytest.raises(UsageError, match="no private key"):
        sign(LocalStore(private.parent / "a" / "emoji"), public)


def test_the_command_and_the_configuration(signed, tmp_path):
    (tmp_path / "datasync.toml").write_text(
        '[clusters.a]\nurl = "a"\n[clusters.b]\nurl = "b"\n'
        '[datasets.emoji]\nhome = "a"\nrequire_signature = "keys/new.pub.pem"\n'
    )
    datasync("sign", "--new-key", "keys/new", cwd=tmp_path)
    refused = datasync("replicate", "--to", "b", cwd=tmp_path, check=1)
    assert "keys/new.pub.pem" in refused.stderr
    datasync("sign", "emoji", "--key", "keys/new.pem", cwd=tmp_path)
    assert "published" in datasync("replicate", "--to", "b", cwd=tmp_path).stdout
    assert (
        "is signed by"
        in datasync("sign", "emoji", "--cluster", "b", "--check", "keys/new.pub.pem", cwd=tmp_path).stdout
    )


# Training reads only what was signed


@pytest.fixture
def stream(tmp_path):
    """A signed dataset at two clusters, and how to read it."""
    a, b = tmp_path / "a" / "rows", tmp_path / "b" / "rows"
    with ShardWriter(out=a, columns={"text": "str"}) as out:
        for row in range(50):
            out.write({"text": f"row {row}"})
    make_keys(tmp_path / "team.pem", tmp_path / "team.pub.pem")
    sign(LocalStore(a), tmp_path / "team.pem")
    shutil.copytree(a, b)
    config = tmp_path / "datasync.toml"
    config.write_text(
        '[clusters.a]\nurl = "a"\n[clusters.b]\nurl = "b"\n'
        '[datasets.rows]\nrequire_signature = "team.pub.pem"\n'
    )

    def read(cache: str = "cache", **options):
        options = options or {"dataset": "rows"}
        found = StreamingDataset(
            streams=[Stream(config=config, local=tmp_path / cache, **options)],
            batch_size=10,
            download_retry=0,
            download_timeout=1,
        )
        return [sample["text"] for sample in found]

    return a, b, tmp_path, read


def test_a_signed_dataset_is_read_and_an_exchanged_one_is_not(stream):
    a, b, folder, read = stream
    rows = [f"row {row}" for row in range(50)]
    assert sorted(read()) == sorted(rows)
    for place in (a, b):
        shutil.rmtree(place)
        with ShardWriter(out=place, columns={"text": "str"}) as out:
            out.write({"text": "poison"})
    for options in ({"dataset": "rows"}, {"remote": "a:rows"}, {"remote": ["b:rows", "a:rows"]}):
        with pytest.raises(CorruptError, match="not signed"):
            read("other", **options)
    make_keys(folder / "other.pem", folder / "other.pub.pem")
    sign(LocalStore(a), folder / "other.pem")
    with pytest.raises(CorruptError, match="not by"):
        read("other", remote="a:rows")


def test_a_replica_that_is_still_right_serves(stream):
    a, _, _, read = stream
    shutil.rmtree(a)
    with ShardWriter(out=a, columns={"text": "str"}) as out:
        out.write({"text": "poison"})
    assert len(read()) == 50


def test_the_signature_is_kept_with_the_index_for_when_no_replica_answers(stream):
    a, b, folder, read = stream
    both = ["a:rows", "b:rows"]
    read(remote=both)
    for place in (a, b):
        place.rename(place.with_name("away"))
        place.parent.joinpath("rows").write_text("a file in the way")
    assert len(read(remote=both)) == 50
    note = next((folder / "cache" / ".datasync-cache").glob("index-*.json"))
    kept = json.loads(note.read_text())
    note.write_text(json.dumps(kept | {"signature": None}))
    with pytest.raises(DatasyncError):
        read(remote=both)


def test_a_signed_dataset_is_checked_by_a_digest_that_cannot_be_made_to_fit(stream):
    *_, folder, _ = stream
    found = Stream(
        config=folder / "datasync.toml", dataset="rows", local=folder / "c", validate_hash="xxh3_64"
    )
    source = found.source(cache_limit=None, limit_folders=[], allow_unsafe_types=False, stats=Stats())
    assert source.validate_hash == "sha256"


# A copy is judged by the signature that it must have, whether anything is copied or not


def test_a_signature_that_was_made_later_follows_although_nothing_else_is_to_do(tmp_path):
    source, b = LocalStore(tmp_path / "a" / "emoji"), LocalStore(tmp_path / "b" / "emoji")
    make_dataset(source)
    make_keys(tmp_path / "team.pem", tmp_path / "team.pub.pem")
    make_keys(tmp_path / "next.pem", tmp_path / "next.pub.pem")
    replicate(source, {"b": b}, name="emoji", options=QUICK)
    for key in ("team", "next"):  # the first, and that of a new key
        sign(source, tmp_path / f"{key}.pem")
        (outcome,) = replicate(source, {"b": b}, name="emoji", options=QUICK)
        assert (outcome.state, outcome.tally.copied) == ("already", 0)
        check_signature(b, b.read("index.json"), tmp_path / f"{key}.pub.pem")
    spy = Spy(b)
    replicate(source, {"b": spy}, name="emoji", options=QUICK)
    assert not [key for operation, key in spy.calls if operation == "write"]


def test_what_must_be_signed_is_checked_by_every_run(signed, tmp_path):
    source, _, public = signed
    b = LocalStore(tmp_path / "b" / "emoji")
    strict = replace(QUICK, require_signature=str(public))

    def run():
        (outcome,) = replicate(source, {"b": b}, name="emoji", options=strict)
        return outcome

    assert run().state == "published"
    spy = Spy(b)
    (outcome,) = replicate(source, {"b": spy}, name="emoji", options=strict)
    assert outcome.state == "already"
    assert not [key for operation, key in spy.calls if operation == "write"]
    (info,) = b.list("_datasync/signatures/")
    b.delete([info.key])
    assert run().state == "already"
    check_signature(b, b.read("index.json"), public)
    # Signed by another key, not at all, and with no key to check by.
    make_keys(tmp_path / "other.pem", tmp_path / "other.pub.pem")
    right = source.read(info.key)
    sign(source, tmp_path / "other.pem")
    b.write(info.key, source.read(info.key))
    with pytest.raises(CorruptError, match="not by"):
        run()
    for store in (source, b):
        store.delete([info.key])
    with pytest.raises(CorruptError, match="not signed"):
        run()
    source.write(info.key, right)
    assert run().state == "already"
    public.rename(tmp_path / "moved")
    with pytest.raises(UsageError, match="no public key"):
        run()


def test_every_command_wants_the_signature(tmp_path):
    make_dataset(LocalStore(tmp_path / "a" / "emoji"))
    plain = '[clusters.a]\nurl = "a"\n[clusters.b]\nurl = "b"\n[datasets.emoji]\nhome = "a"\n'
    (tmp_path / "datasync.toml").write_text(plain)
    datasync("sign", "--new-key", "team", cwd=tmp_path)
    datasync("replicate", "--to", "b", "-q", cwd=tmp_path)
    assert "whole" in datasync("status", "emoji", cwd=tmp_path).stdout
    (tmp_path / "datasync.toml").write_text(plain + 'require_signature = "team.pub.pem"\n')
    at_b = ("emoji", "--cluster", "b")
    for command, code in (
        (("replicate", "emoji", "--to", "b"), 1),
        (("replicate", "emoji", "--to", "b", "--dry-run"), 1),
        (("verify", *at_b, "-q"), 3),
        (("repair", *at_b, "-q"), 3),
        (("wait", *at_b, "--timeout", "0s"), 1),
        (("status", *at_b), 3),
    ):
        done = datasync(*command, cwd=tmp_path, check=code)
        assert "is not signed" in done.stdout + done.stderr
    places = json.loads(datasync("status", "emoji", "--json", cwd=tmp_path, check=3).stdout)["places"]
    assert {place["state"] for place in places} == {"unsigned"}
    datasync("sign", "emoji", "--key", "team.pem", cwd=tmp_path)
    datasync("repair", *at_b, "-q", cwd=tmp_path)
    datasync("verify", *at_b, "-q", cwd=tmp_path)
    datasync("wait", *at_b, "--timeout", "0s", cwd=tmp_path)
    datasync("status", "emoji", cwd=tmp_path)


def test_a_source_that_may_not_be_asked_for_signatures_is_copied_without(tmp_path):
    source, b = LocalStore(tmp_path / "a"), LocalStore(tmp_path / "b")
    make_dataset(source)

    def refuse(operation: str, key: str) -> None:
        if key.startswith("_datasync/signatures/"):
            raise DeniedError("denied: these keys may not list")

    for state in ("published", "already"):
        spy = Spy(source, refuse)
        (outcome,) = replicate(spy, {"b": b}, name="emoji", options=QUICK)
        assert outcome.state == state
    assert spy.calls.count(("stat", "index.json")) == 1
