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


CONFIG = '[clusters.a]\nurl = "a"\n[clusters.b]\nurl = "b"\n[datasets.emoji]\nhome = "a"\n'


@pytest.fixture
def two(tmp_path):
    """A dataset at its home `a` and whole at `b`."""
    (tmp_path / "datasync.toml").write_text(CONFIG)
    make_dataset(LocalStore(tmp_path / "a" / "emoji"))
    datasync("replicate", "emoji", "--to", "b", cwd=tmp_path)
    return tmp_path


def states(folder, *names, check):
    done = datasync("status", *names, "--json", cwd=folder, check=check)
    return {place["cluster"]: place["state"] for place in json.loads(done.stdout)["places"]}, done.stderr


def test_a_home_that_has_lost_its_index_is_damaged(two):
    (two / "a" / "emoji" / "index.json").unlink()
    found, told = states(two, check=3)
    assert found["a"] == "damaged"
    assert "emoji at a: index.json is gone" in told


def test_a_home_where_nothing_is_while_others_have_copies_is_damaged(two):
    (two / "a").rename(two / "elsewhere")
    found, told = states(two, check=3)
    assert found["a"] == "damaged"
    assert "b has a copy: is it mounted?" in told


def test_a_dataset_that_is_nowhere_yet_is_absent_and_a_wrong_name_is_an_error(tmp_path):
    (tmp_path / "datasync.toml").write_text(CONFIG)
    assert states(tmp_path, "emoji", check=0)[0] == {"a": "absent", "b": "absent"}
    done = datasync("status", "emjoi", cwd=tmp_path, check=2)
    assert "no dataset 'emjoi' is at a, b" in done.stderr
    assert "did you mean 'emoji'?" in done.stderr


def test_what_is_being_sharded_is_partial_and_files_are_unproven(tmp_path):
    (tmp_path / "datasync.toml").write_text(CONFIG)
    LocalStore(tmp_path / "a" / "emoji").write("_datasync/jobs/1/plan.json", b"{}")
    LocalStore(tmp_path / "b" / "emoji").write("some/file", b"1")
    assert states(tmp_path, "emoji", check=0)[0] == {"a": "partial", "b": "unproven"}


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["replicate", "emoji", "--to", "nowhere"], 2),
        (["replicate", "emoji", "--too", "b"], 2),
        (["wait", "emoji", "--cluster", "b", "--timeout", "0.1s"], 1),
        (["status", "emjoi"], 2),
    ],
)
def test_json_holds_the_error_that_ended_a_command(tmp_path, arguments, code):
    (tmp_path / "datasync.toml").write_text(CONFIG)
    done = datasync(*arguments, "--json", cwd=tmp_path, check=code)
    document = json.loads(done.stdout)
    assert document["exit_code"] == code
    assert f"error: {document['error']['message']}\n  mend: {document['error']['mend']}" in done.stderr


def test_json_is_there_when_a_run_that_does_not_end_is_ended(two):
    code = (
        "import time, datasync.replicate.control as c, datasync.replicate.relay as r; c.GRACE_SECONDS = 0.2\n"
        "def hang(*a, **k): print('hangs', file=__import__('sys').stderr, flush=True); time.sleep(60)\n"
        "r.replicate = hang\nfrom datasync.cli import main; main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, "replicate", "emoji", "--to", "b", "--json"],
        cwd=two,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr.readline() == "hangs\n"
    process.terminate()
    told, _ = process.communicate(timeout=30)
    assert process.returncode == 143
    assert json.loads(told)["stopped"] == "by SIGTERM"
