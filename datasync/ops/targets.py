"""From what a person writes to stores: which dataset, from where, to where.

    emoji                 a dataset by name: at its home, at --from, or at whichever cluster holds it
    cluster-a:emoji       exactly there
    s3://bucket/x, ./x    exactly there; its name is the last part

A destination is a cluster or a root URL, and the copy lies below it under the dataset's name;
`cluster:other-name` is exact.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from datasync.config_values import nearest
from datasync.errors import DatasyncError, NotFoundError, UsageError
from datasync.replicate.limits import identity
from datasync.storage.base import Store

if TYPE_CHECKING:
    from datasync.config import Config

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One thing to replicate.

    Args:
        name (str): Its name, here and at every destination.
        source (Store): Where it is read.
        cluster (str | None): The cluster that the source belongs to, if it is one of the configuration's.
        to (dict[str, Store]): Name of a destination -> root of the copy.
        fallbacks (tuple[Store, ...]): Other clusters that may hold it.
        require_signature (str | None): Public key that must have signed its index.
        implied (bool): Its name is only the last part of a path or URL.
    """

    name: str
    source: Store
    cluster: str | None
    to: dict[str, Store]
    fallbacks: tuple[Store, ...] = ()
    require_signature: str | None = None
    implied: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """Something to replicate that could not be found.

    Args:
        name (str): What was asked for.
        to (tuple[str, ...]): Where it should have gone.
        error (DatasyncError): Why not.
        cluster (None): As in a `Target`.
    """

    name: str
    to: tuple[str, ...]
    error: DatasyncError
    cluster: None = None


def split(values: Sequence[str]) -> list[str]:
    """Names given one by one or with commas."""
    return [part.strip() for value in values for part in value.split(",") if part.strip()]


def is_place(spec: str) -> bool:
    """Whether a text names a place itself rather than a dataset."""
    return (
        "://" in spec
        or ":" in spec
        or spec.startswith((".", "/", "~"))
        or (os.sep in spec and os.path.isdir(spec))
    )


def targets(
    config: Config,
    names: Sequence[str],
    *,
    to: Sequence[str],
    source: str | None = None,
    rename: str | None = None,
) -> list[Target | Missing]:
    """What to replicate; with no names, every dataset of the configuration.

    One that cannot be found does not keep the others from being replicated.

    Raises:
        UsageError: A name, cluster or combination makes no sense.
    """
    if not to:
        raise UsageError("no destination was given", mend="name one: --to cluster-b")
    if not names and not config.datasets:
        raise UsageError(
            "no dataset is configured and none was named",
            mend="name a dataset, a URL or a folder, or list datasets in datasync.toml",
        )
    chosen = list(names) or list(config.datasets)
    if rename is not None and len(chosen) != 1:
        raise UsageError("--as names one dataset", mend="replicate one at a time with --as")
    found: list[Target | Missing] = []
    for name in chosen:
        try:
            found.append(_target(config, name, to=to, source=source, rename=rename))
        except UsageError:
            raise
        except DatasyncError as error:
            found.append(Missing(name=name, to=tuple(to), error=error))
    return _distinct(found)


def _distinct(found: Sequence[Target | Missing]) -> list[Target | Missing]:
    """Each thing once.

    Raises:
        UsageError: Two of them would be one copy.
    """
    distinct: list[Target | Missing] = []
    sources: dict[tuple[str, str], Target] = {}
    for target in found:
        if isinstance(target, Target):
            _check_apart(target)
            same = [sources.setdefault(identity(store), target) for store in target.to.values()]
            for other in same:
                if identity(other.source) != identity(target.source):
                    raise UsageError(
                        f"{other.source.url} and {target.source.url} would both become {target.name}",
                        mend="replicate them one at a time, with --as NAME",
                    )
            if not any(other is target for other in same):
                continue
        distinct.append(target)
    return distinct


def _check_apart(target: Target) -> None:
    """Two destinations that are one place would wait for each other's lease."""
    roots: dict[tuple[str, str], str] = {}
    for place, store in target.to.items():
        other = roots.setdefault(identity(store), place)
        if other != place:
            raise UsageError(f"{other} and {place} are one place: {store.url}", mend="name it once")


def _target(
    config: Config, spec: str, *, to: Sequence[str], source: str | None, rename: str | None
) -> Target:
    name = rename or spec
    cluster: str | None = None
    if is_place(spec):
        if source is not None:
            raise UsageError(
                f"{spec} says itself where it is; --from {source} cannot too", mend="drop one of them"
            )
        if os.path.isfile(os.path.expanduser(spec)):
            raise UsageError(f"{spec} is a file", mend="give the folder that it is in")
        store = config.resolve(spec)
        name = rename or name_of(spec)
        cluster = spec.partition(":")[0] if spec.partition(":")[0] in config.clusters else None
    else:
        cluster, store = find_source(config, spec, source, avoid=[place.partition(":")[0] for place in to])
    destinations = {place: destination(config, place, name) for place in to}
    known = config.datasets.get(name)
    taken = {identity(store), *(identity(place) for place in destinations.values())}
    fallbacks = replicas(config, name, taken, avoid=cluster)
    return Target(
        name=name,
        source=store,
        cluster=cluster,
        to=destinations,
        fallbacks=fallbacks,
        require_signature=known.require_signature if known else None,
        implied=is_place(spec) and cluster is None and rename is None,
    )


def replicas(
    config: Config, name: str, taken: set[tuple[str, str]], *, avoid: str | None = None
) -> tuple[Store, ...]:
    """The dataset at every other cluster; one that cannot even be opened is no reason not to copy."""
    found = []
    for other in config.clusters:
        try:
            if other != avoid and identity(store := config.dataset_store(other, name)) not in taken:
                found.append(store)
        except DatasyncError as error:
            log.info("%s cannot serve as a source: %s", other, error.message)
    return tuple(found)


def find_source(
    config: Config, name: str, source: str | None = None, *, avoid: Sequence[str] = ()
) -> tuple[str | None, Store]:
    """The cluster and the root of a dataset that is given by name.

    Raises:
        UsageError: No cluster holds it.
    """
    if source is not None:
        if source in config.clusters:
            return source, config.dataset_store(source, name)
        if not is_place(source) and not os.path.isdir(source) and os.sep not in source:
            config.cluster(source)  # says which cluster is meant
        return None, config.resolve(source).child(name)
    known = config.datasets.get(name)
    if known is not None and known.home is not None:
        return known.home, config.dataset_store(known.home, name)
    try:
        holders = [cluster for cluster in config.find_dataset(name) if cluster.name not in avoid]
    except DatasyncError as error:
        if os.path.isdir(name):
            raise type(error)(error.message, mend=f"for the folder that is here, write ./{name}") from error
        raise
    if holders:
        return holders[0].name, config.dataset_store(holders[0].name, name)
    if os.path.isdir(name):
        return None, config.resolve(name)
    places = ", ".join(config.clusters) or "no cluster is configured"
    near = nearest(name, config.datasets)
    raise NotFoundError(
        f"no dataset {name!r} is at any cluster that could be its source ({places})",
        mend=near
        if near.startswith("did you mean")
        else "check the name (datasync status), or give a URL or a folder",
    )


def destination(config: Config, place: str, name: str) -> Store:
    """The root of a dataset's copy at a place."""
    if place in config.clusters:
        return config.dataset_store(place, name)
    head, colon, _ = place.partition(":")
    if colon and head in config.clusters:
        return config.resolve(place)
    if "://" in place or os.sep in place or place.startswith((".", "~")) or os.path.isdir(place):
        return config.resolve(place).child(name)
    return config.cluster(place).store().child(name)  # says which cluster is meant


def name_of(spec: str) -> str:
    """The name of what lies at a URL, a path or `cluster:name`: its last part."""
    bare = os.path.abspath(spec) if "://" not in spec and ":" not in spec else spec
    last = bare.rstrip("/").replace(":", "/").rpartition("/")[2]
    if not last:
        raise UsageError(f"{spec} has no name of its own", mend="give one: --as NAME")
    return last


def locate(config: Config, spec: str, cluster: str | None) -> tuple[str, str, Store]:
    """A dataset at one place, for commands that look at a single copy: (name, place, store)."""
    if is_place(spec):
        if cluster is not None:
            raise UsageError(f"{spec} says itself where it is; --cluster cannot too", mend="drop one of them")
        store = config.resolve(spec)
        return name_of(spec), spec, store
    if cluster is None:
        raise UsageError(f"which copy of {spec}?", mend="name its cluster: --cluster cluster-b")
    return spec, cluster, destination(config, cluster, spec)
