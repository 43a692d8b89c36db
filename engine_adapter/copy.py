"""Copies between pool memory and an engine's paged KV tensors, in one pass and without a buffer in between.

    pool memory   [layer][page][kv_head][head page]           one slot a shard
    engine        per layer: [block][kv_head][head page]      the pages of a chunk are anywhere

Both sides keep a head page in one piece, so a layer of a chunk is `pages x heads` items that move as they are.
numpy does that fastest when the items are opaque: as a `V<head_page_bytes>` array a page list is one call a layer
(`put` by fancy index, `take` with `out`), about 0.75 of a memcpy of the whole chunk at 16 KiB a page. Assigning
page by page or calling memmove through ctypes costs more in Python than it saves; bytes or int64 as items cost an
inner loop. `bench/engine_copy.py` measures it.

Invariant: a view never reaches outside the tensor that it was made from, and block ids are checked once, at the
start, so a wrong id is an error here and never a stray write. Not done here: any decision about what to load.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvstore.errors import InvalidRequest, LayoutMismatch

Bytes = npt.NDArray[np.uint8]
Items = npt.NDArray[np.void]
"""Head pages as opaque items."""


class PagedKv:
    """The pages of some chunks in an engine's KV tensors: a sink for reads and a source for writes.

    `tensors`: one a layer, each (blocks, kv_heads, ...) of any dtype, C-contiguous within a block; blocks may lie
    apart, at a multiple of the head page. `block_ids[i]` names the `pages_per_chunk` blocks of chunk i, the same
    in all layers. `layer_offset` and `head_offset`: place of the engine's first layer and KV head in the model.

    Holds references to the tensors; their storage must not be resized or freed by other means meanwhile. Not for
    concurrent use on the same chunk. Raises LayoutMismatch for shapes that do not fit, InvalidRequest for block
    ids out of range and for tensors that are not in CPU memory.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        pages_per_chunk: int,
        block_ids: Sequence[Sequence[int]],
        layer_offset: int = 0,
        head_offset: int = 0,
    ) -> None:
        if not tensors:
            raise LayoutMismatch("an engine has at least one layer")
        shapes = {(*t.shape, t.dtype) for t in tensors}
        if len(shapes) != 1:
            raise LayoutMismatch(f"all layers have one shape and dtype, not {shapes}")
        self._heads = int(tensors[0].shape[1]) if tensors[0].dim() >= 3 else 0
        self._head_page_bytes = tensors[0][0, 0].numel() * tensors[0].element_size() if self._heads else 0
        if not self._head_page_bytes:
            raise LayoutMismatch(f"a KV tensor is (blocks, kv_heads, ...), not {tuple(tensors[0].shape)}")
        self._offsets = layer_offset, head_offset
        self._pages = pages_per_chunk
        self._item = np.dtype(f"V{self._head_page_bytes}")
        views = [_head_pages(tensor, self._item) for tensor in tensors]
        self._layers = [items for items, _ in views]
        strides = {stride for _, stride in views}
        if len(strides) != 1:
            raise LayoutMismatch("all layers have one distance between blocks")
        # Places of the head pages of chunk i in every layer: (chunks, pages, heads).
        self._places = _checked_blocks(block_ids, pages_per_chunk, len(tensors[0]))[:, :, None] * strides.pop()
        self._places = self._places + np.arange(self._heads)

    def __len__(self) -> int:
        """Number of chunks."""
        return len(self._places)

    def scatter(self, index: int, piece: Bytes, layer_start: int, head_start: int) -> None:
        """Copy `piece` (layers, pages, heads, head_page_bytes) of chunk `index` into the engine's pages."""
        for items, places, part in self._matched(index, piece, layer_start, head_start):
            items[places] = part

    def gather(self, index: int, slot: Bytes, layer_start: int, head_start: int) -> None:
        """Fill `slot` (layers, pages, heads, head_page_bytes) from the engine's pages of chunk `index`."""
        if not slot.flags.writeable:
            raise InvalidRequest("the slot to gather into is read-only")
        for items, places, part in self._matched(index, slot, layer_start, head_start):
            # mode="clip": the default buffers `out`. No place is ever clipped, they were checked at the start.
            items.take(places, out=part, mode="clip")

    def _matched(
        self, index: int, piece: Bytes, layer_start: int, head_start: int
    ) -> Iterator[tuple[Items, npt.NDArray[np.intp], Items]]:
        """Per layer of `piece`: the engine's head pages, the places among them, the pool's head pages."""
        if not 0 <= index < len(self._places):
            raise InvalidRequest(f"chunk {index} of {len(self._places)}")
        if piece.ndim != 4 or piece.dtype != np.uint8 or piece.strides[-1] != 1:
            raise LayoutMismatch("a piece is a uint8 array (layers, pages, heads, head_page_bytes)")
        layer, head = layer_start - self._offsets[0], head_start - self._offsets[1]
        layers, pages, heads, head_page_bytes = piece.shape
        if (pages, head_page_bytes) != (self._pages, self._head_page_bytes):
            raise LayoutMismatch(
                f"the pool has {pages} pages a chunk and {head_page_bytes} bytes a head page, "
                f"the engine {self._pages} and {self._head_page_bytes}"
            )
        if layer < 0 or layer + layers > len(self._layers) or head < 0 or head + heads > self._heads:
            raise LayoutMismatch(
                f"layers {layer_start}+{layers}, heads {head_start}+{heads} do not lie in the engine's "
                f"{self._offsets[0]}+{len(self._layers)}, {self._offsets[1]}+{self._heads}"
            )
        places = self._places[index][:, head : head + heads]
        parts = piece.view(self._item)[..., 0]
        return ((items, places, part) for items, part in zip(self._layers[layer : layer + layers], parts, strict=True))


def _head_pages(tensor: torch.Tensor, item: np.dtype[np.void]) -> tuple[Items, int]:
    """All head pages from the first to the last block as one array of items, and the items between two blocks."""
    if tensor.device.type != "cpu":
        raise InvalidRequest(f"KV on {tensor.device} needs the device copy path, which this version does not have")
    if not tensor[0].is_contiguous():
        raise LayoutMismatch("the inside of a block must be C-contiguous, KV head outermost")
    block_bytes = tensor.stride(0) * tensor.element_size()
    stride, rest = divmod(block_bytes, item.itemsize)
    if rest or stride < tensor.shape[1]:
        raise LayoutMismatch(f"blocks lie {block_bytes} bytes apart, not a multiple of the head page ({item.itemsize})")
    flat = tensor.detach().view(torch.uint8)
    count = (tensor.shape[0] - 1) * stride + tensor.shape[1]
    table = flat.as_strided((count, item.itemsize), (item.itemsize, 1))
    return table.numpy().view(item)[:, 0], stride


def _checked_blocks(block_ids: Sequence[Sequence[int]], pages_per_chunk: int, blocks: int) -> npt.NDArray[np.intp]:
    """Block ids as (chunks, pages). The same block twice is the engine's affair: some have a null block."""
    if any(len(chunk) != pages_per_chunk for chunk in block_ids):
        raise LayoutMismatch(f"every chunk has {pages_per_chunk} blocks")
    places = np.array(block_ids, dtype=np.intp).reshape(len(block_ids), pages_per_chunk)
    lowest, highest = (int(places.min()), int(places.max())) if places.size else (0, 0)
    if lowest < 0 or highest >= blocks:
        raise InvalidRequest(f"block ids lie in 0..{blocks - 1}, not {lowest}..{highest}")
    return places
