"""Where a corpus lies, as a person names it: a path, a glob, a URL, or `cluster:place`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shards.errors import UsageError

if TYPE_CHECKING:
    from datasync.config import Cluster, Config


def locate(config: Config, sources: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """URLs or paths of `sources`, and what fsspec needs to reach them.

    Raises:
        UsageError: They name more than one cluster, or one that the configuration does not have.
    """
    urls: list[str] = []
    clusters: dict[str, Cluster] = {}
    for source in sources:
        head, colon, rest = source.partition(":")
        if (
            not colon
            or rest.startswith("//")
            or "/" in head
            or head.startswith("@")
            or os.path.exists(source)
        ):
            urls.append(source)
            continue
        cluster = config.cluster(head)
        clusters[cluster.name] = cluster
        urls.append(f"{cluster.url.rstrip('/')}/{rest}".rstrip("/"))
    if len(clusters) > 1:
        raise UsageError(
            f"the source names several clusters: {', '.join(clusters)}", mend="shard them one after the other"
        )
    options = next((storage_options(cluster) for cluster in clusters.values()), {})
    return urls, options


def storage_options(cluster: Cluster) -> dict[str, Any]:
    """A cluster's access as the options of its fsspec file system."""
    if not cluster.url.startswith("s3://"):
        return dict(cluster.options)
    from datasync.storage.secrets import reveal

    where = f"cluster {cluster.name}"
    client: dict[str, Any] = {}
    if cluster.region is not None:
        client["region_name"] = cluster.region
    if cluster.ca_bundle is not None:
        client["verify"] = cluster.ca_bundle
    options: dict[str, Any] = {"anon": cluster.anonymous, "client_kwargs": client}
    if cluster.endpoint is not None:
        options["endpoint_url"] = cluster.endpoint
    if cluster.profile is not None:
        options["profile"] = cluster.profile
    for name, reference in (
        ("key", cluster.access_key),
        ("secret", cluster.secret_key),
        ("token", cluster.session_token),
    ):
        if reference is not None:
            options[name] = reveal(reference, where=where)
    if cluster.addressing in ("path", "virtual"):
        options["config_kwargs"] = {"s3": {"addressing_style": cluster.addressing}}
    return options
