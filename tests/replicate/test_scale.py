"""Large manifests: nothing to do costs the same whatever the size, and a plan stays within its memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from datasync.replicate import replicate
from datasync.storage.local import LocalStore
from tests.replicate.kit import QUICK, Spy, environment, make_dataset

PLAN = """
import json, sys
import numpy as np, pyarrow as pa
from datasync.replicate.plan import compare, schema
from shards.manifest import Manifest, schema as manifest_schema

def peak_mib():
    # Of this program alone: what getrusage tells outlives exec, so it may be the test runner's.
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM:"))
    return int(line.split()[1]) / 1024

def table(count, changed=0):
    keys = pa.array([f"shards/{n:08d}-0123456789abcdef.mds" for n in range(count)])
    digests = np.random.default_rng(0).integers(0, 256, (count, 32), dtype=np.uint8)
    digests[:changed] = 0
    sha = pa.FixedSizeBinaryArray.from_buffers(pa.binary(32), count, [None, pa.py_buffer(digests.tobytes())])
    sizes = pa.array(np.full(count, 1 << 20, np.uint64))
    empty = [pa.nulls(count, kind) for kind in (pa.uint32(), pa.uint64(), pa.string())]
    return pa.table([keys, sizes, empty[0], sha, empty[1], empty[2]], schema=schema())

count = int(sys.argv[1])
source, there = table(count, changed=3), table(count)
before = peak_mib()
plan = compare(source, there, {})
found = {"objects": plan.objects, "peak_mib": peak_mib(), "before_mib": before}
print(json.dumps(found))
"""


def measure(count: int) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-c", PLAN, str(count)],
        cwd=Path(__file__).parents[2],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def test_a_plan_of_200_000_objects_is_small():
    found = measure(200_000)
    assert found["objects"] == 3
    assert found["peak_mib"] < 300


@pytest.mark.slow
def test_a_plan_of_a_million_objects_adds_less_than_300_mib():
    found = measure(1_000_000)
    assert found["objects"] == 3
    assert found["peak_mib"] - found["before_mib"] < 300


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
        asked.append((source.calls, b.calls))
        assert source.read_bytes == 0
        assert b.read_bytes < 4000
    assert asked[0] == asked[1]
