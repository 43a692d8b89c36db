"""The client's own memory that network reads land in: bounded, page-aligned, never anybody else's.

`Staging` owns one private anonymous mapping and hands out blocks of it. A block is in one of three states:

    free ──acquire──► in use ──release──► free
                         └──quarantine──► quarantined ──(its transfer has ended)──► free

A block whose transfer was given up while the other side may still write is quarantined: nobody gets it until
the transfer is known to have ended (law 6), which is asked whenever somebody wants room. Bytes of all three states
always add up to the whole (`check`).

Blocks have any size, rounded up to 4 KiB, and are found first fit in one sorted list of free extents, which
joins neighbours as they come back. Fixed slots would be simpler, but shard slots differ by namespace and a
batch wants many of them in one contiguous block; the few blocks that a client holds at a time keep the list
short. Waiters are served in the order of arrival, so that small reads cannot starve a large one.
"""

from __future__ import annotations

import bisect
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.errors import ForkedProcess, InvalidRequest, LimitExceeded
from kvstore.forks import leave_out_of_children

ALIGNMENT_BYTES: Final = 4096
"""Every block starts at, and is rounded up to, a multiple of this (a destination off the page costs half)."""


SETTLE_EVERY_S: Final = 0.005
"""Who waits for room asks so often whether quarantined transfers have ended."""


@dataclass(frozen=True, slots=True, eq=False)
class StagingBlock:
    """A piece of staging. `view` (uint8, exactly the bytes asked for) is the holder's until the block is given back.

    `offset_bytes` is its place in the staging memory, `held_bytes` what it occupies there.
    """

    offset_bytes: int
    held_bytes: int
    view: npt.NDArray[np.uint8] = field(repr=False)


@dataclass(frozen=True, slots=True)
class StagingUsage:
    """Bytes by state; they add up to the size of the staging memory."""

    free_bytes: int
    in_use_bytes: int
    quarantined_bytes: int


class Staging:
    """Hands out blocks of `total_bytes` (rounded up to 4 KiB) of memory. Thread-safe; of no use in a forked child.

    `memory` is the whole of it as one uint8 array, for transports that register memory beforehand.
    """

    def __init__(self, total_bytes: int) -> None:
        if total_bytes < 1:
            raise InvalidRequest(f"staging needs at least one byte, not {total_bytes}")
        self.total_bytes = _rounded(total_bytes)
        mapping = mmap.mmap(-1, self.total_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # A child must not share pages that a transfer writes: a copy-on-write would move them away under it.
        leave_out_of_children(mapping)
        self.memory: npt.NDArray[np.uint8] = np.frombuffer(mapping, dtype=np.uint8)
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
        self._free: list[tuple[int, int]] = [(0, self.total_bytes)]
        self._in_use: set[StagingBlock] = set()
        self._quarantined: dict[StagingBlock, Callable[[], bool]] = {}

    def acquire(self, length_bytes: int, deadline_s: float) -> StagingBlock | None:
        """A block of `length_bytes`, waiting up to `deadline_s` for room; None = staging full until then.

        Raises LimitExceeded for more than the whole staging: the caller streams through it in pieces.
        """
        self._check_process()
        if not 1 <= length_bytes <= self.total_bytes:
            raise LimitExceeded(f"a staging block has 1..{self.total_bytes} bytes, not {length_bytes}")
        deadline = time.monotonic() + deadline_s
        place = object()
        with self._changed:
            self._waiting.append(place)
            try:
                while True:
                    self._settle()
                    block = self._take(length_bytes) if self._waiting[0] is place else None
                    remaining_s = deadline - time.monotonic()
                    if block is not None or remaining_s <= 0:
                        return block
                    longest_s = SETTLE_EVERY_S if self._quarantined else threading.TIMEOUT_MAX
                    self._changed.wait(min(remaining_s, longest_s))
            finally:
                self._waiting.remove(place)
                self._changed.notify_all()

    def release(self, block: StagingBlock) -> None:
        """In use → free. The caller is done with `view` and no transfer can write into it any more."""
        self._check_process()
        with self._changed:
            self._check_in_use(block)
            self._free_block(block)

    def quarantine(self, block: StagingBlock, ended: Callable[[], bool]) -> None:
        """In use → quarantined: its transfer was given up but may still write until `ended` answers True.

        `ended` is called with a lock held: it must not wait.
        """
        self._check_process()
        with self._changed:
            self._check_in_use(block)
            self._quarantined[block] = ended

    def usage(self) -> StagingUsage:
        """Bytes by state, at one moment."""
        self._check_process()
        with self._changed:
            self._settle()
            return StagingUsage(
                sum(size for _, size in self._free),
                sum(block.held_bytes for block in self._in_use),
                sum(block.held_bytes for block in self._quarantined),
            )

    @property
    def waiting_count(self) -> int:
        """Callers of `acquire` that wait for room."""
        return len(self._waiting)

    def check(self) -> None:
        """Assert the law: free, in use and quarantined extents tile the memory exactly, free neighbours are joined."""
        self._check_process()
        with self._changed:
            held = [(block.offset_bytes, block.held_bytes) for block in (*self._in_use, *self._quarantined)]
            position = 0
            for offset, size in sorted([*self._free, *held]):
                assert offset == position, f"gap or overlap at {position}, next extent starts at {offset}"
                assert size > 0 and size % ALIGNMENT_BYTES == 0, f"extent of {size} bytes at {offset}"
                position += size
            assert position == self.total_bytes, f"extents cover {position} of {self.total_bytes} bytes"
            assert self._free == sorted(self._free)
            for (offset, size), (following, _) in zip(self._free, self._free[1:], strict=False):
                assert offset + size < following, f"free extents at {offset} and {following} are not joined"

    def _take(self, length_bytes: int) -> StagingBlock | None:
        wanted = _rounded(length_bytes)
        for index, (offset, size) in enumerate(self._free):
            if size >= wanted:
                self._free[index : index + 1] = [(offset + wanted, size - wanted)] if size > wanted else []
                block = StagingBlock(offset, wanted, self.memory[offset : offset + length_bytes])
                self._in_use.add(block)
                return block
        return None

    def _settle(self) -> None:
        for block in [block for block, ended in self._quarantined.items() if ended()]:
            del self._quarantined[block]
            self._free_block(block)

    def _check_in_use(self, block: StagingBlock) -> None:
        # Blocks compare by identity, so one that was given back cannot free the next holder's memory.
        if block not in self._in_use:
            raise InvalidRequest(f"{block} is not in the state that this call ends")
        self._in_use.remove(block)

    def _free_block(self, block: StagingBlock) -> None:
        self._join(block.offset_bytes, block.held_bytes)
        self._changed.notify_all()

    def _join(self, offset: int, size: int) -> None:
        index = bisect.bisect(self._free, (offset, size))
        start, stop = index, index
        if index < len(self._free) and offset + size == self._free[index][0]:
            size += self._free[index][1]
            stop += 1
        if index and sum(self._free[index - 1]) == offset:
            start -= 1
            offset, size = self._free[start][0], self._free[start][1] + size
        self._free[start:stop] = [(offset, size)]

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedProcess("staging memory does not exist in a forked child; make a client there")


def _rounded(length_bytes: int) -> int:
    return -(-length_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
