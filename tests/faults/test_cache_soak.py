"""Everything at once, at random: readers are killed, servers fail, a small cache is damaged."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from datasync.storage.local import LocalStore
from datasync.streaming.fetch import ShardSource
from datasync.streaming.stamps import FOLDER
from tests.faults import webserver
from tests.faults.webserver import WebServer
from tests.streaming.cachekit import cached_files, make_dataset, read_all, temp_files

ROOT = Path(__file__).resolve().parents[2]
SEED = 20261201
SHARD = 8 << 10
LIMIT = 6 * SHARD

_READER = """
import random, sys
from pathlib import Path
from datasync.storage import open_store
from datasync.streaming import replicas
from datasync.streaming.fetch import ShardSource
from tests.streaming.cachekit import row
replicas._HEDGE_UNKNOWN = 0.5
local, limit, seed, *urls = sys.argv[1:]
rng = random.Random(int(seed))
stream = ShardSource(replicas=[open_store(url) for url in urls], local=Path(local), cache_limit=int(limit),
                     download_timeout=20.0)
count = len(stream.index.shards)
while True:
    order = rng.sample(range(count), count)
    ids = []
    for i, shard in enumerate(order):
        stream.prefetch(order[i:i + 3])
        opened = stream.open(shard)
        for j in range(len(opened)):
            sample = opened[j]
            expected = row(int(sample["id"]))
            assert sample["text"] == expected["text"], sample["id"]
            assert (sample["tokens"] == expected["tokens"]).all(), sample["id"]
            ids.append(int(sample["id"]))
    assert sorted(ids) == list(range(300)), "samples are missing or repeated"
    print("epoch", flush=True)
"""


@pytest.mark.slow
def test_no_sample_is_ever_wrong_and_the_limit_holds(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    make_dataset(tmp_path / "remote", size_limit=SHARD)
    local, number = tmp_path / "local", iter(range(10_000))
    faults = [None, webserver.unavailable, webserver.truncate, webserver.flip_bit, webserver.cut]
    with WebServer(tmp_path / "remote") as one, WebServer(tmp_path / "remote") as two:

        def start() -> subprocess.Popen[str]:
            return subprocess.Popen(
                [sys.executable, "-c", _READER, str(local), str(LIMIT), str(next(number)), one.url, two.url],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )

        readers = [start() for _ in range(4)]
        epochs, most, change, deadline = 0, 0, 0.0, time.monotonic() + 60
        try:
            while time.monotonic() < deadline:
                time.sleep(rng.uniform(0.01, 0.2))
                if time.monotonic() > change:
                    # One server at a time fails, and no fetch meets both of them while they do.
                    bad, good = rng.sample([one, two], 2)
                    bad.fault = good.fault = None
                    time.sleep(0.5)
                    bad.fault, change = rng.choice(faults), time.monotonic() + rng.uniform(1.0, 4.0)
                what = rng.random()
                if what < 0.08:
                    victim = rng.randrange(len(readers))
                    readers[victim].send_signal(signal.SIGKILL)
                    epochs += readers[victim].communicate()[0].count("epoch")
                    readers[victim] = start()
                elif what < 0.3:
                    _damage(local, rng)
                most = max(most, _bytes(local))
                for reader in readers:
                    assert reader.poll() is None, reader.communicate()[1]
        finally:
            for reader in readers:
                reader.kill()
                epochs += reader.communicate()[0].count("epoch")
    assert epochs >= 4
    assert most <= LIMIT
    stream = ShardSource(replicas=[LocalStore(tmp_path / "remote")], local=local, cache_limit=LIMIT)
    assert read_all(stream) == list(range(300))
    assert temp_files(local) == []


def _damage(local: Path, rng: random.Random) -> None:
    """Replace a cached file by a damaged one, as a disk or a person would; never one that is being read."""
    files = cached_files(local)
    if not files:
        return
    path = rng.choice(files)
    try:
        data = bytearray(path.read_bytes())
        data[rng.randrange(len(data))] ^= 1
        temporary = local / FOLDER / f"damaged-{rng.random()}"
        temporary.write_bytes(data)
        os.rename(temporary, path)
    except OSError:
        pass  # it was evicted meanwhile


def _bytes(local: Path) -> int:
    total = 0
    for path in cached_files(local):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total
