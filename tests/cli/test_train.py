"""`datasync train`, `generate`, `runs` and `fork` by their real entry point."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
