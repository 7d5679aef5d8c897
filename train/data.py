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
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shards.errors import UsageError
from train.config import Config, DataConfig, StreamConfig
from train.distributed import Team
from train.documents import Batch, Collate, Encoder
from train.signals import ignore_in_worker

if TYPE_CHECKING:
    from datasync import StreamingDataset

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


class Feed:
    """Batches for ever, from a place that can be saved and loaded.

    Args:
        config (Config): Its `data` section.
        team (Team): Which share of each batch is ours.
        encoder (Encoder): Samples to tokens.
        share (int): Samples of this rank in a step.
        micro (int): Samples of a microbatch.
    """

    def __init__(self, config: Config, team: Team, encoder: Encoder, share: int, micro: int) -> None:
        from datasync import StreamingDataLoader

        self.number = 0
        self.skipped: set[int] = set()
        self.dataset = open_dataset(config, share)
        check_columns(config.data, [source.index.columns for source in self.dataset.catalog.sources])
        self.loader = StreamingDataLoader(
            self.dataset,
            batch_size=share,
            num_workers=config.data.workers,
            collate_fn=Collate(encoder, micro, config.data.pack),
            pin_memory=team.device.type == "cuda",
            worker_init_fn=ignore_in_worker,
        )
        self._batches: Iterator[dict[str, Any]] | None = None
        self._epoch = 0

    def next(self) -> Share:
        """The next batch that is not to be left out.

        Raises:
            UsageError: The dataset holds less than one batch.
        """
        started = time.perf_counter()
        while True:
            batches = self._draw()
            number, self.number = self.number, self.number + 1
            if number not in self.skipped:
                return Share(number, self._epoch, batches, time.perf_counter() - started)
            log.warning(
                "batch %d left out, as decided before: %d samples", number, sum(b.samples for b in batches)
            )

    def _draw(self) -> list[Batch]:
        for _ in range(2):
            if self._batches is None:
                self._batches = iter(self.loader)
            drawn = next(self._batches, None)
            if drawn is not None:
                batches: list[Batch] = drawn["batches"]
                return batches
            self._batches, self._epoch = None, self._epoch + 1
        raise UsageError(
            f"the dataset holds {len(self.dataset)} samples on each rank, less than one batch",
            mend='lower data.batch_size, or set data.uneven = "pad"',
        )

    def state(self) -> dict[str, Any]:
        """The place of the next batch."""
        return {"number": self.number, "epoch": self._epoch, "loader": self.loader.state_dict()}

    def load(self, state: Mapping[str, Any], accept: Sequence[str] = ()) -> None:
        """Go to a place; the stream refuses one of another dataset or order, but for the differences in
        `accept`."""
        self._batches = None
        self.number, self._epoch = state["number"], state["epoch"]
        if state["loader"] is not None:
            try:
                names = [name for name in accept if "." not in name]  # the others are keys of the config
                self.loader.load_state_dict(dict(state["loader"]), accept=names)
            except UsageError as error:
                raise UsageError(
                    error.message,
                    mend="train on the data the run began with, or go on with what differs: --accept NAME",
                ) from error

    def describe(self) -> list[dict[str, Any]]:
        """What each dataset is: for the run folder."""
        return describe(self.dataset)


def open_dataset(config: Config, share: int) -> StreamingDataset:
    """The training stream that the config names."""
    from datasync import Stream, StreamingDataset

    data = config.data
    options: dict[str, Any] = {
        "batch_size": share,
        "shuffle": data.shuffle,
        "shuffle_seed": config.run.seed,
        "cache_limit": data.cache_limit or None,
        "tail": data.uneven,
        "sample_ids": True,
    }
    sources = data.streams or (StreamConfig(remote=data.remote, split=data.split),)
    streams = [
        Stream(
            remote=source.remote,
            local=source.local or str(cache_folder(config, source.remote)),
            split=source.split or None,
            **({"proportion": source.proportion} if source.proportion else {}),
        )
        for source in sources
    ]
    return StreamingDataset(streams=streams, **options)


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
    from datasync import Stream, StreamingDataset

    remote = config.eval.remote or config.data.remote
    split = config.eval.split or (config.data.split if not config.eval.remote else "")
    stream = Stream(remote=remote, local=str(cache_folder(config, remote)), split=split or None)
    return StreamingDataset(streams=[stream], shuffle=False, batch_size=1, sample_ids=True)


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
