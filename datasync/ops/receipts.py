"""Receipts: what a replication proved, as JSON beside the copy.

A receipt is written after everything else, so where it is, the copy was whole at that moment. `verify` keeps
it true afterwards: it adds when the bytes were last checked, and turns `state` to ``damaged`` when they are
not what they were; `repair` turns it back.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from datasync.errors import ConflictError, CorruptError, FormatError, NotFoundError
from datasync.replicate.layout import RECEIPT, RECEIPTS, receipt_key
from datasync.storage.base import Store

log = logging.getLogger(__name__)

FORMAT = 1
WHOLE = "whole"
DAMAGED = "damaged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """Proof that one version is at one place.

    Args:
        name (str): The dataset or tree.
        kind (str): ``dataset`` (with a manifest), ``mds`` (an index that others wrote) or ``tree``.
        version (str): Manifest version, 64 hex digits.
        state (str): ``whole`` or ``damaged``.
        objects (int): Data objects of this version.
        bytes (int): Their bytes.
        samples (int | None): Their samples, for a dataset.
        source (dict): ``url``, ``endpoint``, and ``index`` and ``signature``: the tag and size that the
            source's index had, and its signature, or None.
        destination (str): URL of this place.
        index (dict | None): ``tag``, ``bytes`` and ``sha256`` of the index here; None for a tree.
        copied (dict): ``objects`` and ``bytes`` that this run moved.
        adopted (int): Objects of this version that were here before this tool wrote any.
        checked (dict): How many objects had which digest checked: ``sha256`` before they were stored,
            ``crc32c`` by the store, ``read_back`` from the store.
        started (str): ISO 8601, UTC.
        finished (str): ISO 8601, UTC.
        tool (str): Name and version of the program.
        host (str): Where it ran.
        token (int): Fencing token of the lease it held.
        verified (dict | None): The last `verify`: ``at``, ``mode``, ``objects``, ``bytes``, ``stripe``,
            ``missing``, ``bad``.
        manifest (dict | None): ``tag`` and ``bytes`` of the manifest here.
    """

    name: str
    kind: str
    version: str
    state: str
    objects: int
    bytes: int
    samples: int | None
    source: dict[str, Any]
    destination: str
    index: dict[str, Any] | None
    copied: dict[str, int]
    adopted: int
    checked: dict[str, int]
    started: str
    finished: str
    tool: str
    host: str
    token: int
    verified: dict[str, Any] | None = None
    manifest: dict[str, Any] | None = None
    format: int = field(default=FORMAT)

    @property
    def whole(self) -> bool:
        return self.state == WHOLE


def dumps(receipt: Receipt) -> bytes:
    """The receipt as a JSON document; what of a path is no Unicode is escaped, as JSON has it."""
    return json.dumps(asdict(receipt), indent=1, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"


def parse(data: bytes, *, where: str) -> Receipt:
    """The receipt in `data`.

    Raises:
        CorruptError: It is not a receipt, or not any more.
        FormatError: It is one from a newer version of this program.
    """
    try:
        raw = json.loads(data)
        if raw["format"] > FORMAT:
            raise FormatError(
                f"{where} is a receipt of format {raw['format']}", mend="install a newer datasync"
            )
        names = Receipt.__dataclass_fields__
        found = Receipt(**{name: value for name, value in raw.items() if name in names})
        if not isinstance(found.version, str) or not isinstance(found.source, dict):
            raise ValueError("its version or its source is of another kind")
        return found
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        if isinstance(error, FormatError):
            raise
        why = f": {error}" if isinstance(error, ValueError) else ""  # others' words are about Python
        raise CorruptError(
            f"{where} is damaged: it is not a receipt{why}",
            mend="run datasync replicate or datasync repair: they write it anew",
        ) from error


def read(store: Store, version: str | None = None) -> Receipt | None:
    """The newest receipt at a place, or the one of `version`; None where there is none."""
    key = RECEIPT if version is None else receipt_key(version)
    try:
        data = store.read(key)
    except NotFoundError:
        return None
    return parse(data, where=f"{store.url}/{key}")


def recovered(store: Store) -> tuple[Receipt | None, bool]:
    """The newest receipt at a place, and whether its own file is damaged: then it is that of its version."""
    try:
        return read(store), False
    except CorruptError as error:
        log.warning("%s", error.message)
    found = read_all(store, damaged_too=True)
    return (found[-1] if found else None), True


def read_all(store: Store, *, damaged_too: bool = False) -> list[Receipt]:
    """Every receipt at a place, the newest last.

    Args:
        store (Store): The root of the copy.
        damaged_too (bool): Go on without one that is damaged. Default: ``False``: that is an error.

    Raises:
        CorruptError: One is damaged.
    """
    found = []
    for info in store.list(RECEIPTS):
        try:
            found.append(parse(store.read(info.key), where=f"{store.url}/{info.key}"))
        except CorruptError as error:
            if not damaged_too:
                raise
            log.warning("%s", error.message)
    return sorted(found, key=lambda receipt: (receipt.token, receipt.finished))


def write(store: Store, receipt: Receipt, *, current: bool = True) -> None:
    """Store a receipt under its version and, if `current`, as the newest.

    Raises:
        ConflictError: A run with a later lease has written one: this run was overtaken.
    """
    if current:
        newest, _ = recovered(store)
        if newest is not None and newest.token > receipt.token:
            raise ConflictError(
                f"{store.url} has a receipt of a later run (token {newest.token} after {receipt.token})",
                mend="nothing is lost: this run was overtaken; run again if anything is missing",
            )
    store.write(receipt_key(receipt.version), dumps(receipt))
    if current:
        store.write(RECEIPT, dumps(receipt))


def rate(receipt: Receipt | None) -> float | None:
    """Bytes a second of the run that wrote a receipt, if it copied anything."""
    if receipt is None or not receipt.copied["bytes"]:
        return None
    began, ended = datetime.fromisoformat(receipt.started), datetime.fromisoformat(receipt.finished)
    return receipt.copied["bytes"] / max((ended - began).total_seconds(), 0.001)


def now() -> str:
    """This instant, ISO 8601 in UTC."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def age_seconds(stamp: str) -> float:
    """Seconds since an instant written by `now`."""
    return (datetime.now(UTC) - datetime.fromisoformat(stamp)).total_seconds()
