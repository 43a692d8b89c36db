"""Checksums: xxh3-64 per (layer, KV head) over that head's pages of the chunk in page order. Pure.

The cut is fixed by the namespace and not by any TP size, so that a reader of another rectangle can verify just
the heads that it takes. A shard's table is u64 little-endian [layer][head] and lies behind its payload; the
catalog entry holds the xxh3-64 of the table (never 0: 0 means stored without checksums).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.model.layout import PageLayout, Rectangle

Bytes = npt.NDArray[np.uint8]


def table_of(payload: Bytes, layout: PageLayout, rectangle: Rectangle) -> npt.NDArray[np.uint64]:
    """Checksum table of a shard's contiguous payload (uint8, one-dimensional), shape (layers, heads)."""
    return table_of_layers(payload.reshape(layout.shape(rectangle)))


def table_of_layers(stored: Bytes) -> npt.NDArray[np.uint64]:
    """Checksum table (layers, heads) of contiguous layers (uint8, (layers, pages, heads, head_page_bytes))."""
    layers, pages, heads, size = stored.shape
    view = stored.reshape(-1).data
    page, row = heads * size, pages * heads * size
    digests = []
    if pages == 1 or heads == 1:  # the pages of a head are one run
        run = pages * size
        digest = xxhash.xxh3_64_intdigest
        digests = [digest(view[at : at + run]) for at in range(0, layers * row, run)]
    else:
        new = xxhash.xxh3_64
        for start in range(0, layers * row, row):
            for first in range(start, start + page, size):
                state = new(view[first : first + size])
                for at in range(first + page, first + row, page):
                    state.update(view[at : at + size])
                digests.append(state.intdigest())
    return np.array(digests, dtype="<u8").reshape(layers, heads)


def table_hash(table: Bytes | npt.NDArray[np.uint64]) -> int:
    """xxh3-64 of a table's bytes, never 0."""
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(table).data) or 1


def table_bytes(rectangle: Rectangle) -> int:
    """Bytes of a shard's table."""
    return rectangle.area * 8


def differs(payload: Bytes, table: Bytes, layout: PageLayout, rectangle: Rectangle) -> bool:
    """True if a shard's payload does not match the table stored behind it (uint8, `table_bytes` long)."""
    return not np.array_equal(table_of(payload, layout, rectangle).view(np.uint8).ravel(), table)
