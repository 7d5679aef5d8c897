"""What holds for every command: help, the nearest name, errors with a mend, exit codes."""

from __future__ import annotations

import os
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


def test_the_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "datasync", "--version"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.startswith("datasync ")


def _into(output: int, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "datasync.cli", *arguments]
    return subprocess.run(
        command,
        stdout=output,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


def test_a_full_disk_behind_the_output_is_an_error_and_no_traceback() -> None:
    with open("/dev/full", "w") as full:
        result = _into(full.fileno(), "--help")
    assert result.returncode == 1
    assert result.stderr.startswith("error: standard output: No space left on device\n  mend: ")


@pytest.mark.parametrize("buffered", ["", "1"])
def test_a_reader_that_has_gone_is_told_by_the_code_alone(buffered: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        result = _into(pipe.fileno(), "--help", PYTHONUNBUFFERED=buffered)
    assert (result.returncode, result.stderr) == (141, "")


def test_what_the_character_set_cannot_hold_is_escaped(tmp_path: Path) -> None:
    (tmp_path / "t\u00e4xt.jsonl").write_text('{"a": 1}\n')
    command = [sys.executable, "-m", "datasync.cli", "shard", "t\u00e4xt.jsonl", "\u00f6ut"]
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    result = subprocess.run(
        command, cwd=tmp_path, env=ascii_only, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "\\xf6ut" in result.stdout


def test_a_file_that_cannot_be_written_is_an_error_and_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n')
    assert run("shard", "a.jsonl", "out", "-q", cwd=tmp_path).returncode == 0
    result = run("inspect", "out", "--html", "no/such/page.html", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith(
        "error: no/such/page.html cannot be written: No such file or directory\n  mend: "
    )
