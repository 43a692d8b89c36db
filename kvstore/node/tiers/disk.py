"""Bytes of shards between DRAM slots and the SSD file, in threads. What they mean is decided elsewhere, on the loop.

Moves that lie side by side in the file are one run, so that small slots do not cost a system call each. A job has at
most `JOB_BYTES`, so that several threads share what one caller wants. `SsdIo` moves the runs of a job.
"""

from __future__ import annotations

import asyncio
import mmap
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstore.errors import KvStoreError
from kvstore.model import checksum
from kvstore.node.arena import Run, SsdIo
from kvstore.node.arena.ssd import SsdArena
from kvstore.node.arena.ssd_io import ThreadedIo
from kvstore.node.catalog import UNIT_BYTES
from kvstore.node.chunks import Chunk, Copy

READERS = 8
WRITERS = 8
JOB_BYTES = 512 << 10
"""A job moves more only where a single slot is larger, or where there is enough for all threads: then up to"""
LARGE_JOB_BYTES = 4 << 20
RUN_SLOTS = 256
"""Slots of one system call; the kernel takes 1,024 pieces."""

Bytes = npt.NDArray[np.uint8]
Fail = Callable[[KvStoreError, str], None]
"""Takes the tier out of service for an error of the disk; "read" or "write"."""


@dataclass(slots=True, eq=False)
class Move:
    """One shard on its way from one tier to the other: `slot` in DRAM, `ssd_slot` on the SSD, `size_bytes` of both.

    `error` and `is_right` (the checksums hold) are the result; a read that never happened has neither. `table_hash` of
    what had none is filled in. `source` is the copy that is read, `memory` its bytes where they are not those of the
    slot.
    """

    chunk: Chunk
    shard: int
    slot: int
    ssd_slot: int
    size_bytes: int
    table_hash: int
    generation: int = 0
    source: Copy | None = None
    memory: Bytes | None = None
    error: KvStoreError | None = None
    is_right: bool | None = None
    ahead: bool = False
    began_s: float = field(default_factory=time.monotonic)


class Disk:
    """The open file with its threads. `memory`: the whole DRAM arena; `io`: what moves payloads, None: these threads.
    Used on one event loop."""

    def __init__(self, arena: SsdArena, memory: Bytes, io: SsdIo | None = None) -> None:
        self.arena = arena
        self.io = io or ThreadedIo(arena)
        self._memory = memory
        self._readers = ThreadPoolExecutor(READERS, "kvstore-ssd-read")
        self._writers = ThreadPoolExecutor(WRITERS, "kvstore-ssd-write")

    def start_reads(self, moves: Sequence[Move], on_done: Callable[[Move], None]) -> None:
        """Fill the DRAM slots and check them; `on_done` is called on the loop for each move, also for one that `close`
        took back before it was read."""
        for job in _jobs(moves):
            self._start_read(job, on_done)

    def _start_read(self, job: Sequence[Move], on_done: Callable[[Move], None]) -> None:
        def ended(_: object) -> None:
            for move in job:
                on_done(move)

        asyncio.get_running_loop().run_in_executor(self._readers, self._read, job).add_done_callback(ended)

    async def write(self, moves: Sequence[Move]) -> None:
        """Write payloads and tables; what was stored without checksums gets them here."""
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(loop.run_in_executor(self._writers, self._write, job) for job in _jobs(moves)))

    async def verify(self, move: Move) -> None:
        """Read a shard into memory of its own and check it."""
        move.memory = np.frombuffer(mmap.mmap(-1, move.size_bytes), dtype=np.uint8)
        await asyncio.get_running_loop().run_in_executor(self._readers, self._read, [move])

    async def run(self, work: Callable[..., object], *arguments: object) -> None:
        """Do something that waits for the disk in one of the writers' threads."""
        await asyncio.get_running_loop().run_in_executor(self._writers, work, *arguments)

    def close(self, *, is_idle: bool) -> None:
        """Begin nothing any more and, unless something is stuck in it, close the file."""
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._writers.shutdown(wait=False, cancel_futures=True)
        if is_idle:
            self.io.close()
            self.arena.close()

    # --- in threads --------------------------------------------------------------------------------------

    def _read(self, job: Sequence[Move]) -> None:
        self._move(job, self.io.read)
        for move in job:
            if move.error is None:
                move.is_right = _is_right(move, self._bytes(move))

    def _write(self, job: Sequence[Move]) -> None:
        for move in job:
            if not move.table_hash:
                _add_table(move, self._bytes(move))
        self._move(job, self.io.write)

    def _move(self, job: Sequence[Move], call: Callable[[Sequence[Run]], list[KvStoreError | None]]) -> None:
        runs = list(_runs(job))
        places = [Run(run[0].ssd_slot * UNIT_BYTES, [self._bytes(move).data for move in run]) for run in runs]
        for run, error in zip(runs, call(places), strict=True):
            for move in run:
                move.error = error

    def _bytes(self, move: Move) -> Bytes:
        if move.memory is not None:
            return move.memory
        return self._memory[move.slot * UNIT_BYTES :][: move.size_bytes]


def _jobs(moves: Sequence[Move]) -> list[list[Move]]:
    """Cut into jobs, in the order of the file: few enough for small slots, enough for all threads."""
    jobs: list[list[Move]] = []
    share = sum(move.size_bytes for move in moves) // READERS
    size = limit = max(JOB_BYTES, min(LARGE_JOB_BYTES, share))
    for move in sorted(moves, key=lambda move: move.ssd_slot):
        if size + move.size_bytes > limit:
            jobs.append([])
            size = 0
        jobs[-1].append(move)
        size += move.size_bytes
    return jobs


def _runs(job: Sequence[Move]) -> Iterator[list[Move]]:
    """Moves that lie side by side in the file."""
    run: list[Move] = []
    for move in job:
        if run and (
            run[-1].ssd_slot * UNIT_BYTES + run[-1].size_bytes != move.ssd_slot * UNIT_BYTES or len(run) >= RUN_SLOTS
        ):
            yield run
            run = []
        run.append(move)
    if run:
        yield run


def _is_right(move: Move, stored: Bytes) -> bool:
    space = move.chunk.space
    kind = space.kinds[move.shard]
    payload = stored[: kind.payload_bytes]
    table = stored[kind.payload_bytes :][: checksum.table_bytes(kind.rectangle)]
    if checksum.table_hash(table) != move.table_hash:
        return False
    return not checksum.differs(payload, table, space.layout, kind.rectangle)


def _add_table(move: Move, stored: Bytes) -> None:
    """A page-aligned copy of the slot with its checksum table filled in takes the slot's place."""
    space = move.chunk.space
    kind = space.kinds[move.shard]
    move.memory = np.frombuffer(mmap.mmap(-1, move.size_bytes), dtype=np.uint8)
    move.memory[: kind.payload_bytes] = stored[: kind.payload_bytes]
    table = checksum.table_of(move.memory[: kind.payload_bytes], space.layout, kind.rectangle)
    move.memory[kind.payload_bytes :][: table.nbytes] = table.view(np.uint8).ravel()
    move.table_hash = checksum.table_hash(table)
