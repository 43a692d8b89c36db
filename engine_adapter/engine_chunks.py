"""The blocks that a plan names, as a destination of reads and a source of writes, whole chunks or parts of them.

    chunk of 4 pages      blocks of the plan       in the pool's chunk
    a whole chunk         7   3   9   4            all four pages
    a prompt's end        8   2                    two pages; the others are written as zero and read by nobody
    begun elsewhere       -   -   5   6            only the last two are loaded; it is never stored

A chunk that is there whole goes through one copier for all such chunks; a part has one of its own. Several threads may
copy at a time where the copiers allow it: stores are bound by their checksums otherwise. `close` ends all copying: when
it returns, no block is read or written any more, whatever threads were at it.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from engine_adapter.pieces import Bytes
from engine_adapter.plans import GroupChunks, KvGroup
from kvstore.client.values import gathers_at_once, scatter_checked, scatters_at_once, takes_checksums
from kvstore.errors import InvalidRequest, KvStoreError
from kvstore.model import checksum


class Endpoint(Protocol):
    """A `Destination` and `Source` over an engine's tensors: `copy.PagedKv` or `device_copy.DevicePagedKv`."""

    def scatter(self, index: int, piece: Bytes, layer_start: int, head_start: int) -> None:
        """See `kvstore.client.values.Destination`."""

    def gather(self, index: int, slot: Bytes, layer_start: int, head_start: int) -> None:
        """See `kvstore.client.values.Source`."""


MakeEndpoint = Callable[[int, Sequence[Sequence[int]]], Endpoint]
"""(pages a chunk, blocks of each chunk) -> the copier of these blocks."""


class BlocksTaken(KvStoreError):
    """The engine needs the blocks for something else: the copy is given up."""


_Place = tuple[Endpoint, int, int, int]
"""The endpoint of a chunk, its place there, and the pages [start, stop) that it has."""


class EngineChunks:
    """One group's chunks of one plan. Thread-safe; what is copied at the same time is the caller's affair."""

    def __init__(self, group: KvGroup, chunks: GroupChunks, make: MakeEndpoint) -> None:
        per_chunk, pages = group.blocks_per_chunk, group.namespace.layout.pages_per_chunk
        self._pages_per_block = pages // per_chunk
        self._changed = threading.Condition()
        self._open = True
        self._under_way = 0
        """Pieces that are being copied."""
        self._places: list[_Place | None] = []
        whole: list[list[int]] = []
        parts: list[tuple[int, int, list[int]]] = []
        for at in range(0, len(chunks.keys) * per_chunk, per_chunk):
            first, ids = _present(chunks.blocks[at : at + per_chunk])
            parts.append((first, first + len(ids), ids))
            if len(ids) == per_chunk:
                whole.append(ids)
        everything, places = make(pages, whole) if whole else None, itertools.count()
        for start, stop, ids in parts:
            if len(ids) == per_chunk and everything is not None:
                self._places.append((everything, next(places), 0, pages))
            elif ids:
                some = make(len(ids) * self._pages_per_block, [ids])
                self._places.append((some, 0, start * self._pages_per_block, stop * self._pages_per_block))
            else:
                self._places.append(None)
        self.first_whole = 1 + max((i for i, at in enumerate(self._places) if at is None or at[2]), default=-1)
        """Chunks before it have no block here, or not all that belong to them; from it on none is missing at its start.
        What a writer cannot fill it must not reserve."""
        self.endpoints = tuple({id(place[0]): place[0] for place in self._places if place is not None}.values())
        self.gathers_at_once = all(map(gathers_at_once, self.endpoints))
        self.scatters_at_once = all(map(scatters_at_once, self.endpoints))
        self.sums_on_the_way = all(map(takes_checksums, self.endpoints))

    def __len__(self) -> int:
        """Number of chunks."""
        return len(self._places)

    def scatter(self, index: int, piece: Bytes, layer_start: int, head_start: int) -> None:
        """See Destination. Pages without a block are left out."""
        with self._copying(index) as (endpoint, place, start, stop):
            endpoint.scatter(place, piece[:, start:stop], layer_start, head_start)

    def scatter_checked(
        self, index: int, piece: Bytes, layer_start: int, head_start: int, table: checksum.Table
    ) -> bool:
        """See Checking."""
        with self._copying(index) as (endpoint, place, start, stop):
            if not start and stop == piece.shape[1]:
                return scatter_checked(endpoint, place, piece, layer_start, head_start, table)
            if not checksum.matches(piece, table):
                return False
            endpoint.scatter(place, piece[:, start:stop], layer_start, head_start)
            return True

    def gather(self, index: int, slot: Bytes, layer_start: int, head_start: int) -> None:
        """See Source. Pages behind the prompt become zero; InvalidRequest where pages before the first one lack."""
        with self._copying(index) as (endpoint, place, start, stop):
            if start:
                raise InvalidRequest(f"chunk {index} begins with pages that the engine no longer has")
            slot[:, stop:] = 0
            endpoint.gather(place, slot[:, start:stop], layer_start, head_start)

    def gather_summed(self, index: int, slot: Bytes, layer_start: int, head_start: int) -> checksum.Table:
        """See Summing."""
        with self._copying(index) as (endpoint, place, start, stop):
            if not start and stop == slot.shape[1] and takes_checksums(endpoint):  # else one after the other
                return endpoint.gather_summed(place, slot, layer_start, head_start)
        self.gather(index, slot, layer_start, head_start)
        return checksum.table_of_layers(slot)

    def close(self) -> None:
        """No block is touched after this; waits for the pieces that are being copied. Idempotent."""
        with self._changed:
            self._open = False
            self._changed.wait_for(lambda: not self._under_way)
            for endpoint in self.endpoints:
                synchronize = getattr(endpoint, "synchronize", None)
                if synchronize is not None:
                    synchronize()

    @contextmanager
    def _copying(self, index: int) -> Iterator[_Place]:
        """Where the chunk is, while a piece of it is copied. Raises BlocksTaken after `close`."""
        with self._changed:
            if not self._open:
                raise BlocksTaken("the engine has given these blocks to another request")
            place = self._places[index]
            if place is None:
                raise InvalidRequest(f"chunk {index} has no block in the engine")
            self._under_way += 1
        try:
            yield place
        finally:
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()


class QueuedChunks(EngineChunks):
    """The same where copies may end after the call: `kvstore.client.values.Asynchronous`."""

    def launch(self) -> None:
        """Begin all copies."""
        for endpoint in self.endpoints:
            endpoint.launch()  # type: ignore[attr-defined]

    def synchronize(self) -> None:
        """Wait for all copies."""
        for endpoint in self.endpoints:
            endpoint.synchronize()  # type: ignore[attr-defined]


def _present(blocks: Sequence[int | None]) -> tuple[int, list[int]]:
    """(place of the first block that is there, those that are): they must be one run."""
    first = next((place for place, block in enumerate(blocks) if block is not None), 0)
    ids = list(itertools.takewhile(lambda block: block is not None, blocks[first:]))
    if any(block is not None for block in blocks[first + len(ids) :]):
        raise InvalidRequest(f"the blocks of a chunk are one run, not {list(blocks)}")
    return first, [block for block in ids if block is not None]
