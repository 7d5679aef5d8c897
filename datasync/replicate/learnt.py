"""What a run learns on its way: digests of a tree's objects, and which bytes are paid for."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

from datasync.errors import StoreError
from datasync.replicate.catalog import Catalog, settle
from datasync.replicate.journal import Past
from datasync.replicate.plan import Plan
from datasync.replicate.transfer import Mover


def completed(catalog: Catalog, mover: Mover, past: Past) -> Catalog:
    """The catalog with every digest that was learnt while copying, here or by an unfinished run."""
    if catalog.version is not None and not mover.tags:
        return catalog
    import pyarrow as pa

    table = catalog.table
    columns = {name: table[name].to_pylist() for name in ("bytes", "sha256", "crc32c", "tag")}
    with mover.turn:
        found, changed = dict(mover.found), dict(mover.tags)
    for row, (tag, size) in changed.items():
        columns["tag"][row], columns["bytes"][row] = tag, size
    for row, proof in found.items():
        columns["sha256"][row], columns["crc32c"][row] = bytes.fromhex(proof.sha256), proof.crc32c
    keys = table["key"]
    for row, sha in enumerate(columns["sha256"]):
        if sha is None:
            done = past.done.get(keys[row].as_py())
            if done is None:
                raise StoreError(f"{keys[row].as_py()}: its digest was not learnt", mend="run again")
            columns["sha256"][row], columns["crc32c"][row] = bytes.fromhex(done.sha256), done.crc32c
    for name, values in columns.items():
        at = table.schema.get_field_index(name)
        table = table.set_column(
            at, table.schema.field(name), pa.array(values, table.schema.field(name).type)
        )
    final = replace(catalog, table=table, version=None, manifest=None)
    settle(final)
    return final


class Paid:
    """The objects that destinations have asked for so far, each of which is read once."""

    def __init__(self) -> None:
        self._rows: Any = None
        self._lock = threading.Lock()

    def add(self, plan: Plan) -> int:
        """Bytes of a plan that no plan before it had."""
        import numpy as np

        with self._lock:
            if self._rows is None:
                self._rows = plan.rows
                return plan.bytes
            fresh = ~np.isin(plan.rows, self._rows)
            self._rows = np.concatenate((self._rows, plan.rows[fresh]))
        return int(plan.table["bytes"].to_numpy()[fresh].sum())
