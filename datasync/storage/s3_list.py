"""Listings of a bucket: page after page, in order, whole or an error.

The order of keys is what `list` promises and what merging two listings needs, and not every imitator keeps
it. So it is checked on every page. If the first page is out of order, all is read and sorted; an endpoint
that was once caught is always sorted. Where it shows on a later page, keys were given out already: that is a
`TransientError`, and the next attempt sorts.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from urllib.parse import unquote_plus

from datasync.errors import StoreError, TransientError
from datasync.storage import s3_xml
from datasync.storage.base import ObjectInfo
from datasync.storage.keys import check_prefix, utf8
from datasync.storage.process import shared
from datasync.storage.s3_api import S3Api


class _Order:
    """What is known about an endpoint's order."""

    kept = True


def listed(api: S3Api, root: str, prefix: str, after: str) -> Iterator[ObjectInfo]:
    """The objects below `root` whose keys start with `prefix`, sorted, later than `after`."""
    order = shared(("s3-order", api.endpoint), _Order)
    if not order.kept:
        yield from _sorted(api, root, prefix, after)
        return
    last = utf8(after)
    given = False
    for page in _pages(api, root, prefix, after):
        for info in page:
            if utf8(info.key) <= last:
                order.kept = False
                break
            last = utf8(info.key)
        if not order.kept:
            break
        for info in page:
            given = True
            yield info
    if order.kept:
        return
    if given:
        raise TransientError(
            f"{api.endpoint} lists keys out of order", mend="run again: the listing will be sorted"
        )
    yield from _sorted(api, root, prefix, after)


def _sorted(api: S3Api, root: str, prefix: str, after: str) -> Iterator[ObjectInfo]:
    """All of it at once, since nothing can be given out before the last page."""
    found = [info for page in _pages(api, root, prefix, "") for info in page]
    found.sort(key=lambda info: utf8(info.key))
    start = utf8(after)
    for number, info in enumerate(found):
        if utf8(info.key) > start and (not number or info.key != found[number - 1].key):
            yield info


def _pages(api: S3Api, root: str, prefix: str, after: str) -> Iterator[list[ObjectInfo]]:
    if prefix:
        check_prefix(prefix.rpartition("/")[0], where=api.what(root))
    base = f"{root}/" if root else ""
    query = {"list-type": "2", "encoding-type": "url", "prefix": base + prefix}
    if after:
        query["start-after"] = base + after
    seen: set[str] = set()
    while True:
        body = api.call("GET", query=query).body
        page = s3_xml.parse(body, "ListBucketResult", where=api.endpoint)
        decode = unquote_plus if page.text("EncodingType") == "url" else str
        found = [_info(item, decode(item.text("Key")), base, api) for item in page.all("Contents")]
        # An object named like the root itself is the marker that consoles make for a folder.
        yield [info for info in found if info.key]
        if page.text("IsTruncated") != "true":
            return
        token = page.text("NextContinuationToken")
        if not token or token in seen:
            raise StoreError(
                f"{api.endpoint} breaks off the listing of {api.what(base + prefix)}: there is more",
                mend="this server cannot be listed completely; look for an update of it",
            )
        seen = {token}
        query = {**query, "continuation-token": token}
        query.pop("start-after", None)


def _info(item: s3_xml.Node, full: str, base: str, api: S3Api) -> ObjectInfo:
    if not full.startswith(base):
        raise StoreError(
            f"{api.endpoint} lists {full!r}, which is not below {base!r}", mend="check the endpoint"
        )
    modified = item.text("LastModified")
    return ObjectInfo(
        key=full[len(base) :],
        bytes=int(item.text("Size", "0")),
        etag=item.text("ETag").strip('"') or None,
        mtime=datetime.fromisoformat(modified).timestamp() if modified else None,
    )
