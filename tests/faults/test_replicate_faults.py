"""Replication between two real servers over a network that does everything a network does.

After every run the destination is proven whole, or it is not published; and the run after it, over a good
network, completes. Each fault alone, then all of them mixed at random with a seed.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
import zlib
from datetime import timedelta

import pytest

from datasync.errors import DatasyncError
from datasync.ops import receipts
from datasync.replicate import Options, replicate, transfer
from datasync.replicate.journal import Begun, Journal
from datasync.storage import http1, open_store
from datasync.storage.base import Store
from shards.digests import crc32c
from shards.index import Index
from tests.faults.proxy import KINDS, FaultProxy
from tests.replicate.kit import data_of, make_dataset, make_shards, publish_dataset, shard_info
from tests.servers import running, seaweedfs

SHORT = Options(quiet=True, retry_seconds=6)


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http1, "STALL_SECONDS", 1.5)
    monkeypatch.setattr(transfer, "LARGE_BYTES", 6 << 20)


def check(source: Store, b: Store, outcome) -> None:
    """Whole and proven, or not published; never something in between."""
    found = data_of(b)
    wanted = data_of(source)
    assert all(found[key] == wanted[key] for key in found), "an object is visible with wrong bytes"
    if outcome is not None and outcome.state == "published":
        assert found == wanted
        assert receipts.read(b).whole
    elif "index.json" in found:
        assert found == wanted, "the index is visible before what it names"


def run_and_rerun(
    s3_a, s3_b, *, seed: int, rate: float, kinds=KINDS, count: int = 12, large: bool = True
) -> set[str]:
    """One run over bad networks on both sides, then one over good ones; returns the states of both."""
    url_a, url_b = s3_a.url("emoji"), s3_b.url("emoji")
    good_a, good_b = open_store(url_a, **s3_a.options), open_store(url_b, **s3_b.options)
    shards = make_dataset(good_a, count=count, size=60_000, seed=seed)
    if large:
        shards |= make_shards(1, size=17 << 20, seed=("large", seed))
        publish_dataset(good_a, shards)
    with (
        FaultProxy(s3_a, seed=seed, rate=rate, kinds=kinds, stall_seconds=3) as pa,
        FaultProxy(s3_b, seed=seed + 1, rate=rate, kinds=kinds, stall_seconds=3) as pb,
    ):
        bad_a, bad_b = open_store(url_a, **pa.options), open_store(url_b, **pb.options)
        outcome = None
        with contextlib.suppress(DatasyncError):  # refused before anything was written
            (outcome,) = replicate(bad_a, {"b": bad_b}, name="emoji", options=SHORT)
        check(good_a, good_b, outcome)
    (again,) = replicate(good_a, {"b": good_b}, name="emoji", options=SHORT)
    assert again.state in ("published", "already"), again.error
    assert data_of(good_b) == data_of(good_a)
    assert receipts.read(good_b).whole
    # A probe of the server that was cut off may leave an upload; a later run sweeps it when it is old.
    assert [upload.key for upload in good_b.uploads() if not upload.key.startswith("_datasync/probe-")] == []
    return {outcome.state if outcome is not None else "refused", again.state}


@pytest.mark.parametrize("kind", KINDS)
def test_each_fault_alone(s3_a, s3_b, kind):
    run_and_rerun(
        s3_a,
        s3_b,
        seed=zlib.crc32(kind.encode()) % 1000,
        rate=0.1,
        kinds=[kind],
        large=kind in ("drop", "flip"),
    )


@pytest.mark.parametrize("seed", range(3))
def test_all_faults_mixed(s3_a, s3_b, seed):
    run_and_rerun(s3_a, s3_b, seed=seed, rate=0.08, large=seed == 0)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(20))
def test_all_faults_mixed_500_times(s3_a, s3_b, block):
    states: list[set[str]] = []
    for number in range(25):
        seed = 1000 + block * 25 + number
        states.append(
            run_and_rerun(s3_a, s3_b, seed=seed, rate=(0.02, 0.08, 0.2)[seed % 3], large=seed % 5 == 0)
        )
    assert any("published" in found for found in states)


@pytest.mark.parametrize("hours", [-5, 5])
def test_a_server_whose_clock_is_wrong(s3_a, s3_b, hours):
    url_a, url_b = s3_a.url("emoji"), s3_b.url("emoji")
    good_a, good_b = open_store(url_a, **s3_a.options), open_store(url_b, **s3_b.options)
    make_dataset(good_a, count=3)
    with FaultProxy(s3_b, clock=timedelta(hours=hours)) as proxy:
        (outcome,) = replicate(good_a, {"b": open_store(url_b, **proxy.options)}, name="emoji", options=SHORT)
    assert outcome.error is None
    assert data_of(good_b) == data_of(good_a)


def test_a_server_that_throttles_is_given_time(s3_a, s3_b):
    url_a, url_b = s3_a.url("emoji"), s3_b.url("emoji")
    good_a, good_b = open_store(url_a, **s3_a.options), open_store(url_b, **s3_b.options)
    make_dataset(good_a, count=20)
    with FaultProxy(s3_b) as proxy:
        b = open_store(url_b, **proxy.options)
        b.abilities()
        when = lambda request: request.method == "PUT" and "/shards/" in request.target  # noqa: E731
        proxy.script(*["throttle"] * 20, when=when)
        (outcome,) = replicate(good_a, {"b": b}, name="emoji", options=Options(quiet=True, retry_seconds=60))
        assert proxy.faults["throttle"] == 20
    assert outcome.error is None
    assert data_of(good_b) == data_of(good_a)


def test_both_servers_killed_and_started_again_in_mid_run(tmp_path):
    with running(seaweedfs, 2) as (a, b):
        source, there = a.store("emoji"), b.store("emoji")
        make_dataset(source, count=150, size=100_000)
        results = []

        def go() -> None:
            results.extend(
                replicate(source, {"b": there}, name="emoji", options=Options(quiet=True, retry_seconds=90))
            )

        thread = threading.Thread(target=go)
        thread.start()
        deadline = time.monotonic() + 30
        while sum(1 for _ in there.list("shards/")) < 20 and time.monotonic() < deadline:
            time.sleep(0.02)
        a.kill()
        b.kill()
        time.sleep(1)
        a.launch()
        b.launch()
        a.wait_ready()
        b.wait_ready()
        thread.join(timeout=150)
        assert not thread.is_alive()
        (outcome,) = results
        if outcome.error is not None:
            # A server that was killed may lose what it had not yet written down: then the rerun tells.
            (outcome,) = replicate(source, {"b": there}, name="emoji", options=SHORT)
        assert outcome.state in ("published", "already"), outcome.error
        assert data_of(there) == data_of(source)


@pytest.mark.parametrize("kind", ["tree", "mds"])
def test_bits_flipped_under_objects_whose_digest_nobody_has_said(s3_a, s3_b, kind):
    """As clients without checksums wrote them: one PUT, whose tag is an MD5, and parts, whose tag is none."""
    good_a, good_b = s3_a.store("plain"), s3_b.store("plain")
    client, bucket = plain_client(s3_a), good_a.url.split("/")[2]
    bodies = {f"shard.{n:05d}.mds": random.Random(n).randbytes(70_000) for n in range(6)}
    for key, data in bodies.items():
        client.put_object(Bucket=bucket, Key=good_a.full_key(key), Body=data)
    for name, size in (("shard.00006.mds", 5 << 20), ("shard.00007.mds", 8 << 20)):
        bodies[name] = random.Random(name).randbytes(size)
        in_parts(client, bucket, good_a.full_key(name), bodies[name])
    if kind == "mds":
        index = Index([shard_info(name, data, {}) for name, data in sorted(bodies.items())])
        client.put_object(Bucket=bucket, Key=good_a.full_key("index.json"), Body=index.dumps())
    with FaultProxy(s3_a, seed=3) as proxy:
        flipped = set()

        def first(request):
            if request.method != "GET" or "shard." not in request.target or request.target in flipped:
                return False
            flipped.add(request.target)
            return True

        proxy.script(*["flip"] * len(bodies), when=first)
        source = open_store(good_a.url, **proxy.options)
        (outcome,) = replicate(source, {"b": good_b}, name="plain", options=SHORT)
        assert proxy.faults["flip"] == len(bodies)
    assert outcome.state == "published", outcome.error
    assert data_of(good_b) == data_of(good_a)


def plain_client(server):
    """boto3 as it was before it sent checksums by default."""
    import boto3
    from botocore.config import Config

    return boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        aws_access_key_id=server.access_key,
        aws_secret_access_key=server.secret_key,
        region_name=server.region,
        config=Config(s3={"addressing_style": "path"}, request_checksum_calculation="when_required"),
    )


def in_parts(client, bucket: str, key: str, data: bytes, size: int = 5 << 20) -> None:
    upload = client.create_multipart_upload(Bucket=bucket, Key=key)["UploadId"]
    where = {"Bucket": bucket, "Key": key, "UploadId": upload}
    parts = []
    for number, start in enumerate(range(0, len(data), size), start=1):
        put = client.upload_part(**where, PartNumber=number, Body=data[start : start + size])
        parts.append({"PartNumber": number, "ETag": put["ETag"]})
    client.complete_multipart_upload(**where, MultipartUpload={"Parts": parts})


def test_an_upload_of_an_object_that_is_small_now_is_ended(s3_a, s3_b):
    source, b = s3_a.store("shrinks"), s3_b.store("shrinks")
    source.write("one.bin", b"x" * 1000)
    (outcome,) = replicate(source, {"b": b}, name="shrinks", options=SHORT)
    journal = Journal(b, 99)
    upload = b.begin("two.bin", bytes=20 << 20)
    upload.put(1, b"p" * upload.part_bytes, crc32c=crc32c(b"p" * upload.part_bytes))
    begun = Begun(
        key="two.bin", upload_id=upload.upload_id, bytes=20 << 20, part_bytes=upload.part_bytes, sha256=None
    )
    journal.upload(begun)
    journal.close()
    source.write("two.bin", b"y" * 1000)
    (outcome,) = replicate(source, {"b": b}, name="shrinks", options=SHORT)
    assert outcome.state == "published"
    assert list(b.uploads()) == []
    assert data_of(b) == data_of(source)
