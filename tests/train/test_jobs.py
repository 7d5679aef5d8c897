"""The examples of docs/clusters-jobs.md: they parse, say what the code says, and the Slurm script runs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.train.ranks import TREE
from tests.train.test_resume import digest, write_config

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "clusters-jobs.md").read_text()


def block(language: str) -> str:
    found = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert len(found) == 1
    return str(found[0])


def documented() -> dict[int, str]:
    """Exit code -> whether to start again, from the page's table."""
    rows = re.findall(r"^\| ([\d, ]+) \| (.*?) \| (.*?) \|$", PAGE, re.MULTILINE)
    return {int(code): again for codes, _, again in rows for code in codes.split(",")}


def test_the_exit_codes_of_the_page_are_those_of_the_code() -> None:
    from datasync.errors import BusyError, UsageError
    from train.distributed import RankError
    from train.signals import KINDS

    codes = documented()
    assert {code for code in codes if code > 128} == {128 + kind.value for kind in KINDS}
    assert all(codes[128 + kind.value] == "yes" for kind in KINDS)
    for error in (UsageError, BusyError):
        assert codes[error.exit_code] == "no"
    assert codes[RankError.exit_code] == "after reading it"
    assert codes[0] == "no"


def test_the_kubernetes_job_parses_and_gives_up_on_what_starting_again_cannot_mend() -> None:
    yaml = pytest.importorskip("yaml")
    job: dict[str, Any] = yaml.safe_load(block("yaml"))
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    pod = job["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # what podFailurePolicy asks for
    (rule,) = job["spec"]["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob"
    hopeless = {code for code, again in documented().items() if again == "no" and code}
    assert set(rule["onExitCodes"]["values"]) == hopeless
    assert rule["onExitCodes"]["containerName"] in {container["name"] for container in pod["containers"]}
    volumes = {volume["name"] for volume in pod["volumes"]}
    for container in [*pod["initContainers"], *pod["containers"]]:
        assert {mount["name"] for mount in container.get("volumeMounts", [])} <= volumes
        assert container["command"][0] == "datasync"


def test_the_slurm_script_is_bash() -> None:
    assert subprocess.run(["bash", "-n"], input=block("slurm"), text=True).returncode == 0


SRUN = """#!/bin/bash
exec "$@"
"""
SCONTROL = """#!/bin/bash
case $1 in
    show) echo 127.0.0.1 ;;
    requeue) echo "$2" >> requeued ;;
esac
"""
SLOWLY = """#!{python}
import time
from train.distributed import Team

vote = Team.vote


def slowly(self, step, numbers):
    time.sleep(0.3)
    return vote(self, step, numbers)


Team.vote = slowly
from datasync.cli import main

main()
"""


@pytest.mark.slow
def test_the_slurm_script_saves_on_usr1_puts_itself_back_and_ends_with_the_same_bits(
    shapes: Path, tmp_path: Path
) -> None:
    """With stand-ins for `srun` and `scontrol`, on one node with two ranks."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "datasync": SLOWLY}.items():
        (tools / name).write_text(text.replace("{python}", sys.executable))
        (tools / name).chmod(0o755)
    steps, every = 20, TREE["checkpoint"]["every"]
    config = write_config(shapes, tmp_path)
    config.write_text(config.read_text().replace("[run]", f'[run]\ndir = "{tmp_path / "run"}"'))
    config.write_text(re.sub(r"steps = \d+", f"steps = {steps}", config.read_text()))
    port = 20000 + os.getpid() % 10000
    script = block("slurm").replace("--nproc-per-node=8", "--nproc-per-node=2").replace("29500", str(port))
    (tmp_path / "job.sh").write_text(script)
    root = str(Path(__file__).resolve().parents[2])
    environment = {
        **os.environ, "PATH": f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": root, "SLURM_NNODES": "1", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "one",
    }  # fmt: skip

    def submit() -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", "job.sh"], cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
        )

    job = submit()
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 90
    while not (metrics.exists() and len(metrics.read_text().splitlines()) > every):
        assert job.poll() is None, job.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    job.send_signal(signal.SIGUSR1)
    _, log = job.communicate(timeout=120)
    assert (tmp_path / "requeued").read_text() == "7\n", log
    ends = [json.loads(line) for line in (tmp_path / "run" / "attempts.jsonl").read_text().splitlines()]
    assert ends[-1]["cause"].startswith("stopped by SIGUSR1"), log
    assert 0 < ends[-1]["step"] < steps
    again = submit()
    _, log = again.communicate(timeout=120)
    assert again.returncode == 0, log
    assert (tmp_path / "requeued").read_text() == "7\n"
    (tmp_path / "run").rename(tmp_path / "stopped")
    calm = submit()
    _, log = calm.communicate(timeout=120)
    assert calm.returncode == 0, log
    assert digest(tmp_path / "stopped") == digest(tmp_path / "run")
