"""From a URL to the store behind it.

/data/emoji, file:///data/emoji      a folder
s3://bucket/prefix                   S3, or anything that speaks it at `endpoint`
gs://  az://  sftp://  https://  hf://  memory://  ...    what fsspec and its packages reach
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote

from datasync.errors import UsageError
from datasync.storage.base import Store
from datasync.storage.local import LocalStore
from datasync.storage.rate import Timetable

_NOTHING: Mapping[str, Any] = MappingProxyType({})
_LOCAL = ("file", "local")


def open_store(
    url: str | os.PathLike[str],
    *,
    endpoint: str | None = None,
    profile: str | None = None,
    region: str | None = None,
    access_key: str | None = None,
    secret_key: str | None = None,
    session_token: str | None = None,
    addressing: str | None = None,
    ca_bundle: str | None = None,
    anonymous: bool = False,
    options: Mapping[str, Any] = _NOTHING,
    rate_limit: Timetable | None = None,
) -> Store:
    """The store at `url`; nothing is read or written yet.

    Args:
        url (str | os.PathLike[str]): A path, or a URL of any scheme above.
        endpoint (str | None): The S3 endpoint; None is what the AWS configuration says, else AWS itself.
        profile (str | None): The profile in the AWS configuration files.
        region (str | None): The S3 region.
        access_key (str | None): The access key, better as a reference: ``env:NAME`` or ``file:PATH``.
        secret_key (str | None): The secret key, in the same way.
        session_token (str | None): The session token, in the same way.
        addressing (str | None): ``path``, ``virtual`` or ``auto`` (path where there is an endpoint).
        ca_bundle (str | None): A file with the authorities that sign the endpoint's certificate.
        anonymous (bool): Send no credentials. Default: ``False``.
        options (Mapping[str, Any]): Options of the fsspec file system.
        rate_limit (Timetable | None): Bytes a second, by time of day.

    Raises:
        UsageError: No store has that scheme, or the URL is not complete.
    """
    store = _open(
        os.fspath(url),
        options,
        endpoint=endpoint,
        profile=profile,
        region=region,
        access_key=access_key,
        secret_key=secret_key,
        session_token=session_token,
        addressing=addressing,
        ca_bundle=ca_bundle,
        anonymous=anonymous,
    )
    if rate_limit is None:
        return store
    from datasync.storage.paced import PacedStore

    return PacedStore(store, rate_limit)


def _open(url: str, options: Mapping[str, Any], **s3: Any) -> Store:
    scheme, separator, rest = url.partition("://")
    if not separator or not scheme.replace("+", "").replace("-", "").isalnum():
        if not url:
            raise UsageError("an empty path names no store", mend="give a folder or a URL")
        return LocalStore(url)
    if scheme in _LOCAL:
        if rest and not rest.startswith("/"):
            raise UsageError(f"{url} names a host, not a path", mend=f"write {scheme}:///{rest}")
        return LocalStore(unquote(rest) or "/")
    if scheme in ("s3", "s3a", "s3n"):
        from datasync.storage.s3 import S3Store

        bucket, _, prefix = rest.partition("/")
        return S3Store.open(bucket, prefix, **s3)
    from datasync.storage.fsspec_store import FsspecStore

    if scheme == "azure":  # as MosaicML writes it
        url = f"az://{rest}"
    return FsspecStore.open(url, options)
