"""Writing shards: this project beside MosaicML's MDSWriter, LitData's `optimize` and bare zstandard.

    python -m tests.bench.bench_writer [--mib 1024] [--rounds 1] [--only NAMES] [--json]

Input: Parquet files of token arrays (1,024 int32 a row, 4 KiB; ids follow Zipf's law, as in text; row groups
of 8 MiB, zstd), written once to a temporary folder. Every contender reads the same files and writes the same
samples to the same disk, except the first ones, which are ceilings:

    read        the Parquet files read with pyarrow, nothing else
    zstd        one-shot `zstandard` level 3 over the same bytes, already in memory; nothing read or written
    floor       what no writer of shards can do without: the Parquet files read with pyarrow into one buffer,
                that through one-shot zstandard (or not: raw) and sha256, one write a shard, not synced
    ours        ShardBuilder over Arrow batches: sha256 and xxh3_64 of each shard, synced, renamed into place
    convert     `shards.convert`, the whole job with start of its workers, journal, manifest and index
    mdswriter   MDSWriter over rows of NumPy arrays, no hashes
    litdata     optimize() over rows of NumPy arrays

A rate is raw bytes of tokens a second (MB = 10^6); a name's number is how many processes work. All contenders
run in turn, `--rounds` times, and the best round of each counts. On a machine that others use too, look at
the ratios of CPU time: seconds of all processes together, which waiting does not change.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import multiprocessing
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

TOKENS = 1024
ROW_BYTES = 4 * TOKENS
COLUMNS = {"tokens": f"ndarray:int32:{TOKENS}"}
LEVEL = 3
SHARD_BYTES = 1 << 26
_SCHEMA = pa.schema({"tokens": pa.list_(pa.int32(), TOKENS)})


def make_corpus(folder: Path, mib: int, files: int = 4) -> list[Path]:
    """Parquet files of Zipf-distributed token ids, the same for the same arguments."""
    rows = mib * (1 << 20) // ROW_BYTES // files
    group = min(2048, rows)
    # Drawing is slow, so the same draws serve again and again, each time from another place: what is alike
    # lies farther apart than zstd's window.
    drawn = (np.random.default_rng(0).zipf(1.2, min(rows, 16384) * TOKENS) % 50257).astype(np.int32)
    paths = []
    for number in range(files):
        path = folder / f"part-{number}.parquet"
        with pq.ParquetWriter(path, _SCHEMA, compression="zstd") as writer:
            for first in range(0, rows, group):
                start = (number * rows + first) * 7919 % len(drawn)
                tokens = np.take(drawn, np.arange(start, start + group * TOKENS), mode="wrap")
                column = pa.FixedSizeListArray.from_arrays(pa.array(tokens), TOKENS)
                writer.write_table(pa.table({"tokens": column}, _SCHEMA).slice(0, rows - first))
        paths.append(path)
    return paths


def batches(path: Path) -> Iterator[pa.RecordBatch]:
    """What all contenders read."""
    yield from pq.ParquetFile(path).iter_batches(batch_size=2048, use_threads=False)


def rows(path: Path) -> Iterator[np.ndarray]:
    """The same as arrays, one a row: the best that a writer of rows can be given."""
    for batch in batches(path):
        yield from batch.column(0).flatten().to_numpy().reshape(-1, TOKENS)


_BUFFERS: dict[Path, bytes] = {}


def run_zstd(paths: list[Path], out: Path) -> None:
    for path in paths:
        zstandard.ZstdCompressor(level=LEVEL).compress(_BUFFERS[path])


def run_read(paths: list[Path], out: Path) -> None:
    for path in paths:
        for _ in batches(path):
            pass


def run_floor(paths: list[Path], out: Path, compression: str | None) -> None:
    buffer, at = np.empty(SHARD_BYTES, np.uint8), 0
    compressor = zstandard.ZstdCompressor(level=LEVEL)

    def store() -> None:
        data = buffer[:at].data if compression is None else compressor.compress(buffer[:at])
        name = hashlib.sha256(data).hexdigest()
        with open(out / name, "wb", buffering=0) as file:
            file.write(data)

    out.mkdir(parents=True, exist_ok=True)
    for path in paths:
        for batch in batches(path):
            data = batch.column(0).flatten().to_numpy().view(np.uint8)
            if at + len(data) > SHARD_BYTES:
                store()
                at = 0
            buffer[at : at + len(data)] = data
            at += len(data)
    store()


def run_ours(paths: list[Path], out: Path, compression: str | None) -> None:
    from shards.builder import ShardBuilder
    from shards.place import Folder

    folder = Folder(out)
    builder = ShardBuilder(COLUMNS, compression=compression, size_limit=SHARD_BYTES)
    for path in paths:
        for batch in batches(path):
            for shard in builder.write_batch(batch):
                folder.write(shard.info.stored.basename, shard.data)
    for shard in builder.finish():
        folder.write(shard.info.stored.basename, shard.data)


def run_convert(paths: list[Path], out: Path, compression: str | None) -> None:
    from shards import convert

    convert(str(paths[0].parent), str(out), columns=COLUMNS, compression=compression, workers=2, quiet=True)


def run_mdswriter(paths: list[Path], out: Path, compression: str | None) -> None:
    from streaming import MDSWriter

    with MDSWriter(columns=COLUMNS, out=str(out), compression=compression, size_limit=SHARD_BYTES) as writer:
        for path in paths:
            for row in rows(path):
                writer.write({"tokens": row})


def _litdata_rows(path: str) -> Iterator[np.ndarray]:
    yield from rows(Path(path))


def run_litdata(paths: list[Path], out: Path, compression: str | None, workers: int) -> None:
    import litdata

    with open(os.devnull, "w") as null, contextlib.redirect_stdout(null), contextlib.redirect_stderr(null):
        litdata.optimize(
            fn=_litdata_rows,
            inputs=[str(path) for path in paths],
            output_dir=str(out),
            chunk_bytes=SHARD_BYTES,
            compression=compression,
            num_workers=workers,
            reorder_files=False,
            verbose=False,
        )


def contenders(paths: list[Path], pool: ProcessPoolExecutor) -> dict[str, Callable[[Path], float]]:
    """Name -> what is timed: it gets an empty folder and returns the CPU seconds of the pool's workers."""
    halves = [paths[::2], paths[1::2]]

    def alone(work: Callable[..., None], *options: Any) -> Callable[[Path], float]:
        def run(out: Path) -> float:
            work(paths, out, *options)
            return 0.0

        return run

    def in_two(work: Callable[..., None], *options: Any) -> Callable[[Path], float]:
        def run(out: Path) -> float:
            jobs = [pool.submit(_cpu, work, half, out / str(i), *options) for i, half in enumerate(halves)]
            return sum(job.result() for job in jobs)

        return run

    level = f"zstd:{LEVEL}"
    found: dict[str, Callable[[Path], float]] = {
        "read ×1": alone(run_read),
        "zstd ×1": alone(run_zstd),
        "zstd ×2": in_two(run_zstd),
        "floor zstd ×2": in_two(run_floor, level),
        "floor raw ×2": in_two(run_floor, None),
        "ours zstd ×1": alone(run_ours, level),
        "ours zstd ×2": in_two(run_ours, level),
        "ours raw ×1": alone(run_ours, None),
        "ours raw ×2": in_two(run_ours, None),
    }
    with contextlib.suppress(ImportError):
        from shards import convert  # noqa: F401

        found["convert zstd ×2"] = alone(run_convert, level)
        found["convert raw ×2"] = alone(run_convert, None)
    with contextlib.suppress(ImportError):
        import streaming  # noqa: F401

        found["mdswriter zstd ×1"] = alone(run_mdswriter, level)
        found["mdswriter zstd ×2"] = in_two(run_mdswriter, level)
        found["mdswriter raw ×1"] = alone(run_mdswriter, None)
        found["mdswriter raw ×2"] = in_two(run_mdswriter, None)
    with contextlib.suppress(ImportError):
        import litdata  # noqa: F401

        found["litdata zstd ×2"] = alone(run_litdata, level, 2)
        found["litdata raw ×2"] = alone(run_litdata, None, 2)
    return found


def _cpu(work: Callable[..., None], *arguments: Any) -> float:
    """CPU seconds that `work` takes in this worker."""
    start = time.process_time()
    work(*arguments)
    return time.process_time() - start


RATIOS = (
    ("floor zstd ×2", "zstd ×2"),
    ("convert zstd ×2", "zstd ×2"),
    ("convert zstd ×2", "floor zstd ×2"),
    ("convert zstd ×2", "mdswriter zstd ×1"),
    ("convert zstd ×2", "mdswriter zstd ×2"),
    ("convert zstd ×2", "litdata zstd ×2"),
    ("convert raw ×2", "floor raw ×2"),
    ("convert raw ×2", "mdswriter raw ×1"),
    ("convert raw ×2", "mdswriter raw ×2"),
    ("convert raw ×2", "litdata raw ×2"),
    ("ours zstd ×1", "mdswriter zstd ×1"),
    ("ours zstd ×2", "floor zstd ×2"),
    ("ours raw ×1", "mdswriter raw ×1"),
    ("ours raw ×2", "floor raw ×2"),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=1024, help="tokens in MiB (default: 1024)")
    parser.add_argument("--rounds", type=int, default=1, help="rounds; the best counts (default: 1)")
    parser.add_argument("--only", default="", help="comma-separated beginnings of names to run")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-writer-") as temporary:
        report = measure(Path(temporary), options.mib, options.rounds, tuple(options.only.split(",")))
    print(json.dumps(report, indent=1) if options.json else _table(report))


def measure(folder: Path, mib: int, rounds: int, only: tuple[str, ...]) -> dict[str, Any]:
    """Run all contenders in turn; seconds and rates by name, and ratios."""
    (folder / "in").mkdir()
    paths = make_corpus(folder / "in", mib)
    for path in paths:
        _BUFFERS[path] = b"".join(memoryview(row) for row in rows(path))
    total = sum(map(len, _BUFFERS.values()))
    best: dict[str, float] = {}
    least: dict[str, float] = {}
    for module in ("streaming", "litdata"):
        with contextlib.suppress(ImportError):
            __import__(module)
    # Forked now, so that the buffers of bare zstandard are shared and no worker has to start while timed.
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as pool:
        list(pool.map(time.sleep, [0.1, 0.1]))
        found = contenders(paths, pool)
        for _ in range(rounds):
            for name, work in found.items():
                if not name.startswith(only):
                    continue
                seconds, cpu = _timed(partial(work, folder / "out"), folder / "out")
                best[name] = min(best.get(name, seconds), seconds)
                least[name] = min(least.get(name, cpu), cpu)
                print(f"{name:20} {seconds:7.2f} s  {cpu:7.2f} s of CPU", file=sys.stderr)
    rates = {name: total / seconds / 1e6 for name, seconds in best.items()}
    return {
        "bytes": total,
        "cpus": os.cpu_count(),
        "rounds": rounds,
        "seconds": {name: round(seconds, 3) for name, seconds in best.items()},
        "cpu_seconds": {name: round(seconds, 3) for name, seconds in least.items()},
        "mb_per_second": {name: round(rate, 1) for name, rate in rates.items()},
        "ratios": {
            f"{a} / {b}": round(rates[a] / rates[b], 2) for a, b in RATIOS if a in rates and b in rates
        },
        "cpu_ratios": {
            f"{a} / {b}": round(least[b] / least[a], 2) for a, b in RATIOS if a in rates and b in rates
        },
    }


def _timed(work: Callable[[], float], out: Path) -> tuple[float, float]:
    """Seconds, and CPU seconds of this process, of the processes it starts and of the pool's workers."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    start, before = time.perf_counter(), _cpu_here()
    workers = work()
    return time.perf_counter() - start, _cpu_here() - before + workers


def _cpu_here() -> float:
    uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in uses)


def _table(report: dict[str, Any]) -> str:
    lines = [
        f"{report['bytes'] / 1e6:.0f} MB of tokens, {report['cpus']} CPUs, best of {report['rounds']}",
        "",
    ]
    for name, rate in report["mb_per_second"].items():
        lines.append(f"{name:22} {rate:9.1f} MB/s {report['cpu_seconds'][name]:8.2f} s of CPU")
    lines += ["", f"{'':42}   time     CPU"]
    for name, ratio in report["ratios"].items():
        lines.append(f"{name:42} {ratio:6.2f}× {report['cpu_ratios'][name]:6.2f}×")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
