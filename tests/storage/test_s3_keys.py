"""Keys that an endpoint changes, or that its XML cannot say: refused by name, or handled."""

from __future__ import annotations

import pytest

from datasync.errors import StoreError
from tests.servers import S3Server


@pytest.mark.parametrize("key", ["a\\b", "a//b", "/b", "b/"])
def test_a_key_that_the_endpoint_would_change_is_refused_and_its_neighbour_is_left(
    s3_a: S3Server, key: str
) -> None:
    store = s3_a.store()
    store.write("a/b", b"neighbour")
    for write in (
        lambda: store.write(key, b"x"),
        lambda: store.begin(key, bytes=1 << 20),
        lambda: store.copy(store, "a/b", key),
    ):
        with pytest.raises(StoreError, match="would give it another name"):
            write()
    assert {info.key: store.read(info.key) for info in store.list()} == {"a/b": b"neighbour"}


def test_keys_that_xml_cannot_say_are_deleted_with_the_others(s3_a: S3Server) -> None:
    store = s3_a.store()
    keys = ["plain", "\x01", "line\n", "\r", "\x1f", "\ufffe"]
    for key in keys:
        store.write(key, b"x")
    assert sorted(info.key for info in store.list()) == sorted(keys, key=str.encode)
    store.delete(keys)
    assert list(store.list()) == []
