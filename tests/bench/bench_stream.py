"""Reading shards: this project beside MosaicML Streaming, LitData and WebDataset, and beside the bare work.

    python tests/bench/bench_stream.py [tokens] [cold] [jpeg] [--mib 192] [--shard-mib 16] [--cold-mib 1024]
        [--cold-shard-mib 8] [--network-mib 100] [--rounds 3] [--seconds 3] [--json]

    tokens   samples of 4 KiB (1,024 int32) in batches of 32, shuffled, from a warm cache, without and with 2
             workers. LitData is run with its general loader and with its loader for tokens. Beside them the
             floors: random rows of the same shards copied once, and PyTorch's DataLoader without workers
             over a dataset that gives the same batch again and again.
    cold     one epoch from an S3 server on loopback into an empty cache, zstd shards, twice as many as a
             shuffle holds; beside it the same shards downloaded and decompressed by the same client and as
             many threads, and thrown away; and that with what a cache cannot do without: written to files,
             and every sample copied out once. The first two once more through a relay that lets so many
             MiB of compressed shards pass in a second, since on one machine there is no network.
    jpeg     photographs of 640 x 480 to uint8 tensors, without and with 2 workers; beside it the same files,
             already in memory, decoded by the same function on 2 threads into arrays that are there.

Every measurement is a process of its own. Rates are of the steady state: an epoch's clock starts with its
tenth batch (of photographs, with its fourth). Contenders run in turn, `--rounds` times, and the best round of
each counts. CPU is that of the process and its workers, in microseconds a sample: waiting for others does not
change it. Copies are those of a sample's bytes between shard and batch, as our loader counts them
(`bytes_copied` of its statistics); peers do not say. Before a cold epoch the process touches as much memory
as it will need: on a virtual machine that gives free memory back to its host, the first use of a page costs
more than filling it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.bench import stream_contenders as contenders  # noqa: E402  (found below the root)

CORPUS = ROOT.parent / "shared" / "corpora"
PHOTOGRAPHS = 512


# One measurement, in a process of its own


def steady(
    batches: Callable[[], Iterable[Any]], seconds: float, *, skip: int, every: int
) -> dict[str, float]:
    """Samples, seconds and CPU seconds of epochs without their first batches; the first one warms up."""
    for _ in batches():
        pass
    total = {"samples": 0.0, "seconds": 0.0, "cpu": 0.0}
    while total["seconds"] < seconds:
        counted, marks = 0, []
        for i, batch in enumerate(batches()):
            if i > skip:
                counted += contenders.length(batch)
            # Workers end with the epoch, and their CPU is no more to be seen: look now and then.
            if i >= skip and (i - skip) % every == 0:
                marks.append((counted, time.perf_counter(), cpu_seconds()))
        if len(marks) < 2:
            raise SystemExit("an epoch has too few batches to be measured")
        first, last = marks[0], marks[-1]
        for name, begin, end in zip(total, first, last, strict=True):
            total[name] += end - begin
    return total


def cpu_seconds() -> float:
    """CPU of this process and of its living children."""
    total = time.process_time()
    tick = os.sysconf("SC_CLK_TCK")
    for child in _children(os.getpid()):
        try:
            fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += (int(fields[11]) + int(fields[12])) / tick
    return total


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            found += map(int, (task / "children").read_text().split())
        except OSError:
            continue
    return found + [inner for child in found for inner in _children(child)]


def run_peer(name: str, folder: Path, kind: str, workers: int, seconds: float) -> dict[str, float]:
    import torch

    torch.set_num_threads(1)
    _, read = (contenders.PHOTOGRAPHS_BY if kind == "jpeg" else contenders.TOKENS_BY)[name]
    with tempfile.TemporaryDirectory(prefix="bench-cache-", dir=folder) as cache:
        batches = read(folder / name / kind, Path(cache), jpeg=kind == "jpeg", workers=workers)
        found = steady(
            batches, seconds, **({"skip": 3, "every": 2} if kind == "jpeg" else {"skip": 10, "every": 32})
        )
        return found | ({"copies": copies(batches())} if name == "ours" else {})


def copies(loader: Any) -> float:
    """How often our loader copies a byte of what it gives, over an epoch."""
    before = loader.dataset.stats.total()["bytes_copied"]
    given = sum(values.nbytes for batch in loader for values in batch.values())
    return float((loader.dataset.stats.total()["bytes_copied"] - before) / given)


def run_copied_once(folder: Path, seconds: float) -> dict[str, float]:
    """Random rows of the shards that ours reads, copied into a batch that is there."""
    import numpy as np

    paths = sorted((folder / "ours" / "tokens").rglob("*.mds"))
    rows = np.concatenate([_table_of(path) for path in paths])
    out = np.zeros((contenders.BATCH, contenders.TOKENS), np.int32)
    order = np.random.default_rng(contenders.SEED).permutation(len(rows))

    def batches() -> Iterator[Any]:
        for first in range(0, len(rows) - contenders.BATCH + 1, contenders.BATCH):
            np.take(rows, order[first : first + contenders.BATCH], axis=0, out=out, mode="clip")
            yield out

    return steady(batches, seconds, skip=10, every=32) | {"copies": 1.0}


def _table_of(path: Path) -> Any:
    """The samples of a raw shard of tokens."""
    import numpy as np

    data = np.fromfile(path, np.uint8)
    samples, first = data[:8].view("<u4").tolist()
    return data[first:].view(np.int32).reshape(samples, contenders.TOKENS)


def run_ready_batch(seconds: float) -> dict[str, float]:
    """PyTorch's DataLoader over a dataset that gives the same batch every time."""
    import torch
    from torch.utils.data import DataLoader, IterableDataset

    batch = {"tokens": torch.zeros((contenders.BATCH, contenders.TOKENS), dtype=torch.int32)}

    class Ready(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return itertools.repeat(batch, 1000)

    loader = DataLoader(Ready(), batch_size=None)
    return steady(lambda: loader, seconds, skip=10, every=32) | {"copies": 0.0}


def run_bare_jpeg(folder: Path, threads: int, seconds: float) -> dict[str, float]:
    import numpy as np

    from datasync.streaming.images import decode_pixels

    files = contenders.photographs(PHOTOGRAPHS, CORPUS if CORPUS.is_dir() else None)
    room = np.zeros((4 * contenders.BATCH, 480, 640, 3), np.uint8)
    numbers, stop = itertools.count(), float("inf")

    def work() -> int:
        done = 0
        while time.perf_counter() < stop:
            i = next(numbers)
            decode_pixels(files[i % len(files)], "RGB", room[i % len(room)])
            done += 1
        return done

    with ThreadPoolExecutor(threads) as pool:
        stop = time.perf_counter() + 0.5
        list(pool.map(lambda _: work(), range(threads)))
        start, before = time.perf_counter(), time.process_time()
        stop = start + seconds
        done = sum(pool.map(lambda _: work(), range(threads)))
        wall, cpu = time.perf_counter() - start, time.process_time() - before
    return {"samples": done, "seconds": wall, "cpu": cpu}


def touch(mib: int) -> None:
    """Have so much memory that is there."""
    import numpy as np

    np.ones(mib << 20, np.uint8)


def run_cold_ours(url: str, mib: int) -> dict[str, float]:
    import torch

    from datasync import StreamingDataLoader, StreamingDataset

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="bench-cache-") as cache:
        touch(mib)
        start, before = time.perf_counter(), time.process_time()
        dataset = StreamingDataset(remote=url, local=cache, shuffle=True, batch_size=contenders.BATCH)
        samples = sum(
            contenders.length(batch) for batch in StreamingDataLoader(dataset, batch_size=contenders.BATCH)
        )
        wall, cpu = time.perf_counter() - start, time.process_time() - before
        stats = dataset.stats.total()
    return {
        "samples": samples,
        "seconds": wall,
        "cpu": cpu,
        "wait": stats["wait_seconds"],
        "copies": stats["bytes_copied"] / (4 * contenders.TOKENS * samples),
    }


def run_cold_bare(url: str, mib: int, threads: int, keep: bool) -> dict[str, float]:
    import numpy as np

    from datasync.storage import open_store
    from shards import compression
    from shards.index import Index

    with tempfile.TemporaryDirectory(prefix="bench-cache-") as folder:
        touch(mib)
        start, before = time.perf_counter(), time.process_time()
        store = open_store(url)
        index = Index.parse(store.read("index.json"), where=url)
        room = np.zeros((256, contenders.TOKENS), np.int32)

        def one(i: int) -> int:
            info = index.shards[i]
            data = compression.decompress(
                store.read(info.stored.basename), info.compression or "", limit=info.raw.bytes
            )
            if keep:
                path = Path(folder, f"{i}.mds")
                path.write_bytes(data)
                tokens = np.memmap(path, np.int32, offset=info.raw.bytes - 4096 * info.samples)
                tokens = tokens.reshape(info.samples, -1)
                for first in range(0, info.samples, len(room)):
                    part = tokens[first : first + len(room)]
                    room[: len(part)] = part
            return len(data)

        with ThreadPoolExecutor(threads) as pool:
            total = sum(pool.map(one, range(len(index.shards))))
        assert total == sum(info.raw.bytes for info in index.shards)
        wall, cpu = time.perf_counter() - start, time.process_time() - before
    return {"samples": index.samples, "seconds": wall, "cpu": cpu}


# All of them


def in_process(*arguments: object, environment: dict[str, str] | None = None) -> dict[str, float] | None:
    """Run one measurement of this file; None if it failed, with the reason on standard error."""
    result = subprocess.run(
        [sys.executable, __file__, "--measure", json.dumps(arguments)],
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=600,
    )
    lines = [line for line in result.stdout.splitlines() if line.startswith("{")]
    if result.returncode or not lines:
        print(f"{arguments}: failed\n{result.stderr[-2000:]}", file=sys.stderr)
        return None
    found: dict[str, float] = json.loads(lines[-1])
    rate, micro = found["samples"] / found["seconds"], 1e6 * found["cpu"] / found["samples"]
    print(f"{arguments}: {rate:,.0f} samples/s, {micro:,.1f} us of CPU each", file=sys.stderr)
    return found


def measure(*arguments: Any) -> dict[str, float]:
    """What `in_process` asks for."""
    what, *rest = arguments
    runs: dict[str, Callable[..., dict[str, float]]] = {
        "peer": lambda name, folder, *more: run_peer(name, Path(folder), *more),
        "bare jpeg": lambda folder, *more: run_bare_jpeg(Path(folder), *more),
        "copied once": lambda folder, *more: run_copied_once(Path(folder), *more),
        "ready batch": run_ready_batch,
        "cold ours": run_cold_ours,
        "cold bare": run_cold_bare,
    }
    return runs[what](*rest)


def best_of(rounds: int, jobs: dict[str, tuple[Any, ...]], **options: Any) -> dict[str, dict[str, Any]]:
    """Rates and CPU of each job, the best of its rounds, and the rate in each; jobs take turns."""
    found: dict[str, dict[str, Any]] = {}
    for _ in range(rounds):
        for name, arguments in jobs.items():
            result = in_process(*arguments, **options)
            if result is None:
                continue
            rate = result["samples"] / result["seconds"]
            micro = 1e6 * result["cpu"] / result["samples"]
            old = found.setdefault(name, {"samples_per_second": 0.0, "cpu_us_per_sample": float("inf")})
            old["samples_per_second"] = round(max(old["samples_per_second"], rate), 1)
            old["cpu_us_per_sample"] = round(min(old["cpu_us_per_sample"], micro), 2)
            old["rounds"] = [*old.get("rounds", []), round(rate)]
            if "copies" in result:
                old["copies_per_sample"] = round(result["copies"], 2)
    return found


def ratios(found: dict[str, dict[str, Any]], ours: str, others: Iterable[str]) -> dict[str, dict[str, float]]:
    """How many times faster ours is, and how many times less CPU it takes, than each of the others."""
    if ours not in found:
        return {}
    return {
        f"{ours} / {other}": {
            "rate": round(found[ours]["samples_per_second"] / found[other]["samples_per_second"], 2),
            "cpu": round(found[other]["cpu_us_per_sample"] / found[ours]["cpu_us_per_sample"], 2),
        }
        for other in others
        if other in found
    }


def bench_peers(kind: str, folder: Path, rows: list[Any], rounds: int, seconds: float) -> dict[str, Any]:
    """`tokens` or `jpeg`."""
    jpeg = kind == "jpeg"
    names = contenders.PHOTOGRAPHS_BY if jpeg else contenders.TOKENS_BY
    for name, (write, _) in names.items():
        (folder / name).mkdir(exist_ok=True)
        write(rows, folder / name / kind, jpeg=jpeg)
    jobs: dict[str, tuple[Any, ...]] = {
        f"{name} ×{workers}": ("peer", name, str(folder), kind, workers, seconds)
        for workers in (0, 2)
        for name in names
    }
    if jpeg:
        jobs["bare decoding ×2 threads"] = ("bare jpeg", str(folder), 2, seconds)
    else:
        jobs["rows copied once"] = ("copied once", str(folder), seconds)
        jobs["a DataLoader's ready batch"] = ("ready batch", seconds)
    found = best_of(rounds, jobs)
    compared: dict[str, Any] = {}
    for workers in (0, 2):
        ours = f"ours ×{workers}"
        others = [f"{name} ×{workers}" for name in names if name != "ours"]
        compared |= ratios(found, ours, others if workers or jpeg else [*others, "rows copied once"])
    if jpeg:
        best = max(("ours ×0", "ours ×2"), key=lambda name: found[name]["samples_per_second"])
        compared |= ratios(found, best, [name for name in jobs if not name.startswith("ours")])
    return {"results": found, "ratios": compared}


def bench_cold(folder: Path, mib: int, network_mib: int, rounds: int) -> dict[str, Any]:
    """From an S3 server on loopback, and from it through a relay."""
    from datasync.storage import open_store
    from tests.servers import running, seaweedfs

    some = list(contenders.token_rows(min(mib, 64)))
    rows = itertools.islice(itertools.cycle(some), 256 * mib)
    contenders.write_ours(rows, folder / "cold", jpeg=False, compression="zstd:3")
    with running(seaweedfs) as (server,), relay(server.endpoint, network_mib << 20) as network:
        url = server.url()
        store = open_store(url, **server.options)
        paths = [path for path in (folder / "cold").rglob("*") if path.is_file()]
        for path in sorted(paths, key=lambda path: path.name == "index.json"):
            store.write_file(str(path.relative_to(folder / "cold")), path)
        bare, ours = "bare download and decompression", "ours"
        jobs: dict[str, tuple[Any, ...]] = {
            bare: ("cold bare", url, 3 * mib, 4, False),
            ours: ("cold ours", url, 3 * mib),
            "bare, kept and copied out": ("cold bare", url, 3 * mib, 4, True),
        }
        environment = {**server.environment, "AWS_ENDPOINT_URL": server.endpoint}
        found = best_of(rounds, jobs, environment=environment)
        compared = ratios(found, ours, [name for name in jobs if name != ours])
        behind = f" at {network_mib} MiB/s"
        jobs = {name + behind: jobs[name] for name in (bare, ours)}
        environment = {**server.environment, "AWS_ENDPOINT_URL": network}
        found |= best_of(rounds, jobs, environment=environment)
        compared |= ratios(found, ours + behind, [bare + behind])
    return {"results": found, "ratios": compared}


# A network


@contextmanager
def relay(endpoint: str, rate: int) -> Iterator[str]:
    """The endpoint of a process that passes on what comes, and of the answers so many bytes a second."""
    process = subprocess.Popen(
        [sys.executable, __file__, "--relay", endpoint, str(rate)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


def run_relay(endpoint: str, rate: int) -> None:
    """Serve until ended. Connections share the rate, and none of it can be saved up for later."""
    target = urlsplit(endpoint)
    free = time.monotonic()  # when the line is free again
    turn = threading.Lock()

    def paced(count: int) -> float:
        nonlocal free
        with turn:
            free = max(free, time.monotonic() - 0.005) + count / rate
            return free - time.monotonic()

    def serve(client: socket.socket) -> None:
        buffer = memoryview(bytearray(256 << 10))
        with client, socket.create_connection((target.hostname, target.port)) as server:
            ready = selectors.DefaultSelector()
            ready.register(client, selectors.EVENT_READ, server)
            ready.register(server, selectors.EVENT_READ, client)
            while True:
                for key, _ in ready.select():
                    source: Any = key.fileobj
                    count = source.recv_into(buffer)
                    if not count:
                        return
                    if source is server:
                        time.sleep(max(0.0, paced(count)))
                    key.data.sendall(buffer[:count])

    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help="tokens, cold, jpeg (default: all)")
    parser.add_argument("--mib", type=int, default=192, help="MiB of tokens (default: 192)")
    parser.add_argument("--shard-mib", type=int, default=16, help="MiB of a shard (default: 16)")
    parser.add_argument("--cold-mib", type=int, default=1024, help="MiB of a cold epoch (default: 1024)")
    parser.add_argument("--cold-shard-mib", type=int, default=8, help="MiB of its shards (default: 8)")
    parser.add_argument("--network-mib", type=int, default=100, help="MiB/s of the relay (default: 100)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds; the best counts (default: 3)")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement (default: 3)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--relay", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.relay:
        run_relay(options.relay[0], int(options.relay[1]))
    if options.measure:
        print(json.dumps(measure(*json.loads(options.measure))), flush=True)
        return
    contenders.SHARD_BYTES = options.shard_mib << 20
    parts = options.parts or ["tokens", "cold", "jpeg"]
    report: dict[str, Any] = {"cpus": os.cpu_count(), "rounds": options.rounds}
    with tempfile.TemporaryDirectory(prefix="bench-stream-") as temporary:
        folder = Path(temporary)
        if "tokens" in parts:
            rows = list(contenders.token_rows(options.mib))
            report["tokens"] = bench_peers("tokens", folder, rows, options.rounds, options.seconds)
        if "cold" in parts:
            contenders.SHARD_BYTES = options.cold_shard_mib << 20
            report["cold"] = bench_cold(folder, options.cold_mib, options.network_mib, options.rounds)
            contenders.SHARD_BYTES = options.shard_mib << 20
        if "jpeg" in parts:
            files = contenders.photographs(PHOTOGRAPHS, CORPUS if CORPUS.is_dir() else None)
            report["jpeg"] = bench_peers("jpeg", folder, files, options.rounds, options.seconds)
    print(json.dumps(report, indent=1) if options.json else _table(report))


def _table(report: dict[str, Any]) -> str:
    lines = []
    for part in ("tokens", "cold", "jpeg"):
        if part not in report:
            continue
        lines.append(part)
        for name, result in report[part]["results"].items():
            lines.append(
                f"  {name:44} {result['samples_per_second']:>12,.0f} samples/s"
                f" {result['cpu_us_per_sample']:>10,.2f} us of CPU and"
                f" {result.get('copies_per_sample', '?'):>4} copies a sample"
                f"   rounds: {', '.join(f'{rate:,}' for rate in result['rounds'])}"
            )
        for name, ratio in report[part]["ratios"].items():
            lines.append(f"  {name:72} {ratio['rate']:>7.2f} × the rate {ratio['cpu']:>7.2f} × less CPU")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
