"""The floor of copying: GETs and PUTs of the same objects by the leanest client, nothing looked at.

    python -m tests.bench.bare_copy copy|fan FROM-ENDPOINT BUCKET/PREFIX TO-ENDPOINT BUCKET/PREFIX...

`copy` reads and writes each object; `fan` reads it once and writes it to every place. Four at a time, each
with memory that is used again. Keys are in $KEY and $SECRET.
"""

from __future__ import annotations

import os
import sys
import threading
from queue import Empty, SimpleQueue
from typing import Any

from datasync.storage import open_store


def main() -> None:
    _, endpoint, source, other, *places = sys.argv[1:]
    keys: dict[str, Any] = {
        "access_key": os.environ["KEY"],
        "secret_key": os.environ["SECRET"],
        "region": "us-east-1",
    }
    store = open_store(f"s3://{source}", endpoint=endpoint, **keys)
    to = [open_store(f"s3://{place}", endpoint=other, **keys) for place in places]
    names = [(info.key, info.bytes) for info in store.list()]
    todo: SimpleQueue[tuple[str, int]] = SimpleQueue()
    for name in names:
        todo.put(name)

    def work() -> None:
        memory = memoryview(bytearray(max(size for _, size in names)))
        while True:
            try:
                name, size = todo.get_nowait()
            except Empty:
                return
            with store.api.open("GET", store.full_key(name)) as response:  # type: ignore[attr-defined]
                assert response.read_into(memory[:size]) == size
            for target in to:
                target.api.call("PUT", target.full_key(name), body=memory[:size])  # type: ignore[attr-defined]

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
