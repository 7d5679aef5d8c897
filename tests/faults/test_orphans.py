"""A killed trainer leaves no DataLoader worker behind, however workers are started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.streaming.order_helpers import write_dataset

SCRIPT = """
import sys, time
from torch.utils.data import DataLoader
from datasync import StreamingDataset, StreamingDataLoader

def main(remote, local, method, kind):
    dataset = StreamingDataset(remote=remote, local=local, batch_size=4)
    loader = {"plain": DataLoader, "ours": StreamingDataLoader}[kind](
        dataset, batch_size=4, num_workers=2, multiprocessing_context=method)
    batches = iter(loader)
    next(batches)
    print("ready", flush=True)
    time.sleep(600)

if __name__ == "__main__":
    main(*sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("method", "kind"), [("fork", "ours"), ("forkserver", "plain"), ("forkserver", "ours")]
)
def test_no_worker_outlives_a_killed_trainer(tmp_path: Path, method: str, kind: str) -> None:
    write_dataset(tmp_path / "remote", 80)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    where = [str(tmp_path / "remote"), str(tmp_path / "cache"), method, kind]
    with subprocess.Popen(
        [sys.executable, str(script), *where], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            assert len(members(process.pid)) >= 3
            process.kill()
            process.wait()
            deadline = time.monotonic() + 30
            while members(process.pid) and time.monotonic() < deadline:
                time.sleep(0.1)
            assert members(process.pid) == []
        finally:
            for pid in members(process.pid):
                os.kill(pid, signal.SIGKILL)


def members(session: int) -> list[int]:
    """Living processes of a session, zombies aside."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(status.parent.name))
    return found
