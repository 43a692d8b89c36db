"""Which chunks are in DRAM only, and which of them go to the SSD next. Pure, synchronous.

A chunk with a shard that is in DRAM only is *unsaved*. Those of them that are worth a place on the SSD *wait*, in the
order in which the cleaner takes them: first what was used longest ago.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import islice

from kvstore.node.admission import Admission
from kvstore.node.chunks import Chunk

_SCAN_LIMIT = 4096


class Backlog:
    """Of one node with an SSD. `unsaved_bytes`: those of the shards that are in DRAM only."""

    def __init__(self, clock: Callable[[], float], admission: Admission) -> None:
        self.unsaved: set[Chunk] = set()
        self.unsaved_bytes = 0
        self.waiting: OrderedDict[Chunk, float] = OrderedDict()
        """First to save first -> when they got that place."""
        self._clock = clock
        self._admission = admission

    def add(self, chunk: Chunk, size_bytes: int, *, again: bool = True) -> None:
        """A shard is in DRAM only. `again` False: it is not worth a place just now."""
        self.unsaved.add(chunk)
        self.unsaved_bytes += size_bytes
        if again:
            self._place(chunk, self._clock())

    def used(self, chunk: Chunk, now_s: float) -> None:
        """It may be worth a place from now on."""
        if chunk in self.unsaved:
            self._place(chunk, now_s)

    def saved(self, chunk: Chunk, size_bytes: int) -> None:
        """A shard came onto the SSD."""
        self.unsaved_bytes -= size_bytes
        if chunk.is_saved:
            self.unsaved.remove(chunk)
            self.waiting.pop(chunk, None)

    def leaves(self, chunk: Chunk) -> None:
        """Before its DRAM copies leave."""
        if chunk in self.unsaved:
            self.unsaved.remove(chunk)
            self.waiting.pop(chunk, None)
            self.unsaved_bytes -= _bytes_in_dram_only(chunk)

    def give_up(self, chunk: Chunk) -> None:
        """It is not tried again before somebody uses it or asks for it."""
        self.waiting.pop(chunk, None)

    def put_off(self, chunk: Chunk) -> None:
        """It cannot be saved now: others have their turn first."""
        if chunk in self.waiting:
            self._to_the_end(chunk, self._clock())

    def coldest(self, count: int) -> list[Chunk]:
        """Up to `count` chunks to save, those first that were used longest ago. Nothing changes but their order.

        Chunks that were used since they got their place go back to the end, at most a few thousand in one call.
        """
        late: dict[Chunk, None] = {}
        found: list[Chunk] = []
        for chunk, placed_s in islice(self.waiting.items(), _SCAN_LIMIT):
            if chunk.used_s > placed_s:
                late[chunk] = None
            else:
                found.append(chunk)
                if len(found) == count:
                    break
        for chunk in late:
            self._to_the_end(chunk, chunk.used_s)
        return found or list(late)[:count]

    def clear(self) -> None:
        """There is no SSD any more."""
        self.unsaved.clear()
        self.waiting.clear()
        self.unsaved_bytes = 0

    def _place(self, chunk: Chunk, now_s: float) -> None:
        if self._admission.wants(chunk):
            self.waiting.setdefault(chunk, now_s)

    def _to_the_end(self, chunk: Chunk, placed_s: float) -> None:
        self.waiting[chunk] = placed_s
        self.waiting.move_to_end(chunk)

    def check(self, chunks: Iterable[Chunk]) -> None:
        """Exactly what is unsaved among all chunks of the node is known as such."""
        unsaved = {chunk for chunk in chunks if not chunk.is_saved}
        assert unsaved == self.unsaved >= self.waiting.keys(), "unsaved chunks"
        assert sum(map(_bytes_in_dram_only, unsaved)) == self.unsaved_bytes, "unsaved bytes"


def _bytes_in_dram_only(chunk: Chunk) -> int:
    return sum(copy.size_bytes for shard, copy in chunk.copies.items() if shard not in chunk.ssd)
