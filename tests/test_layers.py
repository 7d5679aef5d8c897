"""Imports point down only: shards, then datasync, then train; and the command line starts light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAY_IMPORT = {
    "shards": {"shards"},
    "datasync": {"shards", "datasync"},
    "train": {"shards", "datasync", "train"},
}
HEAVY = ("torch", "pyarrow", "streaming", "numpy", "boto3", "botocore", "fsspec", "s3fs", "ray", "PIL")


def _modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def _imports(path: Path) -> list[tuple[str, bool]]:
    """Top-level names imported, each with whether a function or only the type checker does it."""
    found: list[tuple[str, bool]] = []

    def walk(node: ast.AST, inside: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found.extend((alias.name.split(".")[0], inside) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}:{child.lineno}: write imports in full"
                found.append((str(child.module).split(".")[0], inside))
            else:
                walk(
                    child,
                    inside or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) or _for_types(child),
                )

    walk(ast.parse(path.read_text()), False)
    return found


def _for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_imports_point_down_only(package: str) -> None:
    files = _modules(package)
    assert files
    for path in files:
        allowed = MAY_IMPORT[package]
        is_command = path.is_relative_to(ROOT / "datasync" / "cli")
        for name, inside in _imports(path):
            if name in MAY_IMPORT and name not in allowed:
                may = is_command and inside
                assert may, f"{path.relative_to(ROOT)} imports {name}"


def test_no_layer_imports_the_tests() -> None:
    for package in MAY_IMPORT:
        for path in _modules(package):
            assert all(name != "tests" for name, _ in _imports(path)), path


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["replicate", "--help"], ["shard", "--help"]]
)
def test_the_command_line_imports_nothing_heavy_before_a_command_runs(arguments: list[str]) -> None:
    program = (
        "import sys\n"
        f"sys.argv = ['datasync', *{arguments!r}]\n"
        "from datasync.cli import main\n"
        "try:\n    main()\n"
        "except SystemExit as done:\n    assert done.code == 0, done.code\n"
        f"heavy = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "assert not heavy, heavy\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_importing_shards_does_not_import_torch() -> None:
    program = "import sys, shards, datasync; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_train_py_and_a_folder_called_shards_beside_a_script_do_no_harm(tmp_path: Path) -> None:
    """A user's own files must not shadow ours: `from datasync import StreamingDataset` works beside them."""
    (tmp_path / "train.py").write_text("raise RuntimeError('the user did not ask to run this')\n")
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "index.json").write_text("{}")
    script = tmp_path / "script.py"
    script.write_text("from datasync import StreamingDataset\nprint(StreamingDataset.__name__)\n")
    result = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.stdout.strip() == "StreamingDataset", result.stderr
