"""The SSD arena against raw O_DIRECT preadv and pwritev of the same places, by the same threads, in alternated rounds.

Threads = depth: each moves jobs of slots in random order, of as many bytes as the tier gives a thread. `--io` names
the ways in which the arena's payloads go (`ssd_io`); raw is one system call a slot. The file is written once before
anything counts, so that no round makes the file system find room. All use the one file: raw through a descriptor of its
own. `cpu_seconds_per_gib`: of the whole process, kernel and waiting included, medians of the rounds.
"""

from __future__ import annotations

import argparse
import functools
import mmap
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from measure import alternated, ratio, report

from kvstore.node.arena import Run, SsdIo
from kvstore.node.arena.ssd import SsdArena
from kvstore.node.arena.ssd_format import ExtentPlace
from kvstore.node.arena.ssd_io import open_ssd_io
from kvstore.node.memory import UNIT_BYTES
from kvstore.node.tiers.disk import JOB_BYTES

SLOT_SIZES = (64 << 10, 256 << 10, 2 << 20, 8 << 20)
DEPTH = 8

Transfer = Callable[[list[Run]], object]
"""Moves a job: runs of one slot each."""


class Workers:
    """`depth` threads, each with page-aligned memory for one job of its own, all of it in `memory`."""

    def __init__(self, depth: int, slot_bytes: int) -> None:
        self._pool = ThreadPoolExecutor(depth)
        self._depth, self._slot_bytes = depth, slot_bytes
        self._job_slots = max(1, JOB_BYTES // slot_bytes)
        self.memory = np.frombuffer(mmap.mmap(-1, depth * self._job_slots * slot_bytes), dtype=np.uint8)
        self.memory[:] = 7

    def run(self, transfer: Transfer, offsets: list[int]) -> None:
        """Move all of these slots, thread i every depth-th job."""
        slots, size = self._job_slots, self._slot_bytes
        jobs = [offsets[start : start + slots] for start in range(0, len(offsets), slots)]

        def share(first: int) -> None:
            memory = self.memory[first * slots * size :]
            for job in jobs[first :: self._depth]:
                transfer([Run(offset, [memory[i * size :][:size].data]) for i, offset in enumerate(job)])

        list(self._pool.map(share, range(self._depth)))

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


def raw_transfer(call: Callable[[int, list[memoryview], int], int], fd: int) -> Transfer:
    """The system call itself, which must not be cut short."""

    def transfer(job: list[Run]) -> None:
        for run in job:
            if call(fd, [memoryview(piece) for piece in run.pieces], run.offset) != len(run.pieces[0]):
                raise SystemExit("a raw transfer was cut short; the comparison would not be fair")

    return transfer


def whole(call: Callable[[list[Run]], list[Any]]) -> Transfer:
    """A way of the arena, whose errors end the bench."""

    def transfer(job: list[Run]) -> None:
        for error in filter(None, call(job)):
            raise error

    return transfer


@contextmanager
def raw_descriptor(arena: SsdArena) -> Iterator[int]:
    """The same file, opened as the arena has it."""
    fd = os.open(arena.path, os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if arena.direct else 0))
    try:
        yield fd
    finally:
        os.close(fd)


def measure(arena: SsdArena, names: list[str], slot_bytes: int, total_bytes: int, depth: int, rounds: int) -> None:
    """Read and write whole slots of one size."""
    count = max(depth, total_bytes // slot_bytes)
    extent = ExtentPlace(arena.slots_start, arena.size_bytes, slot_bytes)
    offsets = [extent.slot(index) * UNIT_BYTES for index in range(min(count, extent.slot_count))]
    random.Random(1).shuffle(offsets)
    workers = Workers(depth, slot_bytes)
    ios: dict[str, SsdIo] = {name: open_ssd_io(name, arena, workers.memory) for name in names}
    try:
        with raw_descriptor(arena) as fd:
            for op, call in (("write", os.pwritev), ("read", os.preadv)):
                transfers = {name: whole(getattr(io, op)) for name, io in ios.items()}
                transfers["raw"] = raw_transfer(call, fd)
                ways = {name: Metered(workers, transfer, offsets) for name, transfer in transfers.items()}
                took = alternated(ways, rounds)
                for name, io in ios.items():
                    tell(arena, io, op, slot_bytes, len(offsets), depth, took, (name, ways))
    finally:
        for io in ios.values():
            io.close()
        workers.close()


class Metered:
    """One way, which notes its CPU seconds."""

    def __init__(self, workers: Workers, transfer: Transfer, offsets: list[int]) -> None:
        self._run = functools.partial(workers.run, transfer, offsets)
        self._cpu_seconds: list[float] = []

    def __call__(self) -> None:
        """All slots once."""
        began = time.process_time()
        self._run()
        self._cpu_seconds.append(time.process_time() - began)

    def cpu_seconds(self) -> float:
        """Of one round, the median without the first, which warms up."""
        return statistics.median(self._cpu_seconds[1:])


def tell(
    arena: SsdArena,
    io: SsdIo,
    op: str,
    slot_bytes: int,
    count: int,
    depth: int,
    took: dict[str, list[float]],
    ways: tuple[str, dict[str, Metered]],
) -> None:
    """One row."""
    name, metered = ways
    size = count * slot_bytes
    report(
        bench="ssd",
        op=op,
        transport="file",
        io=io.detail,
        chunk_bytes=slot_bytes,
        count=count,
        depth=depth,
        direct=arena.direct,
        checksum=False,
        condition="quiet",
        against="raw",
        bytes_per_second=size / statistics.median(took[name]),
        against_bytes_per_second=size / statistics.median(took["raw"]),
        ratio=ratio(took[name], took["raw"]),
        cpu_seconds_per_gib=metered[name].cpu_seconds() / size * (1 << 30),
        against_cpu_seconds_per_gib=metered["raw"].cpu_seconds() / size * (1 << 30),
    )


def main() -> None:
    """Parse, make a file, measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where the file is made")
    parser.add_argument("--io", default="threads", help="ways to compare in one run: threads,nixl")
    parser.add_argument("--mib", type=int, default=256, help="MiB that one round moves")
    parser.add_argument("--depth", type=int, default=DEPTH)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    total_bytes = max(given.mib << 20, given.depth * max(SLOT_SIZES))
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        with SsdArena.open(Path(folder, "ssd"), total_bytes + (64 << 20), "bench", 1) as arena:
            if not arena.direct:
                print("no O_DIRECT here: these rows compare two ways through the page cache", file=sys.stderr)
            for slot_bytes in SLOT_SIZES:
                measure(arena, given.io.split(","), slot_bytes, total_bytes, given.depth, given.rounds)


if __name__ == "__main__":
    main()
