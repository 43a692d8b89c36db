"""A stored chunk read as one wanted rectangle, in pieces and checked against its checksums. Reads only, no fence.

The caller looks at the slots' generations after each piece: what these functions return may be torn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.model import checksum
from kvstore.model.layout import PageLayout, Rectangle
from kvstore.node import ShardPlace
from kvstore.node.catalog import UNIT_BYTES

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """The wanted rectangle of one chunk, seen through the stored shards that cover it.

    Both sides are looked at as rows, one a (layer, page), of heads x head_page_bytes bytes: a stored shard gives the
    wanted rectangle a block of rows and columns.
    """

    memory: Bytes
    layout: PageLayout
    wanted: Rectangle
    places: Sequence[ShardPlace]
    piece_bytes: int

    def digest(self) -> int | None:
        """xxh3-64 of the wanted bytes; None if a shard does not match its checksums. Reads everything twice."""
        if any(place.table_hash and self._differs(place) for place in self.places):
            return None
        state = xxhash.xxh3_64()
        for piece in self.pieces():
            state.update(piece.data)
        return state.intdigest()

    def pieces(self) -> Iterator[Bytes]:
        """The wanted bytes [layer][page][head][head page] as private copies of at most `piece_bytes`, in order."""
        rows = self.wanted.layers * self.layout.pages_per_chunk
        width = self.wanted.heads * self.layout.head_page_bytes
        row_step, column_step = max(1, self.piece_bytes // width), min(width, self.piece_bytes)
        for row in range(0, rows, row_step):
            for column in range(0, width, column_step):
                yield self._block(row, min(row + row_step, rows), column, min(column + column_step, width))

    def _block(self, row: int, row_stop: int, column: int, column_stop: int) -> Bytes:
        block = np.empty((row_stop - row, column_stop - column), dtype=np.uint8)
        pages, size, wanted = self.layout.pages_per_chunk, self.layout.head_page_bytes, self.wanted
        for place in self.places:
            stored = place.rectangle
            common = stored.intersection(wanted)
            if common is None:
                continue
            top = max(row, (common.layer_start - wanted.layer_start) * pages)
            bottom = min(row_stop, (common.layer_stop - wanted.layer_start) * pages)
            left = max(column, (common.head_start - wanted.head_start) * size)
            right = min(column_stop, (common.head_stop - wanted.head_start) * size)
            if top < bottom and left < right:
                down = (wanted.layer_start - stored.layer_start) * pages
                across = (wanted.head_start - stored.head_start) * size
                lines = self._payload(place).reshape(-1, stored.heads * size)
                source = lines[top + down : bottom + down, left + across : right + across]
                block[top - row : bottom - row, left - column : right - column] = source
        return block

    def _payload(self, place: ShardPlace) -> Bytes:
        start = place.slot * UNIT_BYTES
        return self.memory[start : start + self.layout.payload_bytes(place.rectangle)]

    def _differs(self, place: ShardPlace) -> bool:
        start = place.slot * UNIT_BYTES + self.layout.payload_bytes(place.rectangle)
        table = self.memory[start : start + checksum.table_bytes(place.rectangle)]
        return checksum.table_hash(table) != place.table_hash or checksum.differs(
            self._payload(place), table, self.layout, place.rectangle
        )
