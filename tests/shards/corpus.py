"""Small corpora and ways to look at what came of them, for the tests of `datasync shard`."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from PIL import Image

from shards.reader import ShardReader
from shards.stored import Stored


def image_bytes(number: int, *, format: str = "PNG", size: tuple[int, int] = (24, 16)) -> bytes:
    """A picture that differs from number to number."""
    image = Image.new("RGB", size, (number * 37 % 256, number * 101 % 256, number * 7 % 256))
    buffer = io.BytesIO()
    image.save(buffer, format)
    return buffer.getvalue()


def jsonl(path: Path, rows: int, *, words: int = 20) -> list[dict[str, Any]]:
    """Write a JSON Lines file of rows that do not compress away."""
    made = []
    for number in range(rows):
        seed = hashlib.sha256(str(number).encode()).hexdigest()
        made.append(
            {
                "id": number,
                "text": " ".join(seed[part : part + 5] for part in range(words)),
                "score": number / 7,
            }
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return made


def rows(dataset: Path | str) -> list[dict[str, Any]]:
    """Every sample of a dataset, in order."""
    with ShardReader(dataset) as reader:
        assert reader.verify() == []
        return [reader[number] for number in range(len(reader))]


def raw_rows(dataset: Path) -> list[dict[str, Any]]:
    """Every sample with images as the bytes that are stored."""
    found = []
    with ShardReader(dataset) as reader:
        for number in range(len(reader.index.shards)):
            shard = reader.shard(number)
            stored = Stored(shard)
            found += [stored[row] for row in range(len(shard))]
    return found


def tree(folder: Path) -> dict[str, str]:
    """Every file below `folder` and the digest of its content, journals of jobs aside."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "/jobs/" not in path.as_posix()
    }


def command(*arguments: str | os.PathLike[str]) -> list[str]:
    """The command line by its real entry point."""
    return [sys.executable, "-m", "datasync.cli", *map(os.fspath, arguments)]


def start(*arguments: str | os.PathLike[str], cwd: Path) -> subprocess.Popen[str]:
    """Start the command line and go on."""
    return subprocess.Popen(
        command(*arguments),
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.fspath(Path(__file__).resolve().parents[2])},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(
    *arguments: str | os.PathLike[str], cwd: Path | None = None, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command line."""
    environment = {**os.environ, "PYTHONPATH": os.fspath(Path(__file__).resolve().parents[2]), **(env or {})}
    return subprocess.run(
        command(*arguments),
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
