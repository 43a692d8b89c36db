"""What is in DRAM and goes to the SSD: the cleaner, persist, and removal that a restart does not undo.

    save       headers of given-up slots zeroed -> payload and table -> header -> pool.save
    remove     pool forgets at once -> headers zeroed, fdatasync -> the slots may be used again

The cleaner saves whatever waits for it, coldest first, and never for want of room: a threshold would have to know which
chunks go next, which differs from policy to policy (kept at "a quarter is free or saved", hot chunks that had come back
from the SSD filled the quarter and cold ones were lost). One batch is written at a time. While it is, its chunks are
held in DRAM and their parents are kept on the SSD; a chunk that somebody removes meanwhile is noticed afterwards: its
slot counts as removed.

A full disk is no failure: slots that were never written are left alone for a while and others are reused.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from itertools import zip_longest
from typing import Any, TypeVar

from kvstore.errors import CapacityExhausted, KvStoreError, LimitExceeded, StorageFailed
from kvstore.model.prefix import Keys
from kvstore.node.arena.ssd_format import ExtentPlace, SlotHeader, StoredNamespace
from kvstore.node.chunks import Chunk, KnownNamespace
from kvstore.node.core import NodeCore
from kvstore.node.tiers.disk import Disk, Fail, Move

T = TypeVar("T")
logger = logging.getLogger(__name__)
BATCH_CHUNKS = 256
BATCH_BYTES = 64 << 20
"""A batch has at most so many chunks and bytes, but at least one chunk;"""
BATCH_SHARE = 1 / 8
"""and at most this part of the DRAM, because what is being written cannot make room there."""
STEP_CHUNKS = 16
"""Chunks that one turn of the event loop begins or ends: a fraction of a millisecond."""
IDLE_S = 0.05
FULL_PAUSE_S = 30.0
"""After the disk was full, time until slots that were never written are tried again."""


class Saver:
    """Used on the node's event loop. `fail` takes the tier out of service; `has_failed` tells whether it is."""

    def __init__(self, core: NodeCore, disk: Disk, fail: Fail, has_failed: Callable[[], bool]) -> None:
        assert core.pool.ssd is not None
        self._core = core
        self._pool = core.pool
        self._backlog = core.pool.backlog
        self._tier = core.pool.ssd
        self._allocator = core.pool.ssd.allocator
        self._disk = disk
        self._fail = fail
        self._has_failed = has_failed
        self.lock = asyncio.Lock()
        """Held while a batch is written or headers are zeroed."""
        self._work = asyncio.Event()
        self._described: object = None
        """What the superblock says, to see whether it has to be written again."""
        self._stored: dict[bytes, StoredNamespace] = {}
        """Namespaces in the superblock, in the order of their numbers there."""
        self._formatted: set[ExtentPlace] = set()
        self._moving: set[int] = set()
        self._unbacked: list[int] = []
        self._full_until_s = 0.0
        self.begun: set[asyncio.Task[Any]] = set()
        """What is being done on the disk and must not end in the middle: one at a time."""

    def take_up(self, spaces: Sequence[KnownNamespace]) -> None:
        """What the file describes already: its namespaces, in their order; and the extents that are in use."""
        self._stored = dict(zip((space.id for space in spaces), self._disk.arena.superblock.namespaces, strict=True))
        self._formatted = {ExtentPlace(*extent) for extent in self._allocator.extents()}

    @property
    def is_full(self) -> bool:
        """True if the disk had no room for slots that were never written."""
        return self._allocator.only_used_before

    def wake(self) -> None:
        """Something was committed or removed."""
        if self._backlog.waiting or self._pool.removed_slots:
            self._work.set()

    async def clean(self) -> None:
        """Save what waits, without end."""
        while not self._has_failed():
            self._work.clear()
            if self._pool.removed_slots:
                await self._whole(self._forget_removed)
            self._try_fresh_slots()
            if not self._backlog.waiting or not await self.save_coldest():
                try:
                    await asyncio.wait_for(self._work.wait(), IDLE_S)
                except TimeoutError:
                    continue

    async def save_coldest(self) -> bool:
        """One batch of what waits; False if nothing of it reached the SSD."""
        return await self._whole(lambda: self._save_now(self._backlog.coldest(BATCH_CHUNKS)))

    async def persist(self, keys: Keys, ends_s: float) -> tuple[int, str]:
        """Save the leading chunks of these keys now, until the time is up. (Chunks that are saved, why not more)."""
        chunks: list[Chunk] = []
        for key in keys:
            chunk = self._pool.forest.get(key)
            if chunk is None or not chunk.is_committed:
                break
            chunks.append(chunk)
        reason = "" if len(chunks) == len(keys) else "absent"

        def left() -> list[Chunk]:
            return [chunk for chunk in chunks if chunk in self._backlog.unsaved]

        while not self._has_failed() and left():
            if time.monotonic() >= ends_s:
                reason = "deadline"
                break
            was_full = self.is_full
            saved = await self._within(ends_s, lambda: self._save_now(left()))
            if saved is None:
                break
            if not saved and (was_full or not self.is_full):  # else the disk has less room than was thought: once more
                reason = "ssd_full" if self._cut(left()) else "absent"
                break
        before = [list(chunk.ssd.values()) for chunk in chunks]  # what is written from here on is not synced
        if not self._has_failed() and not await self._within(ends_s, self._sync):
            return 0, "ssd_error" if self._has_failed() else "deadline"  # what is written is not safe yet
        run = 0
        for chunk, copies in zip(chunks, before, strict=True):
            if not copies or list(chunk.ssd.values()) != copies or not chunk.is_saved or self._has_failed():
                break
            run += 1
        return run, ("ssd_error" if self._has_failed() else reason or "ssd_full") if run < len(keys) else ""

    async def _sync(self) -> bool:
        try:
            await self._disk.run(self._disk.arena.sync)
        except KvStoreError as exc:
            self._fail(exc, "write")
        return not self._has_failed()

    async def forget_removed(self) -> None:
        """Zero the headers of what was removed and wait for the disk: a restart does not find it any more.

        Raises StorageFailed where that cannot be promised, because the tier is out of service.
        """
        if not self._has_failed():
            await self._whole(self._forget_removed)
        if self._has_failed():
            raise StorageFailed(
                f"what was removed may be found again after a restart on {self._disk.arena.path}, "
                "an SSD file that is out of service: delete that file before the next start"
            )

    async def _forget_removed(self) -> None:
        if self._has_failed():
            return
        slots = list(self._pool.removed_slots)
        stale = [*slots, *self._stale([])]
        if not stale and not self._disk.arena.has_unsynced_headers:  # an eviction may have emptied the header
            return
        try:
            await self._empty(stale)
            await self._disk.run(self._disk.arena.sync)
        except KvStoreError as exc:
            self._fail(exc, "write")
            return
        del self._pool.removed_slots[: len(slots)]  # others may have come behind them
        for slot in slots:
            self._allocator.release(slot)

    # --- one batch ---------------------------------------------------------------------------------------

    def _cut(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """What fits into one batch, each chunk behind its ancestors; the rest of a long prompt comes with the next."""
        limit_bytes = min(BATCH_BYTES, int(self._pool.allocator.arena_bytes * BATCH_SHARE))
        batch: dict[Chunk, None] = {}
        size = 0
        for chunk in chunks:
            line = [] if chunk in batch else [chunk]
            above = chunk.parent
            while above is not None and not above.ssd and above not in batch:
                line.append(above)
                above = above.parent
            if not line:
                continue
            if line[-1].is_orphan or not all(each.copies for each in line):
                # Its parent is not there, or still being written: nothing of it can be saved now. Others must not wait.
                self._backlog.put_off(chunk)
                continue
            for each in reversed(line):
                size += sum(copy.size_bytes for copy in each.copies.values())
                if batch and (size > limit_bytes or len(batch) >= BATCH_CHUNKS):
                    return list(batch)
                batch[each] = None
        return list(batch)

    async def _whole(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """When it is its turn; then to the end, also when the caller is cancelled: threads are writing, and the books
        must say where. A caller who is cancelled before that leaves nothing behind."""
        await self.lock.acquire()
        task = asyncio.get_running_loop().create_task(work())
        self.begun.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self.begun.discard(task)
        self.lock.release()

    async def _within(self, ends_s: float, work: Callable[[], Coroutine[Any, Any, T]]) -> T | None:
        """What the work returns; None where the time is up first, and it goes on."""
        try:
            async with asyncio.timeout(max(0.0, ends_s - time.monotonic())):
                return await self._whole(work)
        except TimeoutError:
            return None

    async def _save_now(self, wanted: Sequence[Chunk]) -> bool:
        """Save a batch of what is wanted, ancestors first. Must not be cancelled.

        True if at least one shard reached the SSD, or nothing is wanted any more.
        """
        if not wanted or self._has_failed():
            return not wanted
        moves = await self._begin(wanted)
        if not moves:
            return False
        began_s, is_whole, saved = time.monotonic(), False, 0
        try:
            await self._write(moves)
            is_whole = True
        finally:  # also after an error that nobody thought of: the books must be right
            for move in moves if not is_whole else ():
                move.error = move.error or StorageFailed("a save ended in the middle")
            saved = await self._end(moves)
        self._pool.seconds["ssd_write"].add(time.monotonic() - began_s)
        return saved > 0

    async def _begin(self, wanted: Sequence[Chunk]) -> list[Move]:
        """Slots for a batch of these. One that gets none keeps no other one off the SSD, only what hangs on it."""
        moves: list[Move] = []
        begun: set[Chunk] = set()
        refused: set[Chunk] = set()
        chunks = self._cut(wanted)
        batch = frozenset(chunks)
        for number, chunk in enumerate(chunks, 1):
            if not number % STEP_CHUNKS:
                await asyncio.sleep(0)
            if self._pool.forest.get(chunk.key) is not chunk or chunk.is_orphan:
                continue
            parent = chunk.parent
            if parent is not None and not parent.ssd and parent not in begun:
                if parent in batch:
                    self._no_room_for(chunk)
                    refused.add(chunk)
                else:  # an earlier one has just pushed it out: the next batch brings both
                    self._backlog.put_off(chunk)
                continue
            kept = ({chunk} if parent is None else {chunk, parent}) - self._tier.kept
            self._tier.kept |= kept
            for shard in [shard for shard in chunk.copies if shard not in chunk.ssd]:
                move = self._take(chunk, shard)
                if move is None:
                    self._no_room_for(chunk)
                    break
                moves.append(move)
                begun.add(chunk)
            if chunk not in begun:
                self._tier.kept -= kept
                refused.add(chunk)
        self._refuse_below(wanted, refused)
        return moves

    def _refuse_below(self, wanted: Sequence[Chunk], refused: set[Chunk]) -> None:
        """What hangs on chunks without room gives up its place too: it would bring them into every batch again, and
        nothing else would get a turn."""
        has_room: set[Chunk] = set()
        for chunk in wanted if refused else ():
            line: list[Chunk] = []
            above: Chunk | None = chunk
            while above is not None and not above.ssd and above not in refused and above not in has_room:
                line.append(above)
                above = above.parent
            if above not in refused:
                has_room.update(line)
            elif line:
                refused.update(line)
                self._no_room_for(chunk)

    def _no_room_for(self, chunk: Chunk) -> None:
        """The SSD has no room for it."""
        self._backlog.give_up(chunk)
        self._pool.counts["ssd_no_room"] += 1

    def _take(self, chunk: Chunk, shard: int) -> Move | None:
        copy = chunk.copies[shard]
        slots = self._tier.take(copy.size_bytes, 1, chunk.space.group)
        if not slots:
            return None
        self._core.holds.keep(chunk)
        self._moving.add(slots[0])
        self._tier.coming_bytes[chunk.space.group] += copy.size_bytes
        generation = self._pool.catalog.next_generation()
        return Move(chunk, shard, copy.slot, slots[0], copy.size_bytes, copy.table_hash, generation)

    async def _write(self, moves: list[Move]) -> None:
        """Headers of what was there before, payloads, headers; an error is noted in the moves that it stopped."""
        arena = self._disk.arena
        try:
            await self._describe(moves)
            await self._empty(self._stale(moves))
            await self._disk.write([each for each in moves if each.error is None])
            headers = [
                (each.ssd_slot, self._header(each)) for each in moves if each.error is None and self._stands(each)
            ]
            await self._disk.run(arena.write_headers, headers)
        except KvStoreError as exc:
            for move in moves:
                move.error = move.error or exc

    def _stale(self, moves: Sequence[Move]) -> list[int]:
        """Slots whose headers tell of what is not there any more: of these moves, and of all that was given up."""
        places = {move.ssd_slot for move in moves}
        slots = [slot for slot in self._pool.stale_slots if slot not in places and self._disk.arena.has_slot(slot)]
        self._pool.stale_slots.clear()
        return [*places, *slots]

    async def _empty(self, slots: Sequence[int]) -> None:
        """Empty the headers of these slots; where that fails they stay to be emptied."""
        try:
            await self._disk.run(self._disk.arena.write_headers, [(slot, None) for slot in slots])
        except KvStoreError:
            self._pool.stale_slots += slots
            raise

    def _stands(self, move: Move) -> bool:
        """The chunk is still that one, still in that slot."""
        copy = move.chunk.copies.get(move.shard)
        return self._pool.forest.get(move.chunk.key) is move.chunk and copy is not None and copy.slot == move.slot

    def _header(self, move: Move) -> SlotHeader:
        chunk = move.chunk
        return SlotHeader(
            key=chunk.key,
            parent_key=chunk.parent_key,
            namespace_number=list(self._stored).index(chunk.space.id) + 1,
            shard=move.shard,
            slot=move.ssd_slot,
            payload_bytes=chunk.space.kinds[move.shard].payload_bytes,
            token_count=chunk.token_count,
            fingerprint=chunk.fingerprint or 0,
            parent_fingerprint=chunk.parent_fingerprint or 0,
            table_hash=move.table_hash,
            generation=move.generation,
            epoch=self._core.info.epoch,
        )

    async def _end(self, moves: Sequence[Move]) -> int:
        """Tell the pool what has arrived. Returns how many shards."""
        saved, pool = 0, self._pool
        arrived: dict[Chunk, None] = {}
        for number, move in enumerate(moves, 1):
            if not number % STEP_CHUNKS:
                await asyncio.sleep(0)
            chunk, error = move.chunk, move.error
            self._core.holds.let(chunk)
            with_parent = chunk.parent is None or bool(chunk.parent.ssd)
            if error is None and self._stands(move) and with_parent and not chunk.is_orphan:
                pool.save(chunk, move.shard, move.ssd_slot, move.generation, move.table_hash)
                arrived[chunk] = None
                pool.counts["ssd_write_bytes"] += move.size_bytes
                saved += 1
            elif isinstance(error, CapacityExhausted):
                self._unbacked.append(move.ssd_slot)
                pool.stale_slots.append(move.ssd_slot)  # there may have been room for its header
            else:
                pool.removed_slots.append(move.ssd_slot)  # its header may be there
                if isinstance(error, LimitExceeded):
                    self._backlog.give_up(chunk)
            self._moving.remove(move.ssd_slot)
            self._tier.coming_bytes[chunk.space.group] -= move.size_bytes
        self._tier.kept.clear()
        self._tier.trim()  # what is being written did not count for the bound of its group
        for last in _ends(list(arrived)):
            pool.order_on_ssd(last)
            await asyncio.sleep(0)
        for error in {type(move.error): move.error for move in moves if move.error is not None}.values():
            self._after(error)
        return saved

    def _after(self, error: KvStoreError) -> None:
        if isinstance(error, CapacityExhausted):
            if not self.is_full:
                logger.warning("%s; the node goes on with the slots that it has there", error)
            self._allocator.only_used_before = True
            self._full_until_s = time.monotonic() + FULL_PAUSE_S
            self._pool.counts["ssd_disk_full"] += 1
        elif isinstance(error, LimitExceeded):
            logger.warning("not saved: %s", error)
        else:
            self._fail(error, "write")

    def _try_fresh_slots(self) -> None:
        if self.is_full and time.monotonic() >= self._full_until_s:
            self._allocator.only_used_before = False
            for slot in self._unbacked:
                self._allocator.release(slot)
            self._unbacked = []

    async def _describe(self, moves: Sequence[Move]) -> None:
        """The superblock knows the namespaces and extents of these moves, durably, before anything refers to them.

        Where their namespaces do not fit any more, what it knows already is saved all the same.
        """
        spaces = dict.fromkeys(move.chunk.space for move in moves)
        try:
            await self._write_superblock(self._stored | {space.id: _stored(space) for space in spaces})
        except LimitExceeded as exc:
            await self._write_superblock(self._stored)
            for move in moves:
                known = self._stored.get(move.chunk.space.id, StoredNamespace(b"")).geometries
                if all(geometry.digest != move.shard >> 8 for geometry, _ in known):
                    move.error = exc

    async def _write_superblock(self, stored: dict[bytes, StoredNamespace]) -> None:
        cuts = self._allocator.cuts
        if (cuts, stored) == self._described:
            return
        extents = [ExtentPlace(*extent) for extent in self._allocator.extents()]
        for extent in [each for each in extents if each not in self._formatted]:
            await self._disk.run(self._disk.arena.format_extent, extent)
        await self._disk.run(self._disk.arena.write_superblock, tuple(stored.values()), extents)
        self._formatted = set(extents)
        self._stored, self._described = stored, (cuts, stored)

    def check(self) -> None:
        """Every SSD slot in use belongs to a chunk, is being written, was removed, or has no room on the disk."""
        owned = [copy.slot for chunk in self._pool.forest.chunks.values() for copy in chunk.ssd.values()]
        slots = [*owned, *self._moving, *self._pool.removed_slots, *self._unbacked]
        assert sorted(slots) == sorted(self._allocator.used_slots()), "an SSD slot is used by nobody, or by two"
        assert self.begun or not (self._moving or self._tier.kept), "a write that nobody does"
        assert self._moving or not +self._tier.coming_bytes, "bytes that are coming"


def _ends(chunks: Sequence[Chunk]) -> list[Chunk]:
    """The last chunk of each run in which every chunk is the child of the one before."""
    return [chunk for chunk, after in zip_longest(chunks, chunks[1:]) if after is None or after.parent is not chunk]


def _stored(space: KnownNamespace) -> StoredNamespace:
    geometries = tuple(
        (geometry, tuple(sorted(space.written_here[digest]))) for digest, geometry in space.geometries.items()
    )
    return StoredNamespace(space.namespace.canonical, geometries)
