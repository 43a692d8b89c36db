"""Where the bytes of a tier lie: `Arena`, for all kinds, and `SsdIo`, which moves payloads to and from the file.

The supervisor loads this package: the standard library only.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvstore.errors import KvStoreError

Buffer = mmap.mmap | memoryview | bytearray
"""Writable memory of the caller. The SSD arena wants it to begin at a multiple of 4096: maps and slices of them do."""


class Arena(Protocol):
    """Bytes that are addressed in units of 4096; what lies at which offset is its caller's knowledge. Thread-safe for
    different places. Blocking."""

    @property
    def size_bytes(self) -> int:
        """Offsets end here."""

    def read(self, offset: int, into: Buffer) -> None:
        """Fill `into` from `offset`; offset and length are multiples of 4096 within the arena."""

    def write(self, offset: int, data: Buffer) -> None:
        """Put `data` at `offset`, likewise. When it returns, reads see it."""

    def close(self) -> None:
        """Give the memory or file back; nothing may be under way."""


@dataclass(frozen=True, slots=True)
class Run:
    """Whole slots that lie side by side in the file from `offset` (bytes) on; `pieces`: their memory, at most 1,024."""

    offset: int
    pieces: Sequence[Buffer]


class SsdIo(Protocol):
    """Moves payloads, and nothing else: headers, superblocks and syncs are the arena's own. Blocking, thread-safe.

    A call returns when all of its runs have ended: nothing of them is read from or written into memory any more, and
    what was written is there for a sync. Where a disk stands still it does not return, as a system call would not, so
    that nobody reuses the memory. What failed is a value, a run: StorageFailed or CapacityExhausted, and memory or
    slot may hold anything.
    """

    @property
    def name(self) -> str:
        """How payloads go now: one of `ssd_io.WAYS`."""

    @property
    def detail(self) -> str:
        """The same with what is underneath, for people."""

    def read(self, runs: Sequence[Run]) -> list[KvStoreError | None]:
        """Fill the memory of each run; why not, None where it is filled. Raises ForkedProcess."""

    def write(self, runs: Sequence[Run]) -> list[KvStoreError | None]:
        """Write each run; why not, None where all of it is written. Raises ForkedProcess."""

    def close(self) -> None:
        """Let go of file and memory, before the arena is closed; nothing may be under way."""
