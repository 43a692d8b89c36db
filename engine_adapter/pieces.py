"""Where a piece of the pool lies in an engine: the checks that all copies make before a byte moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.errors import InvalidRequest, LayoutMismatch

Bytes = npt.NDArray[np.uint8]
BlockIds = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class EngineShape:
    """The part of a model's KV that an engine's rank holds, and what it stores in one piece.

    `layer_offset` and `head_offset`: its first layer and KV head in the model. `pages`: blocks a chunk.
    """

    layers: int
    heads: int
    pages: int
    head_page_bytes: int
    layer_offset: int = 0
    head_offset: int = 0

    def place(self, piece: Bytes, layer_start: int, head_start: int) -> tuple[int, int]:
        """(layer, head) of the engine where `piece` (layers, pages, heads, head_page_bytes) begins.

        Raises LayoutMismatch unless it is such an array and lies in the engine's part.
        """
        if piece.ndim != 4 or piece.dtype != np.uint8 or piece.strides[-1] != 1:
            raise LayoutMismatch("a piece is a uint8 array (layers, pages, heads, head_page_bytes)")
        layer, head = layer_start - self.layer_offset, head_start - self.head_offset
        layers, pages, heads, head_page_bytes = piece.shape
        if (pages, head_page_bytes) != (self.pages, self.head_page_bytes):
            raise LayoutMismatch(
                f"the pool has {pages} pages a chunk and {head_page_bytes} bytes a head page, "
                f"the engine {self.pages} and {self.head_page_bytes}"
            )
        if layer < 0 or layer + layers > self.layers or head < 0 or head + heads > self.heads:
            raise LayoutMismatch(
                f"layers {layer_start}+{layers}, heads {head_start}+{heads} do not lie in the engine's "
                f"{self.layer_offset}+{self.layers}, {self.head_offset}+{self.heads}"
            )
        return layer, head


def checked_blocks(block_ids: Sequence[Sequence[int]], pages_per_chunk: int, blocks: int) -> BlockIds:
    """Block ids as (chunks, pages). The same block twice is the engine's affair: some have a null block."""
    if any(len(chunk) != pages_per_chunk for chunk in block_ids):
        raise LayoutMismatch(f"every chunk has {pages_per_chunk} blocks")
    places = np.array(block_ids, dtype=np.intp).reshape(len(block_ids), pages_per_chunk)
    lowest, highest = (int(places.min()), int(places.max())) if places.size else (0, 0)
    if lowest < 0 or highest >= blocks:
        raise InvalidRequest(f"block ids lie in 0..{blocks - 1}, not {lowest}..{highest}")
    return places


def check_writeable(slot: Bytes) -> None:
    """Raise InvalidRequest for a slot that cannot be filled."""
    if not slot.flags.writeable:
        raise InvalidRequest("the slot to gather into is read-only")
