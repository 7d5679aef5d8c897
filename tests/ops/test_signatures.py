"""A signed index: what the store cannot forge, replicate can check."""

from __future__ import annotations

from dataclasses import replace

import pytest

from datasync.errors import CorruptError, UsageError
from datasync.ops.signatures import check_signature, make_keys, sign
from datasync.replicate import replicate
from datasync.storage.local import LocalStore
from tests.replicate.kit import QUICK, datasync, make_dataset


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
