"""Every shell and Python block of the README and the guides runs, in the folder that `datasync demo` leaves.

The blocks of one document run in order, as one script, so that a later one may use what an earlier one made.
A block in another language (toml, text, crontab, slurm, …) is shown and not run.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted(path for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```(sh|bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SETS_UP = re.compile(
    r"^(make (demo|test)|pip install|git clone)\b"
)  # what this test's own environment has done


def _script(text: str) -> str:
    lines = ["set -euo pipefail"]
    for language, body in BLOCK.findall(text):
        if language == "python":
            lines.append(f"python - <<'END_OF_BLOCK'\n{body}END_OF_BLOCK")
        else:
            lines.append("\n".join(line for line in body.splitlines() if not SETS_UP.match(line)))
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="session")
def demo_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from datasync.cli.demo import prepare

    folder = tmp_path_factory.mktemp("docs") / "demo"
    prepare(folder, count=200)
    return folder


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_blocks_of_a_document_run(document: Path, demo_folder: Path, tmp_path: Path) -> None:
    text = document.read_text()
    if not BLOCK.search(text):
        pytest.skip("no block to run")
    folder = tmp_path / "demo"
    shutil.copytree(demo_folder, folder)
    home = tmp_path / "home"
    home.mkdir()
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / ".cache"),
        "XDG_CONFIG_HOME": str(home / ".config"),
    }
    result = subprocess.run(
        ["bash", "-c", _script(text)],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, f"{document.name}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}"


def test_links_between_documents_lead_somewhere() -> None:
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text()):
            if "://" not in target:
                assert (document.parent / target).exists(), f"{document.name}: {target}"
