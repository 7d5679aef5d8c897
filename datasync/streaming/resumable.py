"""Where a dataset stands, said and heard: `state_dict`, `load_state_dict` and what they are made of.

The position is in `Position`, which a rank shares with its workers; what it means something in is the
`Fingerprint` of data, mixture and order. A state holds both, and loading compares them (invariant 5).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Any, cast

from datasync.errors import UsageError
from datasync.streaming import arguments
from datasync.streaming.agreement import check_agreement
from datasync.streaming.catalog import Catalog
from datasync.streaming.epoch import EpochOrder
from datasync.streaming.iteration import generation_of, iterates_itself
from datasync.streaming.position import Position
from datasync.streaming.state import Fingerprint, State, check_fits, digest
from datasync.streaming.stream import Stream
from datasync.streaming.world import World, refuse_division

if TYPE_CHECKING:
    from datasync.streaming.dataset import StreamingDataset


class Resumable:
    """The part of a `StreamingDataset` that knows where it stands. What it reads of the rest is declared."""

    streams: list[Stream]
    catalog: Catalog
    epoch_size: int
    batch_size: int | None
    batching_method: str
    sampling_method: str
    sampling_granularity: int
    shuffle: bool
    shuffle_algo: str
    shuffle_seed: int
    shuffle_block_size: int | None
    curriculum: arguments.Curriculum | None
    tail: str
    drop_last: bool
    _position: Position
    _world: World

    if TYPE_CHECKING:

        @property
        def global_batch(self) -> int | None: ...

        @property
        def lanes(self) -> int: ...

        def epoch_order(self, epoch: int) -> EpochOrder: ...

        def meet_world(self) -> None: ...

    def __repr__(self) -> str:
        name = type(self).__name__
        if "_position" not in self.__dict__:
            return f"<{name}, not open>"
        names = [stream.name for stream in self.streams]
        streams = ", ".join(names if len(names) < 4 else [*names[:2], f"{len(names) - 2} more streams"])
        batches = f"global batches of {self.global_batch:,}" if self.global_batch else "no batch size yet"
        order = (
            f"shuffled ({self.shuffle_algo}, seed {self.shuffle_seed})" if self.shuffle else "not shuffled"
        )
        epoch, sample, begun = self._position.current()
        return (
            f"<{name} {streams}: {self.catalog.samples:,} samples in {self.catalog.shards:,} shards; "
            f"epochs of {self.epoch_size:,}, {batches}, {order}; "
            f"rank {self._world.rank} of {self._world.ranks}; "
            f"{'in' if begun else 'before'} epoch {epoch}{f' from sample {sample:,} on' if sample else ''}>"
        )

    @property
    def loaded_lanes(self) -> int:
        """Canonical lanes of a loaded state; 0 for none."""
        return self._position.lanes

    @property
    def loaded_nodes(self) -> int:
        """Nodes that the run of a loaded state began with; 0 for unknown."""
        return self._position.initial_nodes

    @property
    def position_serial(self) -> int:
        """A number that changes whenever an epoch is begun or a position is loaded."""
        return self._position.serial

    @property
    def next_epoch(self) -> int:
        """The epoch that the next iteration will be."""
        return self._position.next_epoch

    @next_epoch.setter
    def next_epoch(self, epoch: int) -> None:
        self._position.set_next_epoch(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be this epoch, for loops that count epochs themselves, as Accelerate's.

        A loaded position stands: it is taken to be in the epoch that the loop names first.

        Raises:
            UsageError: The loop is one of Accelerate's that would leave samples out.
        """
        self.meet_world()
        refuse_division(self, self._world)
        self._position.name_epoch(epoch)

    def state_dict(self, num_samples: int = 0, from_beginning: bool = False) -> dict[str, Any]:
        """Where this dataset stands; small, and made of plain values.

        Args:
            num_samples (int): Samples that all ranks together have consumed: of this epoch, or since it was
                entered (in the middle, if a position was loaded). Repeats by `replication` count once.
            from_beginning (bool): Whether they count from the beginning of the epoch.
        """
        if num_samples < 0:
            raise UsageError(f"`num_samples` is {num_samples}", mend="give the samples consumed, 0 or more")
        epoch, offset, begun = self._position.current()
        consumed = num_samples if from_beginning else offset + num_samples
        if begun and self.is_over(epoch, consumed):
            epoch, consumed = epoch + 1, 0
        state = self._state(epoch, consumed)
        this = cast("StreamingDataset", self)
        in_worker = generation_of(this, count=False) is not None
        read = this.samples_read if begun or not in_worker else 0
        if num_samples == 0 and iterates_itself(this) and (in_worker or read):
            # For loaders that keep the dataset's state in each worker (torchdata), and its iterator's if that
            # has one, which that of a user's `__iter__` has not.
            state["datasync"]["read"] = read
        return state

    def state_behind_epoch(self) -> dict[str, Any]:
        """The state when all of the epoch in progress was given: the beginning of the next one."""
        epoch, _, begun = self._position.current()
        return self._state(epoch + begun, 0)

    def _state(self, epoch: int, sample_in_epoch: int) -> dict[str, Any]:
        return State(
            epoch=epoch,
            sample_in_epoch=sample_in_epoch,
            lanes=self._lanes_of_state(),
            seed=self.shuffle_seed,
            initial_nodes=self._position.initial_nodes or self._world.nodes,
            global_batch=self.global_batch or 0,
            fingerprint=self._fingerprint(),
        ).to_dict()

    def load_state_dict(self, obj: dict[str, Any], *, accept: Collection[str] = ()) -> None:
        """Let the next iteration begin where `obj` says.

        Args:
            obj (dict[str, Any]): From `state_dict`; MosaicML's if `shuffle_algo` is one of its own.
            accept (Collection[str]): Names of differences from the saved dataset that are meant.

        Raises:
            UsageError: The state was saved over other data or in another order; each difference is named.
        """
        this = cast("StreamingDataset", self)
        read = obj.get("datasync", {}).get("read") if isinstance(obj, dict) else None
        if generation_of(this, count=False) is not None:
            # A worker's place is that of its iterator, see Samples.load_state_dict, if that has one.
            if read is not None:
                this.skip_read(obj)
            return
        state = self._fitting(obj, accept)
        self._check_place(state)
        seek = partial(self._position.seek, lanes=state.lanes, nodes=state.initial_nodes)
        seek(state.epoch, state.sample_in_epoch)
        if state.sample_in_epoch and self.is_over(state.epoch, state.sample_in_epoch):
            seek(state.epoch + 1, 0)
        if read is not None:
            this.skip_read(obj)
        if state.global_batch and self.global_batch and state.global_batch != self.global_batch:
            arguments.log.warning(
                "the global batch was %d samples when the state was saved and is %d now: "
                "the sequence of samples goes on unchanged, in batches of the new size",
                state.global_batch,
                self.global_batch,
            )

    def enter(self, obj: dict[str, Any], *, epoch: int, offset: int) -> None:
        """Note that an epoch is in progress, in the order of a saved state; refuses what does not fit."""
        self._position.enter(epoch, offset, lanes=self._fitting(obj, ()).lanes)

    def _fitting(self, obj: dict[str, Any], accept: Collection[str]) -> State:
        """A saved state, if it is one of this dataset in this order."""
        state = State.from_dict(obj)
        if state.fingerprint is None:
            if self.shuffle_algo == arguments.OUR_ALGORITHM and "shuffle_algo" not in accept:
                raise UsageError(
                    "the state is one of MosaicML Streaming, whose order this dataset does not have",
                    mend="go on in its order with shuffle_algo='py1e' (or what it was), "
                    "or start the epoch anew without loading",
                )
            self.shuffle_seed = state.seed
        check_fits(state, seed=self.shuffle_seed, own=self._fingerprint(), accept=accept)
        return state

    def is_over(self, epoch: int, consumed: int) -> bool:
        """Whether no batch is left of an epoch behind its first `consumed` samples.

        With MosaicML's algorithms that is known where the epoch is begun, not before: it may be longer than
        its size, or shorter.
        """
        if self.shuffle_algo != arguments.OUR_ALGORITHM:
            return False
        if self.global_batch is None:
            return consumed >= self.epoch_size
        rest = self.epoch_order(epoch).samples - consumed
        return rest <= 0 or (rest < self.global_batch and self._leaves_out(rest))

    def _check_place(self, state: State) -> None:
        """Refuse a place behind the epoch by more than a batch: so many may its last one have repeated."""
        most = self.epoch_size + max(self.global_batch or 0, state.global_batch)
        if self.shuffle_algo == arguments.OUR_ALGORITHM and state.sample_in_epoch > most:
            raise UsageError(
                f"the saved state stands behind {state.sample_in_epoch:,} samples of an epoch "
                f"of {self.epoch_size:,}",
                mend="load what state_dict() returned; num_samples are those of one epoch",
            )

    def pass_over(self, epoch: int) -> None:
        """Note that nothing was left of an epoch that was begun, so that the next one is in progress."""
        self._position.skip(epoch)

    def _leaves_out(self, rest: int) -> bool:
        """Whether the `rest` samples behind the last full batch of an epoch are left out."""
        if self.tail == "drop" or not self.drop_last or self.batching_method == "device_per_stream":
            return self.tail == "drop"
        assert self.global_batch is not None
        return ceil(rest / self._world.ranks) < ceil(self.global_batch / self._world.ranks)

    def _agree(self) -> bool:
        """Refuse to read other data, or in another order, than other ranks; False if they cannot be asked."""
        name = digest([[stream.name, stream.split] for stream in self.streams])
        return check_agreement(name, {"shuffle_seed": self.shuffle_seed, **asdict(self._fingerprint())})

    def _lanes_of_state(self) -> int:
        if self.shuffle_algo == arguments.OUR_ALGORITHM:
            return self.lanes
        from datasync.streaming.mosaic import canonical_nodes

        return canonical_nodes(cast("StreamingDataset", self), self._world)

    def _fingerprint(self) -> Fingerprint:
        chosen = [stream.choose for stream in self.streams]
        theirs = self.shuffle_algo != arguments.OUR_ALGORITHM
        shares = [stream.proportion for stream in self.streams] if theirs else []
        batch = self.global_batch
        depends = {
            "stratified": batch,
            "per_stream": batch,
            "device_per_stream": None if batch is None else batch // self._world.ranks,
        }
        return Fingerprint(
            dataset=digest([source.index.fingerprint for source in self.catalog.sources]),
            mixture=digest(chosen, self.curriculum, self.sampling_method, self.sampling_granularity, *shares),
            epoch_size=self.epoch_size,
            shuffle=self.shuffle,
            shuffle_algo=self.shuffle_algo,
            shuffle_block_size=self.shuffle_block_size,
            batching_method=self.batching_method,
            batch=depends.get(self.batching_method),
        )
