"""The whole path on two real S3 servers: shard, replicate, verify, stream, train, kill, resume."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from datasync.shapes import make_shapes
from tests.servers import S3Server


class Clusters:
    """A folder whose `datasync.toml` names two buckets on two servers, and the command line run there."""

    def __init__(self, folder: Path, a: S3Server, b: S3Server) -> None:
        self.folder = folder
        self.servers = {"cluster-a": (a, a.bucket()), "cluster-b": (b, b.bucket())}
        keys = 'access_key = "env:TEST_KEY"\nsecret_key = "env:TEST_SECRET"'
        text = "".join(
            f'[clusters.{name}]\nurl = "s3://{bucket}/datasets"\nendpoint = "{server.endpoint}"\n{keys}\n'
            for name, (server, bucket) in self.servers.items()
        )
        (folder / "datasync.toml").write_text(text)
        self.environment = {**os.environ, "TEST_KEY": a.access_key, "TEST_SECRET": a.secret_key}

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "datasync.cli", *arguments],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )

    def run(self, *arguments: str, code: int = 0) -> str:
        """Standard output of a command that must end with `code`."""
        process = self.start(*arguments)
        out, err = process.communicate(timeout=250)
        assert process.returncode == code, f"datasync {' '.join(arguments)}\n{out}\n{err}"
        assert self.environment["TEST_SECRET"] not in out + err
        return out

    def objects(self, cluster: str) -> dict[str, bytes]:
        server, bucket = self.servers[cluster]
        client = server.client()
        found: dict[str, bytes] = {}
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket):
            for entry in page.get("Contents", []):
                found[entry["Key"]] = client.get_object(Bucket=bucket, Key=entry["Key"])["Body"].read()
        return found


@pytest.fixture
def clusters(tmp_path: Path, s3_a: S3Server, s3_b: S3Server) -> Clusters:
    return Clusters(tmp_path, s3_a, s3_b)


def _data(objects: dict[str, bytes]) -> dict[str, bytes]:
    """What both sides must have alike: everything but this side's own receipts, journals and leases."""
    return {key: data for key, data in objects.items() if "/_datasync/" not in key or "/manifests/" in key}


TRAIN = """
[run]
dir = "run"
steps = 24
[data]
remote = "cluster-b:shapes"
batch_size = 8
[model]
size = "0.2m"
context = 80
[checkpoint]
every = 4
"""


def test_from_a_corpus_to_weights_across_two_object_stores(clusters: Clusters) -> None:
    make_shapes(clusters.folder / "corpus", count=300)
    clusters.run("shard", "corpus", "cluster-a:shapes", "--size-limit", "24kb")
    first = json.loads(
        clusters.run("replicate", "shapes", "--from", "cluster-a", "--to", "cluster-b", "--json")
    )
    a, b = clusters.objects("cluster-a"), clusters.objects("cluster-b")
    assert _data(a) == _data(b)
    assert sum(key.startswith("datasets/shapes/shards/") for key in b) >= 4
    assert any("/receipts/" in key for key in b)
    assert first

    before = clusters.objects("cluster-b")
    again = clusters.run("replicate", "shapes", "--from", "cluster-a", "--to", "cluster-b")
    after = clusters.objects("cluster-b")
    assert _data(before) == _data(after)
    assert "up to date" in again or "nothing to copy" in again or "0 to copy" in again, again
    clusters.run("verify", "shapes", "--cluster", "cluster-b", "--full")
    assert "shapes" in clusters.run("status")

    (clusters.folder / "train.toml").write_text(TRAIN)
    process = clusters.start("train", "train.toml")
    metrics = clusters.folder / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if metrics.exists() and metrics.read_text().count("\n") >= 10:
            break
        time.sleep(0.02)
    assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    resumed = json.loads(clusters.run("train", "train.toml", "--json"))
    calm = json.loads(clusters.run("train", "train.toml", "--set", "run.dir=calm", "--json"))
    assert resumed["attempts"] == 2
    assert calm["attempts"] == 1
    assert resumed["digest"] == calm["digest"]
    assert resumed["loss"] == calm["loss"]


def test_a_flipped_bit_at_the_destination_is_found_and_mended(clusters: Clusters) -> None:
    make_shapes(clusters.folder / "corpus", count=120)
    clusters.run("shard", "corpus", "cluster-a:shapes", "--size-limit", "24kb")
    clusters.run("replicate", "shapes", "--from", "cluster-a", "--to", "cluster-b")
    server, bucket = clusters.servers["cluster-b"]
    good = clusters.objects("cluster-b")
    key = next(key for key in good if "/shards/" in key)
    bad = bytearray(good[key])
    bad[len(bad) // 2] ^= 1
    server.client().put_object(Bucket=bucket, Key=key, Body=bytes(bad))
    clusters.run("verify", "shapes", "--cluster", "cluster-b", "--full", code=3)
    clusters.run("repair", "shapes", "--cluster", "cluster-b")
    assert clusters.objects("cluster-b")[key] == good[key]
    clusters.run("verify", "shapes", "--cluster", "cluster-b", "--full")


def test_real_corpora_arrive_sample_for_sample(
    clusters: Clusters, corpora: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Emoji with captions and Bible verses: what is streamed from cluster-b is what lies in the corpus."""
    from datasync import StreamingDataset

    emoji, kjv = corpora / "captions" / "emoji_google", corpora / "text" / "kjv.jsonl"
    clusters.run("shard", str(emoji), "cluster-a:emoji", "--size-limit", "1mb")
    clusters.run("shard", str(kjv), "cluster-a:kjv", "--size-limit", "1mb")
    for name in ("emoji", "kjv"):
        clusters.run("replicate", name, "--from", "cluster-a", "--to", "cluster-b")
    monkeypatch.setenv("DATASYNC_CONFIG", str(clusters.folder / "datasync.toml"))
    for name in ("TEST_KEY", "TEST_SECRET"):
        monkeypatch.setenv(name, clusters.environment[name])

    def stream(name: str) -> list[dict[str, Any]]:
        local = clusters.folder / "cache" / name
        clusters_of = ["cluster-b", "cluster-a"]
        return list(
            StreamingDataset(dataset=name, clusters=clusters_of, local=local, shuffle=True, batch_size=1)
        )

    verses = [json.loads(line) for line in kjv.read_text().splitlines()]
    streamed = [{key: row[key] for key in verses[0]} for row in stream("kjv")]
    assert streamed != verses, "shuffled"
    assert sorted(streamed, key=repr) == sorted(verses, key=repr)

    lines = [json.loads(line) for line in (emoji / "metadata.jsonl").read_text().splitlines()]
    expected = sorted((line["text"], _pixels(Image.open(emoji / line["file_name"]))) for line in lines)
    assert sorted((row["text"], _pixels(row["image"])) for row in stream("emoji")) == expected


def _pixels(image: Image.Image) -> str:
    return hashlib.sha256(repr((image.mode, image.size)).encode() + image.tobytes()).hexdigest()
