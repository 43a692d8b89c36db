"""Moves between DRAM and SSD: read-back, cleaner, persist, removal. The asyncio shell of the SSD tier.

The pool decides what lies where, on the event loop; threads of this module only read and write bytes. Disk and pool
meet in this order:

    save       headers of given-up slots zeroed -> payload and table -> header -> pool.save
    read back  pool reserves a DRAM slot -> payload and table into it -> checksums -> pool.promote
    remove     pool forgets at once -> headers zeroed, fdatasync -> the slots may be used again

The cleaner saves whatever waits for it, coldest first, and never for want of room: a threshold would have to know which
chunks go next, which differs from policy to policy (kept at "a quarter is free or saved", hot chunks that had come back
from the SSD filled the quarter and cold ones were lost).

While the disk is written to, the chunk is held in DRAM and its parent is kept on the SSD. A chunk that somebody removes
meanwhile is noticed afterwards: its slot counts as removed and its header is zeroed. Nothing here makes Reserve wait.

When the disk fails, the tier goes out of service and the node lives on: what was only there is a miss for readers, the
rest stays. A full disk is no failure: slots that were never written are left alone and others are reused.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.errors import CapacityExhausted, KvStoreError, LimitExceeded
from kvstore.model import checksum
from kvstore.model.layout import Rectangle
from kvstore.model.prefix import Keys
from kvstore.model.values import MissReason
from kvstore.node.arena.ssd import SsdArena
from kvstore.node.arena.ssd_format import ExtentPlace, SlotHeader, StoredNamespace
from kvstore.node.catalog import UNIT_BYTES
from kvstore.node.chunks import Chunk, Copy, KnownNamespace
from kvstore.node.core import NodeCore
from kvstore.node.pool import SlotState

logger = logging.getLogger(__name__)
READERS = 8
WRITERS = 4
BATCH_CHUNKS = 64
BATCH_BYTES = 32 << 20
"""A batch of the cleaner has at most so many chunks and bytes, but at least one chunk."""
JOB_BYTES = 256 << 10
"""Smaller slots share a thread's turn, up to so many bytes."""
IDLE_S = 0.05
FULL_PAUSE_S = 30.0
"""After the disk was full, time until slots that were never written are tried again."""
STEP_CHUNKS = 256
"""Chunks that one turn of the event loop drops: a few milliseconds."""
STOP_SAVING_S = 10.0
"""At an orderly end, time to save what is only in DRAM."""
_ROOM_POLL_S = 0.01

Bytes = npt.NDArray[np.uint8]


@dataclass(slots=True, eq=False)
class _Move:
    """One shard on its way from one tier to the other. `slot` in DRAM, `ssd_slot` on the SSD, `size` in bytes."""

    chunk: Chunk
    shard: int
    slot: int
    ssd_slot: int
    size: int
    table_hash: int
    generation: int = 0
    error: KvStoreError | None = None
    is_right: bool = True


class TierStack:
    """The SSD tier of one node, in its event loop. `memory`: the whole DRAM arena as uint8."""

    def __init__(self, core: NodeCore, memory: Bytes, arena: SsdArena) -> None:
        assert core.pool.ssd is not None
        self._core = core
        self._pool = core.pool
        self._tier = core.pool.ssd
        self._allocator = core.pool.ssd.allocator
        self._memory = memory
        self._arena = arena
        self._readers = ThreadPoolExecutor(READERS, "kvstore-ssd-read")
        self._writers = ThreadPoolExecutor(WRITERS, "kvstore-ssd-write")
        self._reading: dict[tuple[Chunk, int], asyncio.Future[bool]] = {}
        self._saving = asyncio.Lock()
        self._room = asyncio.Event()
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._described: object = None
        """What the superblock says, to see whether it has to be written again."""
        self._spaces: dict[bytes, KnownNamespace] = {}
        """Namespaces in the superblock, in the order of their numbers there."""
        self._formatted: set[ExtentPlace] = set()
        self._unbacked: list[int] = []
        self._full_until_s = 0.0
        self.failed: KvStoreError | None = None

    def start(self) -> None:
        """Start the cleaner."""
        self._task = asyncio.get_running_loop().create_task(self._clean())

    def take_up(self, spaces: Sequence[KnownNamespace]) -> None:
        """What the file describes already: its namespaces, in their order; and the extents that are in use."""
        self._spaces = {space.id: space for space in spaces}
        self._formatted = {ExtentPlace(*extent) for extent in self._allocator.extents()}

    async def stop(self) -> None:
        """Save what is only in DRAM, as far as that goes in 10 s, and close the file."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        ends_s = time.monotonic() + STOP_SAVING_S
        while self.failed is None and self._pool.to_save and time.monotonic() < ends_s:
            if not await self._save_batch(self._next_batch()):
                break
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._writers.shutdown(wait=False, cancel_futures=True)
        self._arena.close()

    def wake(self) -> None:
        """Something was committed or came free."""
        if self._pool.to_save or self._pool.removed_slots:
            self._work.set()
        self._room.set()

    # --- read back ---------------------------------------------------------------------------------------

    async def stage(self, keys: Keys, rectangle: Rectangle, first: int, ends_s: float) -> tuple[int, MissReason | None]:
        """Bring chunks from place `first` on into DRAM, as many as one call may (`read_back_bytes`), within the time.

        Returns how many chunks came from the SSD, and why the next did not; None also where the bound of one call was
        reached. What came is in DRAM when this returns, and stays there until the caller gives the loop back.
        """
        chunks: list[Chunk] = []
        reads: list[asyncio.Future[bool]] = []
        budget, reason = 0, None
        held = [chunk] if first and (chunk := self._pool.forest.get(keys[first - 1])) else []
        for chunk in held:
            self._core.holds.keep(chunk)
        try:
            for index in range(first, len(keys)):
                found = self._pool.forest.get(keys[index])
                shards = found.covering_anywhere(rectangle) if found is not None else None
                if found is None or shards is None:
                    break
                wanted = [shard for shard in shards if shard not in found.copies]
                size = sum(found.ssd[shard].size_bytes for shard in wanted)
                budget = budget or max(size, self._pool.read_back_bytes(size))
                if size > budget and chunks:
                    break
                budget -= size
                self._core.holds.keep(found)
                held.append(found)
                self._pool.touch([found.key])
                started = [await self._read(found, shard, ends_s) for shard in wanted]
                reads += [read for read in started if read is not None]
                if None in started:
                    reason = MissReason.STAGING_FULL if self.failed is None else MissReason.TIER_FAILED
                    break
                chunks.append(found)
            reason = await self._wait_all(reads, ends_s) or reason
        finally:
            for chunk in held:
                self._core.holds.let(chunk)
        arrived = [chunk.covering(rectangle) is not None for chunk in chunks]
        return arrived.index(False) if False in arrived else len(arrived), reason

    async def _wait_all(self, reads: Sequence[asyncio.Future[bool]], ends_s: float) -> MissReason | None:
        if not reads:
            return None
        done, late = await asyncio.wait(reads, timeout=max(0.0, ends_s - time.monotonic()))
        if late:
            return MissReason.DEADLINE
        if all(read.result() for read in done):
            return None
        return MissReason.TIER_FAILED if self.failed is not None else MissReason.CHECKSUM

    async def stage_all(self, keys: Keys, rectangle: Rectangle, first: int, ends_s: float) -> None:
        """As `stage`, again and again, for a reader who is expected. Stops at the first chunk that does not come."""
        while first < len(keys) and time.monotonic() < ends_s:
            staged, reason = await self.stage(keys, rectangle, first, ends_s)
            first += staged
            if reason is not None or not staged:
                return

    async def promote(self, chunks: Iterable[Chunk], ends_s: float) -> int:
        """Bring all shards of these chunks (parents first) into DRAM, as far as there is room. Returns how many chunks
        are there whole; each one that came pushes out what is colder, but none of the same call."""
        held: list[Chunk] = []
        count = 0
        try:
            for chunk in chunks:
                if self._pool.forest.get(chunk.key) is not chunk or time.monotonic() > ends_s:
                    break
                self._core.holds.keep(chunk)
                held.append(chunk)
                missing = [shard for shard in chunk.ssd if shard not in chunk.copies]
                started = [await self._read(chunk, shard, ends_s, wait=False) for shard in missing]
                reads = [read for read in started if read is not None]
                if len(reads) < len(missing) or await self._wait_all(reads, ends_s):
                    break
                count += 1
        finally:
            for chunk in held:
                self._core.holds.let(chunk)
        return count

    async def _read(self, chunk: Chunk, shard: int, ends_s: float, *, wait: bool = True) -> asyncio.Future[bool] | None:
        """Begin to read one shard, or join a read under way; None if no slot comes free in time. True = it is there."""
        place = (chunk, shard)
        if place in self._reading:
            return self._reading[place]
        size = chunk.space.kinds[shard].slot_bytes
        while self.failed is None:
            copy = chunk.ssd.get(shard)
            if copy is None:
                return None
            slots = self._pool.dram.take(size, 1, chunk.space.group)
            if slots:
                move = _Move(chunk, shard, slots[0], copy.slot, size, copy.table_hash)
                self._reading[place] = future = asyncio.get_running_loop().create_future()
                self._begin_read(move, copy, future)
                return future
            left_s = ends_s - time.monotonic()
            if not wait or left_s <= 0:
                return None
            self._room.clear()
            try:
                await asyncio.wait_for(self._room.wait(), min(left_s, _ROOM_POLL_S))
            except TimeoutError:
                continue
        return None

    def _begin_read(self, move: _Move, copy: Copy, future: asyncio.Future[bool]) -> None:
        catalog, chunk = self._pool.catalog, move.chunk
        catalog.raise_generation(move.slot)
        catalog.record(
            move.slot, SlotState.RESERVED, chunk.space.number, 0, (0, 0), move.shard, chunk.key, chunk.parent_key
        )
        self._core.own_slots.add(move.slot)
        self._core.holds.keep(chunk)
        into = self._memory[move.slot * UNIT_BYTES :][: move.size]
        job = asyncio.get_running_loop().run_in_executor(self._readers, self._read_job, move, into)
        job.add_done_callback(lambda _: self._end_read(move, copy, future))

    def _read_job(self, move: _Move, into: Bytes) -> None:
        """In a thread: bytes into the DRAM slot, then the checksums."""
        try:
            self._arena.read(move.ssd_slot * UNIT_BYTES, into.data)
        except KvStoreError as exc:
            move.error = exc
            return
        space = move.chunk.space
        kind = space.kinds[move.shard]
        payload = into[: kind.payload_bytes]
        table = into[kind.payload_bytes :][: checksum.table_bytes(kind.rectangle)]
        move.is_right = checksum.table_hash(table) == move.table_hash and not checksum.differs(
            payload, table, space.layout, kind.rectangle
        )

    def _end_read(self, move: _Move, copy: Copy, future: asyncio.Future[bool]) -> None:
        chunk, pool = move.chunk, self._pool
        del self._reading[chunk, move.shard]
        self._core.own_slots.discard(move.slot)
        self._core.holds.let(chunk)
        stands = pool.forest.get(chunk.key) is chunk and chunk.ssd.get(move.shard) is copy
        good = stands and move.error is None and move.is_right and move.shard not in chunk.copies
        if good:
            pool.promote(chunk, move.shard, move.slot, move.table_hash)
            pool.counts["ssd_read_bytes"] += move.size
        else:
            pool.free_slot(move.slot)
        if move.error is not None:
            self._fail(move.error)
        elif stands and not move.is_right:
            pool.counts["ssd_checksum_failures"] += 1
            logger.warning("chunk %s on the SSD differs from what was stored: it is dropped", chunk.key.hex())
            self.drop_broken(chunk)
        self._room.set()
        if not future.done():
            future.set_result(good)

    async def is_broken(self, chunk: Chunk, shard: int) -> bool:
        """True if a shard on the SSD is not what was stored. Reads it."""
        copy = chunk.ssd.get(shard)
        if copy is None or self.failed is not None:
            return False
        move = _Move(chunk, shard, 0, copy.slot, copy.size_bytes, copy.table_hash)
        into: Bytes = np.frombuffer(mmap.mmap(-1, copy.size_bytes), dtype=np.uint8)
        await asyncio.get_running_loop().run_in_executor(self._readers, self._read_job, move, into)
        if move.error is not None:
            self._fail(move.error)
        return move.error is None and not move.is_right and chunk.ssd.get(shard) is copy

    def drop_broken(self, chunk: Chunk) -> None:
        """The chunk's SSD copies are gone, and all below it that needs them there."""
        for each in self._pool.forest.subtree(chunk):
            if each.ssd:
                self._pool.drop_from_ssd(each)
        self._work.set()

    # --- save --------------------------------------------------------------------------------------------

    async def _clean(self) -> None:
        while self.failed is None:
            self._work.clear()
            if self._pool.removed_slots:
                await self.forget_removed()
            self._try_fresh_slots()
            busy = self._pool.to_save and await self._save_batch(self._next_batch())
            if not busy:
                try:
                    await asyncio.wait_for(self._work.wait(), IDLE_S)
                except TimeoutError:
                    continue

    async def persist(self, keys: Keys, ends_s: float) -> tuple[int, str]:
        """Save the leading chunks of these keys now, until the time is up. (Chunks that are saved, why not more)."""
        chunks = []
        for key in keys:
            chunk = self._pool.forest.get(key)
            if chunk is None or not chunk.is_committed:
                break
            chunks.append(chunk)
        reason = "" if len(chunks) == len(keys) else "absent"
        while self.failed is None and (left := [chunk for chunk in chunks if chunk in self._pool.unsaved]):
            if time.monotonic() >= ends_s:
                reason = "deadline"
                break
            if not await self._save_batch(self._cut(left)):
                reason = "ssd_full" if self._is_full else "ssd_error"
                break
        if self.failed is None:
            await self._on_disk(self._arena.sync)
        run = 0
        while run < len(chunks) and chunks[run].ssd and chunks[run].is_saved and self.failed is None:
            run += 1
        return run, ("ssd_error" if self.failed is not None else reason) if run < len(keys) else ""

    @property
    def _is_full(self) -> bool:
        return self._allocator.only_used_before

    def _next_batch(self) -> list[Chunk]:
        """The coldest chunks that are to be saved, each behind its ancestors."""
        return self._cut(self._pool.coldest_to_save(BATCH_CHUNKS))

    def _cut(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """What fits into one batch, ancestors first."""
        batch: dict[Chunk, None] = {}
        size = 0
        for chunk in chunks:
            chain = []
            above: Chunk | None = chunk
            while above is not None and not above.ssd and above not in batch:
                chain.append(above)
                above = above.parent
            if not chain and not chunk.is_saved and chunk not in batch:
                chain = [chunk]
            if chain and chain[-1].is_orphan:
                continue
            size += sum(copy.size_bytes for each in chain for copy in each.copies.values())
            if batch and (size > BATCH_BYTES or len(batch) + len(chain) > BATCH_CHUNKS):
                break
            batch.update(dict.fromkeys(reversed(chain)))
        return list(batch)

    async def _save_batch(self, chunks: Sequence[Chunk]) -> bool:
        """Save these chunks, ancestors first. True if at least one shard reached the SSD."""
        async with self._saving:
            moves = self._begin_save(chunks)
            if not moves:
                return False
            try:
                await self._write(moves)
            finally:
                saved = self._end_save(moves)
            return saved > 0

    def _begin_save(self, chunks: Sequence[Chunk]) -> list[_Move]:
        moves: list[_Move] = []
        for chunk in chunks:
            if self._pool.forest.get(chunk.key) is not chunk or chunk.is_orphan:
                continue
            self._tier.kept.update({chunk} if chunk.parent is None else {chunk, chunk.parent})
            for shard, copy in chunk.copies.items():
                if shard in chunk.ssd:
                    continue
                slots = self._tier.take(copy.size_bytes, 1, chunk.space.group)
                if not slots:
                    self._pool.counts["ssd_no_room"] += 1
                    return moves
                generation = self._pool.catalog.next_generation()
                move = _Move(chunk, shard, copy.slot, slots[0], copy.size_bytes, copy.table_hash, generation)
                self._core.holds.keep(chunk)
                moves.append(move)
        return moves

    async def _write(self, moves: list[_Move]) -> None:
        """Headers of what was there before, payloads, headers; an error is noted in the moves that it stopped."""
        try:
            await self._describe(moves)
            await self._on_disk(self._arena.write_headers, [(slot, None) for slot in self._stale(moves)])
            loop = asyncio.get_running_loop()
            jobs = [loop.run_in_executor(self._writers, self._write_job, group) for group in _groups(moves)]
            await asyncio.gather(*jobs)
            headers = [
                (move.ssd_slot, self._header(move)) for move in moves if move.error is None and self._stands(move)
            ]
            await self._on_disk(self._arena.write_headers, headers)
        except KvStoreError as exc:
            for move in moves:
                move.error = move.error or exc

    def _stale(self, moves: Sequence[_Move]) -> list[int]:
        """Slots whose headers tell of what is not there any more: of these moves, and of all that was given up."""
        places = {move.ssd_slot for move in moves}
        slots = [slot for slot in self._pool.stale_slots if slot not in places and self._arena.has_slot(slot)]
        self._pool.stale_slots.clear()
        return [*places, *slots]

    def _write_job(self, moves: Sequence[_Move]) -> None:
        """In a thread: payloads and tables. What was stored without checksums gets them here."""
        for move in moves:
            data = self._memory[move.slot * UNIT_BYTES :][: move.size]
            if not move.table_hash:
                data, move.table_hash = _with_table(data, move)
            try:
                self._arena.write(move.ssd_slot * UNIT_BYTES, data.data)
            except KvStoreError as exc:
                move.error = exc

    def _stands(self, move: _Move) -> bool:
        """The chunk is still that one, still in that slot."""
        copy = move.chunk.copies.get(move.shard)
        return self._pool.forest.get(move.chunk.key) is move.chunk and copy is not None and copy.slot == move.slot

    def _end_save(self, moves: Sequence[_Move]) -> int:
        """Tell the pool what has arrived. Returns how many shards."""
        saved = 0
        pool = self._pool
        for move in moves:
            chunk = move.chunk
            self._core.holds.let(chunk)
            error = move.error
            with_parent = chunk.parent is None or bool(chunk.parent.ssd)
            if error is None and self._stands(move) and with_parent and not chunk.is_orphan:
                pool.save(chunk, move.shard, move.ssd_slot, move.generation, move.table_hash)
                pool.counts["ssd_write_bytes"] += move.size
                saved += 1
            elif isinstance(error, CapacityExhausted):
                self._unbacked.append(move.ssd_slot)
            else:
                pool.removed_slots.append(move.ssd_slot)  # its header may be there
                if isinstance(error, LimitExceeded):
                    pool.to_save.pop(chunk, None)
        self._tier.kept.clear()
        self._after_errors([move.error for move in moves if move.error is not None])
        return saved

    def _after_errors(self, errors: Sequence[KvStoreError]) -> None:
        for error in errors:
            if isinstance(error, CapacityExhausted):
                if not self._is_full:
                    logger.warning("%s; the node goes on with the slots that it has there", error)
                self._allocator.only_used_before = True
                self._full_until_s = time.monotonic() + FULL_PAUSE_S
                self._pool.counts["ssd_disk_full"] += 1
            elif isinstance(error, LimitExceeded):
                logger.warning("not saved: %s", error)
            else:
                self._fail(error)
                return

    def _try_fresh_slots(self) -> None:
        if self._is_full and time.monotonic() >= self._full_until_s:
            self._allocator.only_used_before = False
            for slot in self._unbacked:
                self._allocator.release(slot)
            self._unbacked = []

    def _header(self, move: _Move) -> SlotHeader:
        chunk = move.chunk
        return SlotHeader(
            key=chunk.key,
            parent_key=chunk.parent_key,
            namespace_number=list(self._spaces).index(chunk.space.id) + 1,
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

    # --- superblock and removal --------------------------------------------------------------------------

    async def _describe(self, moves: Sequence[_Move]) -> None:
        """The superblock knows the namespaces and extents of these moves, durably, before anything refers to them."""
        for move in moves:
            self._spaces.setdefault(move.chunk.space.id, move.chunk.space)
        stored = tuple(_stored(space) for space in self._spaces.values())
        if (self._allocator.cuts, stored) == self._described:
            return
        extents = [ExtentPlace(*extent) for extent in self._allocator.extents()]
        for extent in [each for each in extents if each not in self._formatted]:
            await self._on_disk(self._arena.format_extent, extent)
        await self._on_disk(self._arena.write_superblock, stored, extents)
        self._formatted = set(extents)
        self._described = (self._allocator.cuts, stored)

    async def forget_removed(self) -> None:
        """Zero the headers of what was removed and wait for the disk: a restart does not find it any more."""
        if self.failed is not None:
            return
        async with self._saving:
            slots, self._pool.removed_slots = self._pool.removed_slots, []
            stale = [*slots, *self._stale([])]
            if not stale:
                return
            try:
                await self._on_disk(self._arena.write_headers, [(slot, None) for slot in stale])
                await self._on_disk(self._arena.sync)
            except KvStoreError as exc:
                self._fail(exc)
                return
            for slot in slots:
                self._allocator.release(slot)

    async def _on_disk(self, work: Callable[..., object], *arguments: object) -> None:
        await asyncio.get_running_loop().run_in_executor(self._writers, work, *arguments)

    # --- failure -----------------------------------------------------------------------------------------

    def _fail(self, error: KvStoreError) -> None:
        """Out of service: readers are told at once in small steps, nothing is written any more."""
        if self.failed is not None:
            return
        self.failed = error
        self._pool.counts["ssd_failures"] += 1
        logger.error("the SSD tier is out of service until the node is restarted: %s", error)
        self._leaving = asyncio.get_running_loop().create_task(self._forget_all())

    async def _forget_all(self) -> None:
        """Drop all SSD copies, children first, a few at a time."""
        async with self._saving:
            for read in list(self._reading.values()):
                await asyncio.wait([read])
            while on_ssd := [chunk for chunk in self._pool.forest.chunks.values() if chunk.ssd]:
                on_ssd.sort(key=lambda chunk: -chunk.depth)
                for number, chunk in enumerate(on_ssd, 1):
                    if self._pool.forest.get(chunk.key) is chunk and chunk.ssd:
                        self._pool.evict_from_ssd(chunk)
                    if not number % STEP_CHUNKS:
                        await asyncio.sleep(0)
            self._pool.close_ssd()


def _stored(space: KnownNamespace) -> StoredNamespace:
    geometries = tuple(
        (geometry, tuple(sorted(space.written_here[digest]))) for digest, geometry in space.geometries.items()
    )
    return StoredNamespace(space.namespace.canonical, geometries)


def _groups(moves: Sequence[_Move]) -> list[list[_Move]]:
    """Moves that share a thread's turn."""
    groups: list[list[_Move]] = []
    size = JOB_BYTES
    for move in moves:
        if size + move.size > JOB_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(move)
        size += move.size
    return groups


def _with_table(stored: Bytes, move: _Move) -> tuple[Bytes, int]:
    """A page-aligned copy of a slot with its checksum table filled in, and the table's hash."""
    space = move.chunk.space
    kind = space.kinds[move.shard]
    copy: Bytes = np.frombuffer(mmap.mmap(-1, move.size), dtype=np.uint8)
    copy[: kind.payload_bytes] = stored[: kind.payload_bytes]
    table = checksum.table_of(copy[: kind.payload_bytes], space.layout, kind.rectangle)
    copy[kind.payload_bytes : kind.payload_bytes + table.nbytes] = table.view(np.uint8)
    return copy, checksum.table_hash(table)
