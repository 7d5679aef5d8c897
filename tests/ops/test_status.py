"""A place that takes connections and never answers: told within a time, and no reason to hang."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time

import pytest

from datasync.storage.local import LocalStore
from tests.replicate.kit import datasync, environment, make_dataset


@pytest.fixture
def work(tmp_path):
    """A dataset at `a`, whole at `b`, and a third cluster that is silent."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        (tmp_path / "datasync.toml").write_text(
            '[clusters.a]\nurl = "a"\n[clusters.b]\nurl = "b"\n[datasets.emoji]\nhome = "a"\n'
            '[clusters.silent]\nurl = "s3://bucket"\nanonymous = true\n'
            f'endpoint = "http://127.0.0.1:{silent.getsockname()[1]}"\n'
        )
        make_dataset(LocalStore(tmp_path / "a" / "emoji"))
        datasync("replicate", "emoji", "--to", "b", cwd=tmp_path)
        yield tmp_path


def test_wait_keeps_to_its_timeout_at_a_silent_place(work):
    began = time.monotonic()
    done = datasync("wait", "emoji", "--cluster", "silent", "--timeout", "2s", cwd=work, check=1)
    assert time.monotonic() - began < 10
    assert "did not answer within 2 s" in done.stderr
    assert "nothing is whole at silent after 2s" in done.stderr


@pytest.mark.parametrize("names", [[], ["emoji"]])
def test_status_tells_of_a_silent_cluster_and_of_the_others(work, names):
    code = "import datasync.ops.patience as p; p.ANSWER_SECONDS = 1; from datasync.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "status", *names, "--json"],
        cwd=work,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 1
    states = {place["cluster"]: place["state"] for place in json.loads(done.stdout)["places"]}
    assert states == {"a": "home", "b": "whole", "silent": "unreachable"}
    assert "silent could not be asked: " in done.stderr
    assert "did not answer within 1 s" in done.stderr
