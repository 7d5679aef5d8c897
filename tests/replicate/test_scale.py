"""Large manifests: nothing to do costs the same whatever the size, and a plan stays within its memory."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from datasync.replicate import replicate
from datasync.storage.local import LocalStore
from tests.replicate.kit import QUICK, Spy, environment, make_dataset

PLAN = """
import json, sys, time
import numpy as np, pyarrow as pa, pyarrow.parquet as pq
from datasync.replicate.manifests import ManifestFile
from datasync.replicate.plan import compare
from datasync.storage.local import LocalStore
from shards.manifest import schema

def peak_mib():
    # Of this program alone: what getrusage tells outlives exec, so it may be the test runner's.
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM:"))
    return int(line.split()[1]) / 1024

def write(path, count, changed):
    with pq.ParquetWriter(path, schema(), compression="zstd", store_schema=False) as writer:
        for begin in range(0, count, 100_000):
            n = min(100_000, count - begin)
            keys = pa.array([f"shards/{i:09d}-0123456789abcdef.mds" for i in range(begin, begin + n)])
            digests = np.random.default_rng(begin).integers(0, 256, (n, 32), dtype=np.uint8)
            digests[: changed if begin == 0 else 0] = 0
            raw = [None, pa.py_buffer(digests.tobytes())]
            sha = pa.FixedSizeBinaryArray.from_buffers(pa.binary(32), n, raw)
            sizes = pa.array(np.full(n, 1 << 20, np.uint64))
            nulls = [pa.nulls(n, kind) for kind in (pa.uint32(), pa.uint64())]
            writer.write_table(pa.table([keys, sizes, nulls[0], sha, nulls[1]], schema=schema()), 1 << 20)

folder, count = sys.argv[1], int(sys.argv[2])
if sys.argv[3:] == ["write"]:
    write(f"{folder}/a", count, 3)
    write(f"{folder}/b", count, 0)
else:
    store, began = LocalStore(folder), time.monotonic()
    plan = compare(ManifestFile.open(store, "a").batches(), ManifestFile.open(store, "b").batches(), {})
    found = {"objects": plan.objects, "have": plan.have, "seconds": time.monotonic() - began}
    print(json.dumps({**found, "peak_mib": peak_mib()}))
"""


def measure(folder: Path, count: int) -> dict[str, float]:
    """Plan `count` objects of which three have changed, from two manifests as they lie at their stores."""
    for arguments in (["write"], []):
        done = subprocess.run(
            [sys.executable, "-c", PLAN, str(folder), str(count), *arguments],
            cwd=Path(__file__).parents[2],
            env=environment(),
            capture_output=True,
            text=True,
            check=True,
        )
    found: dict[str, float] = json.loads(done.stdout)
    assert (found["objects"], found["have"]) == (3, count - 3)
    return found


def test_a_plan_costs_the_same_memory_whatever_the_number_of_objects(tmp_path):
    small, large = measure(tmp_path, 100_000), measure(tmp_path, 500_000)
    assert large["peak_mib"] < 300
    assert large["peak_mib"] < small["peak_mib"] + 60  # the file that is held whole, where it is small


@pytest.mark.slow
def test_a_plan_of_ten_million_objects_stays_below_300_mib(tmp_path):
    million, ten = measure(tmp_path, 1_000_000), measure(tmp_path, 10_000_000)
    assert million["peak_mib"] < 300
    assert ten["peak_mib"] < million["peak_mib"] * 1.2


RUN = """
import hashlib, json, sys, time
import numpy as np, pyarrow as pa
from datasync.ops import receipts
from datasync.replicate import Options, replicate
from datasync.storage.local import LocalStore
from shards.index import FileInfo, Index, ShardInfo
from shards.manifest import Manifest, manifest_key, schema

def peak_mib():
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM:"))
    return int(line.split()[1]) / 1024

def line(name, size, digest):
    file = FileInfo(name, size, {"sha256": digest, "xxh3_64": digest[:16]})
    names = (("sha256", "xxh3_64"), ("image", "label"), ("jpeg", "int"), (None, 8))
    info = ShardInfo(samples=1, size_limit=1 << 26, compression=None, hashes=names[0], column_names=names[1],
                     column_encodings=names[2], column_sizes=names[3], raw=file, zip=None)
    return json.dumps(info.to_dict(), sort_keys=True)

def version(store, names, digests):
    # Index and manifest of shards of which only the last one is there.
    raw = [None, pa.py_buffer(digests.tobytes())]
    sha = pa.FixedSizeBinaryArray.from_buffers(pa.binary(32), len(names), raw)
    sizes = pa.array(np.full(len(names), 1 << 10, np.uint64))
    crc, samples = pa.nulls(len(names), pa.uint32()), pa.nulls(len(names), pa.uint64())
    manifest = Manifest(pa.table([pa.array(names), sizes, crc, sha, samples], schema=schema()))
    store.write(manifest_key(manifest.version), manifest.to_parquet())
    template = line("NAME", 1 << 10, "f" * 64)
    extra = {"version": manifest.version, "manifest": manifest_key(manifest.version)}
    head, tail = Index([], extra).dumps().split(b"[\\n", 1)
    with open(f"{store.root}/index.json", "wb") as file:
        file.write(head + b"[\\n")
        for at, (name, digest) in enumerate(zip(names, digests)):
            text = template.replace("NAME", name).replace("f" * 64, digest.tobytes().hex())
            text = text.replace("f" * 16, digest.tobytes().hex()[:16])
            file.write((",\\n" if at else "").encode() + text.encode())
        file.write(tail)
    return manifest.version

a, b = LocalStore(sys.argv[1] + "/a"), LocalStore(sys.argv[1] + "/b")
count = int(sys.argv[2])
if sys.argv[3:] == ["write"]:
    last = b"x" * 1024
    digests = np.random.default_rng(1).integers(0, 256, (count, 32), dtype=np.uint8)
    digests[-1] = np.frombuffer(hashlib.sha256(last).digest(), np.uint8)
    names = [f"shards/{at:08d}-{digest[:8].tobytes().hex()}.mds" for at, digest in enumerate(digests)]
    a.write(names[-1], last)
    version(a, names, digests)
    old = version(b, names[:-1], digests[:-1])
    now = receipts.now()
    receipts.write(b, receipts.Receipt(
        name="x", kind="dataset", version=old, state="whole", objects=count - 1, bytes=(count - 1) << 10,
        samples=None, source={"url": a.url, "endpoint": "file://", "index": None}, destination=b.url,
        index={"tag": None, "bytes": 0, "sha256": "0" * 64}, copied={"objects": 0, "bytes": 0}, adopted=0,
        checked={}, started=now, finished=now, tool="test", host="test", token=0))
else:
    began = time.monotonic()
    (outcome,) = replicate(a, {"b": b}, name="x", options=Options(quiet=True))
    if outcome.error is not None:
        raise outcome.error
    found = {"state": outcome.state, "copied": outcome.tally.copied, "seconds": time.monotonic() - began}
    print(json.dumps({**found, "peak_mib": peak_mib()}))
"""


def one_more_shard(folder: Path, count: int) -> tuple[dict[str, float], dict[str, float]]:
    """A run that finds one new shard among `count`, and one after it that finds nothing."""
    found = []
    for arguments in (["write"], [], []):
        done = subprocess.run(
            [sys.executable, "-c", RUN, str(folder), str(count), *arguments],
            cwd=Path(__file__).parents[2],
            env=environment() | {"ARROW_DEFAULT_MEMORY_POOL": "system"},  # as the command does
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        found.append(json.loads(done.stdout or "{}"))
    run, again = found[1:]
    assert (run["state"], run["copied"]) == ("published", 1)
    assert (again["state"], again["copied"]) == ("already", 0)
    assert (folder / "b" / "index.json").read_bytes() == (folder / "a" / "index.json").read_bytes()
    return run, again


def test_a_whole_run_does_not_hold_the_index(tmp_path):
    run, again = one_more_shard(tmp_path, 100_000)
    assert (tmp_path / "a" / "index.json").stat().st_size > 40 << 20
    assert run["peak_mib"] < 250
    assert again["peak_mib"] < 120


@pytest.mark.slow
def test_a_whole_run_among_a_million_shards_stays_below_300_mib(tmp_path):
    run, again = one_more_shard(tmp_path, 1_000_000)
    assert run["peak_mib"] < 300
    assert again["peak_mib"] < 120


def test_nothing_to_do_asks_for_the_same_whatever_the_size(tmp_path):
    asked = []
    for count in (2, 60):
        source, b = Spy(LocalStore(tmp_path / f"a{count}")), Spy(LocalStore(tmp_path / f"b{count}"))
        make_dataset(source, count=count, size=100)
        replicate(source, {"b": b}, name="x", options=QUICK)
        source.calls.clear()
        b.calls.clear()
        source.read_bytes = b.read_bytes = 0
        (outcome,) = replicate(source, {"b": b}, name="x", options=QUICK)
        assert outcome.state == "already"
        # Some names have a digest in them, and some requests are made side by side.
        hidden = [[(op, re.sub("[0-9a-f]{64}", "…", key)) for op, key in spy.calls] for spy in (source, b)]
        asked.append([sorted(calls) for calls in hidden])
        assert source.read_bytes == 0
        assert b.read_bytes < 4000
    assert asked[0] == asked[1]
