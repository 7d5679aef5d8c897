"""A dataset's state: a few scalars that say where it stands, and a fingerprint of what it stands in.

    {"epoch", "sample_in_epoch", "num_canonical_nodes", "shuffle_seed", "initial_physical_nodes",
     "datasync": {"version", "global_batch_size", "dataset", "mixture", "epoch_size", …}}

The first five keys are those of MosaicML Streaming, with its meaning. `sample_in_epoch` counts samples that
were consumed, of all ranks; an epoch that is over is the beginning of the next one. Loading is a seek. A
state that was saved over other data or in another order is refused with the names of what differs
(invariant 5).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from datasync.errors import FormatError, UsageError

VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """What a position means something in. Each field is named in the error when it differs.

    Args:
        dataset (str): Digest over the fingerprints of the streams' indexes.
        mixture (str): Digest over what each stream gives in each phase, and how its part is sampled.
        epoch_size (int): Samples of an epoch.
        shuffle (bool): Whether samples are permuted.
        shuffle_algo (str): By which algorithm.
        shuffle_block_size (int | None): In which blocks.
        batching_method (str): How batches are composed.
        batch (int | None): The batch size, where the composition of batches depends on it.
    """

    dataset: str
    mixture: str
    epoch_size: int
    shuffle: bool
    shuffle_algo: str
    shuffle_block_size: int | None
    batching_method: str
    batch: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A position with its fingerprint.

    Args:
        epoch (int): The epoch.
        sample_in_epoch (int): Samples consumed of it.
        lanes (int): Canonical lanes.
        seed (int): The shuffle seed.
        initial_nodes (int): Nodes that the run began with; only MosaicML's partitioning depends on it.
        global_batch (int): Samples of a global batch when the state was saved.
        fingerprint (Fingerprint | None): None for a state of MosaicML Streaming.
    """

    epoch: int
    sample_in_epoch: int
    lanes: int
    seed: int
    initial_nodes: int
    global_batch: int
    fingerprint: Fingerprint | None

    def to_dict(self) -> dict[str, Any]:
        """As it is saved: nothing but numbers, strings and one nested mapping."""
        assert self.fingerprint is not None
        return {
            "epoch": self.epoch,
            "sample_in_epoch": self.sample_in_epoch,
            "num_canonical_nodes": self.lanes,
            "shuffle_seed": self.seed,
            "initial_physical_nodes": self.initial_nodes,
            "datasync": {
                "version": VERSION,
                "global_batch_size": self.global_batch,
                **asdict(self.fingerprint),
            },
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> State:
        """Read a saved state, ours or MosaicML's.

        Raises:
            FormatError: A key is missing or has a value that cannot be, or it comes from a newer version.
        """
        if not isinstance(state, Mapping):
            raise FormatError(f"{state!r} is no state of a dataset", mend="load what state_dict() returned")
        ours = state.get("datasync")
        if ours is not None and ours.get("version") != VERSION:
            raise FormatError(
                f"the state of a dataset has version {ours.get('version')!r}, this is version {VERSION}",
                mend="use the version of datasync that saved it, or a newer one",
            )
        try:
            fields = Fingerprint.__dataclass_fields__
            fingerprint = None if ours is None else Fingerprint(**{name: ours[name] for name in fields})
            return cls(
                epoch=_count(state, "epoch"),
                sample_in_epoch=_count(state, "sample_in_epoch"),
                lanes=_count(state, "num_canonical_nodes"),
                seed=_count(state, "shuffle_seed"),
                initial_nodes=_count(state, "initial_physical_nodes", 0),
                global_batch=0 if ours is None else _count(ours, "global_batch_size"),
                fingerprint=fingerprint,
            )
        except KeyError as error:
            raise FormatError(
                f"the state of a dataset has no {error.args[0]!r}", mend="load what state_dict() returned"
            ) from None


def check_fits(saved: State, *, seed: int, own: Fingerprint, accept: Collection[str] = ()) -> None:
    """Refuse a state that was saved in another order or over other data.

    Args:
        saved (State): The state to load.
        seed (int): The seed of the dataset that loads it.
        own (Fingerprint): The fingerprint of that dataset.
        accept (Collection[str]): Names of differences that are meant.

    Raises:
        UsageError: Something else differs; the message names each with both values.
    """
    known = {"shuffle_seed", *Fingerprint.__dataclass_fields__}
    if not set(accept) <= known:
        raise UsageError(
            f"accept names {sorted(set(accept) - known)}, which a state does not have",
            mend=f"it may name {', '.join(sorted(known))}",
        )
    if saved.fingerprint is None:
        return
    pairs = {"shuffle_seed": (saved.seed, seed)}
    for name, value in asdict(saved.fingerprint).items():
        pairs[name] = (value, getattr(own, name))
    differing = [name for name, (then, now) in pairs.items() if then != now and name not in accept]
    if differing:
        listed = "; ".join(
            f"{name} was {_short(pairs[name][0])}, is {_short(pairs[name][1])}" for name in differing
        )
        raise UsageError(
            f"the saved state does not fit this dataset: {listed}",
            mend="build the dataset as it was when the state was saved, or, if the difference is meant, "
            f"load_state_dict(state, accept={differing!r})",
        )


def digest(*parts: object) -> str:
    """32 hexadecimal digits of SHA-256 over values that JSON can hold."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _count(state: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value: Any = state[key] if default is None else state.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not hasattr(value, "__index__") or value < 0:
        raise FormatError(
            f"the state of a dataset has {key} = {value!r}, which is no count",
            mend="load what state_dict() returned",
        )
    return int(value)


def _short(value: object) -> str:
    text = repr(value) if not isinstance(value, str) else value
    return text if len(text) <= 12 else f"{text[:12]}…"
