"""What holds for every command: help, the nearest name, errors with a mend, exit codes."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from datasync.cli import COMMANDS


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "datasync.cli", *arguments]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )


def test_help_lists_every_command() -> None:
    result = run("--help")
    assert result.returncode == 0
    for name, (_, summary) in COMMANDS.items():
        assert name in result.stdout
        assert summary.split(",")[0] in " ".join(result.stdout.split())


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_help(name: str) -> None:
    result = run(name, "--help")
    assert result.returncode == 0, result.stderr
    assert f"{name} [OPTIONS]" in result.stdout


def test_a_misspelled_command_names_the_nearest() -> None:
    result = run("replicat")
    assert result.returncode == 2
    assert "did you mean `datasync replicate`?" in result.stderr


def test_an_unknown_option_is_a_usage_error_that_points_at_the_help() -> None:
    result = run("replicate", "--fro", "x")
    assert result.returncode == 2
    assert "--fro" in result.stderr
    assert "datasync replicate --help" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "arguments", [["--config", "absent.toml", "status"], ["status", "--config=absent.toml"]]
)
def test_the_configuration_file_may_be_named_before_or_after_the_command(
    arguments: list[str], tmp_path: Path
) -> None:
    result = run(*arguments, cwd=tmp_path)
    assert result.returncode == 2
    assert "absent.toml" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_misspelled_configuration_key_is_named_with_the_nearest_right_one(tmp_path: Path) -> None:
    (tmp_path / "datasync.toml").write_text('[clusters.a]\nurll = "x"\n')
    result = run("status", cwd=tmp_path)
    assert result.returncode == 2
    assert "urll" in result.stderr
    assert "url" in result.stderr.replace("urll", "")
    assert "datasync.toml" in result.stderr


def test_help_answers_at_once() -> None:
    """Meant to be under 0.3 s of CPU; this bound leaves room for slow machines."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert run("--help").returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime) < 1.0
