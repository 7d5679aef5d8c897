"""`datasync train`, `generate`, `runs` and `fork` by their real entry point."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.train.ranks import port

CONFIG = """
[run]
dir = "runs/a"
steps = 6
[data]
remote = "cluster-b:shapes"
batch_size = 16
[model]
size = "0.2m"
context = 64
image.size = 16
[checkpoint]
every = 2
keep_last = 0
"""


def datasync(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "datasync.cli", *arguments],
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cluster with a dataset, and a run on it."""
    from datasync.shapes import make_shapes
    from shards.writer import ShardWriter

    folder = tmp_path_factory.mktemp("place")
    make_shapes(folder / "corpus", count=96, pixels=16)
    with ShardWriter(columns={"image": "bytes", "caption": "str"}, out=folder / "b" / "shapes") as writer:
        for line in (folder / "corpus" / "metadata.jsonl").read_text().splitlines():
            entry = json.loads(line)
            image = (folder / "corpus" / entry["file_name"]).read_bytes()
            writer.write({"image": image, "caption": entry["caption"]})
    (folder / "clusters.toml").write_text('[clusters.cluster-b]\nurl = "b"\n')
    (folder / "run.toml").write_text(CONFIG)
    done = datasync(folder, "train", "run.toml", "--config", "clusters.toml", "--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["step"], summary["attempts"]) == (6, 1)
    assert "step 6/6  loss" in done.stderr
    return folder


def test_the_run_folder_says_what_it_was_made_from(place: Path) -> None:
    run = place / "runs" / "a"
    assert json.loads((run / "config.json").read_text())["run"]["steps"] == 6
    (data,) = json.loads((run / "data.json").read_text())
    assert data["samples"] == 96
    assert len(data["fingerprint"]) == 64
    start = json.loads((run / "attempts.jsonl").read_text().splitlines()[0])
    assert {"torch", "python", "datasync", "git", "command", "host"} <= start.keys()


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["absent.toml"], 2, "no such file: absent.toml"),
        (["run.toml", "--set", "optim.learning_rat=1"], 2, "unknown key optim.learning_rat"),
        (["run.toml", "--set", "data.remote=nowhere", "--set", "run.dir=runs/x"], 1, "nowhere"),
        (["run.toml", "--set", "data.text=title", "--set", "run.dir=runs/y"], 2, "no column 'title'"),
        (["run.toml", "--set", "optim.lr=0.5"], 2, "--accept optim.lr"),
        ([], 2, "give a config"),
    ],
)
def test_what_is_wrong_is_one_error_with_its_code(
    place: Path, arguments: list[str], code: int, says: str
) -> None:
    failed = datasync(place, "train", *arguments, DATASYNC_CONFIG="clusters.toml")
    assert failed.returncode == code, failed.stderr
    assert says in failed.stderr
    assert "mend:" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert failed.stdout == ""


def test_explain_and_plan_train_nothing(place: Path) -> None:
    explained = datasync(place, "train", "run.toml", "--explain", "--set", "optim.lr=1e-4").stdout
    assert "optim.lr = 0.0001" in explained
    assert "--set optim.lr=1e-4. Peak learning rate." in explained
    assert "model.size = 0.2m. Width." in explained
    big = datasync(place, "train", "run.toml", "--plan", "--json", "--set", "model.size=7b")
    plan = json.loads(big.stdout)
    assert 6e9 < plan["parameters"] < 8e9
    assert plan["total"] > 16 * plan["parameters"]
    assert "memory of a rank" in datasync(place, "train", "run.toml", "--plan").stdout


def test_captions_of_samples_and_files_as_text_and_as_pages(place: Path) -> None:
    made = datasync(
        place,
        "generate",
        "runs/a",
        "--samples",
        "3",
        "--grid",
        "grid.html",
        "--json",
        DATASYNC_CONFIG="clusters.toml",
    )
    assert made.returncode == 0, made.stderr
    assert [set(example) for example in json.loads(made.stdout)] == [{"truth", "generated"}] * 3
    assert (place / "grid.html").read_text().count("<img") == 3
    one = datasync(place, "generate", "runs/a", "--image", "corpus/00000.png", "--max-tokens", "5")
    assert one.returncode == 0, one.stderr
    text = datasync(
        place, "generate", "runs/a", "--prompt", "a small", "--temperature", "1", "--max-tokens", "5"
    )
    assert text.stdout.startswith("a small")


def test_runs_are_forked_listed_compared_and_exported(place: Path) -> None:
    variables = {"DATASYNC_CONFIG": "clusters.toml"}
    forked = datasync(place, "fork", "runs/a", "--step", "4", "--set", "optim.lr=1e-4", "--json", **variables)
    assert forked.returncode == 0, forked.stderr
    assert json.loads(forked.stdout)["run"] == "runs/a-step4"
    listed = datasync(place, "runs", "runs", "--json")
    found = {Path(run["path"]).name: run for run in json.loads(listed.stdout)}
    assert found["a"]["state"] == found["a-step4"]["state"] == "finished"
    assert 0 < found["a"]["goodput"] <= 1
    compared = datasync(
        place, "runs", "runs/a", "runs/a-step4", "--goodput", "--plot", "compare.html", COLUMNS="200"
    )
    assert compared.returncode == 0, compared.stderr
    assert "optim.lr" in compared.stdout
    assert "steps that count" in compared.stdout
    assert "<svg" in (place / "compare.html").read_text()
    exported = datasync(place, "runs", "runs/a", "--export", "weights")
    assert exported.returncode == 0, exported.stderr
    assert json.loads((place / "weights" / "config.json").read_text())["model_type"] == "qwen3"


def test_a_run_is_reproduced_and_a_difference_is_told_by_the_code(place: Path) -> None:
    variables = {"DATASYNC_CONFIG": "clusters.toml"}
    same = datasync(place, "train", "--reproduce", "runs/a", "--json", **variables)
    assert same.returncode == 0, same.stderr
    result = json.loads(same.stdout)
    assert (result["reproduced"], result["first_difference"]) == (True, None)
    other = datasync(place, "train", "--reproduce", "runs/a", "--set", "run.seed=2", "--json", **variables)
    assert other.returncode == 3
    result = json.loads(other.stdout)
    assert (result["reproduced"], result["first_difference"]) == (False, 1)


@pytest.mark.slow
def test_torchrun_restarts_all_ranks_after_one_was_killed(place: Path) -> None:
    """A rank kills itself once; torchrun starts the group again and it ends as if nothing had happened."""
    (place / "suicide.py").write_text(
        "import os, pathlib, signal, sys\n"
        "from train.distributed import Team\n"
        "vote = Team.vote\n"
        "def faulty(self, step, numbers):\n"
        "    once = pathlib.Path('died')\n"
        "    if self.rank == 1 and step == 5 and not once.exists():\n"
        "        once.touch()\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return vote(self, step, numbers)\n"
        "Team.vote = faulty\n"
        "from datasync.cli import main\n"
        "main()\n"
    )
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1",
         "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0",
         "suicide.py", "train", "run.toml", "--set", "run.dir=runs/torchrun", "--set", "run.threads=1"],
        cwd=place, capture_output=True, text=True,
        env={**os.environ, "DATASYNC_CONFIG": "clusters.toml", "PYTHONPATH": root},
    )  # fmt: skip
    assert (place / "died").exists()
    assert done.returncode == 0, done.stderr[-2000:]
    summary = json.loads((place / "runs/torchrun/summary.json").read_text())
    assert (summary["step"], summary["attempts"]) == (6, 2)


@pytest.mark.slow
def test_torchrun_goes_on_with_fewer_nodes_after_one_was_lost(place: Path) -> None:
    """Two nodes of two ranks; one is killed with its ranks; the other goes on alone, to the same bits."""
    (place / "slowly.py").write_text(
        "import time\n"
        "from train.distributed import Team\n"
        "vote = Team.vote\n"
        "def slowly(self, step, numbers):\n"
        "    time.sleep(0.4)\n"
        "    return vote(self, step, numbers)\n"
        "Team.vote = slowly\n"
        "from datasync.cli import main\n"
        "main()\n"
    )
    root, at = str(Path(__file__).resolve().parents[2]), port()
    variables = {**os.environ, "DATASYNC_CONFIG": "clusters.toml", "PYTHONPATH": root}
    sets = ["--set", 'run.deterministic="elastic"', "--set", "data.micro_batch=2", "--set", "run.steps=20"]
    sets += ["--set", "model.dropout=0.1", "--set", "run.timeout_s=20"]
    calm = datasync(place, "train", "run.toml", *sets, "--set", "run.dir=runs/calm", **variables)
    assert calm.returncode == 0, calm.stderr
    nodes = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "2",
             "--max-restarts", "3", "--rdzv-id", "x", "--rdzv-backend", "c10d",
             "--rdzv-endpoint", f"127.0.0.1:{at}", "--local-addr", "127.0.0.1", "--rdzv-conf",
             f"is_host={number == 0},last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3",
             "slowly.py", "train", "run.toml", *sets, "--set", "run.dir=runs/nodes"],
            cwd=place, env=variables, stderr=subprocess.PIPE, text=True,
        )
        for number in (0, 1)
    ]  # fmt: skip
    metrics, deadline = place / "runs/nodes/metrics.jsonl", time.monotonic() + 120
    try:
        while not (metrics.exists() and len(metrics.read_text().splitlines()) >= 5):
            assert nodes[0].poll() is None, nodes[0].communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        ranks = children(nodes[1].pid)
        nodes[1].kill()
        for rank in ranks:
            os.kill(rank, signal.SIGKILL)
        _, said = nodes[0].communicate(timeout=150)
        assert nodes[0].returncode == 0, said
    finally:
        for node in nodes:
            for pid in children(node.pid) if node.poll() is None else []:
                os.kill(pid, signal.SIGKILL)
            node.kill()
            node.communicate()
    lines = [json.loads(line) for line in (place / "runs/nodes/attempts.jsonl").read_text().splitlines()]
    assert [line["world"] for line in lines if line["event"] == "start"] == [4, 2]
    assert "rank 2 (" in lines[1]["cause"]
    ends = [json.loads((place / f"runs/{name}/summary.json").read_text()) for name in ("calm", "nodes")]
    assert ends[0]["digest"] == ends[1]["digest"]


def children(pid: int) -> list[int]:
    """Processes that a process has started."""
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
