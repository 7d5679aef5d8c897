"""The wheel holds everything and works outside the checkout; the base install needs no extra."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = (
    "torch",
    "tensorboard",
    "tokenizers",
    "safetensors",
    "matplotlib",
    "soundfile",
    "av",
    "streaming",
    "ray",
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return next(out.glob("*.whl"))


def test_the_wheel_holds_every_module_marker_and_template(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for package in ("shards", "datasync", "train"):
        for path in (ROOT / package).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                assert str(path.relative_to(ROOT)) in names
        assert f"{package}/py.typed" in names
    assert not any(name.startswith("tests/") for name in names)


def test_the_wheel_works_outside_the_checkout_and_without_extras(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (site / "sitecustomize.py").write_text(
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.split('.')[0] in {EXTRAS!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
    )
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"text": "row {i}"}}\n' for i in range(100)))
    (tmp_path / "datasync.toml").write_text('[clusters.a]\nurl = "a"\n[clusters.b]\nurl = "b"\n')
    environment = {**os.environ, "PYTHONPATH": str(site)}
    program = "import shards, datasync; print(shards.__file__)"
    where = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert where.stdout.startswith(str(site)), where.stdout + where.stderr
    for arguments in (["shard", "rows.jsonl", "a/rows"], ["replicate", "rows", "--from", "a", "--to", "b"]):
        result = subprocess.run(
            [sys.executable, "-m", "datasync.cli", *arguments],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stdout + result.stderr
    assert (tmp_path / "b" / "rows" / "index.json").read_bytes() == (
        tmp_path / "a" / "rows" / "index.json"
    ).read_bytes()
