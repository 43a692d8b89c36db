"""What is on the SSD and wanted in DRAM: staging for readers, warming, and a look whether it is still right.

    pool reserves a DRAM slot -> payload and table into it -> checksums -> pool.promote

A shard is read once however many readers wait for it. While it is read its chunk is held; a chunk that somebody removes
meanwhile is noticed afterwards, and the slot is free again. Writers leave a part of the DRAM free for this
(`Pool.read_back_bytes`), and one call brings at most so much, so that a prompt larger than the DRAM comes in parts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence

from kvstore.model.layout import Rectangle
from kvstore.model.prefix import Keys
from kvstore.model.values import MissReason
from kvstore.node.chunks import Chunk
from kvstore.node.core import NodeCore
from kvstore.node.pool import SlotState
from kvstore.node.tiers.disk import Disk, Fail, Move

logger = logging.getLogger(__name__)
ROOM_POLL_S = 0.01
WINDOW_BYTES = 64 << 20
"""One call brings at most so much, so that a reader copies while the next part is on its way."""
STEP_CHUNKS = 64
"""Chunks that one turn of the event loop finds slots for: a few milliseconds."""
WARM_CHUNKS = 64
"""Chunks of a promotion that are under way at a time."""


Arrival = asyncio.Future[MissReason | None]
"""Of one shard that is read: None, it is in DRAM; or why it is not."""


class ReadBack:
    """Used on the node's event loop. `fail` takes the tier out of service; `has_failed` tells whether it is."""

    def __init__(self, core: NodeCore, disk: Disk, fail: Fail, has_failed: Callable[[], bool]) -> None:
        self.holds = core.holds
        self._own_slots = core.own_slots
        self._pool = core.pool
        self._disk = disk
        self._fail = fail
        self._has_failed = has_failed
        self._room = asyncio.Event()
        self.under_way: dict[tuple[Chunk, int], Arrival] = {}

    def wake(self) -> None:
        """A slot may have come free."""
        self._room.set()

    async def stage(
        self, keys: Keys, rectangle: Rectangle, first: int, ends_s: float, *, ahead: bool = False
    ) -> tuple[int, MissReason | None]:
        """Bring chunks from place `first` on into DRAM, as many as one call may, within the time.

        That is `WINDOW_BYTES`, or what writers leave free (`Pool.read_back_bytes`) where that is less, at least one
        chunk. `ahead`: before a reader asks for them, which is no use of them yet. Returns how many chunks came, and
        why the next did not; None also where the bound of one call was reached. What came is in DRAM when this returns,
        and stays there until the caller gives the loop back.

        Only the first chunk waits for a slot, and only where the reader has nothing before it to copy: what is held for
        him may be just what has to leave the DRAM for the next.
        """
        batch = _Batch(self, ends_s, ahead=ahead)
        if first and (before := self._pool.forest.get(keys[first - 1])):
            batch.hold(before)
        chunks: list[Chunk] = []
        budget: int | None = None
        reason = None
        try:
            for index in range(first, len(keys)):
                if not (index - first + 1) % STEP_CHUNKS:
                    await asyncio.sleep(0)  # what was wanted so far is held
                chunk = self._pool.forest.get(keys[index])
                shards = chunk.covering_anywhere(rectangle) if chunk is not None else None
                if chunk is None or shards is None:
                    break
                wanted = [shard for shard in shards if shard not in chunk.copies]
                size = sum(chunk.ssd[shard].size_bytes for shard in wanted)
                if budget is None and size:
                    budget = max(size, min(WINDOW_BYTES, self._pool.read_back_bytes(size)))
                if budget is not None:
                    if size > budget:
                        break
                    budget -= size
                if not ahead:
                    self._pool.touch([chunk.key])  # before it comes: coming is no further use
                has_some = bool(first or chunks)
                if not await batch.want(chunk, wanted, waits=not (ahead or has_some)):
                    why = self._why_not(chunk, wanted)
                    reason = None if has_some and why is MissReason.STAGING_FULL else why
                    break
                chunks.append(chunk)
            reason = await batch.wait() or reason
        finally:
            batch.let_go()
        arrived = [chunk.covering(rectangle) is not None for chunk in chunks]
        return arrived.index(False) if False in arrived else len(arrived), reason

    async def stage_all(self, keys: Keys, rectangle: Rectangle, first: int, ends_s: float) -> None:
        """As `stage`, again and again, for a reader who is expected. Stops at the first chunk that does not come."""
        while first < len(keys) and time.monotonic() < ends_s:
            staged, reason = await self.stage(keys, rectangle, first, ends_s, ahead=True)
            first += staged
            if reason is not None or not staged:
                return

    async def promote(self, chunks: Sequence[Chunk], ends_s: float) -> int:
        """Bring all shards of these chunks (parents first) into DRAM, until one does not come or the time is up.

        Returns how many came whole. They push out what is colder, but none of the same call.
        """
        batch = _Batch(self, ends_s)
        count = 0
        try:
            for start in range(0, len(chunks), WARM_CHUNKS):
                for chunk in chunks[start : start + WARM_CHUNKS]:
                    missing = [shard for shard in chunk.ssd if shard not in chunk.copies]
                    if self._pool.forest.get(chunk.key) is not chunk or not await batch.want(
                        chunk, missing, waits=False
                    ):
                        break
                    count += 1
                if await batch.wait() or count < min(start + WARM_CHUNKS, len(chunks)):
                    break
        finally:
            batch.let_go()
        return sum(chunk.ssd.keys() <= chunk.copies.keys() for chunk in chunks[:count])

    async def is_broken(self, chunk: Chunk, shard: int) -> bool:
        """True if a shard on the SSD is not what was stored. Reads it."""
        copy = chunk.ssd.get(shard)
        if copy is None or self._has_failed():
            return False
        move = Move(chunk, shard, 0, copy.slot, copy.size_bytes, copy.table_hash, source=copy)
        await self._disk.verify(move)
        if move.error is not None:
            self._fail(move.error, "read")
        broken = move.error is None and move.is_right is False and chunk.ssd.get(shard) is copy
        self._pool.counts["ssd_checksum_failures"] += broken
        return broken

    def drop_broken(self, chunk: Chunk) -> None:
        """The chunk's SSD copies are gone, and all below it that needs them there."""
        for each in self._pool.forest.subtree(chunk):
            if each.ssd:
                self._pool.drop_from_ssd(each)
                self.let_pins_wait(each)

    def let_pins_wait(self, chunk: Chunk) -> None:
        """After its SSD copies were dropped: pins stop counting a chunk that left with them, and wait for it."""
        if chunk.holds and self._pool.forest.get(chunk.key) is not chunk:
            self.holds.forget(chunk)

    # --- one read ----------------------------------------------------------------------------------------

    def take(self, chunk: Chunk, shard: int, *, ahead: bool = False) -> Move | None:
        """Reserve a DRAM slot for a shard on the SSD; None if there is no room now, or nothing to read."""
        copy = chunk.ssd.get(shard)
        if copy is None or self._has_failed():
            return None
        slots = self._pool.dram.take(copy.size_bytes, 1, chunk.space.group)
        if not slots:
            return None
        slot, catalog = slots[0], self._pool.catalog
        catalog.raise_generation(slot)
        catalog.record(slot, SlotState.RESERVED, chunk.space.number, 0, (0, 0), shard, chunk.key, chunk.parent_key)
        self._own_slots.add(slot)
        self._pool.dram.coming_bytes[chunk.space.group] += copy.size_bytes
        self.holds.keep(chunk)
        self.under_way[chunk, shard] = asyncio.get_running_loop().create_future()
        return Move(chunk, shard, slot, copy.slot, copy.size_bytes, copy.table_hash, source=copy, ahead=ahead)

    def start(self, moves: Sequence[Move]) -> None:
        """Read what was taken."""
        self._disk.start_reads(moves, self._end)

    def _end(self, move: Move) -> None:
        chunk, pool = move.chunk, self._pool
        arrival = self.under_way.pop((chunk, move.shard))
        self._own_slots.discard(move.slot)
        pool.dram.coming_bytes[chunk.space.group] -= move.size_bytes
        self.holds.let(chunk)
        stands = pool.forest.get(chunk.key) is chunk and chunk.ssd.get(move.shard) is move.source
        reason = None
        if move.error is None:
            pool.counts["ssd_read_bytes"] += move.size_bytes
            pool.seconds["ssd_read"].add(time.monotonic() - move.began_s)
        if stands and move.error is None and move.is_right and move.shard not in chunk.copies:
            pool.promote(chunk, move.shard, move.slot, move.table_hash, ahead=move.ahead)
        else:
            pool.free_slot(move.slot)
        if move.error is not None:
            reason = MissReason.TIER_FAILED
            self._fail(move.error, "read")
        elif not stands:
            reason = MissReason.ABSENT
        elif move.is_right is None:  # the slot holds what it held before
            reason = MissReason.TIER_FAILED
        elif not move.is_right:
            reason = MissReason.CHECKSUM
            pool.counts["ssd_checksum_failures"] += 1
            logger.warning("chunk %s on the SSD differs from what was stored: it is dropped", chunk.key.hex())
            self.drop_broken(chunk)
        self._room.set()
        if not arrival.done():
            arrival.set_result(reason)

    def _why_not(self, chunk: Chunk, wanted: Sequence[int]) -> MissReason:
        """Why no read of these shards was begun."""
        if self._has_failed():
            return MissReason.TIER_FAILED
        there = all(shard in chunk.ssd or shard in chunk.copies for shard in wanted)
        return MissReason.STAGING_FULL if there else MissReason.ABSENT

    def check(self) -> None:
        """Every slot that the node fills itself is filled by a read under way."""
        assert len(self.under_way) == len(self._own_slots), "reads from the SSD"
        assert self.under_way or not +self._pool.dram.coming_bytes, "bytes that are coming back"

    async def wait_for_room(self, seconds: float) -> None:
        """Until a slot may have come free, but not longer than a moment."""
        self._room.clear()
        try:
            await asyncio.wait_for(self._room.wait(), min(seconds, ROOM_POLL_S))
        except TimeoutError:
            return


class _Batch:
    """Reads that one caller waits for. They are handed to the disk together, so that neighbours go with one call."""

    def __init__(self, owner: ReadBack, ends_s: float, *, ahead: bool = False) -> None:
        self._ahead = ahead
        self._owner = owner
        self._ends_s = ends_s
        self._held: list[Chunk] = []
        self._taken: list[Move] = []
        self._reads: list[Arrival] = []

    def hold(self, chunk: Chunk) -> None:
        """Keep a chunk until `let_go`."""
        self._owner.holds.keep(chunk)
        self._held.append(chunk)

    async def want(self, chunk: Chunk, shards: Iterable[int], *, waits: bool) -> bool:
        """Also these shards; False if one finds no slot, now or (`waits`) within the time."""
        self.hold(chunk)
        for shard in shards:
            while (read := self._owner.under_way.get((chunk, shard))) is None:
                move = self._owner.take(chunk, shard, ahead=self._ahead)
                if move is not None:
                    self._taken.append(move)
                    continue
                left_s = self._ends_s - time.monotonic()
                if not waits or left_s <= 0 or shard not in chunk.ssd or self._owner._has_failed():
                    return shard in chunk.copies
                self._start()
                await self._owner.wait_for_room(left_s)
                if shard in chunk.copies:
                    break
            else:
                self._reads.append(read)
        return True

    def _start(self) -> None:
        if self._taken:
            self._owner.start(self._taken)
            self._taken = []

    async def wait(self) -> MissReason | None:
        """Until all have come; why the first that has not did not."""
        self._start()
        reads, self._reads = self._reads, []
        if reads:
            await asyncio.wait(reads, timeout=max(0.0, self._ends_s - time.monotonic()))
        for read in reads:
            if not read.done():
                return MissReason.DEADLINE
            if (reason := read.result()) is not None:
                return reason
        return None

    def let_go(self) -> None:
        """End all holds; what was taken and not started is started, because it can only end by its reading."""
        self._start()
        for chunk in self._held:
            self._owner.holds.let(chunk)
