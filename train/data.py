"""The stream that feeds the model, and the place in it.

    StreamingDataset ─► sample {image, caption, …} ─► [workers: Collate] ─► this rank's microbatches

Step t takes samples [tB, (t+1)B) of the epoch's global order, cut into equal contiguous shares, one a rank;
so the samples of a step, and with fixed microbatches each microbatch, are the same on any number of ranks.
The place is a count of batches drawn and the stream's own few numbers: going to it is a seek.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from datasync import Stream, StreamingDataLoader, StreamingDataset
from shards.errors import UsageError
from shards.index import Index, ShardInfo
from shards.progress import format_count
from train.config import Config, DataConfig, StreamConfig
from train.distributed import Team
from train.documents import Batch, Collate, Encoder
from train.signals import ignore_in_worker

if TYPE_CHECKING:
    from datasync.streaming.fetch import ShardSource

log = logging.getLogger("train")


@dataclass(frozen=True, slots=True)
class Share:
    """This rank's part of one step.

    Args:
        number (int): The step's batch in the stream, counted from 0 through all epochs.
        epoch (int): Its epoch.
        batches (list[Batch]): Microbatches.
        wait_s (float): Seconds that we stood still for it.
    """

    number: int
    epoch: int
    batches: list[Batch]
    wait_s: float

    @property
    def valid(self) -> int:
        """Targets in this share."""
        return sum(batch.valid for batch in self.batches)

    @property
    def positions(self) -> int:
        """Positions that go through the model, padding and all."""
        return sum(batch.tokens.numel() for batch in self.batches)

    @property
    def ids(self) -> list[str]:
        """Ids of its samples."""
        return [name for batch in self.batches for name in batch.ids]

    @property
    def ledger(self) -> int:
        """A sum over hashes of the ids, below 2**48: adding those of all ranks gives the same on any
        ranks."""
        return sum(
            int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest()) for name in self.ids
        )


@dataclass(frozen=True, slots=True)
class Drawn:
    """A batch as it comes out of the stream, and the place behind it."""

    number: int
    epoch: int
    batches: list[Batch]
    place: dict[str, Any]


def in_background(work: Callable[[], Drawn]) -> Future[Drawn]:
    """Do it in a thread that nothing waits for at the end of the process."""
    future: Future[Drawn] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is asked for
            future.set_exception(error)

    threading.Thread(target=run, name="next batch", daemon=True).start()
    return future


class Feed:
    """Batches for ever, from a place that can be saved and loaded.

    Without DataLoader workers a thread draws the next batch while the step runs. What was drawn ahead is not
    consumed: the place is behind the last batch that was handed out.

    Args:
        config (Config): Its `data` section.
        team (Team): Which share of each batch is ours.
        encoder (Encoder): Samples to tokens.
        pieces (int): Microbatches of a step.
    """

    def __init__(self, config: Config, team: Team, encoder: Encoder, pieces: int) -> None:
        self.skipped: set[int] = set()
        self.device, self.workers = team.device, config.data.workers
        self.dataset = open_dataset(config)
        check_columns(config.data, [source.index.columns for source in self.dataset.catalog.sources])
        if self.dataset.is_over(0, 0):
            raise UsageError(
                f"the dataset has {self.dataset.epoch_size} samples, fewer than data.batch_size "
                f"= {self.dataset.global_batch}",
                mend='lower data.batch_size, or set data.uneven = "pad"',
            )
        self.loader = StreamingDataLoader(
            self.dataset,
            num_workers=self.workers,
            collate_fn=Collate(encoder, pieces, config.data.pack),
            pin_memory=team.device.type == "cuda",
            worker_init_fn=ignore_in_worker,
            generator=torch.Generator(),  # the model's random numbers are not the loader's to draw
        )
        self._batches: Iterator[dict[str, Any]] | None = None
        self._number = self._epoch = 0
        self._ahead: Future[Drawn] | None = None
        self._place = self._reached()

    def next(self, *, more: bool = True) -> Share:
        """The next batch that is not to be left out; `more` says that another one will be asked for.

        Raises:
            UsageError: The dataset holds less than one batch.
        """
        started = time.perf_counter()
        while True:
            drawn = self._draw() if self._ahead is None else self._ahead.result()
            self._ahead = in_background(self._draw) if more and not self.workers else None
            self._place = drawn.place
            if drawn.number not in self.skipped:
                return Share(drawn.number, drawn.epoch, drawn.batches, time.perf_counter() - started)
            left_out = sum(batch.samples for batch in drawn.batches)
            log.warning("batch %d left out, as decided before: %d samples", drawn.number, left_out)

    def _draw(self) -> Drawn:
        if self.device.type == "cuda":  # each thread has a current device of its own
            torch.cuda.set_device(self.device)
        for _ in range(2):
            if self._batches is None:
                self._batches = iter(self.loader)
            made = next(self._batches, None)
            if made is not None:
                self._number += 1
                return Drawn(self._number - 1, self._epoch, made["batches"], self._reached())
            self._batches, self._epoch = None, self._epoch + 1
        raise UsageError("two epochs in a row had no batch", mend="look at the dataset: datasync inspect")

    def _reached(self) -> dict[str, Any]:
        return {"number": self._number, "epoch": self._epoch, "loader": self.loader.state_dict()}

    def state(self) -> dict[str, Any]:
        """The place of the next batch."""
        return self._place

    def load(self, state: Mapping[str, Any], accept: Sequence[str] = ()) -> None:
        """Go to a place; the stream refuses one of another dataset or order, but for the differences in
        `accept`."""
        self.close()
        self._number, self._epoch, self._place = state["number"], state["epoch"], dict(state)
        if state["loader"] is not None:
            try:
                names = [name for name in accept if "." not in name]  # the others are keys of the config
                self.loader.load_state_dict(dict(state["loader"]), accept=names)
            except UsageError as error:
                raise UsageError(
                    error.message,
                    mend="train on the data the run began with, or go on with what differs: --accept NAME",
                ) from error

    def close(self, timeout_s: float | None = None) -> None:
        """Give up what was drawn ahead, when it is there."""
        if self._ahead is not None:
            wait([self._ahead], timeout_s)
        self._batches = self._ahead = None

    def describe(self) -> list[dict[str, Any]]:
        """What each dataset is: for the run folder."""
        return describe(self.dataset)


def open_dataset(config: Config) -> StreamingDataset:
    """The training stream that the config names."""
    data = config.data
    options: dict[str, Any] = {
        "global_batch_size": data.batch_size,
        "uneven": True,
        "shuffle": data.shuffle,
        "shuffle_seed": config.run.seed,
        "cache_limit": data.cache_limit or None,
        "tail": data.uneven,
        "sample_ids": True,
    }
    streams = [open_stream(config, source, held=False) for source in sources_of(data)]
    return StreamingDataset(streams=streams, **options)


def sources_of(data: DataConfig) -> Sequence[StreamConfig]:
    """The streams of a run: those of the mixture, or the one dataset."""
    return data.streams or (StreamConfig(remote=data.remote, split=data.split),)


def open_stream(config: Config, source: StreamConfig, *, held: bool) -> Stream:
    """One dataset: what is trained on, or with `held` what `eval.holdout` keeps back."""
    return Side(
        config.eval.holdout,
        held,
        remote=source.remote,
        local=source.local or str(cache_folder(config, source.remote)),
        split=source.split or None,
        **({"proportion": source.proportion} if source.proportion and not held else {}),
    )


class Side(Stream):
    """A dataset without the share that is held out, or that share; all of it where that is 0."""

    def __init__(self, share: float, held: bool, **options: Any) -> None:
        super().__init__(**options)
        self.share, self.held = share, held

    def source(self, **options: Any) -> ShardSource:
        """The shards of this side."""
        whole = super().source(**options)
        if not self.share:
            return whole
        index = side(whole.index, self.share, held=self.held, name=self.name)
        whole.close()
        return super().source(index=index, **options)


def side(index: Index, share: float, *, held: bool, name: str) -> Index:
    """The shards of a dataset that are held out, or the others.

    A shard is held out if the hash of its content falls below `share`, so it stays on its side when the
    dataset grows; where none does, the one with the lowest hash.

    Raises:
        UsageError: Nothing would be left to train on.
    """

    def height(info: ShardInfo) -> float:
        what = sorted(info.stored.hashes.items()) or info.stored.basename
        return int.from_bytes(hashlib.sha256(repr(what).encode()).digest()[:8]) / 2**64

    heights = [height(info) for info in index.shards]
    lowest = min(heights, default=0.0)
    out = [at < share or at == lowest for at in heights]
    if all(out):
        raise UsageError(
            f"eval.holdout = {share} leaves nothing of {name} to train on: "
            f"it has {format_count(len(out), 'shard')}",
            mend="write it with smaller shards (datasync shard --size-limit), or split it (--split)",
        )
    return Index(
        (info for info, is_out in zip(index.shards, out, strict=True) if is_out == held), index.extra
    )


def check_columns(data: DataConfig, streams: Sequence[Mapping[str, str]]) -> None:
    """Refuse a column that is not there before anything is computed, rather than train without it.

    Args:
        data (DataConfig): Names the columns.
        streams (Sequence[Mapping[str, str]]): Column -> encoding, of each stream.

    Raises:
        UsageError: A stream has no text, or no stream has an image or audio column that the config names.
    """
    for columns in streams:
        if data.text not in columns and data.tokens not in columns:
            raise UsageError(
                f"data.text: the dataset has no column {data.text!r}; it has {', '.join(columns)}",
                mend="set data.text (or data.tokens) to the column that holds the text",
            )
    have = sorted({name for columns in streams for name in columns})
    for key, named in (("image", data.image), ("audio", data.audio)):
        usual = DataConfig.__dataclass_fields__[key].default  # not named: samples may be text alone
        if named != usual and named and named not in have:
            raise UsageError(
                f"data.{key}: the dataset has no column {named!r}; it has {', '.join(have)}",
                mend=f'name the column, or set data.{key} = "" to train without',
            )


def open_fixed(config: Config) -> StreamingDataset:
    """The samples of `eval`, in their own order."""
    e = config.eval
    if e.remote and not e.holdout:
        sources: Sequence[StreamConfig] = [StreamConfig(remote=e.remote, split=e.split)]
    else:
        sources = [replace(source, split=e.split or source.split) for source in sources_of(config.data)]
    streams = [open_stream(config, source, held=True) for source in sources]
    return StreamingDataset(streams=streams, shuffle=False, batch_size=1, sample_ids=True)


def fixed_samples(dataset: StreamingDataset, count: int) -> list[int]:
    """Numbers of `count` samples, evenly spread over the set; all of them for 0."""
    count = min(count or dataset.size, dataset.size)
    return [i * dataset.size // count for i in range(count)]


def cache_folder(config: Config, remote: str) -> Path:
    """Where the shards of one dataset are cached, by default in the run folder."""
    root = Path(config.data.cache) if config.data.cache else Path(config.run.dir) / "cache"
    return root / hashlib.sha256(remote.encode()).hexdigest()[:12]


def describe(dataset: StreamingDataset) -> list[dict[str, Any]]:
    """Each stream's place, version, fingerprint and number of samples."""
    out = []
    for first, samples in zip(dataset.sample_offset_per_stream, dataset.samples_per_stream, strict=True):
        found = dataset.where(int(first))
        kept = {key: found[key] for key in ("dataset", "version", "fingerprint")}
        out.append({**kept, "samples": int(samples)})
    return out


def receipts(dataset: StreamingDataset) -> list[Any]:
    """The receipt of each stream's version at the store it is read from; None where there is none."""
    from datasync.errors import StoreError

    out: list[Any] = []
    for stream, described in zip(dataset.streams, describe(dataset), strict=True):
        try:
            store, *_ = stream.replicas()
            out.append(json.loads(store.read(f"_datasync/receipts/{described['version']}.json")))
        except (StoreError, ValueError):
            out.append(None)
    return out
