"""Sharding a folder of JPEGs beside the bare work, planning a million files, and peak memory.

    python -m tests.bench.bench_shard_files [--files 20000] [--million 1000000] [--memory 2048] [--json]

A number of 0 leaves that part out.

**A folder of JPEGs** (`--files` of them, made to look like photographs of 384 x 384, about 58 KB each),
stored uncompressed. A rate is bytes of JPEGs a second (MB = 10^6), a name's number that of its processes:

    bare        every file read whole, in order, and the bytes written once, to files of 64 MiB; nothing else
    floor       bare, and the sha256 of every file of 64 MiB
    convert     `shards.convert`: listing, every JPEG checked to be one and whole, every file checked
                to be as it was listed, sha256 and xxh3_64 of each shard, synced; journal, manifest and index
    mdswriter   MDSWriter over the same bytes and names, nothing checked, no hashes

**A million files** (`--million` of 1 KB, 1,000 a folder): seconds, CPU seconds and peak memory of listing,
finding their kind and columns and cutting them into tasks, in a process of its own.

**Peak memory** (`--memory` MiB and a tenth of it, of tokens in Parquet and of JPEGs): the most resident
memory (VmHWM) of the process that calls `convert` and of the largest of its 2 workers, in MiB.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import multiprocessing
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench.bench_writer import SHARD_BYTES, _cpu, _timed, make_corpus

_BASES = 64
_A_FOLDER = 1000
_PIXELS = 384
_JPEG_BYTES = 58_000  # of one, about
_TINY = b"\xff\xd8\xff" + bytes(1019) + b"\xff\xd9"

_PLAN = """
import json, resource, sys, time
start = time.perf_counter()
from shards.find import find
from shards.options import ConvertOptions
from shards.plan import job_name
options = ConvertOptions()
found = find(sys.argv[1], options)
job_name(found.files, options, found.kind.name, found.schema)
used = resource.getrusage(resource.RUSAGE_SELF)
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM:"))
print(json.dumps({
    "files": len(found.files),
    "tasks": found.tasks,
    "seconds": round(time.perf_counter() - start, 1),
    "cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
    "peak_mib": int(peak.split()[1]) >> 10,
}))
"""

_CONVERT = """
import sys
from shards import convert
convert(sys.argv[1], sys.argv[2], compression=sys.argv[3] or None, workers=2, quiet=True)
"""


def make_jpegs(folder: Path, files: int) -> int:
    """JPEGs that look like photographs to an encoder, all different, 1,000 a folder; their bytes."""
    from PIL import Image

    bases = []
    for number in range(min(_BASES, files)):
        random = np.random.default_rng(number)
        smooth = Image.fromarray(random.integers(0, 255, (24, 24, 3), np.uint8)).resize((_PIXELS, _PIXELS))
        grain = random.normal(0, 10, (_PIXELS, _PIXELS, 1))
        image = Image.fromarray((np.asarray(smooth) + grain).clip(0, 255).astype(np.uint8))
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=int(random.integers(75, 95)))
        bases.append(buffer.getvalue())
    total = 0
    for number in range(files):
        base = bases[number % len(bases)]
        comment = b"picture %d" % number
        path = folder / f"{number // _A_FOLDER:04d}" / f"{number:08d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        segment = b"\xff\xfe" + struct.pack(">H", len(comment) + 2) + comment
        total += path.write_bytes(base[:2] + segment + base[2:])
    return total


def read_all(paths: list[Path]) -> Iterator[bytes]:
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            yield file.read()


def run_bare(paths: list[Path], out: Path, sha256: bool) -> None:
    out.mkdir(parents=True, exist_ok=True)
    held: list[bytes] = []
    size = files = 0

    def store() -> None:
        data = b"".join(held)
        if sha256:
            hashlib.sha256(data).digest()
        with open(out / str(files), "wb", buffering=0) as file:
            file.write(data)

    for data in read_all(paths):
        held.append(data)
        size += len(data)
        if size > SHARD_BYTES:
            store()
            held, size, files = [], 0, files + 1
    store()


def run_convert(paths: list[Path], out: Path) -> None:
    from shards import convert

    convert(str(paths[0].parent.parent), str(out), compression=None, workers=2, quiet=True)


def run_mdswriter(paths: list[Path], out: Path) -> None:
    from streaming import MDSWriter

    columns = {"file_name": "str", "image": "jpeg", "label": "str"}
    with MDSWriter(columns=columns, out=str(out), size_limit=SHARD_BYTES) as writer:
        for path, data in zip(paths, read_all(paths), strict=True):
            writer.write({"file_name": path.name, "image": data, "label": path.parent.name})


def measure_jpegs(folder: Path, files: int, rounds: int) -> dict[str, Any]:
    """Rates and ratios of the contenders over a folder of JPEGs."""
    total = make_jpegs(folder / "in", files)
    paths = sorted((folder / "in").glob("*/*"))
    halves = [paths[: files // 2], paths[files // 2 :]]
    best: dict[str, tuple[float, float]] = {}
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as pool:
        list(pool.map(time.sleep, [0.1, 0.1]))

        def in_two(out: Path, sha256: bool) -> float:
            jobs = [pool.submit(_cpu, run_bare, half, out / str(i), sha256) for i, half in enumerate(halves)]
            return sum(job.result() for job in jobs)

        def alone(work: Callable[..., None], *options: Any) -> Callable[[Path], float]:
            def run(out: Path) -> float:
                work(paths, out, *options)
                return 0.0

            return run

        found: dict[str, Callable[[Path], float]] = {
            "bare ×1": alone(run_bare, False),
            "bare ×2": partial(in_two, sha256=False),
            "floor ×1": alone(run_bare, True),
            "floor ×2": partial(in_two, sha256=True),
            "convert ×2": alone(run_convert),
        }
        with contextlib.suppress(ImportError):
            import streaming  # noqa: F401

            found["mdswriter ×1"] = alone(run_mdswriter)
        for _ in range(rounds):
            for name, work in found.items():
                used = _timed(partial(work, folder / "out"), folder / "out")
                best[name] = min(best.get(name, used), used)
                print(f"{name:14} {used[0]:7.2f} s  {used[1]:7.2f} s of CPU", file=sys.stderr)
    rate = {name: total / seconds / 1e6 for name, (seconds, _) in best.items()}
    return {
        "files": files,
        "bytes": total,
        "seconds": {name: round(seconds, 2) for name, (seconds, _) in best.items()},
        "cpu_seconds": {name: round(cpu, 2) for name, (_, cpu) in best.items()},
        "mb_per_second": {name: round(value) for name, value in rate.items()},
        "ratios": {
            f"convert ×2 / {name}": round(rate["convert ×2"] / value, 2)
            for name, value in rate.items()
            if not name.startswith("convert")
        },
    }


def measure_plan(folder: Path, files: int) -> dict[str, Any]:
    """What planning a folder of very many small files takes."""
    for number in range(files):
        if number % _A_FOLDER == 0:
            below = folder / f"{number // _A_FOLDER:05d}"
            below.mkdir(parents=True)
        (below / f"{number:08d}.jpg").write_bytes(_TINY)
    done = subprocess.run(
        [sys.executable, "-c", _PLAN, str(folder)], capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measure_memory(folder: Path, mib: int) -> dict[str, dict[str, int]]:
    """Peak memory of `convert` at two sizes, in MiB: of its process and of the largest worker."""
    found = {}
    for size in (mib // 10, mib):
        for kind in ("tokens", "jpegs"):
            source = folder / f"{kind}-{size}"
            source.mkdir()
            if kind == "tokens":
                make_corpus(source, size)
            else:
                make_jpegs(source, size * (1 << 20) // _JPEG_BYTES)
            for compression in ("zstd:3", ""):
                name = f"{size} MiB of {kind}, {compression or 'raw'}"
                found[name] = _peaks(source, folder / "out", compression)
                print(f"{name}: {found[name]}", file=sys.stderr)
                shutil.rmtree(folder / "out")
            shutil.rmtree(source)
    return found


def _peaks(source: Path, out: Path, compression: str) -> dict[str, int]:
    """Run `convert` and look at its memory, and at that of its workers, until it ends."""
    process = subprocess.Popen([sys.executable, "-c", _CONVERT, str(source), str(out), compression])
    peaks: dict[int, int] = {}
    while process.poll() is None:
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            for pid in (process.pid, *map(int, children)):
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                peak = next((line for line in lines if line.startswith("VmHWM:")), None)
                if peak is not None:
                    peaks[pid] = int(peak.split()[1]) >> 10
        time.sleep(0.01)
    assert process.returncode == 0
    main = peaks.pop(process.pid)
    return {"main": main, "worker": max(peaks.values(), default=0), "workers": len(peaks)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", type=int, default=20_000, help="JPEGs in the folder (default: 20000)")
    parser.add_argument("--million", type=int, default=1_000_000, help="files to plan (default: 1000000)")
    parser.add_argument("--memory", type=int, default=2048, help="MiB of the larger corpus (default: 2048)")
    parser.add_argument("--rounds", type=int, default=2, help="rounds; the best counts (default: 2)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="bench-shard-") as temporary:
        folder = Path(temporary)
        if options.files:
            report["jpegs"] = measure_jpegs(folder / "jpegs", options.files, options.rounds)
            shutil.rmtree(folder / "jpegs")
        if options.memory:
            report["memory"] = measure_memory(folder, options.memory)
        if options.million:
            report["plan"] = measure_plan(folder / "million", options.million)
    print(json.dumps(report, indent=1) if options.json else _text(report))


def _text(report: dict[str, Any]) -> str:
    lines = []
    if "jpegs" in report:
        found = report["jpegs"]
        lines.append(f"{found['files']:,} JPEGs, {found['bytes'] / 1e6:.0f} MB")
        for name, rate in found["mb_per_second"].items():
            lines.append(f"  {name:14} {rate:6} MB/s {found['cpu_seconds'][name]:7.2f} s of CPU")
        lines += [f"  {name:28} {ratio:5.2f}" for name, ratio in found["ratios"].items()]
    for name, peaks in report.get("memory", {}).items():
        lines.append(f"{name:28} {peaks['main']:5} MiB, a worker {peaks['worker']:5} MiB")
    if "plan" in report:
        found = report["plan"]
        lines.append(
            f"{found['files']:,} files: {found['tasks']:,} tasks in {found['seconds']} s, "
            f"{found['cpu_seconds']} s of CPU, {found['peak_mib']} MiB"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
