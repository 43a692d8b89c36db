"""The catalog's place in memory: constants, header, sizes and offsets, and the memfd itself.

The byte layout is written down in `docs/shared-memory.md`. The standard library only: the supervisor, which makes the
memory and keeps it for the workers, loads this module and nothing of numpy or gRPC.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from kvstore.errors import LayoutMismatch

MAGIC: Final = int.from_bytes(b"KVSTCAT1", "little")
LAYOUT_VERSION: Final = 1
UNIT_BYTES: Final = 4096
"""Slots are named by their offset in the arena in these units."""
ENTRY_WORDS: Final = 8
BUCKET_ENTRIES: Final = 4
RECORD_WORDS: Final = 8
NAMESPACE_LIMIT: Final = 4096
GEOMETRY_LIMIT: Final = 4096
"""As many as namespaces: each writer's namespace lists one. Records that nobody wrote take no memory."""
GEOMETRY_WORDS: Final = 2 + 256
"""A geometry record: namespace number u32 | digest u32, rectangle count u64, then one u64 a rectangle."""
DESCRIPTION_BYTES: Final = 4096
"""A namespace's canonical description: its length as u32, then the text. Pages that nobody wrote take no memory."""
WRITTEN_HERE_BYTES: Final = 32
"""One bit a rectangle of a geometry: writers of this node store it here."""


class Header:
    """Word numbers in the header page."""

    MAGIC: Final = 0
    VERSION: Final = 1
    EPOCH: Final = 2
    ARENA_BYTES: Final = 3
    BUCKETS: Final = 4
    UNITS: Final = 5
    TAGS_OFFSET: Final = 6
    ENTRIES_OFFSET: Final = 7
    GENERATIONS_OFFSET: Final = 8
    RECORDS_OFFSET: Final = 9
    NAMESPACES_OFFSET: Final = 10
    GEOMETRIES_OFFSET: Final = 11
    TOTAL_BYTES: Final = 12
    DIRECTORY_VERSION: Final = 13
    NAMESPACES: Final = 14
    GEOMETRIES: Final = 15
    COUNTER: Final = 16
    SERVING: Final = 17
    DESCRIPTIONS_OFFSET: Final = 18
    WRITTEN_HERE_OFFSET: Final = 19
    WORDS: Final = 20


class _Words(Protocol):
    """u64 words: a memoryview or an array."""

    def __getitem__(self, place: slice, /) -> Iterable[Any]: ...


@dataclass(frozen=True, slots=True)
class CatalogShape:
    """Sizes and offsets (bytes) of a catalog for `slot_count` slots over an arena of `arena_bytes`."""

    arena_bytes: int
    buckets: int
    units: int
    namespaces_offset: int
    geometries_offset: int
    tags_offset: int
    entries_offset: int
    generations_offset: int
    records_offset: int
    descriptions_offset: int
    written_here_offset: int
    total_bytes: int

    @classmethod
    def make(cls, arena_bytes: int, slot_count: int) -> CatalogShape:
        """Twice as many entries as slots, the number of buckets rounded up to a power of two."""
        buckets = 1 << max(4, (-(-2 * slot_count // BUCKET_ENTRIES) - 1).bit_length())
        units = -(-arena_bytes // UNIT_BYTES)
        sizes = (
            UNIT_BYTES,  # header
            NAMESPACE_LIMIT * 16,
            GEOMETRY_LIMIT * GEOMETRY_WORDS * 8,
            buckets * 8,
            buckets * BUCKET_ENTRIES * ENTRY_WORDS * 8,
            units * 8,
            units * RECORD_WORDS * 8,
            NAMESPACE_LIMIT * DESCRIPTION_BYTES,
            GEOMETRY_LIMIT * WRITTEN_HERE_BYTES,
        )
        offsets = [0]
        for size in sizes:
            offsets.append(offsets[-1] + -(-size // UNIT_BYTES) * UNIT_BYTES)
        return cls(arena_bytes, buckets, units, *offsets[1:])

    @classmethod
    def read(cls, header: _Words) -> CatalogShape:
        """From a mapped header; raises LayoutMismatch if this is no catalog of this version."""
        word = [int(value) for value in header[: Header.WORDS]]
        if word[Header.MAGIC] != MAGIC:
            raise LayoutMismatch("not a kvstore catalog")
        if word[Header.VERSION] != LAYOUT_VERSION:
            raise LayoutMismatch(
                f"catalog layout version {word[Header.VERSION]}, this library reads {LAYOUT_VERSION}; "
                "update the older side and restart the node"
            )
        return cls(
            word[Header.ARENA_BYTES],
            word[Header.BUCKETS],
            word[Header.UNITS],
            word[Header.NAMESPACES_OFFSET],
            word[Header.GEOMETRIES_OFFSET],
            word[Header.TAGS_OFFSET],
            word[Header.ENTRIES_OFFSET],
            word[Header.GENERATIONS_OFFSET],
            word[Header.RECORDS_OFFSET],
            word[Header.DESCRIPTIONS_OFFSET],
            word[Header.WRITTEN_HERE_OFFSET],
            word[Header.TOTAL_BYTES],
        )


def create_catalog(shape: CatalogShape) -> tuple[int, mmap.mmap]:
    """A memfd and its only writable mapping: sealed, so that no other process can map it for writing.

    The mapping is inherited by forked children, which is how a worker gets it from its supervisor.
    """
    fd = os.memfd_create("kvstore-catalog", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, shape.total_bytes)
    memory = mmap.mmap(fd, shape.total_bytes)
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    f_seal_future_write = 0x10  # not named by the fcntl module of Python 3.11
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals | f_seal_future_write)
    return fd, memory
