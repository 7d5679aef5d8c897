"""A place that says nothing: how long it is waited for, and what is told about it."""

from __future__ import annotations

import signal
import socket
import threading
import time

import pytest

from datasync.errors import TransientError
from datasync.replicate import Options, limits, replicate
from datasync.replicate.retry import Stopped, retrying
from datasync.storage import open_store
from datasync.storage.local import LocalStore
from datasync.storage.retry import Patience, inheriting, patience, patient
from tests.faults.proxy import FaultProxy
from tests.replicate.kit import Spy, data_of, datasync, make_dataset, start


@pytest.fixture
def silent(s3_b):
    """A way to the second server on which every answer stops in the middle."""
    with FaultProxy(s3_b, rate=1, kinds=["stall"], stall_seconds=120) as proxy:
        yield proxy


@pytest.fixture
def folder(tmp_path, monkeypatch, s3_a, s3_b, silent):
    """A configuration in which b is reached on the silent way."""
    monkeypatch.setenv("TEST_KEY", s3_a.access_key)
    monkeypatch.setenv("TEST_SECRET", s3_a.secret_key)
    keys = 'access_key = "env:TEST_KEY"\nsecret_key = "env:TEST_SECRET"\nregion = "us-east-1"\n'
    url_a = s3_a.url()
    make_dataset(open_store(f"{url_a}/x", **s3_a.options), count=2)
    (tmp_path / "datasync.toml").write_text(
        f'[clusters.a]\nurl = "{url_a}"\nendpoint = "{s3_a.endpoint}"\n{keys}'
        f'[clusters.b]\nurl = "{s3_b.url("emoji")}"\nendpoint = "{silent.endpoint}"\n{keys}'
    )
    return tmp_path


def seconds_of(work) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


@pytest.mark.parametrize("way", [("a:x", "b"), ("b:x", "a")], ids=["destination", "source"])
def test_a_silent_place_ends_the_run_when_retry_for_is_over(folder, silent, way):
    done = None

    def go() -> None:
        nonlocal done
        source, to = way
        done = datasync("replicate", source, "--to", to, "--retry-for", "2", cwd=folder, check=1)

    assert 1 < seconds_of(go) < 12
    assert f"{silent.endpoint} is silent at s3://" in done.stderr
    assert "mend: check the network to it" in done.stderr
    assert len(silent.requests) < 20


def test_objects_that_get_no_answer_end_it_as_well(s3_a, s3_b):
    source = open_store(s3_a.url("emoji"), **s3_a.options)
    make_dataset(source, count=3)
    with FaultProxy(s3_b, stall_seconds=60) as proxy:
        b = open_store(s3_b.url("emoji"), **proxy.options)
        proxy.script(*["stall"] * 100, when=lambda r: r.method == "PUT" and "/shards/" in r.target)
        began = time.monotonic()
        (outcome,) = replicate(source, {"b": b}, name="emoji", options=Options(quiet=True, retry_seconds=3))
        assert time.monotonic() - began < 12
    assert outcome.state == "failed"
    assert "is silent at s3://" in str(outcome.error)
    assert "/shards/" in str(outcome.error)
    assert "index.json" not in data_of(open_store(s3_b.url("emoji"), **s3_b.options))


@pytest.mark.parametrize(
    ("ending", "code"),
    [(signal.SIGTERM, 143), (signal.SIGINT, 130), (None, 4)],
    ids=["SIGTERM", "Ctrl-C", "max-runtime"],
)
def test_a_run_stops_at_once_though_a_request_hangs(folder, silent, ending, code):
    limit = ["--max-runtime", "2s"] if ending is None else []
    process = start("replicate", "a:x", "--to", "b", "-q", *limit, cwd=folder)
    while process.poll() is None and not silent.requests:
        time.sleep(0.05)
    if ending is not None:
        process.send_signal(ending)
    began = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - began < 10
    assert process.returncode == code, err
    assert "run the same command again to continue" in err
    assert "Traceback" not in err


def test_one_silent_destination_does_not_keep_another(s3_a, s3_b, silent):
    source = open_store(s3_a.url("emoji"), **s3_a.options)
    make_dataset(source, count=4)
    b, c = open_store(s3_b.url("b"), **silent.options), open_store(s3_b.url("c"), **s3_b.options)
    first, second = replicate(
        source, {"b": b, "c": c}, name="emoji", options=Options(quiet=True, retry_seconds=3)
    )
    assert (first.state, second.state) == ("failed", "published")
    assert second.seconds < 5


def test_a_hung_destination_leaves_the_other_at_its_endpoint_a_slot(s3_a, s3_b):
    source = open_store(s3_a.url("emoji"), **s3_a.options)
    make_dataset(source, count=30)
    with FaultProxy(s3_b, stall_seconds=60) as proxy:
        b, c = open_store(s3_b.url("b"), **proxy.options), open_store(s3_b.url("c"), **proxy.options)
        limits.concurrency_of(b).limit = limits.concurrency_of(b).most = 1
        hung = b.full_key("shards/")
        proxy.script(*["stall"] * 100, when=lambda r: r.method == "PUT" and hung in r.target)
        first, second = replicate(
            source, {"b": b, "c": c}, name="emoji", options=Options(quiet=True, retry_seconds=6)
        )
    assert (first.state, second.state) == ("failed", "published")
    assert second.seconds < 5 < first.seconds


def test_a_destination_that_dies_while_it_is_looked_at_takes_no_reader_along(tmp_path):
    """All of b's objects are in place and must be proven, one at a time, and b answers nothing."""
    source, c = LocalStore(tmp_path / "a"), LocalStore(tmp_path / "c")
    shards = make_dataset(source, count=80, size=2000)
    inner = LocalStore(tmp_path / "b")
    for key, data in shards.items():
        inner.write(key, data)

    def dead(operation: str, key: str) -> None:
        if operation == "stat" and key.startswith("shards/"):
            time.sleep(0.05)
            raise TransientError("no answer", mend="run again")

    b = Spy(inner, dead)
    limits.concurrency_of(b).limit = limits.concurrency_of(b).most = 1
    first, second = replicate(
        source, {"b": b, "c": c}, name="emoji", options=Options(quiet=True, retry_seconds=1)
    )
    assert (first.state, second.state) == ("failed", "published")
    assert data_of(c) == data_of(source)


def test_a_web_server_that_is_silent_is_given_up():
    pytest.importorskip("aiohttp", reason="aiohttp is not installed")
    with socket.create_server(("127.0.0.1", 0)) as silent, patient(1.0):
        source = open_store(f"http://127.0.0.1:{silent.getsockname()[1]}/emoji")

        def go() -> None:
            with pytest.raises(TransientError, match="/emoji/index"):
                retrying(lambda: source.read("index.json"))

        assert seconds_of(go) < 60


def test_tries_at_one_thing_share_their_time():
    tries = []

    def fail() -> None:
        tries.append(patience().left())
        patience().failed(waited=0.5)
        time.sleep(0.3)
        raise TransientError("no answer", mend="run again")

    with patient(1.0), pytest.raises(TransientError):
        retrying(fail, seconds=60)
    assert 1 <= len(tries) <= 3
    assert tries[0] == 1.0
    assert patience().left() == float("inf")


def test_what_moves_starts_the_time_again():
    bearing = Patience(seconds=1.0)
    bearing.failed(waited=0.9)
    assert bearing.left() < 0.5
    assert not bearing.allows(0.5)
    bearing.moved()
    assert bearing.left() == 1.0
    assert bearing.allows(0.5)


def test_another_thread_takes_the_patience_along():
    seen = []
    stop = threading.Event()
    with patient(7.0, stop):
        thread = threading.Thread(target=inheriting(lambda: seen.append(patience())))
        thread.start()
        thread.join()
    assert (seen[0].seconds, seen[0].stop) == (7.0, stop)


def test_a_stop_ends_tries_and_pauses():
    stop = threading.Event()
    threading.Timer(0.3, stop.set).start()

    def fail() -> None:
        raise TransientError("no answer", mend="run again")

    def go() -> None:
        with pytest.raises(Stopped):
            retrying(fail, seconds=60, stop=stop)

    assert seconds_of(go) < 2
