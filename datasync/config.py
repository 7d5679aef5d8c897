"""`datasync.toml`: the clusters, the datasets, and what is replicated where and when.

    [clusters.cluster-b]                     one place where datasets live
    url = "s3://datasets"

    [datasets.emoji]                         a recipe: `datasync shard emoji` runs it
    source = "corpora/emoji"
    home = "cluster-a"
    shard.compression = "zstd:9"

    [replication.nightly]                    `datasync schedule run nightly`
    from = "cluster-a"
    to = ["cluster-b"]

A dataset lives at `<url of the cluster>/<name>`; one that the file does not list is found there too. Relative
paths are relative to the file. Secrets stand in the file by reference only (`env:`, `file:`). The file is
read strictly: an unknown key is an error, since a misspelt limit or schedule would be ignored in silence.
The reference of every key is docs/config.md.
"""

from __future__ import annotations

import logging
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datasync import config_values as values
from datasync.config_values import Place, Reader
from datasync.errors import DatasyncError, NotFoundError, StoreError, UsageError
from datasync.storage.keys import check_prefix
from datasync.storage.rate import Timetable

if TYPE_CHECKING:
    from datasync.storage.base import Store

FILE_NAME = "datasync.toml"
VARIABLE = "DATASYNC_CONFIG"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A place where datasets live: a bucket, a prefix of one, or a folder.

    Args:
        name (str): What commands call it.
        url (str): Its root: ``s3://bucket/prefix``, a path, or any URL that fsspec knows.
        endpoint (str | None): The S3 endpoint; None is AWS.
        profile (str | None): The profile in the AWS configuration files.
        region (str | None): The S3 region.
        addressing (str | None): ``path``, ``virtual`` or ``auto``.
        ca_bundle (str | None): A file with the authorities that sign the endpoint's certificate.
        access_key (str | None): A reference to the access key.
        secret_key (str | None): A reference to the secret key.
        session_token (str | None): A reference to the session token.
        anonymous (bool): Send no credentials.
        options (Mapping[str, Any]): Options of the fsspec file system; texts may be references.
        rate_limit (Timetable | None): Bytes a second, by time of day.
        egress_per_gib (float): The price of reading 1 GiB from here, for plans. Default: ``0``.
    """

    name: str
    url: str
    endpoint: str | None = None
    profile: str | None = None
    region: str | None = None
    addressing: str | None = None
    ca_bundle: str | None = None
    access_key: str | None = None
    secret_key: str | None = None
    session_token: str | None = None
    anonymous: bool = False
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    rate_limit: Timetable | None = None
    egress_per_gib: float = 0.0

    def store(self) -> Store:
        """The cluster's root."""
        from datasync.storage import open_store

        return open_store(
            self.url,
            endpoint=self.endpoint,
            profile=self.profile,
            region=self.region,
            addressing=self.addressing,
            ca_bundle=self.ca_bundle,
            access_key=self.access_key,
            secret_key=self.secret_key,
            session_token=self.session_token,
            anonymous=self.anonymous,
            options=self.options,
            rate_limit=self.rate_limit,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetConfig:
    """A dataset's recipe.

    Args:
        name (str): Its name, which is also its folder at every cluster.
        source (str | None): The corpus: a path or a URL.
        home (str | None): The cluster that `datasync shard` writes it to.
        require_signature (str | None): The public key that must have signed its index.
        shard (Mapping[str, Any]): Options of `datasync shard`, with underscores for dashes.
    """

    name: str
    source: str | None = None
    home: str | None = None
    require_signature: str | None = None
    shard: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replication:
    """What `datasync schedule run NAME` does.

    Args:
        name (str): The policy's name.
        to (tuple[str, ...]): Destination clusters.
        source (str | None): The cluster to copy from (``from``); None is each dataset's home.
        datasets (tuple[str, ...]): Names; empty is every configured dataset.
        schedule (str | None): Five cron fields, or ``@hourly`` and the like.
        jitter (float): Seconds of random delay before a scheduled run. Default: ``0``.
        verify (str): ``stored`` or ``full``. Default: ``stored``.
        relay (bool): A finished destination may serve as source for the next. Default: ``False``.
        delete (bool): Remove at the destination what the source no longer has. Default: ``False``.
        max_delete (float): The largest share of a destination that a run may remove. Default: ``0.1``.
        keep (int | None): Versions that `gc` leaves after a run; None leaves all.
        max_runtime (float | None): Seconds after which a run stops cleanly.
        retries (int): Further attempts of a failed run. Default: ``3``.
        retry_delay (float): Seconds before the next attempt. Default: ``60``.
        on_failure (str | None): A command, or a URL that is called with the run's JSON line.
        on_recovery (str | None): The same, for the first good run after a failure.
        heartbeat (str | None): A URL that is called after every good run.
        metrics (str | None): The Prometheus text file to write.
        log (str | None): The file that each run adds one JSON line to.
    """

    name: str
    to: tuple[str, ...]
    source: str | None = None
    datasets: tuple[str, ...] = ()
    schedule: str | None = None
    jitter: float = 0.0
    verify: str = "stored"
    relay: bool = False
    delete: bool = False
    max_delete: float = 0.1
    keep: int | None = None
    max_runtime: float | None = None
    retries: int = 3
    retry_delay: float = 60.0
    on_failure: str | None = None
    on_recovery: str | None = None
    heartbeat: str | None = None
    metrics: str | None = None
    log: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A whole configuration; without a file it is empty, and URLs and paths still work.

    Args:
        path (Path | None): The file it was read from.
        clusters (Mapping[str, Cluster]): By name.
        datasets (Mapping[str, DatasetConfig]): By name.
        replication (Mapping[str, Replication]): By name.
    """

    path: Path | None = None
    clusters: Mapping[str, Cluster] = field(default_factory=dict, hash=False)
    datasets: Mapping[str, DatasetConfig] = field(default_factory=dict, hash=False)
    replication: Mapping[str, Replication] = field(default_factory=dict, hash=False)

    @classmethod
    def load(cls, path: str | os.PathLike[str] | None = None) -> Config:
        """The configuration at `path`, or the first found in the usual places, or an empty one.

        The usual places: ``$DATASYNC_CONFIG``; ``datasync.toml`` in the working folder or one above it;
        ``~/.config/datasync/datasync.toml``.

        Raises:
            UsageError: The named file does not exist, or a file is not as docs/config.md says.
        """
        found = find_file(path)
        if found is None:
            return cls()
        try:
            content = found.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UsageError(
                f"{found} is not UTF-8: byte {error.start} ({error.reason})", mend="save it as UTF-8"
            ) from None
        return cls.parse(content, path=found)

    @classmethod
    def parse(cls, content: str, *, path: Path) -> Config:
        """The configuration that `content` says, as if it stood at `path`."""
        place = Place(str(path))
        try:
            document = tomllib.loads(content)
        except tomllib.TOMLDecodeError as error:
            raise UsageError(f"{path} is not TOML: {error}", mend="mend that line") from None
        base = path.resolve().parent
        known: dict[str, Reader] = {
            "clusters": values.table,
            "datasets": values.table,
            "replication": values.table,
        }
        found = values.fields(document, place, known)
        clusters = {
            name: _cluster(name, item, place.at("clusters").at(name), base)
            for name, item in found.get("clusters", {}).items()
        }
        datasets = {
            name: _dataset(name, item, place.at("datasets").at(name), base, clusters)
            for name, item in found.get("datasets", {}).items()
        }
        replication = {
            name: _replication(name, item, place.at("replication").at(name), base, clusters)
            for name, item in found.get("replication", {}).items()
        }
        return cls(path=path, clusters=clusters, datasets=datasets, replication=replication)

    def cluster(self, name: str) -> Cluster:
        """The cluster called `name`.

        Raises:
            UsageError: There is none; the mend names the nearest.
        """
        if name not in self.clusters:
            where = str(self.path) if self.path else f"no {FILE_NAME} was found, so"
            raise UsageError(f"{where}: no cluster is called {name!r}", mend=self._cluster_mend(name))
        return self.clusters[name]

    def resolve(self, spec: str) -> Store:
        """The store that `spec` names: ``cluster:name``, ``cluster:``, a URL or a path."""
        from datasync.storage import open_store

        head, colon, rest = spec.partition(":")
        named = colon and not rest.startswith("//") and "/" not in head
        if named and (head in self.clusters or not os.path.exists(spec)):
            store = self.cluster(head).store()
            return store.child(rest) if rest.strip("/") else store
        return open_store(spec)

    def dataset_store(self, cluster: str, dataset: str) -> Store:
        """Where `dataset` lives at `cluster`."""
        return self.cluster(cluster).store().child(dataset)

    def signed_by(self, dataset: str) -> str | None:
        """The public key that must have signed the index of `dataset`; None where nothing is required."""
        return self.datasets[dataset].require_signature if dataset in self.datasets else None

    def find_dataset(self, name: str) -> tuple[Cluster, ...]:
        """The clusters that hold a published `name`, in the order of the file.

        Raises:
            StoreError, UsageError: No cluster holds it, and at least one could not be asked.
        """

        def holds(cluster: Cluster) -> bool | DatasyncError:
            try:
                cluster.store().child(name).stat("index.json")
            except NotFoundError:
                return False
            except (StoreError, UsageError) as error:
                return error
            return True

        check_prefix(name, where="a cluster")
        clusters = list(self.clusters.values())
        with ThreadPoolExecutor(max_workers=max(len(clusters), 1)) as pool:
            answers = list(pool.map(holds, clusters))
        failures = {
            cluster.name: answer
            for cluster, answer in zip(clusters, answers, strict=True)
            if isinstance(answer, DatasyncError)
        }
        found = tuple(cluster for cluster, answer in zip(clusters, answers, strict=True) if answer is True)
        if failures and not found:
            asked, failure = next(iter(failures.items()))
            near = values.nearest(name, self.datasets) if name not in self.datasets else ""
            raise type(failure)(
                f"{name} was not found, and {asked} could not be asked: {failure.message}",
                mend=near if near.startswith("did you mean") else f"{failure.mend}; or check the name",
            )
        for asked, failure in failures.items():
            _log.info("looking for %s at %s: %s", name, asked, failure.message)
        return found

    def _cluster_mend(self, name: str) -> str:
        if not self.clusters:
            return f"write [clusters.{name}] with its url into {FILE_NAME}, or give a URL or a path"
        return values.nearest(name, self.clusters)


def find_file(path: str | os.PathLike[str] | None = None) -> Path | None:
    """The configuration file that `Config.load` reads, if there is one."""
    named = os.fspath(path) if path is not None else os.environ.get(VARIABLE)
    if named:
        found = Path(named).expanduser()
        if not found.is_file():
            raise UsageError(
                f"no configuration file {found}" + ("" if path is not None else f" (from ${VARIABLE})"),
                mend=f"name a {FILE_NAME} that exists",
            )
        return found
    here = Path.cwd()
    home = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "datasync"
    for folder in (here, *here.parents, home):
        if (folder / FILE_NAME).is_file():
            return folder / FILE_NAME
    return None


_CLUSTER: dict[str, Reader] = {
    "url": values.text,
    "endpoint": values.text,
    "profile": values.text,
    "region": values.text,
    "addressing": values.one_of("path", "virtual", "auto"),
    "ca_bundle": values.text,
    "access_key": values.reference,
    "secret_key": values.reference,
    "session_token": values.reference,
    "anonymous": values.flag,
    "options": values.table,
    "rate_limit": values.timetable,
    "egress_per_gib": values.number,
}


def _schedule(value: object, place: Place) -> str:
    from datasync.ops.cron import Cron

    Cron.parse(values.text(value, place), where=str(place))
    return str(value)


_REPLICATION: dict[str, Reader] = {
    "datasets": values.some_texts,
    "from": values.text,
    "to": values.texts,
    "schedule": _schedule,
    "jitter": values.duration,
    "verify": values.one_of("stored", "full"),
    "relay": values.flag,
    "delete": values.flag,
    "max_delete": values.share,
    "keep": values.at_least_one,
    "max_runtime": values.duration,
    "retries": values.count,
    "retry_delay": values.duration,
    "on_failure": values.text,
    "on_recovery": values.text,
    "heartbeat": values.web_url,
    "metrics": values.text,
    "log": values.text,
}

_DATASET: dict[str, Reader] = {
    "source": values.text,
    "home": values.text,
    "require_signature": values.text,
    "shard": values.table,
}


def _cluster(name: str, value: object, place: Place, base: Path) -> Cluster:
    if not name or any(c in name for c in ":/,") or name != name.strip():
        raise place.wrong(f"{name!r} cannot name a cluster", "use letters, digits, '-', '_' and '.'")
    found = values.fields(value, place, _CLUSTER)
    if "url" not in found:
        raise place.wrong("has no url", 'write url = "s3://bucket/prefix", or a folder')
    if re.fullmatch(r"(s3|gs|gcs|az|abfs|azure|sftp|https?|hf)://*", found["url"]):
        raise place.at("url").wrong(
            f"{found['url']!r} names no bucket, container or host", 'write "s3://bucket/prefix"'
        )
    for key in ("url", "endpoint"):
        if key in found and _holds_secret(found[key]):
            raise place.at(key).wrong(
                "holds a password",
                'take it out, and give access_key and secret_key as "env:NAME" or "file:PATH"',
            )
    if ("access_key" in found) != ("secret_key" in found):
        raise place.wrong("access_key and secret_key belong together", "give both, or neither")
    endpoint = found.get("endpoint", "https://")
    if not endpoint.startswith(("https://", "http://")):
        raise place.at("endpoint").wrong(
            f"{endpoint!r} is no URL", 'write "https://host" or "http://host:port"'
        )
    for key in ("url", "ca_bundle", "access_key", "secret_key", "session_token"):
        if key in found:
            found[key] = _beside(base, found[key])
    return Cluster(name=name, **found)


def _dataset(
    name: str, value: object, place: Place, base: Path, clusters: Mapping[str, Cluster]
) -> DatasetConfig:
    try:
        if check_prefix(name, where="a cluster") != name or name.startswith("_datasync") or ":" in name:
            raise UsageError(f"{name!r} is reserved or ends in a slash")
    except UsageError:
        raise place.wrong(f"{name!r} cannot name a dataset", "use a name that can be a folder") from None
    for key in values.table(value, place):
        if key not in _DATASET and _is_shard_option(key.replace("-", "_")):
            raise place.wrong(f"{key!r} is an option of datasync shard", f"write shard.{key} = …")
    found = values.fields(value, place, _DATASET)
    if "home" in found:
        _check_cluster(found["home"], place.at("home"), clusters)
    for key in ("source", "require_signature"):
        if key in found:
            found[key] = _beside(base, found[key], clusters)
    if "shard" in found:
        found["shard"] = {key.replace("-", "_"): item for key, item in found["shard"].items()}
    return DatasetConfig(name=name, **found)


def _is_shard_option(name: str) -> bool:
    from shards.options import ConvertOptions

    return name in ConvertOptions.__dataclass_fields__


def _replication(
    name: str, value: object, place: Place, base: Path, clusters: Mapping[str, Cluster]
) -> Replication:
    found = values.fields(value, place, _REPLICATION)
    found["source"] = found.pop("from", None)
    if not re.fullmatch(r"\w[\w .-]*", name):
        raise place.wrong(
            "is no name for a schedule: it goes into crontabs and file names",
            "take letters, digits, spaces, '-', '_' and '.'",
        )
    if not found.get("to"):
        raise place.wrong("has no destination", 'write to = ["cluster-b"]')
    for number, cluster in enumerate(found["to"]):
        _check_cluster(cluster, place.at("to"), clusters)
        for earlier in found["to"][:number]:
            if _root(clusters[earlier]) == _root(clusters[cluster]):
                twice = cluster if cluster == earlier else f"{earlier} and {cluster}"
                raise place.at("to").wrong(f"{twice} would be copied to twice", "name each place once")
    if found["source"] is not None:
        _check_cluster(found["source"], place.at("from"), clusters)
        for cluster in found["to"]:
            if _root(clusters[cluster]) == _root(clusters[found["source"]]):
                raise place.at("to").wrong(f"{cluster!r} is also the source", "take it out of one of them")
    for key in ("metrics", "log"):
        if key in found:
            found[key] = _beside(base, found[key])
    return Replication(name=name, **found)


def _root(cluster: Cluster) -> tuple[str | None, str]:
    """What makes two clusters one place."""
    url = cluster.url
    return cluster.endpoint, url.rstrip("/") if "://" in url else os.path.normpath(url)


def _check_cluster(name: str, place: Place, clusters: Mapping[str, Cluster]) -> None:
    if name not in clusters:
        raise place.wrong(f"no cluster is called {name!r}", values.nearest(name, clusters))


def _beside(base: Path, value: str, clusters: Iterable[str] = ()) -> str:
    """A path relative to the configuration's folder; URLs, references and `cluster:name` as they are."""
    head, colon, rest = value.partition(":")
    if head == "file" and colon and not rest.startswith("//"):
        return f"file:{base / Path(rest).expanduser()}"
    if "://" in value or "::" in value or (colon and (head == "env" or head in clusters)):
        return value
    return str(base / Path(value).expanduser())


def _holds_secret(url: str) -> bool:
    """Whether a URL carries a user and a password."""
    host = url.partition("://")[2].partition("/")[0]
    return "@" in host and ":" in host.rpartition("@")[0]
