"""Whether the ranks of a job read the same data in the same order, asked without waiting for anybody.

Ranks open their datasets at slightly different times, perhaps from different replicas, and a dataset may be
published again in between. The first rank to get there leaves what it has in the key-value store that
`torch.distributed` keeps anyway; every other one compares. No rank waits for another (invariant 6), so a
dataset that only some ranks make, for evaluation say, is no hang.

Datasets are matched by their names and by how many of that name a rank has made before.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

from datasync.errors import UsageError

_made: Counter[str] = Counter()


def check_agreement(name: str, mine: Mapping[str, Any]) -> bool:
    """Compare with the other ranks; False where there is nobody to ask, or not yet.

    Args:
        name (str): Which dataset.
        mine (Mapping[str, Any]): What must be the same on every rank: names to values that JSON can hold.

    Raises:
        UsageError: Another rank has something else; each difference is named with both values.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return False
    from torch.distributed.distributed_c10d import _get_default_store

    rank = distributed.get_rank()
    key = f"datasync/{name}/{_made[name]}"
    _made[name] += 1
    own = json.dumps({"rank": rank, "has": dict(mine)})
    store = _get_default_store()
    try:
        first = json.loads(own if store is None else store.compare_set(key, "", own))
    except NotImplementedError:  # ranks that are only pretended to be there
        return True
    differing = [
        f"{what}: {first['has'].get(what)} and {value}"
        for what, value in mine.items()
        if first["has"].get(what) != value
    ]
    if differing:
        raise UsageError(
            f"ranks {first['rank']} and {rank} do not read the same: {'; '.join(differing)}",
            mend="give every rank the same arguments; if the dataset is being published, wait until every "
            "replica has it (datasync wait), or name the version to read: version=…",
        )
    return True
