"""Copies between pool memory and an engine's paged KV tensors, in one pass and without a buffer in between.

    pool memory   [layer][page][kv_head][head page]           one slot a shard
    engine        per layer: (blocks, kv_heads, *head page)   strided views, see `views`; a chunk's blocks are anywhere

Both sides are cut into items (see `items`): where the engine keeps a head page in one piece, it is the item, and a
layer of a chunk is `pages x heads` of them; an NHD engine has an item a token and head. All layers of an engine
have the same strides, so one table of places serves them all.

A page list is one numpy call (`put` by fancy index, `take` with `out`). Assigning page by page or calling memmove
through ctypes costs more in Python than it saves. Short items move fastest when they are opaque (`V<item_bytes>`), a
call a layer: rows of bytes cost an inner loop, twice the time at 512 bytes. From 2 KiB on rows are as fast, and numpy
gives the interpreter's lock up while it puts them. Where all layers lie at distances that such rows divide, one call
moves all layers of a piece: two threads then move half as much again as one, where a call a layer leaves them waiting
for the lock. That is the common case: allocators put large tensors at one place of their first memory page.
`bench/engine_copy.py` and `bench/reshard.py` measure it.

Invariant: no byte outside the tensors is touched. Block ids are checked once, at the start, so a wrong id is an error
here and never a stray access. An array of all layers reaches over what lies between them, but no place of it does.
Not done here: any decision about what to load.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import gcd
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from engine_adapter.items import Places, cut_items
from engine_adapter.pieces import Bytes, EngineShape, check_writeable, checked_blocks
from engine_adapter.views import HeadPages
from kvstore.errors import InvalidRequest, LayoutMismatch
from kvstore.model import checksum

Items = npt.NDArray[np.void] | Bytes
"""Runs of bytes: opaque items, or from `ROW_BYTES` on rows of bytes, with one dimension more."""
ROW_BYTES = 2048
"""Least bytes of a row."""


class PagedKv:
    """The pages of some chunks in an engine's KV tensors: a sink for reads and a source for writes.

    `pages`: what `views.head_pages` makes of an engine's tensors; or the tensors themselves, one a layer, each
    (blocks, kv_heads, ...) of any dtype, whose inside is stored as it is. `block_ids[i]` names the blocks of chunk
    i, the same in all layers: `pages_per_chunk` of them, more or fewer where blocks are not as long as stored pages.
    `layer_offset` and `head_offset`: place of the engine's first layer and KV head in the model.

    Holds references to the tensors; their storage must not be resized or freed by other means meanwhile. Several
    threads may copy at a time, each another chunk. Raises LayoutMismatch for shapes that do not fit, InvalidRequest
    for block ids out of range and for tensors that are not in CPU memory.
    """

    def __init__(
        self,
        pages: HeadPages | Sequence[torch.Tensor],
        pages_per_chunk: int,
        block_ids: Sequence[Sequence[int]],
        layer_offset: int = 0,
        head_offset: int = 0,
    ) -> None:
        if not isinstance(pages, HeadPages):
            pages = HeadPages.opaque(pages, pages_per_chunk)
        if not pages.layers:
            raise LayoutMismatch("an engine has at least one layer")
        if pages.pages_per_chunk != pages_per_chunk:
            raise LayoutMismatch(f"the views have {pages.pages_per_chunk} pages a chunk, not {pages_per_chunk}")
        first = pages.layers[0]
        if len({view.shape for view in first}) != 1:
            raise LayoutMismatch(f"K and V have one shape, not {[tuple(view.shape) for view in first]}")
        self._parts = [_Part(pages, number) for number in range(len(first))]
        # A call a layer is too short to get the interpreter's lock back for.
        self.gathers_at_once = all(part.joined for part in self._parts)
        self.scatters_at_once = all(part.item_bytes >= ROW_BYTES for part in self._parts)
        self._in_rows = len(self._parts) == 1 and self._parts[0].joined
        self.sums_on_the_way = self._in_rows and checksum.moved_natively(self._parts[0].item_bytes)
        self._shape = EngineShape(
            len(pages.layers),
            int(first[0].shape[1]),
            pages_per_chunk,
            pages.head_page_bytes,
            layer_offset,
            head_offset,
        )
        blocks = checked_blocks(block_ids, pages.blocks_per_chunk, len(first[0]))
        # For each chunk, page and unit of the page: its block, and which unit of the block it is.
        units = np.arange(pages_per_chunk * pages.units_per_page).reshape(pages_per_chunk, pages.units_per_page)
        self._blocks: Places = blocks[:, units // pages.units_per_block]
        self._units: Places = units % pages.units_per_block

    def __len__(self) -> int:
        """Number of chunks."""
        return len(self._blocks)

    def scatter(self, index: int, piece: Bytes, layer_start: int, head_start: int) -> None:
        """Copy `piece` (layers, pages, heads, head_page_bytes) of chunk `index` into the engine's pages."""
        for items, places, stored in self._matched(index, piece, layer_start, head_start):
            items[places] = stored

    def scatter_checked(
        self, index: int, piece: Bytes, layer_start: int, head_start: int, table: checksum.Table
    ) -> bool:
        """The same, and only what has these checksums: checked on the way where the pages are rows of one array."""
        if self._in_rows:
            ((items, places, _),) = self._matched(index, piece, layer_start, head_start)
            return checksum.scatter(piece, table, cast(Bytes, items), places)
        if not checksum.matches(piece, table):
            return False
        self.scatter(index, piece, layer_start, head_start)
        return True

    def gather(self, index: int, slot: Bytes, layer_start: int, head_start: int) -> None:
        """Fill `slot` (layers, pages, heads, head_page_bytes) from the engine's pages of chunk `index`."""
        check_writeable(slot)
        for items, places, stored in self._matched(index, slot, layer_start, head_start):
            # mode="clip": the default buffers `out`. No place is ever clipped, they were checked at the start.
            items.take(places, axis=0, out=stored, mode="clip")

    def gather_summed(self, index: int, slot: Bytes, layer_start: int, head_start: int) -> checksum.Table:
        """The same, and returns the checksums: taken on the way where the engine's pages are rows of one array."""
        if self._in_rows:
            check_writeable(slot)
            ((items, places, _),) = self._matched(index, slot, layer_start, head_start)
            return checksum.gather(cast(Bytes, items), places, slot)
        self.gather(index, slot, layer_start, head_start)
        return checksum.table_of_layers(slot)

    def _matched(
        self, index: int, piece: Bytes, layer_start: int, head_start: int
    ) -> Iterator[tuple[Items, Places, Items]]:
        """For all layers of `piece`, or for each: the engine's items, the places among them, the pool's items."""
        if not 0 <= index < len(self._blocks):
            raise InvalidRequest(f"chunk {index} of {len(self._blocks)}")
        layer, head = self._shape.place(piece, layer_start, head_start)
        layers, _, heads, _ = piece.shape
        for part in self._parts:
            places = part.places(self._blocks[index], self._units, head, head + heads)
            stored = part.stored_items(piece)
            if part.joined:
                first = part.first[layer : layer + layers]
                yield part.memory[0], first.reshape(-1, *(1,) * places.ndim) + places, stored
            else:
                for items, one in zip(part.memory[layer : layer + layers], stored, strict=True):
                    yield items, places, one


class _Part:
    """One view a layer as items: whole head pages, or the K or the V of them, or rows of either.

    `joined`: `memory` is one array of all layers, and layer i begins at its item `first[i]`; else it is one a layer.
    """

    def __init__(self, pages: HeadPages, number: int) -> None:
        self._cut = cut = cut_items(pages, number)
        views = [layer[number] for layer in pages.layers]
        if any(view.device.type != "cpu" for view in views):
            where = views[0].device
            raise InvalidRequest(f"KV on {where} is copied by engine_adapter.device_copy.DevicePagedKv")
        starts = [view.data_ptr() for view in views]
        lowest = min(starts)
        row_bytes = gcd(cut.item_bytes, *(start - lowest for start in starts))
        self.joined = row_bytes >= ROW_BYTES
        self.item_bytes = row_bytes if self.joined else cut.item_bytes
        self._rows = np.arange(cut.item_bytes // self.item_bytes)
        layer_bytes = cut.count * cut.item_bytes
        if self.joined:
            rows = (max(starts) + layer_bytes - lowest) // row_bytes
            self.memory: list[Items] = [np.asarray(_Memory(views, lowest, (rows, row_bytes)))]
            self.first: Places = (np.array(starts, dtype=np.intp) - lowest) // row_bytes
        else:
            shape = cut.count, cut.item_bytes
            self.memory = [_as_items(np.asarray(_Memory([view], view.data_ptr(), shape))) for view in views]

    def places(self, blocks: Places, units: Places, head_start: int, head_stop: int) -> Places:
        """Places (pages, heads, units, *inside) of the items of one chunk, whose units lie there (pages, units).

        Where an item is several rows, the last dimension is theirs.
        """
        cut, rows = self._cut, self._rows
        first = (blocks * cut.block_step + units * cut.unit_step)[:, None]
        heads = np.arange(head_start, head_stop)[:, None] * cut.head_step
        places: Places = (first + heads)[(..., *(None,) * cut.inside.ndim)] + cut.inside
        return places if len(rows) == 1 else places[..., None] * len(rows) + rows

    def stored_items(self, piece: Bytes) -> Items:
        """The same items of a stored piece: (layers, pages, heads, units, *inside)."""
        items = piece.reshape(*piece.shape[:3], *self._cut.stored_shape)[self._cut.which]
        return _as_items(items if len(self._rows) == 1 else items.reshape(*items.shape[:-1], -1, self.item_bytes))


class _Memory:
    """Memory from an address on as an array, which keeps the tensors that own it."""

    def __init__(self, owners: Sequence[torch.Tensor], address: int, shape: tuple[int, int]) -> None:
        self._owners = owners
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "data": (address, False), "shape": shape}


def _as_items(rows: Bytes) -> Items:
    """The last dimension as items."""
    return rows if rows.shape[-1] >= ROW_BYTES else rows.view(f"V{rows.shape[-1]}")[..., 0]
