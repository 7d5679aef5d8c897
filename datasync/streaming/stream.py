"""One source of samples: where its dataset is, how it is cached, and how much of it an epoch uses.

Takes what `Stream` of MosaicML Streaming 0.13 takes, with the same meaning; besides, `remote` may be a list
of replicas, and `dataset` names one of the configured clusters' datasets instead.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from datasync.config import Config
from datasync.errors import NotFoundError, UsageError
from datasync.storage import Store
from datasync.streaming.arguments import check_count, check_flag
from datasync.streaming.fetch import ShardSource
from datasync.streaming.permute import Ints
from datasync.streaming.stats import Stats
from shards.index import Index

Remote = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


class Stream:
    """A dataset from which samples are streamed; several make a mixture.

    Give `remote`, `local` or both, or `dataset`. At most one of `proportion`, `repeat` and `choose` says
    how much of it an epoch uses; all streams of a dataset use `proportion`, or none does. Arguments that
    are None take the dataset's value.

    Args:
        remote (str | Sequence[str] | None): URL or path of the dataset, or several replicas of it, the
            preferred one first; also ``cluster:name``. Default: ``None``, it is in `local`.
        local (str | None): The cache folder. Default: ``None``, one below the user's cache folder
            (``$DATASYNC_CACHE``, else ``~/.cache/datasync``).
        split (str | None): The folder of the split below `remote` and `local`.
        proportion (float | None): Share of the epoch that comes from this stream.
        repeat (float | None): How often its samples are used in an epoch.
        choose (int | None): How many samples of it an epoch uses.
        download_retry (int | None): Tries after the first.
        download_timeout (float | None): Seconds without progress after which a download is given up.
        validate_hash (str | None): Which of the index's digests is verified.
        keep_zip (bool | None): Keep compressed files in the cache.
        dataset (str | None): Name of a dataset of the configuration's clusters.
        clusters (str | Sequence[str] | None): Which clusters to read it from, the preferred one first.
            Default: every one that has it.
        config (str | None): The configuration file. Default: found in the usual places.
        version (str | None): The version of the dataset, or its first 8 digits or more: a replica that has
            another one is passed over. Default: that of the first replica that answers.

    Raises:
        UsageError: Arguments exclude each other or cannot be.
    """

    proportion: float
    repeat: float
    choose: int

    def __init__(
        self,
        *,
        remote: Remote | None = None,
        local: str | os.PathLike[str] | None = None,
        split: str | None = None,
        proportion: float | None = None,
        repeat: float | None = None,
        choose: int | None = None,
        download_retry: int | None = None,
        download_timeout: float | None = None,
        validate_hash: str | None = None,
        keep_zip: bool | None = None,
        dataset: str | None = None,
        clusters: str | Sequence[str] | None = None,
        config: str | os.PathLike[str] | None = None,
        version: str | None = None,
    ) -> None:
        self.remote = remote
        _check(split is None or isinstance(split, str), f"`split` is {split!r}", mend="give a folder's name")
        self.split = split or ""
        self.dataset = dataset
        self.clusters = [clusters] if isinstance(clusters, str) else clusters
        self.config = config
        self.version = version
        self.download_retry = download_retry
        self.download_timeout = download_timeout
        self.validate_hash = validate_hash
        self.keep_zip = keep_zip
        self._local = None if local is None else os.path.expanduser(local)
        self._check_place()
        check_count("download_retry", download_retry, least=0)
        check_flag("keep_zip", keep_zip)
        _check_number("download_timeout", download_timeout)
        _check(
            download_timeout != 0,
            "`download_timeout` is 0",
            mend="give seconds, more than 0; the default is 60",
        )
        _check(
            version is None or re.fullmatch("[0-9a-f]{8,64}", version) is not None,
            f"`version` {version!r} is not 8 to 64 hexadecimal digits",
            mend="give the version, or its beginning, as datasync inspect shows it",
        )
        weights = {"proportion": proportion, "repeat": repeat, "choose": choose}
        self.weight = {name: value for name, value in weights.items() if value is not None}
        _check(
            len(self.weight) <= 1,
            f"a stream has {' and '.join(f'`{name}`' for name in self.weight)}",
            mend="give one of them: a share of the epoch, a number of passes, or a number of samples",
        )
        for name, value in self.weight.items():
            _check_number(name, value)
            setattr(self, name, value)

    def __repr__(self) -> str:
        remotes = [_without_secrets(remote) for remote in _as_list(self.remote)]
        told: dict[str, object] = {
            "dataset": self.dataset,
            "clusters": self.clusters,
            "remote": remotes if len(remotes) > 1 else remotes[0] if remotes else None,
            "local": self._local,
            "split": self.split or None,
            "version": self.version,
            **self.weight,
        }
        given = ", ".join(f"{name}={value!r}" for name, value in told.items() if value is not None)
        return f"{type(self).__name__}({given})"

    @property
    def name(self) -> str:
        """What to call it: its dataset, its first remote or its folder."""
        remotes = _as_list(self.remote)
        return self.dataset or (os.fspath(remotes[0]) if remotes else self.local)

    @property
    def local(self) -> str:
        """The cache folder; without an argument, one of its own below the user's cache folder."""
        if self._local is None:
            self._local = str(cache_home() / self._cache_name())
        return self._local

    def apply_default(self, default: dict[str, Any]) -> None:
        """Take the dataset's values for what was not given."""
        if not (self.remote or self._local or self.dataset):
            raise UsageError(
                "a stream has neither `remote` nor `local` nor `dataset`", mend="give one of them"
            )
        self.split = self.split or default["split"] or ""
        for name in ("download_retry", "download_timeout", "validate_hash", "keep_zip"):
            if getattr(self, name) is None:
                setattr(self, name, default[name])

    def replicas(self) -> list[Store]:
        """The stores to read from, the preferred one first; none if the dataset is in `local`."""
        config = Config.load(self.config)
        if self.dataset is not None:
            clusters = self.clusters or [cluster.name for cluster in config.find_dataset(self.dataset)]
            if not clusters:
                raise NotFoundError(
                    f"no configured cluster has a dataset {self.dataset!r}",
                    mend="datasync status lists what is where; or name its clusters",
                )
            return [config.dataset_store(cluster, self.dataset) for cluster in clusters]
        return [config.resolve(os.fspath(remote)) for remote in _as_list(self.remote)]

    def source(
        self,
        *,
        cache_limit: int | None,
        limit_folders: Sequence[Path],
        allow_unsafe_types: bool,
        stats: Stats,
        index: Index | None = None,
    ) -> ShardSource:
        """The shards of this stream: all, or those of an `index` that holds some of them."""
        return ShardSource(
            replicas=self.replicas(),
            local=Path(self.local),
            index=index,
            split=self.split or None,
            cache_limit=cache_limit,
            limit_folders=limit_folders,
            validate_hash=self.validate_hash,
            signed_by=self._signed_by(),
            version=self.version,
            keep_zip=bool(self.keep_zip),
            download_retry=2 if self.download_retry is None else self.download_retry,
            download_timeout=60.0 if self.download_timeout is None else self.download_timeout,
            allow_unsafe_types=allow_unsafe_types,
            stats=stats,
        )

    def _signed_by(self) -> str | None:
        """The key that must have signed the index, where the configuration says so of this dataset."""
        config = Config.load(self.config)
        named = [self.dataset] if self.dataset is not None else []
        for remote in _as_list(self.remote):
            cluster, colon, name = os.fspath(remote).partition(":")
            if colon and cluster in config.clusters:
                named.append(name.strip("/"))
        keys = {config.datasets[name].require_signature for name in named if name in config.datasets}
        _check(
            len(keys) < 2,
            f"the replicas {', '.join(named)} must be signed by different keys, or by none",
            mend="let require_signature be the same for all of them in the configuration",
        )
        return keys.pop() if keys else None

    def _check_place(self) -> None:
        if self.dataset is not None:
            _check(not self.remote, "a stream has both `dataset` and `remote`", mend="give one of them")
        else:
            _check(
                self.clusters is None,
                "`clusters` says where a `dataset` is, and there is none",
                mend="name the dataset too, or give `remote` the places",
            )

    def _cache_name(self) -> str:
        if self.dataset is not None:
            return self.dataset
        place = "\0".join(os.fspath(remote) for remote in _as_list(self.remote))
        return hashlib.blake2s(place.encode(), digest_size=16).hexdigest()


def cache_home() -> Path:
    """The folder that holds a user's caches: ``$DATASYNC_CACHE``, or ``datasync`` in the XDG cache folder."""
    named = os.environ.get("DATASYNC_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "datasync" / "shards"


def validate_weights(streams: Sequence[Stream]) -> bool:
    """Whether streams are weighted by `proportion`; refuse a mixture of that with anything else."""
    proportional = ["proportion" in stream.weight for stream in streams]
    for i, one in enumerate(proportional):
        _check(
            one == proportional[0],
            f"stream {i} and stream 0 are weighted in ways that exclude each other: "
            "`proportion` is relative; `repeat`, `choose` and none are absolute",
            mend="give every stream a `proportion`, or none of them",
        )
    return proportional[0]


def apply_weights(streams: Sequence[Stream], sizes: Ints, epoch_size: int | None, seed: int) -> int:
    """Work out what each stream gives to an epoch, and note it in the streams.

    Args:
        streams (Sequence[Stream]): All streams of a dataset.
        sizes (Ints): Samples of each.
        epoch_size (int | None): Samples of an epoch, where the streams are weighted by proportion or not at
            all.
        seed (int): Decides which streams get the samples that rounding leaves over.

    Returns:
        int: Samples of an epoch.
    """
    relative = validate_weights(streams)
    unweighted = not any(stream.weight for stream in streams)
    if relative or (unweighted and epoch_size):
        total = epoch_size or int(sizes.sum())
        weights = np.array([s.weight["proportion"] for s in streams], np.float64) if relative else sizes * 1.0
        _check(
            float(weights.sum()) > 0,
            "the proportions of the streams are all 0" if relative else "the streams have no samples",
            mend="give one of them a share" if relative else "look at their indexes: datasync inspect",
        )
        shares = weights / weights.sum()
        chosen = (total * shares).astype(np.int64)
        # Which streams get the rest is drawn as MosaicML Streaming draws it, so that sizes agree.
        rest = total - int(chosen.sum())
        chosen[np.random.default_rng(seed).choice(len(streams), rest, False)] += 1
    else:
        _check(
            not epoch_size,
            "`epoch_size` is given, and streams have a `repeat` or `choose`, which make an epoch too",
            mend="leave epoch_size out, or weight the streams by `proportion`",
        )
        chosen = np.array([_absolute(s, int(n)) for s, n in zip(streams, sizes, strict=True)], np.int64)
        total = int(chosen.sum())
        shares = chosen / max(1, total)
    _check(
        total > 0,
        "the streams give no sample to an epoch",
        mend="raise `repeat` or `choose`; or look at their indexes: datasync inspect",
    )
    # The share is that which was asked for, not the rounded one: blocks and batches of MosaicML's order are
    # divided by it.
    rows = zip(streams, sizes.tolist(), chosen.tolist(), shares.tolist(), strict=True)
    for stream, size, count, share in rows:
        stream.choose, stream.repeat, stream.proportion = count, count / size, share
    return total


def _absolute(stream: Stream, size: int) -> int:
    if "repeat" in stream.weight:
        return int(stream.weight["repeat"] * size)
    return int(stream.weight.get("choose", size))


def _as_list(remote: Remote | None) -> list[str | os.PathLike[str]]:
    if remote is None or remote == "":
        return []
    return [remote] if isinstance(remote, str | os.PathLike) else list(remote)


def _without_secrets(remote: str | os.PathLike[str]) -> str:
    """A URL without its password and query."""
    return re.sub(r"(://[^/@]*):[^/@]*@", r"\1:…@", os.fspath(remote)).partition("?")[0]


def _check(good: bool, problem: str, *, mend: str) -> None:
    if not good:
        raise UsageError(problem, mend=mend)


def _check_number(name: str, value: float | None) -> None:
    number = value is None or (isinstance(value, int | float | np.number) and not isinstance(value, bool))
    _check(number, f"`{name}` is {value!r}", mend="give a number")
    _check(value is None or value >= 0, f"`{name}` {value} is negative", mend="give a number of at least 0")


streams_registry: dict[str, type[Stream]] = {"stream": Stream}
"""Classes of streams that `StreamingDataset(stream_name=…)` can make, by name."""
