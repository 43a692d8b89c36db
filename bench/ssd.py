"""The SSD arena against raw O_DIRECT preadv and pwritev of the same places, by the same threads, in alternated rounds.

Threads = depth: each has one transfer under way. The file is written once before anything counts, so that no round
makes the file system find room. Both sides use the one file: raw through a descriptor of its own.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from measure import alternated, ratio, report

from kvstore.node.arena.ssd import SsdArena
from kvstore.node.arena.ssd_file import pages
from kvstore.node.arena.ssd_format import ExtentPlace
from kvstore.node.memory import UNIT_BYTES

SLOT_SIZES = (256 << 10, 2 << 20, 8 << 20)
DEPTH = 8

Transfer = Callable[[int, memoryview], object]
"""Moves one slot (offset in bytes, memory)."""


class Workers:
    """`depth` threads, each with page-aligned memory for one slot of its own."""

    def __init__(self, depth: int, slot_bytes: int) -> None:
        self._pool = ThreadPoolExecutor(depth)
        self._memory = [memoryview(pages(slot_bytes)) for _ in range(depth)]
        for number, memory in enumerate(self._memory):
            memory[:] = bytes([number + 1]) * slot_bytes

    def run(self, transfer: Transfer, offsets: list[int]) -> None:
        """Move all of these slots, thread i every depth-th."""
        step = len(self._memory)

        def share(first: int) -> None:
            for offset in offsets[first::step]:
                transfer(offset, self._memory[first])

        list(self._pool.map(share, range(step)))

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


def raw_transfer(call: Callable[[int, list[memoryview], int], int], fd: int) -> Transfer:
    """The system call itself, which must not be cut short."""

    def transfer(offset: int, memory: memoryview) -> None:
        if call(fd, [memory], offset) != len(memory):
            raise SystemExit("a raw transfer was cut short; the comparison would not be fair")

    return transfer


@contextmanager
def raw_descriptor(arena: SsdArena) -> Iterator[int]:
    """The same file, opened as the arena has it."""
    fd = os.open(arena.path, os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if arena.direct else 0))
    try:
        yield fd
    finally:
        os.close(fd)


def measure(arena: SsdArena, slot_bytes: int, total_bytes: int, depth: int, rounds: int) -> None:
    """Read and write whole slots of one size."""
    count = max(depth, total_bytes // slot_bytes)
    extent = ExtentPlace(arena.slots_start, arena.size_bytes, slot_bytes)
    offsets = [extent.slot(index) * UNIT_BYTES for index in range(min(count, extent.slot_count))]
    workers = Workers(depth, slot_bytes)
    try:
        with raw_descriptor(arena) as fd:
            workers.run(arena.write, offsets)
            for op, ours, call in (("read", arena.read, os.preadv), ("write", arena.write, os.pwritev)):
                ways = {
                    "arena": functools.partial(workers.run, ours, offsets),
                    "raw": functools.partial(workers.run, raw_transfer(call, fd), offsets),
                }
                took = alternated(ways, rounds)
                tell(arena, op, slot_bytes, len(offsets), depth, took)
    finally:
        workers.close()


def tell(
    arena: SsdArena, op: str, slot_bytes: int, count: int, depth: int, took: dict[str, list[float]], **other: Any
) -> None:
    """One row."""
    report(
        bench="ssd",
        op=op,
        transport="file",
        chunk_bytes=slot_bytes,
        count=count,
        depth=depth,
        direct=arena.direct,
        checksum=False,
        condition="quiet",
        against="raw",
        bytes_per_second=count * slot_bytes / statistics.median(took["arena"]),
        against_bytes_per_second=count * slot_bytes / statistics.median(took["raw"]),
        ratio=ratio(took["arena"], took["raw"]),
        **other,
    )


def main() -> None:
    """Parse, make a file, measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where the file is made")
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
                measure(arena, slot_bytes, total_bytes, given.depth, given.rounds)


if __name__ == "__main__":
    main()
