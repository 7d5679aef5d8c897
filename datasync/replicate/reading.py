"""Whether an object was read right whose digest nobody has said: a tree's, or that of an index without any.

    the store's own checksum, compared while reading        where it keeps one
    the MD5 that the object's tag is                        what one PUT has made, at most stores
    the CRC that the store tells when it is asked           objects too large for one reading
    a second reading                                        all else that came without encryption

What comes encrypted (https, sftp) cannot change on the way, and a folder's files come no way.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

from datasync.errors import CorruptError
from datasync.replicate.catalog import etag_of
from datasync.replicate.limits import endpoint_of
from datasync.replicate.plan import Item
from datasync.storage.base import Store

_MD5 = re.compile(r"[0-9a-f]{32}")


def algorithms(item: Item) -> set[str]:
    """Digests to take of an object besides SHA-256."""
    if item.sha256 is not None or item.hashes or not _MD5.fullmatch(_tag(item)):
        return set(item.hashes)
    return {"md5"}


def is_proven(source: Store, item: Item, digests: Mapping[str, str], *, checked: bool) -> bool:
    """Whether nothing more has to be asked.

    Args:
        source (Store): Where the object was read.
        item (Item): The object.
        digests (Mapping[str, str]): Of what was read: SHA-256 and `algorithms`.
        checked (bool): The store's own checksum was compared.
    """
    known = item.sha256 is not None or bool(item.hashes)
    encrypted = not endpoint_of(source).startswith("http://")
    return known or checked or encrypted or digests.get("md5") == _tag(item)


def read_again(source: Store, item: Item, *, sha256: str, crc32c: int) -> int:
    """Compare with the CRC that the store tells, or with a second reading.

    Returns:
        int: How many bytes were read for that.

    Raises:
        CorruptError: They differ.
    """
    told = source.stat(item.key).crc32c
    digest, size = hashlib.sha256(), 0
    if told is None:
        with source.stream(item.key, etag=etag_of(item.tag)) as pieces:
            for piece in pieces:
                digest.update(piece)
                size += len(piece)
    if crc32c != told if told is not None else digest.hexdigest() != sha256:
        raise CorruptError(
            f"{item.key} on {source.url} came differently when it was read twice",
            mend="run again; if it stays, check the network to that place, or use https",
        )
    return size


def _tag(item: Item) -> str:
    return (etag_of(item.tag) or "").strip('"')
