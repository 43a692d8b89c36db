"""A worker for tests between hosts: stores or reads chunks whose bytes follow from their keys, and says what it saw.

nixl_worker.py write|read NODE METADATA CHUNKS [TRANSPORT]
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np

import kvstore
from kvstore.client.values import Bytes

LAYOUT = kvstore.PageLayout(8, 4, 128, kvstore.Dtype.BF16, 16, 4)
"""1 MiB a chunk."""
DEADLINE_S = 30.0


def pages_of(keys: Any) -> Bytes:
    """Random bytes, seeded by each chunk's own key."""
    shape = (len(keys), *LAYOUT.shape(LAYOUT.whole))
    pages = np.empty((len(keys), LAYOUT.chunk_bytes), dtype=np.uint8)
    for page, key in zip(pages, keys, strict=True):
        page[:] = np.random.default_rng(int.from_bytes(key, "little")).integers(0, 256, len(page), dtype=np.uint8)
    return pages.reshape(shape)


def main() -> None:
    """One command, one JSON line."""
    verb, node, metadata, count, *more = sys.argv[1:]
    transport = more[0] if more else "auto"
    with kvstore.connect(node, metadata, transport=transport) as client:
        cache = client.bind(kvstore.Namespace("between-hosts", "1", LAYOUT))
        keys = cache.keys(np.arange(int(count) * LAYOUT.chunk_tokens, dtype=np.uint32))
        expected = pages_of(keys)
        if verb == "write":
            print(json.dumps({"stored": cache.write(keys, expected, deadline_s=DEADLINE_S).visible}))
            return
        pages = cache.empty(len(keys))
        pages[:] = 0xA5
        result = cache.read(keys, pages, deadline_s=DEADLINE_S)
        right = sum(bool((a == b).all()) for a, b in zip(pages, expected, strict=True))
        print(
            json.dumps(
                {
                    "chunks": result.chunks,
                    "right": right,
                    "reason": result.reason,
                    "bytes_by_path": dict(result.bytes_by_path),
                    "path": client.remote_path,
                }
            )
        )


if __name__ == "__main__":
    main()
