"""Every other store: whatever fsspec and its packages reach (gs, az, sftp, https, hf, memory, ...).

fsspec promises less than S3, so this store does too, and says so in `abilities`:

- `if_absent` only where the file system has an exclusive create, else `UnsupportedError`.
- no `if_match`, no multipart uploads that outlive the process (`fsspec_upload`), no CRC that the store itself
  checks. A CRC given with a write is compared with the bytes here; after the write the size is compared with
  the store's.
- a write goes through the file system's own upload, which object stores make visible when it is complete. On
  file systems in the narrow sense (sftp, ftp, smb, hdfs, webdav, ssh) it goes to a hidden name and is moved.

Listings are read without fsspec's listing cache, whole, and sorted. Schemes that only read (http, https, hf
of somebody else) refuse writes as `UnsupportedError`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import socket
import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from datasync.errors import (
    ConflictError,
    CorruptError,
    DatasyncError,
    DeniedError,
    NotFoundError,
    StoreError,
    ThrottledError,
    TransientError,
    UnsupportedError,
    UsageError,
)
from datasync.storage import http1
from datasync.storage.base import TIME_TAG, Abilities, Buffer, Filled, ObjectInfo, Store, Upload, UploadInfo
from datasync.storage.keys import check_key, check_prefix, join, utf8
from datasync.storage.process import shared
from datasync.storage.retry import patience
from datasync.storage.secrets import is_reference, reveal
from datasync.storage.temp import HIDDEN
from shards.digests import crc32c as crc32c_of

_FOLDERS = {"sftp", "ssh", "ftp", "smb", "hdfs", "webhdfs", "webdav", "dav", "arrow_hdfs"}
_SERIAL = {"sftp", "ssh", "ftp"}  # one connection, on which two threads mix up each other's answers
_READ_ONLY = {"http", "https", "zip", "tar", "github", "git", "reference", "data"}
_EXCLUSIVE = {"memory", "gs", "gcs", "az", "abfs", "abfss"}
_NO_QUERY = {"az", "abfs", "abfss"}
_no_lock = contextlib.nullcontext()
_PACKAGES = {"gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs", "abfss": "adlfs"}
_PACKAGES |= {
    "sftp": "paramiko",
    "ssh": "paramiko",
    "hf": "huggingface_hub",
    "https": "aiohttp",
    "http": "aiohttp",
}


class FsspecStore:
    """Objects below a path of an fsspec file system; make it with `open_store`.

    Args:
        scheme (str): The file system's protocol.
        root (str): The root as the file system itself writes it, without a slash at its end.
        options (Mapping[str, Any]): Its options; texts may be references to secrets.
        url (str): The root as a URL, without secrets.
    """

    def __init__(self, scheme: str, root: str, options: Mapping[str, Any], url: str) -> None:
        self.scheme = scheme
        self.root = root
        self._options = dict(options)
        self._url = url

    @classmethod
    def open(cls, url: str, options: Mapping[str, Any]) -> FsspecStore:
        """The store at `url`.

        Raises:
            UsageError: No file system has that scheme, or its package is not installed.
        """
        import fsspec
        from fsspec.utils import infer_storage_options

        scheme = url.partition("://")[0].rpartition("::")[2]
        try:
            kind = fsspec.get_filesystem_class(scheme)
        except ValueError:
            raise UsageError(
                f"no store has the scheme {scheme!r}",
                mend="write a path, s3://..., gs://..., az://...",
            ) from None
        except ImportError as error:
            package = _PACKAGES.get(scheme, "the package that fsspec names")
            raise UsageError(f"{scheme}:// needs a package: {error}", mend=f"pip install {package}") from None
        root = str(kind._strip_protocol(url)).rstrip("/")
        named = dict(kind._get_kwargs_from_urls(url))
        found = infer_storage_options(url)
        if found.get("password"):
            raise UsageError(
                f"a {scheme}:// URL with a password in it would be logged",
                mend='put it into options as "env:NAME" or "file:PATH"',
            )
        return cls(scheme, root, {**named, **options}, url.rstrip("/"))

    @property
    def url(self) -> str:
        return self._url

    @property
    def fs(self) -> Any:
        """This process's file system."""
        return shared(("fsspec", self.scheme, _frozen(self._options)), self._connect)

    def _alone(self) -> contextlib.AbstractContextManager[Any]:
        if self.scheme not in _SERIAL:
            return _no_lock
        return shared(("fsspec-lock", self.scheme, _frozen(self._options)), threading.RLock)

    def __repr__(self) -> str:
        return f"FsspecStore({self._url!r})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FsspecStore):
            return NotImplemented
        return (self._url, self.root, self._options) == (other._url, other.root, other._options)

    def __hash__(self) -> int:
        return hash((FsspecStore, self._url, self.root))

    def child(self, prefix: str) -> FsspecStore:
        inner = check_prefix(prefix, where=self._url)
        if not inner:
            return self
        return FsspecStore(self.scheme, join(self.root, inner), self._options, join(self._url, inner))

    def abilities(self) -> Abilities:
        return Abilities(
            if_absent=self.scheme in _EXCLUSIVE,
            if_match=False,
            crc32c=False,
            multipart=False,
            server_copy=self.scheme not in _READ_ONLY | _SERIAL,
            ranges=True,
        )

    def full_path(self, key: str) -> str:
        """The path of `key` in the file system."""
        check_key(key, where=self._url)
        if self.scheme in _NO_QUERY and ("?" in key or "#" in key):
            raise StoreError(
                f"{key!r} cannot be kept at {self._url}: adlfs would store it under another name",
                mend="rename the object, or use another store for this tree",
            )
        return f"{self.root}/{key}"

    # Reading

    def stat(self, key: str) -> ObjectInfo:
        path = self.full_path(key)
        with self.translated(key):
            found = self._info(path)
        if found.get("type") == "directory":
            raise NotFoundError(
                f"no object {key} at {self._url}: that is a folder", mend="name an object in it"
            )
        return _described(key, found)

    def _info(self, path: str) -> Mapping[str, Any]:
        """What the file system says of one object, asked anew."""
        if self.scheme == "hf":
            return _info_at_hub(self.fs, path)
        self.fs.invalidate_cache(self.fs._parent(path))
        found: Mapping[str, Any] = self.fs.info(path)
        return found

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[ObjectInfo]:
        folder = check_prefix(prefix.rpartition("/")[0], where=self._url) if "/" in prefix else ""
        start = join(self.root, folder) if folder else self.root
        with self.translated(prefix):
            self.fs.invalidate_cache()
            try:
                # A walk instead of `find`: `find` ends early, in silence, where a folder cannot be read.
                found = list(self._walk(start))
            except FileNotFoundError:
                if folder or self._is_bucket_store():
                    return
                raise
        base = f"{self.root}/" if self.root else ""
        infos = [
            _described(item["name"][len(base) :], item) for item in found if item["name"].startswith(base)
        ]
        infos.sort(key=lambda info: utf8(info.key))
        start_after = utf8(after)
        for info in infos:
            if info.key.startswith(prefix) and utf8(info.key) > start_after:
                yield info

    def _walk(self, path: str) -> Iterator[dict[str, Any]]:
        """The files below `path`, at any depth."""
        for item in self.fs.ls(path, detail=True):
            name = str(item["name"]).rstrip("/")
            if name == path.rstrip("/"):
                if item.get("type") == "file":
                    return  # `ls` of a file gives the file itself
                continue
            if item.get("type") != "directory":
                yield {**item, "name": name}
            elif name.rpartition("/")[2] != HIDDEN:
                yield from self._walk(name)

    def _is_bucket_store(self) -> bool:
        """Whether a prefix without objects is simply empty, rather than a folder that is missing."""
        return self.scheme not in _FOLDERS | _READ_ONLY

    def read(self, key: str, *, start: int = 0, length: int | None = None, etag: str | None = None) -> bytes:
        with self.stream(key, start=start, length=length, etag=etag, chunk=16 << 20) as pieces:
            parts = [bytes(piece) for piece in pieces]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_into(
        self,
        key: str,
        buffer: memoryview,
        *,
        start: int | None = None,
        etag: str | None = None,
        sha256: bool = False,
    ) -> Filled:
        data = self.read(key, start=start or 0, length=None if start is None else len(buffer), etag=etag)
        if len(data) > len(buffer):
            return Filled(bytes=len(data), crc32c=0)
        buffer[: len(data)] = data
        digest = hashlib.sha256(data).hexdigest() if sha256 else None
        return Filled(bytes=len(data), crc32c=crc32c_of(data), sha256=digest)

    @contextlib.contextmanager
    def stream(
        self,
        key: str,
        *,
        start: int = 0,
        length: int | None = None,
        etag: str | None = None,
        chunk: int = 1 << 20,
    ) -> Iterator[Iterator[Buffer]]:
        info = self.stat(key)
        if etag is not None and info.etag != etag:
            raise ConflictError(f"{self._url}/{key} has changed since it was looked at", mend="look again")
        if info.bytes < 0:
            yield self._unsized(key, start, length)
            return
        end = info.bytes if length is None else min(start + length, info.bytes)
        yield self._pieces(key, start, end, chunk, info)

    def _pieces(self, key: str, start: int, end: int, chunk: int, before: ObjectInfo) -> Iterator[Buffer]:
        path, offset = self.full_path(key), start
        # The hub's files would each look themselves up, by a listing of their folder.
        more = {"size": before.bytes, "cache_type": "none"} if self.scheme == "hf" else {}
        while offset < end:
            stop = min(offset + chunk, end)
            with self.translated(key):
                piece = self.fs.cat_file(path, start=offset, end=stop, **more)
            if len(piece) != stop - offset:
                raise TransientError(
                    f"{self._url}/{key} gave {len(piece)} of {stop - offset} bytes", mend="run again"
                )
            offset = stop
            # The last piece is not given out before it is known that all were of one version.
            if offset == end and end - start > chunk and before.etag and self.stat(key).etag != before.etag:
                raise ConflictError(f"{self._url}/{key} changed while it was read", mend="read it again")
            yield piece

    def _unsized(self, key: str, start: int, length: int | None) -> Iterator[Buffer]:
        """A server that does not say how long the object is: read it whole."""
        with self.translated(key):
            data = self.fs.cat_file(self.full_path(key))
        yield data[start : None if length is None else start + length]

    # Writing

    def write(
        self,
        key: str,
        data: Buffer,
        *,
        crc32c: int | None = None,
        if_absent: bool = False,
        if_match: str | None = None,
    ) -> ObjectInfo:
        path = self.full_path(key)
        body = bytes(data)
        if crc32c is not None and crc32c_of(body) != crc32c:
            raise CorruptError(
                f"the bytes for {self._url}/{key} are not those that were meant", mend="read them again"
            )
        with self._written(key, path, if_absent=if_absent, if_match=if_match) as target:
            if if_absent:
                # The object stores decide themselves; in memory two threads could both find nothing.
                with (
                    shared(("fsspec-create", self.scheme), threading.Lock)
                    if self.scheme == "memory"
                    else _no_lock
                ):
                    self.fs.pipe_file(target, body, mode="create")
            else:
                self.fs.pipe_file(target, body)
        return self.checked(key, len(body))

    def write_file(self, key: str, path: Path, *, if_absent: bool = False) -> ObjectInfo:
        if if_absent:
            return self.write(key, path.read_bytes(), if_absent=True)
        size = path.stat().st_size
        with self._written(key, self.full_path(key)) as target:
            self.fs.put_file(str(path), target)
        return self.checked(key, size)

    @contextlib.contextmanager
    def _written(
        self, key: str, path: str, *, if_absent: bool = False, if_match: str | None = None
    ) -> Iterator[str]:
        """Where to write so that the object is seen only when it is complete."""
        self._check_writable()
        if if_match is not None or (if_absent and self.scheme not in _EXCLUSIVE):
            raise UnsupportedError(
                f"{self._url} has no conditional writes", mend="let one writer at a time use it"
            )
        hidden = self.hidden_path() if self.scheme in _FOLDERS else path
        try:
            with self.translated(key):
                if self.scheme in _FOLDERS:
                    self.fs.makedirs(self.fs._parent(hidden), exist_ok=True)
                    self.fs.makedirs(self.fs._parent(path), exist_ok=True)
                yield hidden
                if hidden != path:
                    self.replace(hidden, path)
        except FileExistsError:
            raise ConflictError(f"{self._url}/{key} exists already", mend="look at it again") from None
        except BaseException:
            if hidden != path:
                with contextlib.suppress(Exception), self.translated(key):
                    self.fs.rm_file(hidden)
            raise

    def _check_writable(self) -> None:
        if self.scheme in _READ_ONLY:
            raise UnsupportedError(f"{self._url} can only be read", mend="choose another destination")

    @property
    def moves(self) -> bool:
        """Whether a file that is being written is seen, so that it has to be moved when it is complete."""
        return self.scheme in _FOLDERS or self.scheme == "memory"

    def hidden_path(self) -> str:
        """A new name that is not listed."""
        return f"{self.root}/{HIDDEN}/{uuid.uuid4().hex}"

    def replace(self, hidden: str, path: str) -> None:
        """Give a complete file its name."""
        if self.scheme == "memory":
            self.fs.cp_file(hidden, path)
            self.fs.rm_file(hidden)
        else:
            self.fs.mv(hidden, path)

    def checked(self, key: str, size: int) -> ObjectInfo:
        """The object as it was written, of `size` bytes."""
        info = self.stat(key)
        if info.bytes != size:
            raise CorruptError(
                f"{self._url}/{key} has {info.bytes} bytes after {size} were written", mend="run again"
            )
        return info

    def begin(self, key: str, *, bytes: int) -> Upload:
        from datasync.storage.fsspec_upload import FsspecUpload

        self._check_writable()
        return FsspecUpload(self, key, bytes)

    def resume(self, key: str, upload_id: str, *, bytes: int) -> Upload:
        from datasync.storage.fsspec_upload import FsspecUpload

        return FsspecUpload.resumed(self, key, upload_id)

    def uploads(self, prefix: str = "") -> Iterator[UploadInfo]:
        return iter(())

    def copy(self, source: Store, source_key: str, key: str) -> ObjectInfo:
        same = (
            isinstance(source, FsspecStore)
            and source.scheme == self.scheme
            and source._options == self._options
        )
        if not same or self.scheme in _READ_ONLY:
            raise UnsupportedError(
                f"{source.url} and {self._url} are not one store", mend="pass the bytes through"
            )
        assert isinstance(source, FsspecStore)
        info = source.stat(source_key)
        path = self.full_path(key)
        with self._written(key, path) as target:
            self.fs.cp_file(source.full_path(source_key), target)
        return self.checked(key, info.bytes)

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            path = self.full_path(key)
            self._check_writable()
            try:
                with self.translated(key):
                    self.fs.rm_file(path)
            except NotFoundError:
                continue

    def _connect(self) -> Any:
        import fsspec

        options: dict[str, Any] = {
            name: reveal(value, where=f"option {name} of {self._url}")
            if isinstance(value, str) and is_reference(value)
            else value
            for name, value in self._options.items()
        }
        if self.scheme not in _FOLDERS:  # those pass their options on to a connection that knows no such word
            options.setdefault("use_listings_cache", False)
        if self.scheme in ("http", "https"):
            options["client_kwargs"] = {"timeout": _web_timeout(), **options.get("client_kwargs", {})}
        with self.translated(""):
            found = fsspec.filesystem(self.scheme, skip_instance_cache=True, **options)
            if self.scheme in ("sftp", "ssh"):
                # Else each small packet waits 40 ms for the answer to the one before.
                found.client.get_transport().sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return found

    @contextlib.contextmanager
    def translated(self, key: str) -> Iterator[None]:
        """Raise what a file system raises as an error of ours; file systems differ in what they raise.

        Every use of `fs` is inside of this: of some file systems only one thread may use one at a time.
        """
        try:
            with self._alone():
                yield
        except (DatasyncError, FileExistsError):
            raise
        except FileNotFoundError as error:
            # Over HTTP, fsspec calls every failure to look a file up "not found": also a server that is down.
            if isinstance(error.__cause__, Exception) and not isinstance(error.__cause__, _ABSENT):
                raise _by_status(error.__cause__, f"{self._url}/{key}") from error
            raise NotFoundError(f"no object {key} at {self._url}", mend="check the name") from error
        except PermissionError as error:
            raise DeniedError(
                f"{self._url}/{key}: not allowed ({error})", mend="check the credentials"
            ) from error
        except NotImplementedError as error:
            raise UnsupportedError(
                f"{self._url} cannot do that with {key}", mend="use another store"
            ) from error
        except (TimeoutError, ConnectionError) as error:
            raise TransientError(f"{self._url}/{key}: {error}", mend="run again") from error
        except Exception as error:
            raise _by_status(error, f"{self._url}/{key}") from error


def _web_timeout() -> Any:
    """A server that is silent is given up; one that moves is not, however long it takes."""
    from aiohttp import ClientTimeout

    silence = min(http1.STALL_SECONDS, patience().seconds)
    connect = min(http1.CONNECT_SECONDS, silence)
    return ClientTimeout(total=None, sock_connect=connect, sock_read=silence)


def _info_at_hub(fs: Any, path: str) -> Mapping[str, Any]:
    """One object of Hugging Face's hub; its file system would list the whole folder to find it."""
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    place = fs.resolve_path(path)
    found = HfApi(endpoint=fs.endpoint, token=fs.token).get_paths_info(
        place.repo_id, place.path_in_repo, revision=place.revision, repo_type=place.repo_type
    )
    if not found:
        raise FileNotFoundError(path)
    if not isinstance(found[0], RepoFile):
        return {"type": "directory"}
    return {"type": "file", "size": found[0].size, "blob_id": found[0].blob_id}


# What SDKs and their HTTP clients raise when a connection does not come about, breaks or is silent.
_BROKEN = {"ConnectionError", "ClientConnectionError", "ClientPayloadError", "TransportError"}
_BROKEN |= {"ServiceRequestError", "ServiceResponseError", "SSHException"}

_ABSENT = (FileNotFoundError, LookupError)  # what file systems themselves mean by "not there"


def _by_status(error: Exception, what: str) -> StoreError:
    """An error of an SDK, by the HTTP status that most of them carry, or by its number."""
    status = next(
        (
            value
            for name in ("status", "status_code", "code")
            if isinstance(value := getattr(error, name, None), int)
        ),
        getattr(getattr(error, "response", None), "status_code", None),
    )
    text = f"{what}: {type(error).__name__}: {error}"
    if status == 404:
        return NotFoundError(text, mend="check the name")
    if status in (401, 403):
        return DeniedError(text, mend="check the credentials and what they may do")
    if status in (429, 503):
        return ThrottledError(text, mend="run again with less at once")
    if status in (408, 500, 502, 504):
        return TransientError(text, mend="run again")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreError(f"{what}: no space left", mend="free space, then run again")
    if isinstance(error, TimeoutError) or _BROKEN & {kind.__name__ for kind in type(error).__mro__}:
        return TransientError(text, mend="check the network to it; run again")
    if isinstance(error, OSError) and error.errno in (errno.EIO, errno.ETIMEDOUT, errno.ECONNRESET):
        return TransientError(text, mend="run again")
    return StoreError(text, mend="look at the message of the store")


def _described(key: str, found: Mapping[str, Any]) -> ObjectInfo:
    size = found.get("size")
    modified = next(
        (found[name] for name in ("mtime", "updated", "last_modified", "created") if found.get(name)), None
    )
    if isinstance(modified, str):
        try:
            modified = datetime.fromisoformat(modified)
        except ValueError:
            modified = None
    stamp = modified.timestamp() if isinstance(modified, datetime) else modified
    return ObjectInfo(
        key=key,
        bytes=int(size) if size is not None else -1,
        etag=_etag(found, size, stamp),
        mtime=float(stamp) if isinstance(stamp, int | float) else None,
    )


def _etag(found: Mapping[str, Any], size: object, stamp: object) -> str | None:
    """A version tag: the store's own, else one made of size and time, which says so."""
    for name in ("generation", "etag", "ETag", "content_md5", "md5Hash", "blob_id", "sha"):
        if found.get(name):
            return str(found[name]).strip('"')
    if stamp is None:
        return None
    return TIME_TAG + hashlib.sha256(f"{size} {stamp!r}".encode()).hexdigest()[:16]


def _frozen(options: Mapping[str, Any]) -> str:
    return repr(sorted(options.items(), key=lambda item: item[0]))
