"""One cache, many processes, and what happens to it while they run."""

from __future__ import annotations

import multiprocessing
import os
import random
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

from datasync.storage.local import LocalStore
from datasync.streaming.fetch import ShardSource
from datasync.streaming.filelock import file_lock
from datasync.streaming.stamps import FOLDER, encoded
from tests.streaming.cachekit import (
    FaultyStore,
    cached_files,
    datasync_threads,
    make_dataset,
    open_files_below,
    read_all,
    slow,
    temp_files,
)

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = list(range(300))


@pytest.fixture
def remote(tmp_path: Path) -> Path:
    make_dataset(tmp_path / "remote", size_limit=8 << 10)
    return tmp_path / "remote"


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that other users may read."""
    folder = Path(tempfile.mkdtemp(prefix="cache-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def source(remote: Path, local: Path, **options) -> ShardSource:
    return ShardSource(replicas=[LocalStore(remote)], local=local, **options)


def _read(stream: ShardSource, out) -> None:
    try:
        out.put(read_all(stream) == SAMPLES)
    except BaseException as error:
        out.put(repr(error))
        raise


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_started_in_the_middle_of_prefetching_read_everything(
    remote: Path, tmp_path: Path, method: str
) -> None:
    context = multiprocessing.get_context(method)
    stream = source(remote, tmp_path / "local")
    stream.open(0)
    stream.prefetch(range(len(stream.index.shards)))
    out = context.Queue()
    workers = [context.Process(target=_read, args=(stream, out)) for _ in range(4)]
    for worker in workers:
        worker.start()
    assert read_all(stream) == SAMPLES
    assert [out.get(timeout=60) for _ in workers] == [True] * 4
    for worker in workers:
        worker.join(10)
        assert worker.exitcode == 0
    # Together they fetched each shard once, and the parent sees what its workers counted.
    assert stream.stats.total()["shards_fetched"] == len(stream.index.shards)
    stream.close()
    assert temp_files(tmp_path / "local") == []


def test_a_fork_taken_while_a_shard_is_being_fetched_does_not_hold_its_lock(
    remote: Path, tmp_path: Path
) -> None:
    store = FaultyStore(remote, fault=lambda key: None)
    stream = ShardSource(replicas=[store], local=tmp_path / "local")
    _ = stream.index
    store.fault = slow(0.5)
    stream.prefetch([0])
    time.sleep(0.2)
    child = os.fork()
    if not child:
        time.sleep(60)
        os._exit(0)
    try:
        assert len(stream.open(0)) > 0
        started = time.monotonic()
        other = source(remote, tmp_path / "local")
        (cached_files(tmp_path / "local")[0]).unlink()
        assert len(other.open(0)) > 0
        assert time.monotonic() - started < 5
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        stream.close()


_JOB = """
import sys
from pathlib import Path
from datasync.storage.local import LocalStore
from datasync.streaming.fetch import ShardSource
from tests.streaming.cachekit import read_all
remote, local, limit, epochs = sys.argv[1:]
stream = ShardSource(replicas=[LocalStore(remote)], local=Path(local), cache_limit=int(limit) or None)
for epoch in range(int(epochs)):
    stream.prefetch(range(len(stream.index.shards)))
    assert read_all(stream) == list(range(300))
print("done", flush=True)
"""


def job(remote: Path, local: Path, *, limit: int = 0, epochs: int = 1, code: str = _JOB) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", code, str(remote), str(local), str(limit), str(epochs)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen, seconds: float = 120) -> str:
    out, err = process.communicate(timeout=seconds)
    assert process.returncode == 0, err
    return out


def test_two_jobs_share_a_small_cache_and_the_limit_holds(remote: Path, tmp_path: Path) -> None:
    limit = 4 * (8 << 10)
    jobs = [job(remote, tmp_path / "local", limit=limit, epochs=4) for _ in range(2)]
    most = 0
    while any(process.poll() is None for process in jobs):
        sizes = []
        for path in cached_files(tmp_path / "local"):
            try:
                sizes.append(path.stat().st_size)
            except FileNotFoundError:
                continue
        most = max(most, sum(sizes))
        time.sleep(0.001)
    for process in jobs:
        assert finish(process) == "done\n"
    assert 0 < most <= limit
    assert temp_files(tmp_path / "local") == []


def test_many_sources_in_one_process_with_few_file_descriptors(remote: Path, tmp_path: Path) -> None:
    code = """
import resource, sys
from pathlib import Path
from datasync.storage.local import LocalStore
from datasync.streaming.fetch import ShardSource
from tests.streaming.cachekit import read_all
resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))
remote, local = sys.argv[1:3]
sources = [ShardSource(replicas=[LocalStore(remote)], local=Path(local) / str(i % 4), threads=2)
           for i in range(32)]
for epoch in range(2):
    for source in sources:
        source.prefetch(range(len(source.index.shards)))
    for source in sources:
        assert read_all(source) == list(range(300))
for source in sources:
    source.close()
print("done", flush=True)
"""
    assert finish(job(remote, tmp_path / "local", code=code)) == "done\n"


def test_a_cache_folder_that_is_deleted_under_a_running_job(remote: Path, tmp_path: Path) -> None:
    stream = source(remote, tmp_path / "local")
    stop = threading.Event()

    def delete() -> None:
        while not stop.wait(random.uniform(0.005, 0.05)):
            shutil.rmtree(tmp_path / "local", ignore_errors=True)

    thread = threading.Thread(target=delete)
    thread.start()
    try:
        for _ in range(10):
            stream.prefetch(range(len(stream.index.shards)))
            assert read_all(stream) == SAMPLES
            stream.close()
    finally:
        stop.set()
        thread.join()
    assert read_all(stream) == SAMPLES
    stream.close()


def test_cached_files_that_are_damaged_under_a_running_job(remote: Path, tmp_path: Path) -> None:
    stream = source(remote, tmp_path / "local")
    rng = random.Random(7)
    for _ in range(10):
        assert read_all(stream) == SAMPLES
        stream.close()
        for path in rng.sample(cached_files(tmp_path / "local"), 3):
            kind = rng.randrange(3)
            if kind == 0:
                path.write_bytes(path.read_bytes()[: rng.randrange(100)])
            elif kind == 1:
                path.unlink()
            else:
                data = bytearray(path.read_bytes())
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
                path.write_bytes(data)
    assert stream.stats.total()["quarantined"] > 10


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody who may not write")
@pytest.mark.parametrize("filled", [False, True])
def test_a_cache_that_becomes_read_only_is_read_and_what_is_missing_goes_to_memory(
    public: Path, filled: bool
) -> None:
    local = public / "local"
    make_dataset(public / "remote", size_limit=8 << 10)
    stream = source(public / "remote", local)
    if filled:
        read_all(stream)
        for path in (local / FOLDER / "placed").iterdir():
            path.unlink()  # a copy made by hand has no stamps
    else:
        stream.open(0)
    stream.close()
    child = os.fork()
    if not child:
        code = 1
        try:
            os.seteuid(65534)
            stream.prefetch(range(len(stream.index.shards)))
            good = read_all(stream) == SAMPLES
            uncached = stream.stats.total()["uncached"]
            expected = 0 if filled else len(stream.index.shards) - 1
            code = 0 if good and uncached == expected else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_job_killed_in_the_middle_of_fetching_leaves_nothing_that_matters(
    remote: Path, tmp_path: Path
) -> None:
    rng = random.Random(3)
    for _ in range(6):
        process = job(remote, tmp_path / "local", limit=5 * (8 << 10), epochs=50)
        assert process.stdout is not None
        deadline = time.monotonic() + 20
        while not cached_files(tmp_path / "local") and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(rng.uniform(0.0, 0.3))
        process.send_signal(signal.SIGKILL)
        process.communicate()
    stream = source(remote, tmp_path / "local", cache_limit=5 * (8 << 10))
    assert read_all(stream) == SAMPLES
    assert temp_files(tmp_path / "local") == []
    assert sum(path.stat().st_size for path in cached_files(tmp_path / "local")) <= 5 * (8 << 10)


def test_a_process_that_hangs_with_a_lock_delays_the_others_and_does_not_stop_them(
    remote: Path, tmp_path: Path
) -> None:
    stream = source(remote, tmp_path / "local", download_timeout=0.3)
    name = encoded(stream.index.shards[0].raw.basename)
    folder = tmp_path / "local" / FOLDER / "locks"
    folder.mkdir(parents=True)
    with file_lock(str(folder / name)):
        started = time.monotonic()
        assert len(stream.open(0)) > 0
        assert 0.5 < time.monotonic() - started < 5


_INTERRUPTED = """
import os, sys, time
from pathlib import Path
from datasync.streaming.fetch import ShardSource
from tests.streaming.cachekit import FaultyStore, slow
store = FaultyStore(Path(sys.argv[1]), fault=lambda key: None)
stream = ShardSource(replicas=[store], local=Path(sys.argv[2]))
count = len(stream.index.shards)
store.fault = slow(float(sys.argv[3]))
stream.prefetch(range(count))
print("reading", flush=True)
try:
    for shard in range(count):
        stream.open(shard)
        time.sleep(0.2)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize("seconds", [0, 1])
def test_ctrl_c_leaves_no_process_thread_or_file(remote: Path, tmp_path: Path, seconds: int) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", _INTERRUPTED, str(remote), str(tmp_path / "local"), str(seconds)],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "reading\n"
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=20)
    assert out == "interrupted\n"
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    # Other programs may run beside this test: what is ours has our name or the number of the process.
    left = [name for name in os.listdir("/dev/shm") if "datasync" in name or str(process.pid) in name]
    assert left == []
    assert list(temporary.iterdir()) == []
    # A thread may have been in the middle of a read that could not be interrupted; the next run sweeps.
    assert read_all(source(remote, tmp_path / "local")) == SAMPLES
    assert temp_files(tmp_path / "local") == []


def test_closing_leaves_no_thread_and_no_open_file(remote: Path, tmp_path: Path) -> None:
    before = threading.enumerate()
    stream = source(remote, tmp_path / "local")
    stream.prefetch(range(len(stream.index.shards)))
    read_all(stream)
    assert open_files_below(tmp_path / "local") > 0
    stream.close()
    assert open_files_below(tmp_path / "local") == 0
    assert datasync_threads(before) == []


def test_a_source_that_nobody_uses_any_more_ends_its_threads(remote: Path, tmp_path: Path) -> None:
    before = threading.enumerate()
    stream = source(remote, tmp_path / "local")
    stream.prefetch(range(len(stream.index.shards)))
    read_all(stream)
    del stream
    deadline = time.monotonic() + 5
    while datasync_threads(before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert datasync_threads(before) == []
