"""Large objects: read in ranges ahead of the hash, sent in parts, visible only after the whole digest fits.

    range 1 ─┐                    ┌─ part 1 ─► lane b
    range 2 ─┼─► in order: hash ──┼─ part 2 ─► lane b        then, if the digest fits: complete
    range 3 ─┘                    └─ …                        else: abort

A part that an earlier run finished is read again for the hash, and compared, but not sent again. A lane that
lags drops out with its parts recorded and goes on from them when the object comes round again.
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from datasync.errors import CorruptError, DatasyncError, NotFoundError, StoreError
from datasync.replicate.buffers import Loan
from datasync.replicate.journal import Begun, Done
from datasync.replicate.lane import Lane
from datasync.replicate.plan import Item
from datasync.replicate.reading import algorithms
from datasync.replicate.retry import retrying
from datasync.storage.base import Filled, Store, Upload
from datasync.storage.retry import inheriting
from shards.digests import Digest, crc32c

if TYPE_CHECKING:
    from datasync.replicate.transfer import Mover, Proof

log = logging.getLogger(__name__)

_AHEAD = 4


@dataclass(slots=True, eq=False)
class _Sending:
    """One lane's side of one object."""

    lane: Lane
    upload: Upload
    journaled: dict[int, tuple[str, int]]
    stored: dict[int, tuple[str, int]]
    tags: dict[int, str] = field(default_factory=dict)
    waiting: int = 0
    lagged: bool = False
    error: DatasyncError | None = None

    @property
    def going(self) -> bool:
        return self.lane.alive and self.error is None and not self.lagged


def send_large(mover: Mover, source: Store, item: Item, lanes: list[Lane]) -> None:
    """Move one large object.

    Raises:
        CorruptError: The source's bytes do not have their digest; nothing became visible.
        StoreError: The source could not be read.
    """
    sendings = []
    for lane in lanes:
        try:
            sendings.append(_open(lane, item))
        except DatasyncError as error:
            lane.fail_object(item, error)
    # Parts must have one size for all who share a reading.
    for size in sorted({sending.upload.part_bytes for sending in sendings}):
        group = [sending for sending in sendings if sending.upload.part_bytes == size]
        _send_group(mover, source, item, size, group)


def _open(lane: Lane, item: Item) -> _Sending:
    """Go on with the upload of an earlier run, or begin one."""
    begun = lane.uploads.get(item.key)
    if begun is not None and begun.bytes == item.bytes and begun.sha256 in (None, item.sha256):
        try:
            upload = lane.store.resume(item.key, begun.upload_id, bytes=item.bytes)
            stored = retrying(upload.parts, seconds=lane.retry_seconds)
            if upload.part_bytes == begun.part_bytes or not begun.parts:
                return _Sending(lane, upload, dict(begun.parts), stored)
            upload.abort()
        except NotFoundError:
            pass  # expired or swept: begin again
        except StoreError as error:
            log.info("the upload of %s cannot go on: %s", item.key, error.message)
    elif begun is not None:
        lane.drop_upload(begun)
    upload = retrying(lambda: lane.store.begin(item.key, bytes=item.bytes), seconds=lane.retry_seconds)
    fresh = Begun(
        key=item.key,
        upload_id=upload.upload_id,
        bytes=item.bytes,
        part_bytes=upload.part_bytes,
        sha256=item.sha256,
    )
    lane.uploads[item.key] = fresh
    lane.journal.upload(fresh)
    return _Sending(lane, upload, {}, {})


def _send_group(mover: Mover, source: Store, item: Item, size: int, group: list[_Sending]) -> None:
    digest, crc = Digest({"sha256", *algorithms(item)}), 0
    try:
        for number, loan, part_crc, reserved in _ranges(mover, source, item, size, group):
            crc = crc32c(loan.view, crc)
            digest.update(loan.view)
            for sending in reserved:
                _offer(mover, sending, item, number, loan, part_crc)
            loan.release()
    finally:
        for sending in group:
            _settle(mover, sending)
    if digest.bytes < item.bytes:
        return  # every lane is dead or has put the object off
    try:
        proof = mover.proven(source, item, digest.hexdigests(), crc)
    except CorruptError:
        for sending in group:
            sending.lane.drop_upload(sending.lane.uploads[item.key])
        raise
    for sending in group:
        if sending.going:
            sending.lane.submit(_Complete(sending, item, proof), item, 0)


def _ranges(
    mover: Mover, source: Store, item: Item, size: int, group: list[_Sending]
) -> Iterator[tuple[int, Loan, int, list[_Sending]]]:
    """The object's ranges in order, several being read ahead; each with its CRC and the lanes that have room
    for it."""
    ahead: deque[tuple[int, Future[Filled], list[_Sending], Loan]] = deque()
    pool = ThreadPoolExecutor(_AHEAD, thread_name_prefix="ranges")
    try:
        for number, start in enumerate(range(0, item.bytes, size), start=1):
            length = min(size, item.bytes - start)
            going = [sending for sending in group if sending.going]
            lanes = mover.reserve(item, [sending.lane for sending in going], length)
            reserved = [sending for sending in going if sending.lane in lanes]
            for sending in going:
                sending.lagged = sending not in reserved
            if not reserved:
                break
            loan = mover.buffers.take(length)
            future = pool.submit(inheriting(mover.read), source, item, start, loan.view)
            ahead.append((number, future, reserved, loan))
            if len(ahead) >= _AHEAD:
                yield _next(ahead)
        while ahead:
            yield _next(ahead)
    finally:
        pool.shutdown(cancel_futures=True)
        for _, _, reserved, loan in ahead:
            for sending in reserved:
                sending.lane.give_back(len(loan.view))
            loan.release()


def _next(
    ahead: deque[tuple[int, Future[Filled], list[_Sending], Loan]],
) -> tuple[int, Loan, int, list[_Sending]]:
    number, future, reserved, loan = ahead[0]
    crc = future.result().crc32c
    ahead.popleft()
    return number, loan, crc, reserved


def _offer(mover: Mover, sending: _Sending, item: Item, number: int, loan: Loan, crc: int) -> None:
    """Send a part, unless the store has it."""
    data = loan.view
    if number in sending.stored:
        tag, length = sending.stored[number]
        recorded = sending.journaled.get(number)
        if length == len(data) and (recorded == (tag, crc) or _is_tag_of(tag, data, crc)):
            sending.tags[number] = tag
            with mover.turn:
                sending.lane.tally.resumed_bytes += length
            sending.lane.give_back(length)
            return
    with mover.turn:
        sending.waiting += 1
    loan.share(1)
    sending.lane.submit(_Part(mover, sending, item, number, loan, crc), item, len(data))


def _settle(mover: Mover, sending: _Sending) -> None:
    """Wait until the parts on their way have arrived or failed."""
    with mover.turn:
        while sending.waiting:
            mover.turn.wait(1.0)


def _is_tag_of(tag: str, data: memoryview, crc: int) -> bool:
    """Whether a store's tag of a part says that it has these bytes: an MD5, or length and CRC of a folder."""
    bare = tag.strip('"').lower()
    return bare == f"{len(data):x}-{crc:08x}" or bare == hashlib.md5(data, usedforsecurity=False).hexdigest()


class _Part:
    """One part on its way to one lane."""

    __slots__ = ("crc", "item", "loan", "mover", "number", "sending")

    def __init__(
        self, mover: Mover, sending: _Sending, item: Item, number: int, loan: Loan, crc: int
    ) -> None:
        self.mover, self.sending, self.item = mover, sending, item
        self.number, self.loan, self.crc = number, loan, crc

    def __call__(self) -> None:
        sending, lane = self.sending, self.sending.lane

        def send() -> str:
            data = self.loan.view
            with lane.slot(len(data)):
                return sending.upload.put(self.number, data, crc32c=self.crc)

        try:
            if sending.error is None:
                sending.upload.wait_turn(
                    self.number
                )  # without a slot: the part before it may need the last one
                tag = retrying(send, seconds=lane.retry_seconds, stop=self.mover.stop)
                sending.tags[self.number] = tag
                if (begun := lane.uploads.get(self.item.key)) is not None:
                    begun.parts[self.number] = tag, self.crc
                lane.journal.part(self.item.key, sending.upload.upload_id, self.number, tag, self.crc)
        except DatasyncError as error:
            first, sending.error = sending.error is None, error
            if first:
                lane.fail_object(self.item, error)

    def ended(self) -> None:
        if self.number not in self.sending.tags:
            self.sending.upload.give_up()
        self.loan.release()
        with self.mover.turn:
            self.sending.waiting -= 1
            self.mover.turn.notify_all()


class _Complete:
    """The last step: the parts become the object."""

    __slots__ = ("item", "proof", "sending")

    def __init__(self, sending: _Sending, item: Item, proof: Proof) -> None:
        self.sending, self.item, self.proof = sending, item, proof

    def __call__(self) -> None:
        sending, lane, item = self.sending, self.sending.lane, self.item
        if len(sending.tags) != -(-item.bytes // sending.upload.part_bytes):
            return  # stopped on the way; the parts are recorded

        def complete() -> None:
            try:
                with lane.slot():
                    sending.upload.complete(dict(sending.tags))
            except NotFoundError:
                # The answer to an earlier try was lost: then the object is there.
                if not lane.holds(item.key, item.bytes, sha256=self.proof.sha256, crc32c=self.proof.crc32c):
                    raise

        retrying(complete, seconds=lane.retry_seconds)
        lane.uploads.pop(item.key, None)
        if lane.read_back and not lane.proven(item, sha256=self.proof.sha256):
            raise CorruptError(
                f"{item.key} on {lane.name} is not what was sent (expected sha256 {self.proof.sha256})",
                mend="run again; if it comes back, check the disk or the network of that place",
            )
        done = Done(bytes=item.bytes, sha256=self.proof.sha256, crc32c=self.proof.crc32c, tag=item.tag)
        lane.finished(item, done)
