"""What a replication is told and what it tells: options, the request to stop, the outcome of a place."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from datasync.errors import DatasyncError, UsageError
from datasync.ops.receipts import Receipt
from datasync.replicate.lane import Tally
from datasync.replicate.lease import TTL_SECONDS
from datasync.replicate.retry import RETRY_SECONDS

ALREADY, PLANNED, PUBLISHED, FAILED, STOPPED = "already", "planned", "published", "failed", "stopped"


@dataclass(slots=True)
class Stop:
    """A request to end, with its reason; shared by the caller (signals, deadline) and the run."""

    event: threading.Event = field(default_factory=threading.Event)
    reason: str = ""
    exit_code: int = 4

    def ask(self, reason: str, exit_code: int = 4) -> None:
        if not self.event.is_set():
            self.reason, self.exit_code = reason, exit_code
            self.event.set()


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to replicate.

    Args:
        as_tree (bool): Copy every file, also of a folder that has an index. Default: ``False``.
        dry_run (bool): Plan only; nothing is written anywhere. Default: ``False``.
        verify (str): ``stored``: each object is proven before it is sent, and by the destination's checksum
            while it is stored. ``full``: each is also read back. Default: ``stored``.
        delete (bool): Remove from a tree's copy what the source no longer has. Default: ``False``.
        max_delete (float): The largest share that may be removed. Default: ``0.1``.
        require_signature (str | None): Public key file that must have signed the index.
        retry_seconds (float): How long a failing place is tried. Default: ``120``.
        lease_seconds (float): Time to live of the leases. Default: ``60``.
        quiet (bool): No progress. Default: ``False``.
        engine (str): ``local``, or ``ray``: spread over the nodes of a Ray cluster. Default: ``local``.
        akin (frozenset | None): Identities of the places that hold the same, where the name is only the last
            part of a path: a copy from elsewhere is one of something else, and is left alone. Default:
            ``None``, anywhere.
    """

    as_tree: bool = False
    dry_run: bool = False
    verify: str = "stored"
    delete: bool = False
    max_delete: float = 0.1
    require_signature: str | None = None
    retry_seconds: float = RETRY_SECONDS
    lease_seconds: float = TTL_SECONDS
    quiet: bool = False
    engine: str = "local"
    akin: frozenset[tuple[str, str]] | None = None

    def __post_init__(self) -> None:
        if self.verify not in ("stored", "full"):
            raise UsageError(f"verify cannot be {self.verify!r}", mend="use stored or full")


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What became of one destination.

    Args:
        name (str): The dataset or tree.
        source (str): URL.
        destination (str): The cluster's name, or a URL.
        url (str): URL of the copy.
        kind (str): ``dataset``, ``mds`` or ``tree``.
        state (str): ``already``, ``planned``, ``published``, ``failed`` or ``stopped``.
        version (str | None): Version of the source, where known.
        objects, bytes, samples (int): Of the whole version.
        to_copy, to_copy_bytes (int): Of the plan.
        to_compare (int): Objects to copy that are in place with their size: a dry run, which reads none of
            them, cannot tell whether they are the same.
        feeder (str): Which other destination it is fed from, in a relay. Default: none, the source.
        paid_bytes (int): Of the bytes to copy, those that are read for no destination before this one:
            what several destinations need is read once.
        to_delete, deleted (int): Objects that ``delete`` would remove, and removed.
        estimate_seconds (float | None): Of a plan: at the rate of the last run that copied.
        tally (Tally): What was done.
        seconds (float): How long it took.
        source_bytes_read (int): Read from the source, for all destinations together.
        left_out (Sequence[str]): Markers of folders at the source, which are no data and are not copied.
        receipt (Receipt | None): The proof.
        error (DatasyncError | None): Why it failed.
    """

    name: str
    source: str
    destination: str
    url: str
    kind: str = ""
    state: str = FAILED
    version: str | None = None
    objects: int = 0
    bytes: int = 0
    samples: int | None = None
    to_copy: int = 0
    to_copy_bytes: int = 0
    to_compare: int = 0
    feeder: str = ""
    paid_bytes: int = 0
    to_delete: int = 0
    deleted: int = 0
    estimate_seconds: float | None = None
    tally: Tally = field(default_factory=Tally)
    seconds: float = 0.0
    source_bytes_read: int = 0
    left_out: Sequence[str] = ()
    receipt: Receipt | None = None
    error: DatasyncError | None = None
