"""A small captioned dataset in several shards, made once; ranks end with the test that started them."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def no_rank_outlives_its_test() -> Iterator[None]:
    before = set(multiprocessing.active_children())
    yield
    for process in set(multiprocessing.active_children()) - before:
        process.kill()
        process.join()


@pytest.fixture(scope="session")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """240 drawings with captions in about ten compressed shards."""
    from datasync.shapes import make_shapes
    from shards.writer import ShardWriter

    corpus, out = tmp_path_factory.mktemp("corpus"), tmp_path_factory.mktemp("shapes") / "mds"
    make_shapes(corpus, count=240, pixels=16)
    columns = {"image": "bytes", "caption": "str"}
    with ShardWriter(columns=columns, out=out, compression="zstd:3", size_limit=12_000) as writer:
        for line in (corpus / "metadata.jsonl").read_text().splitlines():
            entry = json.loads(line)
            image = (corpus / entry["file_name"]).read_bytes()
            writer.write({"image": image, "caption": entry["caption"]})
    return out
