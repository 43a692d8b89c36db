"""Checksums: xxh3-64 per (layer, KV head) over that head's pages of the chunk in page order. Pure.

The cut is fixed by the namespace and not by any TP size, so that a reader of another rectangle can verify just
the heads that it takes. A shard's table is u64 little-endian [layer][head] and lies behind its payload; the
catalog entry holds the xxh3-64 of the table (never 0: 0 means stored without checksums).

xxhash keeps the interpreter's lock while it hashes a head page, so threads that copy wait for each other. `_checksum.c`
takes a table in one call without the lock, or takes or checks it while it copies. The package works without it, slower
(`NATIVE` tells): the values are the same.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.model.layout import PageLayout, Rectangle

_native: ModuleType | None
try:
    from kvstore.model import _checksum as _native
except ImportError:  # built without a C compiler
    _native = None

Bytes = npt.NDArray[np.uint8]
Table = npt.NDArray[np.uint64]
"""(layers, heads), u64 little-endian."""
Places = npt.NDArray[np.intp]
NATIVE = _native is not None
"""Whether checksums are taken by compiled code."""


def table_of(payload: Bytes, layout: PageLayout, rectangle: Rectangle) -> Table:
    """Checksum table of a shard's contiguous payload (uint8, one-dimensional), shape (layers, heads)."""
    return table_of_layers(payload.reshape(layout.shape(rectangle)))


def table_of_layers(stored: Bytes) -> Table:
    """Checksum table (layers, heads) of contiguous layers (uint8, (layers, pages, heads, head_page_bytes))."""
    if _native is None or not hashed_natively(stored):
        return _table_by_xxhash(stored)
    layers, _, heads, _ = stored.shape
    table = np.empty((layers, heads), dtype="<u8")
    _native.table(stored, *stored.shape, table)
    return table


def gather(memory: Bytes, places: Places, slot: Bytes) -> Table:
    """Fill `slot` with rows of `memory`; returns its checksum table, which is taken on the way.

    `memory` (rows, row_bytes), contiguous; `slot` (layers, pages, heads, head_page_bytes), contiguous; `places`: of the
    rows that fill it, in its order, any shape. IndexError where one lies outside, ValueError where they do not fill it.
    """
    row_bytes = memory.shape[1]
    if _native is None or not hashed_natively(slot) or not _in_rows(memory, slot):
        checked = _checked(memory, places, slot)
        if slot.flags.c_contiguous:
            memory.take(checked, axis=0, out=slot.reshape(-1, row_bytes), mode="clip")  # the default buffers `out`
        else:
            slot[...] = memory[checked].reshape(slot.shape)
        return table_of_layers(slot)
    layers, _, heads, _ = slot.shape
    table = np.empty((layers, heads), dtype="<u8")
    _native.gather(memory, row_bytes, np.ascontiguousarray(places, dtype=np.int64), slot, *slot.shape, table)
    return table


def scatter(piece: Bytes, table: Table, memory: Bytes, places: Places) -> bool:
    """Copy `piece` to rows of `memory`, no layer before its checksums were found to be those of `table`.

    False if a layer has others: neither it nor a layer behind it is copied. Arguments and errors as in `gather`.
    """
    row_bytes = memory.shape[1]
    if _native is None or not hashed_natively(piece) or not _in_rows(memory, piece):
        checked = _checked(memory, places, piece)
        if not matches(piece, table):
            return False
        memory[checked] = piece.reshape(-1, row_bytes)
        return True
    if table.shape != (piece.shape[0], piece.shape[2]):
        return False
    table = np.ascontiguousarray(table, dtype="<u8")
    where = np.ascontiguousarray(places, dtype=np.int64)
    return bool(_native.scatter(piece, *piece.shape, table, memory, row_bytes, where) == len(piece))


def copy_out(stored: Bytes, slot: Bytes) -> Table:
    """`gather` where `stored` is an array of the shape of `slot`."""
    if stored.flags.c_contiguous and stored.shape == slot.shape and hashed_natively(slot):
        layers = stored.reshape(len(stored), -1)
        return gather(layers, np.arange(len(layers)), slot)
    slot[...] = stored
    return table_of_layers(slot)


def copy_in(piece: Bytes, table: Table, target: Bytes) -> bool:
    """`scatter` where `target` is an array of the shape of `piece`."""
    if target.flags.c_contiguous and target.shape == piece.shape and hashed_natively(piece):
        layers = target.reshape(len(target), -1)
        return scatter(piece, table, layers, np.arange(len(layers)))
    if not matches(piece, table):
        return False
    target[...] = piece
    return True


def matches(piece: Bytes, table: Table) -> bool:
    """True if these layers have these checksums."""
    return np.array_equal(table_of_layers(piece), table)


_STRIPE, _LEAST = 64, 241
"""The compiled code hashes whole stripes, and no inputs for which XXH3 has ways of their own."""


def hashed_natively(stored: Bytes) -> bool:
    """True if the compiled code, where it is there, hashes such layers: contiguous, of whole stripes, not tiny."""
    _, pages, _, size = stored.shape
    return size % _STRIPE == 0 and pages * size >= _LEAST and stored.size > 0 and stored.flags.c_contiguous


def moved_natively(row_bytes: int) -> bool:
    """True if the compiled code, where it is there, moves rows of this length."""
    return row_bytes % _STRIPE == 0


def _in_rows(memory: Bytes, stored: Bytes) -> bool:
    row_bytes, layer_bytes = memory.shape[1], stored[0].nbytes
    return moved_natively(row_bytes) and layer_bytes % row_bytes == 0 and memory.flags.c_contiguous


def _checked(memory: Bytes, places: Places, stored: Bytes) -> Places:
    """The places in one dimension. IndexError and ValueError as in `gather`."""
    flat = places.reshape(-1)
    if flat.size * memory.shape[1] != stored.nbytes:
        raise ValueError(f"{flat.size} rows of {memory.shape[1]} bytes are not {stored.nbytes} bytes")
    if flat.size and not 0 <= int(flat.min()) <= int(flat.max()) < len(memory):
        raise IndexError(f"rows {flat.min()}..{flat.max()} of {len(memory)}")
    return flat


def _table_by_xxhash(stored: Bytes) -> Table:
    layers, pages, heads, size = stored.shape
    view = stored.reshape(-1).data  # contiguous, or a copy that is
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


def table_hash(table: Bytes | Table) -> int:
    """xxh3-64 of a table's bytes, never 0."""
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(table).data) or 1


def table_bytes(rectangle: Rectangle) -> int:
    """Bytes of a shard's table."""
    return rectangle.area * 8


def differs(payload: Bytes, table: Bytes, layout: PageLayout, rectangle: Rectangle) -> bool:
    """True if a shard's payload does not match the table stored behind it (uint8, `table_bytes` long)."""
    return not np.array_equal(table_of(payload, layout, rectangle).view(np.uint8).ravel(), table)
