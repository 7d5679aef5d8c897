"""S3 behind a bad network and a moody server: right bytes, or one clear error; never silent damage."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from datasync.errors import (
    ConflictError,
    CorruptError,
    DeniedError,
    NotFoundError,
    StoreError,
    ThrottledError,
    TransientError,
)
from datasync.storage import Store, http1, open_store, retry
from shards.digests import crc32c
from tests.faults.proxy import KINDS, FaultProxy, Request
from tests.servers import S3Server

BODY = random.Random(7).randbytes(300_000)


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http1, "STALL_SECONDS", 0.5)
    for name, seconds in (("_FIRST_SECONDS", 0.01), ("_MOST_SECONDS", 0.1), ("_GATE_MOST", 0.2)):
        monkeypatch.setattr(retry, name, seconds)


@pytest.fixture(scope="module")
def module_proxy(s3_a: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(s3_a, seed=3, stall_seconds=5) as proxy:
        yield proxy


@pytest.fixture
def proxy(module_proxy: FaultProxy) -> FaultProxy:
    module_proxy.reset()
    return module_proxy


@pytest.fixture
def store(proxy: FaultProxy) -> Store:
    """A store behind the proxy that has found out already what the server can do."""
    store = open_store(proxy.server.url(), **proxy.options)
    assert store.abilities().if_absent
    proxy.reset()
    return store


def _is(method: str, part: str = "") -> Callable[[Request], bool]:
    return lambda request: request.method == method and part in request.target


@pytest.mark.parametrize("kind", KINDS)
def test_one_fault_while_reading(store: Store, proxy: FaultProxy, kind: str) -> None:
    store.write("k", BODY)
    proxy.script(kind, when=_is("GET", "/k"))
    assert store.read("k") == BODY
    assert proxy.faults[kind] == 1


@pytest.mark.parametrize("kind", KINDS)
def test_one_fault_while_writing(store: Store, proxy: FaultProxy, kind: str) -> None:
    proxy.script(kind, when=_is("PUT"))
    store.write("k", BODY, crc32c=crc32c(BODY))
    assert proxy.faults[kind] == 1
    assert store.read("k") == BODY


@pytest.mark.parametrize("kind", sorted({*KINDS} - {"flip"}))
def test_one_fault_while_creating_is_no_conflict_with_oneself(
    store: Store, proxy: FaultProxy, kind: str
) -> None:
    proxy.script(kind, when=_is("PUT"))
    store.write("lease", b"mine", if_absent=True)
    with pytest.raises(ConflictError):
        store.write("lease", b"other", if_absent=True)
    proxy.script(kind, when=_is("PUT"))
    store.write("lease", b"mine again", if_match=store.stat("lease").etag)
    assert store.read("lease") == b"mine again"
    assert proxy.faults[kind] == 2


@pytest.mark.parametrize("kind", sorted({*KINDS} - {"flip"}))
def test_one_fault_while_listing_and_looking(store: Store, proxy: FaultProxy, kind: str) -> None:
    store.write("a", b"1")
    store.write("b", b"22")
    proxy.script(kind, when=_is("GET", "list-type"))
    assert [info.key for info in store.list()] == ["a", "b"]
    proxy.script(kind, when=_is("HEAD"))
    assert store.stat("b").bytes == 2
    proxy.script(kind, when=_is("POST", "delete"))
    store.delete(["a", "b"])
    assert list(store.list()) == []
    assert proxy.faults[kind] == 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", ["uploads", "partNumber", "uploadId"])
def test_one_fault_in_an_upload(store: Store, proxy: FaultProxy, kind: str, step: str) -> None:
    method = "PUT" if step == "partNumber" else "POST"
    proxy.script(kind, when=_is(method, step))
    upload = store.begin("k", bytes=len(BODY))
    info = upload.complete({1: upload.put(1, BODY)})
    assert info.bytes == len(BODY)
    assert store.read("k") == BODY


def test_a_stream_goes_on_after_a_break_with_the_same_version(store: Store, proxy: FaultProxy) -> None:
    store.write("k", BODY)
    proxy.script("truncate", "reset", "", when=_is("GET", "/k"))
    with store.stream("k", chunk=1000) as pieces:
        assert b"".join(pieces) == BODY
    ranges = [request.headers.get("range") for request in proxy.requests if request.method == "GET"]
    assert ranges[0] is None
    assert all(found and found.endswith(f"-{len(BODY) - 1}") for found in ranges[1:])


def test_a_stream_does_not_go_on_with_another_version(store: Store, proxy: FaultProxy) -> None:
    store.write("k", BODY)
    proxy.script("truncate", when=_is("GET", "/k"))
    with store.stream("k", chunk=1000) as pieces:
        first = next(pieces)
        store.write("k", BODY[::-1])
        with pytest.raises(ConflictError):
            b"".join(pieces)
    assert first == BODY[:1000]


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("drop", TransientError),
        ("lose", TransientError),
        ("reset", TransientError),
        ("stall", TransientError),
        ("throttle", ThrottledError),
        ("error", TransientError),
        ("expire", DeniedError),
        ("flip", CorruptError),
    ],
)
def test_a_fault_that_stays_is_one_clear_error(
    store: Store, proxy: FaultProxy, kind: str, error: type[StoreError]
) -> None:
    store.write("k", BODY)
    proxy.rate, proxy.kinds = 1.0, (kind,)
    started = time.monotonic()
    with pytest.raises(error) as caught:
        store.read("k")
    assert time.monotonic() - started < 30
    assert "/k" in str(caught.value)
    assert caught.value.mend
    with pytest.raises(error):
        store.write("new", BODY)
    proxy.rate = 0.0
    time.sleep(0.1)
    if kind not in ("lose", "reset", "stall"):
        with pytest.raises(NotFoundError):
            store.stat("new")


@pytest.mark.parametrize("hours", [-2, 2])
def test_the_offset_of_a_clock_is_learnt(s3_a: S3Server, hours: int) -> None:
    with FaultProxy(s3_a, clock=timedelta(hours=hours)) as proxy:
        store = open_store(s3_a.url(), **proxy.options)
        store.write("k", BODY)
        with pytest.raises(NotFoundError):
            store.stat("nothing")
        assert store.read("k") == BODY
        assert proxy.faults["skew"] <= 2


def test_a_throttled_endpoint_is_left_alone_by_all_threads(store: Store, proxy: FaultProxy) -> None:
    proxy.script(*["throttle"] * 6)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: store.write(f"{number}", b"1"), range(12)))
    assert len(list(store.list())) == 12
    assert proxy.faults["throttle"] == 6


@pytest.mark.parametrize("seed", range(4))
def test_a_mixture_of_faults_never_damages(s3_a: S3Server, seed: int) -> None:
    """What the store reports as done is there, byte for byte; what it reports as failed says why."""
    draw = random.Random(seed)
    contents = {f"k{number}": draw.randbytes(draw.randrange(1, 200_000)) for number in range(30)}
    with FaultProxy(s3_a, seed=seed, rate=0.25) as proxy:
        store = open_store(s3_a.url(), **proxy.options)

        def until_done(operation: Callable[[], object]) -> object:
            for _ in range(20):
                try:
                    return operation()
                except (TransientError, CorruptError, DeniedError):
                    continue
            raise AssertionError("twenty attempts were not enough")

        def write(key: str) -> None:
            until_done(lambda: store.write(key, contents[key], crc32c=crc32c(contents[key])))

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(write, contents))
            read = list(pool.map(lambda key: until_done(lambda: store.read(key)), contents))
        assert read == list(contents.values())
        assert sum(proxy.faults.values()) > 10
    direct = open_store(store.url, **s3_a.options)
    assert {info.key: direct.read(info.key) for info in direct.list()} == contents
