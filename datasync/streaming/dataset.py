"""`StreamingDataset`: samples streamed from replicas through a local cache, in an order that nothing changes.

    arguments ─► streams, weights ─► EpochOrder (order.py, epoch.py): numbers ─► (stream, shard, row)
    iteration ─► Position: which epoch ─► Plan: this worker's batches ─► ShardSource: verified shards ─►
    values
    state     ─► Resumable (resumable.py)

Takes what MosaicML Streaming 0.13 takes, with the same meaning; what we add is marked in the docstring.
Nothing here grows with the number of samples. Workers need no more than a copy of this object; what they
agree on is in `Position`.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from math import ceil
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from datasync.errors import UsageError
from datasync.streaming import arguments
from datasync.streaming.array import Array
from datasync.streaming.catalog import Catalog, Shards, Spanner
from datasync.streaming.epoch import EpochOrder, EpochSettings, check_ranks, piece_bounds
from datasync.streaming.iteration import Samples, generation_of
from datasync.streaming.order import SHARDS_HELD, OrderSettings, default_lanes
from datasync.streaming.permute import Ints
from datasync.streaming.plan import LanePlan, ListPlan, Plan
from datasync.streaming.position import Position
from datasync.streaming.resumable import Resumable
from datasync.streaming.sizes import parse_bytes, parse_count
from datasync.streaming.stats import Stats
from datasync.streaming.stream import Remote, Stream, apply_weights, streams_registry, validate_weights
from datasync.streaming.world import World
from shards.progress import format_bytes


class _Stats(Stats):
    """Counters that can also be called: `dataset.stats()` is their sum over all workers."""

    def __call__(self) -> dict[str, int | float]:
        return self.total()


class StreamingDataset(Resumable, Array, IterableDataset[dict[str, Any]]):
    """An iterable PyTorch dataset over one or more streams; also indexable.

    Give `streams`, or `remote` and/or `local`, or `dataset`.

    Args:
        streams (Sequence[Stream] | None): What to mix.
        remote (str | Sequence[str] | None): Where the dataset is; ours: several replicas, the preferred
            first.
        local (str | None): The cache folder; the dataset itself without `remote`.
        split (str | None): The split's folder below both.
        download_retry (int): Tries after the first.
        download_timeout (float): Seconds without progress after which a download is given up.
        validate_hash (str | None): Which of the index's digests is verified. Ours: by default the cheapest
            one.
        keep_zip (bool): Keep compressed files in the cache.
        epoch_size (int | str | None): Samples of an epoch, such as ``"64M"``.
        predownload (int | None): Samples a worker fetches ahead. Default: until the end of each lane's next
            block of shards.
        cache_limit (int | str | None): Most bytes of the cache, such as ``"10gb"``.
        sampling_method (str): ``balanced`` or ``fixed``: which part of a stream an epoch uses.
        sampling_granularity (int): Samples taken from a shard at a time in a partial use.
        partition_algo (str): ``relaxed`` or ``orig``; matters with MosaicML's algorithms only.
        num_canonical_nodes (int | None): Lanes of the order. Default: the largest divisor of the global
            batch size not above 64; 1 without shuffling.
        batch_size (int | None): Samples of a rank's batch, as for the DataLoader.
        shuffle (bool): Whether to permute.
        shuffle_algo (str): ``lanes``, ours, or MosaicML's ``py1e``, ``py1br``, ``py1s``, ``py2s``,
            ``naive`` for exactly its order (needs the extra ``mosaicml``).
        shuffle_seed (int): Names the order.
        shuffle_block_size (int | None): Samples of a lane that are permuted together. Default: by shards
            held.
        batching_method (str): ``random``, ``stratified``, ``per_stream`` or ``device_per_stream``.
        allow_unsafe_types (bool): Read columns whose decoding may run code.
        replication (int | None): How many consecutive ranks get the same samples.
        stream_name (str): Which registered class of streams to make from the arguments.
        stream_config (dict[str, Any] | None): More arguments for it.
        dataset (str | None): Ours: the name of a dataset at the configured clusters.
        clusters (str | Sequence[str] | None): Ours: which of them to read from, the preferred first.
        config (str | None): Ours: the configuration file.
        version (str | None): Ours: the version to read, or its first 8 digits or more. Default: that of the
            first replica that answers.
        global_batch_size (int | None): Ours: samples of all ranks' batches, instead of `batch_size`.
        uneven (bool): Ours: allow ranks that do not divide the global batch; some get a sample more.
        tail (str): Ours: the samples that do not fill a global batch: ``pad``, ``drop``, ``uneven``,
            ``mask``.
        curriculum (Sequence | None): Ours: ``(sample, weights)`` pairs: from which sample of the epoch on
            which weights of the streams hold.
        sample_ids (bool): Ours: add a column ``sample_id``, the sample's number in the dataset (`where`).
    """

    def __init__(
        self,
        *,
        streams: Sequence[Stream] | None = None,
        remote: Remote | None = None,
        local: str | os.PathLike[str] | None = None,
        split: str | None = None,
        download_retry: int = 2,
        download_timeout: float = 60,
        validate_hash: str | None = None,
        keep_zip: bool = False,
        epoch_size: int | str | None = None,
        predownload: int | None = None,
        cache_limit: int | str | None = None,
        sampling_method: str = "balanced",
        sampling_granularity: int = 1,
        partition_algo: str = "relaxed",
        num_canonical_nodes: int | None = None,
        batch_size: int | None = None,
        shuffle: bool = False,
        shuffle_algo: str = arguments.OUR_ALGORITHM,
        shuffle_seed: int = 9176,
        shuffle_block_size: int | None = None,
        batching_method: str = "random",
        allow_unsafe_types: bool = False,
        replication: int | None = None,
        stream_name: str = "stream",
        stream_config: dict[str, Any] | None = None,
        dataset: str | None = None,
        clusters: str | Sequence[str] | None = None,
        config: str | os.PathLike[str] | None = None,
        version: str | None = None,
        global_batch_size: int | None = None,
        uneven: bool = False,
        tail: str = "pad",
        curriculum: arguments.Curriculum | None = None,
        sample_ids: bool = False,
    ) -> None:
        arguments.check_order(
            sampling_method=sampling_method,
            sampling_granularity=sampling_granularity,
            partition_algo=partition_algo,
            num_canonical_nodes=num_canonical_nodes,
            predownload=predownload,
            batch_size=batch_size,
            global_batch_size=global_batch_size,
            shuffle_algo=shuffle_algo,
            shuffle_seed=shuffle_seed,
            shuffle_block_size=shuffle_block_size,
            batching_method=batching_method,
            tail=tail,
            curriculum=curriculum,
        )
        flags = {
            "shuffle": shuffle,
            "keep_zip": keep_zip,
            "allow_unsafe_types": allow_unsafe_types,
            "uneven": uneven,
            "sample_ids": sample_ids,
        }
        for name, value in flags.items():
            arguments.check_flag(name, value)
        self.predownload = predownload
        self.sampling_method = sampling_method
        self.sampling_granularity = sampling_granularity
        self.partition_algo = partition_algo
        self.num_canonical_nodes = num_canonical_nodes
        self.batch_size = batch_size
        self.global_batch_size = global_batch_size
        self.shuffle = shuffle
        self.shuffle_algo = shuffle_algo
        self.shuffle_seed = shuffle_seed
        self.shuffle_block_size = shuffle_block_size
        self.batching_method = batching_method
        self.allow_unsafe_types = allow_unsafe_types
        self.replication = replication
        self.uneven = uneven
        self.tail = tail
        self.curriculum = curriculum
        self.sample_ids = sample_ids
        self._check_batches()

        self._world = self._detected_world()
        self.cache_limit = None if cache_limit is None else parse_bytes(cache_limit, name="`cache_limit`")
        wanted = parse_count(epoch_size, name="`epoch_size`") if epoch_size else None
        if wanted is not None and wanted < 0:
            raise UsageError(f"`epoch_size` {epoch_size} is negative", mend="give a positive number")
        self._check_world()

        if bool(streams) == bool(remote or local or dataset):
            raise UsageError(
                "`streams` and `remote`, `local` or `dataset` are both given"
                if streams
                else "nothing says what to read: there is no stream, no `remote`, `local` or `dataset`",
                mend="give streams, or one dataset",
            )
        if streams and version is not None:
            raise UsageError("`version` is that of one dataset", mend="give each stream its version")
        default = {
            "split": split,
            "download_retry": download_retry,
            "download_timeout": download_timeout,
            "validate_hash": validate_hash,
            "keep_zip": keep_zip,
        }
        if not streams:
            arguments.check_choice("stream_name", stream_name, tuple(streams_registry))
            place = {"remote": remote, "local": local, **default}
            if dataset is not None:
                place |= {"dataset": dataset, "clusters": clusters, "config": config}
            if version is not None:
                place["version"] = version
            streams = [streams_registry[stream_name](**{**(stream_config or {}), **place})]
        self.streams: list[Stream] = list(streams)
        for i, stream in enumerate(self.streams):
            if not isinstance(stream, Stream):
                raise UsageError(
                    f"streams[{i}] is a {type(stream).__module__}.{type(stream).__name__}",
                    mend="make it of datasync.Stream, which takes the same arguments",
                )
            stream.apply_default(default)
        validate_weights(self.streams)

        self.stats: Stats = _Stats()
        self._open_catalog()
        self._check_limit()
        self.epoch_size = apply_weights(self.streams, self.samples_per_stream, wanted, shuffle_seed)
        self.length = self._length()
        self._position = Position()
        self._orders: dict[int, EpochOrder] = {}
        self.drop_last = False  # set by a StreamingDataLoader that leaves short batches out
        self._read = [0]  # samples of this process's last pass
        self._serial, self._pid = -1, os.getpid()  # of the position then, and which process it was
        self._resumed: dict[str, Any] | None = None  # a state that says what had been read
        self._passes = 0  # of this process as a DataLoader worker
        if self.global_batch is not None and self.shuffle_algo == arguments.OUR_ALGORITHM:
            # What cannot be batched is refused here, not in a worker.
            self.epoch_order(0).check_tail(0, ranks=self._world.ranks)
        self._agreed = self._agree()

    # What there is

    def _open_catalog(self) -> None:
        catalog = self.catalog = Catalog(
            self.streams,
            cache_limit=self.cache_limit,
            allow_unsafe_types=self.allow_unsafe_types,
            stats=self.stats,
        )
        self.num_streams = len(self.streams)
        self.samples_per_stream = catalog.samples_per_stream
        self.shards_per_stream = catalog.shards_per_stream
        self.shard_offset_per_stream = catalog.first_shard
        self.sample_offset_per_stream = catalog.first_sample
        self.samples_per_shard = catalog.samples_per_shard
        self.num_shards = catalog.shards
        self.num_samples = catalog.samples

    @property
    def size(self) -> int:
        """Samples of all streams, each counted once."""
        return self.num_samples

    @property
    def shards(self) -> Shards:
        """The shards by number; asking for one opens it, and fetches it if it is not in the cache."""
        return Shards(self.catalog)

    @property
    def spanner(self) -> Spanner:
        """Sample number -> number of its shard, and its row there."""
        return Spanner(self.catalog)

    @property
    def stream_per_shard(self) -> Ints:
        """Which stream each shard is of."""
        return np.repeat(np.arange(self.num_streams), self.shards_per_stream)

    @property
    def sample_offset_per_shard(self) -> Ints:
        """Number of the first sample of each shard."""
        return self.catalog.bounds[:-1]

    def prepare_shard(self, shard_id: int, blocking: bool = True) -> None:
        """Fetch a shard if it is not in the cache, or let it be fetched while the caller goes on."""
        if blocking:
            self.catalog.open(shard_id)
        else:
            self.catalog.prefetch(shard_id)

    @property
    def initial_physical_nodes(self) -> int | None:
        """Nodes that the run began with, where a state that was loaded says so."""
        return self._position.initial_nodes or None

    def __len__(self) -> int:
        """Samples of an epoch on this rank, for the DataLoader."""
        self.meet_world()
        return self.length

    def get_item(self, sample_id: int, retry: int = 7) -> Any:
        """The sample of this number in the dataset, fetched if it is not in the cache."""
        return self.catalog.read(sample_id)

    def where(self, sample_id: int) -> dict[str, Any]:
        """Which stream, dataset, version, shard and row a sample number means.

        Raises:
            IndexError: There is no such sample.
        """
        if not 0 <= sample_id < self.size:
            raise IndexError(f"there are {self.size} samples, none at {sample_id}")
        return self.catalog.describe(sample_id)

    # The order

    @property
    def global_batch(self) -> int | None:
        """Samples of all ranks' batches together; None as long as no batch size is known."""
        if self.global_batch_size is not None:
            return self.global_batch_size
        return None if self.batch_size is None else self.batch_size * self._world.ranks

    @property
    def rank_batch_size(self) -> int:
        """Samples of this rank's batch."""
        low, high = piece_bounds(self._known_batch(), self._world.rank, self._world.ranks)
        return high - low

    @property
    def lanes(self) -> int:
        """Canonical lanes of the order: of a loaded state, as asked for, or the default."""
        if self._position.lanes:
            return self._position.lanes
        if self.num_canonical_nodes is not None:
            return self.num_canonical_nodes
        return default_lanes(self._known_batch()) if self.shuffle else 1

    def epoch_order(self, epoch: int) -> EpochOrder:
        """The order of an epoch; the last two are kept."""
        settings = self._epoch_settings()
        made = self._orders.get(epoch)
        if made is None or made.settings is not settings:
            made = EpochOrder(settings, epoch)
            self._orders = {
                e: o for e, o in self._orders.items() if e == epoch - 1 and o.settings is settings
            }
            self._orders[epoch] = made
        return made

    def _epoch_settings(self) -> EpochSettings:
        """Kept as long as nothing that it depends on has changed."""
        key = (self._known_batch(), self.lanes, self.shuffle_seed)
        cached: tuple[tuple[int, int, int], EpochSettings] | None = self.__dict__.get("_settings")
        if cached is None or cached[0] != key:
            order = OrderSettings(
                seed=self.shuffle_seed,
                shuffle=self.shuffle,
                lanes=self.lanes,
                block_size=self.shuffle_block_size,
                sampling_method=self.sampling_method,
                granularity=self.sampling_granularity,
            )
            chosen = [stream.choose for stream in self.streams]
            made = EpochSettings(
                sizes=[source.index.sizes for source in self.catalog.sources],
                phases=arguments.plan_phases(chosen, self.curriculum, lanes=self.lanes),
                order=order,
                method=self.batching_method,
                global_batch=self._known_batch(),
                device_batch=max(1, self._known_batch() // self._world.ranks),
                tail=self.tail,
            )
            cached = self._settings = (key, made)
        return cached[1]

    @property
    def ranks(self) -> int:
        """Ranks that get different samples: all, divided by `replication`."""
        return self._world.ranks

    @property
    def world(self) -> World:
        """The place of this rank among those that get different samples."""
        return self._world

    def meet_world(self) -> None:
        """Look again who this process is: a launcher may have started the other ranks meanwhile.

        Lightning's own does, in `fit`. What can no longer be seen (in a spawned worker, or when
        `torch.distributed` has ended) changes nothing.

        Raises:
            UsageError: The ranks' part of `global_batch_size` was another when the dataset was made, or the
                new world cannot carry the batch.
        """
        world = self._detected_world()
        if world == self._world or world.ranks == 1:
            return
        if self.global_batch_size is not None:
            raise UsageError(
                f"the dataset was made for {self._world.ranks} ranks, and now there are {world.ranks}",
                mend="make it after the ranks have been started, or give batch_size, that of a rank",
            )
        self._world = world
        self.length = self._length()
        self._orders.clear()
        self.__dict__.pop("_settings", None)

    # Iteration

    def __iter__(self) -> Iterator[Any]:
        """This worker's samples of the next epoch, from a loaded position on; batch after batch."""
        return self.samples()

    def samples(self, *, batches: bool = False, packs: bool = False, files: Collection[str] = ()) -> Samples:
        """Begin the next epoch, or join the one that this DataLoader's other workers have begun.

        See `Samples` for what the arguments mean.
        """
        self.meet_world()
        if self.tail == "drop" and self.epoch_size < self._known_batch():
            raise UsageError(
                f"an epoch of {self.epoch_size} samples has no batch of {self.global_batch}, and tail='drop' "
                "leaves out what does not fill one",
                mend="lower the batch size, raise epoch_size, or choose another tail",
            )
        generation = generation_of(self)
        if generation is None and not self._agreed:
            self._agreed = self._agree()
        resumed, self._resumed = self._resumed if self._is_mine() else None, None
        epoch, offset = self._position.begin(generation)
        if generation is not None and resumed is not None:
            epoch, offset = resumed["epoch"], resumed["sample_in_epoch"]
            self.enter(resumed, epoch=epoch, offset=offset)
        skip = 0 if resumed is None else resumed["datasync"]["read"]
        self._read, self._serial, self._pid = [skip], self._position.serial, os.getpid()
        return Samples(
            self, epoch, offset, batches=batches, packs=packs, files=files, skip=skip, read=self._read
        )

    def skip_read(self, obj: dict[str, Any]) -> None:
        """Let this process's next pass go on at a state, behind the samples that were read by then."""
        if generation_of(self, count=False) is not None:
            self.enter(obj, epoch=obj["epoch"], offset=obj["sample_in_epoch"])
        self._resumed, self._read = obj, [obj["datasync"]["read"]]
        self._serial, self._pid = self._position.serial, os.getpid()

    @property
    def samples_read(self) -> int:
        """Samples that this process has read in the pass in progress, whatever became of them."""
        return self._read[0] if self._is_mine() else 0

    def _is_mine(self) -> bool:
        """Whether what was read is of this process, and no other position was set meanwhile."""
        in_worker = generation_of(self, count=False) is not None
        return self._pid == os.getpid() and (in_worker or self._serial == self._position.serial)

    def plan(self, epoch: int, offset: int) -> Plan:
        """The batches of this worker in an epoch that is entered at sample `offset`."""
        world = self._world.with_workers()
        if self.shuffle_algo == arguments.OUR_ALGORITHM:
            order = self.epoch_order(epoch)
            order.check_tail(offset, ranks=world.ranks)
            following, over = self.epoch_order(epoch + 1), self.is_over(epoch, offset)
            return LanePlan(order, offset, world, following, over=over)
        from datasync.streaming.mosaic import rank_samples

        samples = rank_samples(self, world, epoch, offset)
        batch = self._known_batch() // self._world.ranks
        return ListPlan(
            samples[world.worker],
            bounds=self.catalog.bounds,
            first_shard=self.catalog.first_shard,
            batch=batch,
            over=max(map(len, samples)) < (batch if self.drop_last else 1),
        )

    def close(self) -> None:
        """Stop background threads and let go of open shards; iterating again starts them again."""
        self.catalog.close()

    # Helpers

    def __getstate__(self) -> dict[str, Any]:
        self.meet_world()  # a spawned worker has no way to find out
        return dict(self.__dict__)

    def _detected_world(self) -> World:
        world = World.detect()
        return world if self.replication is None else world.replicate(self.replication)

    def lookahead(self) -> int:
        """Samples of this rank to fetch ahead: as asked for, or about two blocks of every lane.

        All lanes come to their next blocks at about the same time, and then need all of its shards.
        """
        if self.predownload is not None:
            return self.predownload
        held = SHARDS_HELD * ceil(self.num_samples / max(1, self.num_shards))
        return max(8 * self.rank_batch_size, 2 * held // self._world.ranks)

    def _known_batch(self) -> int:
        if self.global_batch is None:
            raise UsageError(
                "a dataset that is iterated needs its `batch_size`: the order of batches depends on it",
                mend="pass batch_size to StreamingDataset, the same as to the DataLoader",
            )
        return self.global_batch

    def _check_batches(self) -> None:
        if (
            self.predownload is not None
            and self.batch_size is not None
            and self.predownload < self.batch_size
        ):
            arguments.log.warning(
                "predownload (%d) is less than batch_size (%d): every batch will wait",
                self.predownload,
                self.batch_size,
            )

    def _check_limit(self) -> None:
        if self.cache_limit is None or not self.shuffle:
            return
        held = min(SHARDS_HELD, self.num_shards) * self.catalog.shard_bytes()
        if self.cache_limit < held:
            arguments.log.warning(
                "cache_limit (%s) is less than the shards that this shuffle reads at a time (%s): shards are"
                " fetched again and again, and those in use stay on the disk besides",
                format_bytes(self.cache_limit),
                format_bytes(held),
            )

    def _check_world(self) -> None:
        if self.global_batch_size is not None:
            check_ranks(self.global_batch_size, self._world.ranks, uneven=self.uneven)

    def _length(self) -> int:
        if self.tail == "drop" and self.global_batch is not None:
            return self.epoch_size // self.global_batch * self.rank_batch_size
        return ceil(self.epoch_size / self._world.ranks)
