"""The whole of it, dataset, loader, workers and decoder, while what is around it fails."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from datasync import Stream, StreamingDataLoader, StreamingDataset
from datasync.errors import StoreError, UsageError
from datasync.streaming import replicas as replicas_module
from tests.faults import webserver
from tests.faults.webserver import WebServer
from tests.streaming.cachekit import datasync_threads, open_files_below, temp_files
from tests.streaming.order_helpers import flat, ids, write_dataset

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = 400

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture(scope="module")
def remote(tmp_path_factory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("remote"), SAMPLES)


def dataset(remote, local: Path, **options) -> StreamingDataset:
    return StreamingDataset(remote=remote, local=str(local), batch_size=8, shuffle=True, **options)


@pytest.fixture(scope="module")
def expected(remote, tmp_path_factory) -> list[list[int]]:
    """The batches of two epochs."""
    loader = StreamingDataLoader(dataset(str(remote), tmp_path_factory.mktemp("expected")))
    return [ids(batch) for _ in range(2) for batch in loader]


_JOB = """
import io, sys, time
import PIL.Image
from datasync import StreamingDataLoader, StreamingDataset
from datasync.streaming.decode import Decoder
from shards.writer import ShardWriter
root, workers, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with ShardWriter(out=root + "/remote", columns={"image": "png"}, size_limit=2000) as writer:
    for i in range(300):
        file = io.BytesIO()
        PIL.Image.new("RGB", (20, 20), (i % 256, 0, 0)).save(file, "PNG")
        writer.write({"image": file.getvalue()})
dataset = StreamingDataset(remote=root + "/remote", local=root + "/cache", batch_size=4, shuffle=True)
decoder = Decoder({"image": "tensor"}, threads=threads, stack=True)
loader = StreamingDataLoader(dataset, collate_fn=decoder, num_workers=workers, persistent_workers=workers > 0)
try:
    while True:
        for batch in loader:
            print("batch", flush=True)
            time.sleep(0.02)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder for temporary files with a short name: there are sockets in it."""
    folder = Path(tempfile.mkdtemp(prefix="ds-"))
    yield folder
    shutil.rmtree(folder)


def test_a_temporary_folder_with_too_long_a_name_is_refused(
    remote: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("n" * 108)
    monkeypatch.setattr(multiprocessing.util, "get_temp_dir", lambda: str(folder))
    loader = StreamingDataLoader(dataset(str(remote), tmp_path / "cache"), num_workers=1)
    with pytest.raises(UsageError, match="set TMPDIR to a shorter path"):
        next(iter(loader))


@pytest.mark.parametrize(("workers", "threads"), [(2, 1), (0, 2)])
def test_ctrl_c_leaves_no_process_thread_or_file(
    tmp_path: Path, temporary: Path, workers: int, threads: int
) -> None:
    before = set(os.listdir("/dev/shm"))
    process = subprocess.Popen(
        [sys.executable, "-c", _JOB, str(tmp_path), str(workers), str(threads)],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    for _ in range(5):
        assert process.stdout.readline() == "batch\n"
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to everybody
    started = time.monotonic()
    out, err = process.communicate(timeout=30)
    assert out.endswith("interrupted\n"), err
    assert time.monotonic() - started < 10
    deadline = time.monotonic() + 5
    while _group_lives(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _group_lives(process.pid)
    # Other tests may run beside this one: what is ours has our name or the number of the process.
    left = set(os.listdir("/dev/shm")) - before
    assert [name for name in left if "datasync" in name or str(process.pid) in name] == []
    assert list(temporary.iterdir()) == []
    assert temp_files(tmp_path / "cache") == []


def _started(tmp_path: Path, temporary: Path) -> subprocess.Popen[str]:
    """A trainer with two workers, in a group of its own, that has read some batches."""
    process = subprocess.Popen(
        [sys.executable, "-c", _JOB, str(tmp_path), "2", "1"],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    for _ in range(5):
        assert process.stdout.readline() == "batch\n"
    return process


def _ended(process: subprocess.Popen[str]) -> None:
    process.communicate(timeout=30)
    deadline = time.monotonic() + 5
    while _group_lives(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _group_lives(process.pid)


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGKILL])
def test_a_trainer_that_is_ended_from_outside_leaves_no_worker_and_no_folder(
    tmp_path: Path, temporary: Path, stop: signal.Signals
) -> None:
    process = _started(tmp_path, temporary)
    assert len(list(temporary.iterdir())) == 1  # of the workers' sockets
    process.send_signal(stop)
    _ended(process)
    assert process.returncode == -stop
    assert list(temporary.iterdir()) == []


def test_what_a_trainer_left_that_was_ended_with_its_workers_is_removed_by_the_next_one(
    tmp_path: Path, temporary: Path
) -> None:
    process = _started(tmp_path, temporary)
    beside = _started(tmp_path / "beside", temporary)
    theirs = set(temporary.iterdir())
    assert len(theirs) == 2
    os.killpg(process.pid, signal.SIGKILL)
    _ended(process)
    assert set(temporary.iterdir()) == theirs
    following = _started(tmp_path / "following", temporary)
    left = theirs & set(temporary.iterdir())
    assert len(left) == 1  # of the one that goes on
    for running in (beside, following):
        os.killpg(running.pid, signal.SIGINT)
        _ended(running)
    assert list(temporary.iterdir()) == []


def _group_lives(pid: int) -> bool:
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGTERM])
def test_a_worker_that_dies_is_an_error_and_no_hang(remote: Path, tmp_path: Path, expected, stop) -> None:
    loader = StreamingDataLoader(dataset(str(remote), tmp_path), num_workers=2, prefetch_factor=1)
    got: list[list[int]] = []

    def read() -> None:
        for batch in loader:
            got.append(ids(batch))
            if len(got) == 5:
                for worker in multiprocessing.active_children():
                    os.kill(worker.pid, stop)

    with pytest.raises(RuntimeError, match="worker"):  # torch's own, after seconds
        read()
    again = StreamingDataLoader(dataset(str(remote), tmp_path), num_workers=1)
    again.load_state_dict(loader.state_dict())
    assert got + [ids(batch) for batch in again] == expected[: len(expected) // 2]


def test_32_datasets_in_one_process(remote: Path, tmp_path: Path, expected) -> None:
    before = threading.enumerate()
    made = [dataset(str(remote), tmp_path / f"cache{i % 3}", cache_limit=None) for i in range(32)]
    loaders = [iter(StreamingDataLoader(one)) for one in made]
    got: list[list[list[int]]] = [[] for _ in made]
    for step in range(len(expected) // 2):  # all of them in turn
        for i, batches in enumerate(loaders):
            got[i].append(ids(next(batches)))
        assert step or len(datasync_threads(before)) < 32 * 5
    assert all(batches == expected[: len(expected) // 2] for batches in got)
    fetched = sum(one.stats.total()["shards_fetched"] for one in made)
    assert fetched == 3 * len(made[0].catalog.sources[0].index.shards)  # once for each folder
    for one in made:
        one.close()
    assert datasync_threads(before) == []
    assert open_files_below(tmp_path) == 0


def test_a_mixture_of_32_streams_with_workers(remote: Path, tmp_path: Path) -> None:
    streams = [Stream(remote=str(remote), local=str(tmp_path / f"cache{i}"), choose=20) for i in range(32)]
    made = StreamingDataset(streams=streams, batch_size=8, shuffle=True)
    batches = [ids(batch) for batch in StreamingDataLoader(made, num_workers=2)]
    assert len(flat(batches)) == 640
    assert batches == [ids(batch) for batch in made_again(streams)]


def made_again(streams) -> StreamingDataLoader:
    return StreamingDataLoader(StreamingDataset(streams=streams, batch_size=8, shuffle=True))


def test_a_cache_that_is_deleted_and_damaged_under_a_running_job(remote, tmp_path, expected) -> None:
    stop = threading.Event()
    cache = tmp_path / "cache"

    def destroy() -> None:
        turn = 0
        while not stop.wait(0.03):
            turn += 1
            if turn % 3:
                for path in [*cache.glob("*.mds"), *cache.glob("shards/*")][:3]:
                    # Another file in its place, as a disk or a person would leave one.
                    (cache / f"damaged{turn}").write_bytes(b"x" * 2000)
                    (cache / f"damaged{turn}").rename(path)
            else:
                shutil.rmtree(cache, ignore_errors=True)

    thread = threading.Thread(target=destroy)
    loader = StreamingDataLoader(dataset(str(remote), cache, cache_limit="12kb"), num_workers=2)
    batches = []
    thread.start()
    try:
        for _ in range(2):
            for batch in loader:
                batches.append(ids(batch))
                time.sleep(0.005)
    finally:
        stop.set()
        thread.join()
    assert batches == expected


def test_replicas_that_fail_in_turn_cost_no_sample(remote, tmp_path, expected, monkeypatch) -> None:
    monkeypatch.setattr(replicas_module, "_cool_off", lambda error: (0.05, 0.2))
    monkeypatch.setattr(replicas_module, "_HEDGE_UNKNOWN", 0.3)
    faults = [webserver.unavailable, webserver.truncate, webserver.flip_bit, webserver.cut, webserver.hang]
    with WebServer(remote) as first, WebServer(remote) as second:
        servers = [first, second]
        made = StreamingDataset(
            remote=[server.url for server in servers],
            local=str(tmp_path / "cache"),
            batch_size=8,
            shuffle=True,
            cache_limit="12kb",
        )
        batches = []
        for epoch in range(2):
            for step, batch in enumerate(StreamingDataLoader(made, num_workers=2)):
                batches.append(ids(batch))
                if step % 5 == 0:
                    bad = (step // 5) % 2
                    servers[bad].fault, servers[1 - bad].fault = faults[(epoch + step // 5) % 5], None
        for server in servers:
            server.fault = None
    assert batches == expected
    total = made.stats.total()
    assert total["failovers"] + total["hedges_won"] > 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 20 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("this user may not mount a file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_that_is_full_holds_what_it_can_and_then_is_an_error(small_disk: Path, tmp_path: Path) -> None:
    """4 MiB of a disk hold a dataset of 12, also while others fill it to the last byte."""
    from shards.writer import ShardWriter

    with ShardWriter(out=tmp_path / "big", columns={"id": "int", "pad": "bytes"}, size_limit=1 << 20) as out:
        for i in range(120):
            out.write({"id": i, "pad": i.to_bytes(4, "little") * 25_000})
    (small_disk / "first").write_bytes(b"x" * (15 << 20))
    made = StreamingDataset(
        remote=str(tmp_path / "big"), local=str(small_disk / "cache"), batch_size=8, download_timeout=2
    )
    assert [int(sample["id"]) for sample in made] == list(range(120))
    assert made.stats.total()["evicted"] > 6
    seen = []
    for sample in made:
        seen.append(int(sample["id"]))
        if len(seen) == 40:
            with open(small_disk / "other", "wb", buffering=0) as other, contextlib.suppress(OSError):
                while other.write(b"x" * 4096):
                    pass
    assert seen == list(range(120))
    made.close()
    shutil.rmtree(small_disk / "cache")
    (small_disk / "other").write_bytes(b"x" * (4600 << 10))
    with pytest.raises(
        StoreError, match=r"no room for .* in the cache .*disk/cache: no limit, .* free"
    ) as caught:
        next(iter(made))
    assert "free space on that disk" in str(caught.value)
    made.close()
    assert temp_files(small_disk / "cache") == []
    (small_disk / "other").unlink()
    assert [int(sample["id"]) for sample in made] == list(range(120))
    made.close()
