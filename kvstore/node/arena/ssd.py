"""The SSD arena: one file, cut into extents of slots, that remembers what its slots hold. Blocking, thread-safe.

It owns the file and the order of writes inside one call. The order between calls is its caller's:

    publish    write (payload and table) -> write_headers
    withdraw   write_headers(None) -> only then may anything write into the slot; remove and drop also sync
    extent     format_extent -> write_superblock that names it -> payloads, headers

A crash at any point then leaves headers of whole payloads only; a loss of power can leave a header whose payload is not
whole, which the checksum table behind the payload tells (`kvstore.model.checksum`). It has no threads of its own, and
nothing but header writers waits for a header write.
"""

from __future__ import annotations

import bisect
import contextlib
import logging
import mmap
import secrets
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from kvstore.errors import ConfigurationError, KvStoreError, StorageFailed
from kvstore.node.arena import Buffer
from kvstore.node.arena.ssd_file import Calls, SsdFile, pages
from kvstore.node.arena.ssd_format import (
    FILE_LIMIT_BYTES,
    HEADER_BYTES,
    REGION_MOST_BYTES,
    SUPERBLOCK_MAGIC,
    ExtentPlace,
    SlotHeader,
    StoredNamespace,
    Superblock,
    bytes_to_read,
    header_block_bytes,
    region_bytes_of,
)
from kvstore.node.memory import UNIT_BYTES

logger = logging.getLogger(__name__)

LEAST_ROOM_BYTES: Final = 2 * UNIT_BYTES
"""A header block and a slot."""
_NO_HEADER: Final = bytes(HEADER_BYTES)


class SsdArena:
    """An open SSD file of this node. `superblock` is the one that was written last."""

    def __init__(self, file: SsdFile, superblock: Superblock) -> None:
        self.superblock = superblock
        self._file = file
        self._superblock_lock = threading.Lock()
        self._headers_lock = threading.Lock()
        self._extents = {extent.start: extent for extent in superblock.extents}
        self._starts = sorted(self._extents)
        self._headers: dict[int, bytearray] = {}
        """Start of an extent -> its header block, as it is or will be on the disk. Loaded when first needed."""
        self._page = pages(UNIT_BYTES)
        self._header_writes = self._synced_header_writes = 0

    @classmethod
    def open(cls, path: Path, size_bytes: int, node_id: str, epoch: int, *, calls: Calls | None = None) -> SsdArena:
        """Open this node's file, or make it; at most `size_bytes` long, rounded down to 4096.

        With another size than before, what lies within the new one stays. Raises ConfigurationError for a file of
        another node or program or one in use, LayoutMismatch for another format, CapacityExhausted and StorageFailed
        for what the disk says. Writes a superblock and reads it back: where O_DIRECT does not do that, a warning is
        logged and the page cache used.
        """
        path, size_bytes = Path(path), size_bytes // UNIT_BYTES * UNIT_BYTES
        if not 2 * region_bytes_of(size_bytes) + LEAST_ROOM_BYTES <= size_bytes <= FILE_LIMIT_BYTES:
            raise ConfigurationError(
                f"an SSD file has {2 * region_bytes_of(0) + LEAST_ROOM_BYTES} to {FILE_LIMIT_BYTES} bytes, "
                f"not {size_bytes}; change --ssd"
            )
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(SsdFile.open(path, make=True, calls=calls))
            found = _own_superblock(file, size_bytes, node_id)
            first = found or Superblock(
                secrets.randbits(64), node_id, epoch, size_bytes, region_bytes_of(size_bytes), sequence=0
            )
            arena = cls(file, replace(first.within(size_bytes), epoch=epoch))
            arena._begin(is_new=found is None)
            stack.pop_all()
        return arena

    def _begin(self, *, is_new: bool) -> None:
        block = replace(self.superblock, sequence=self.superblock.sequence + 1)
        data = _padded(block.pack())
        reason = self._file.try_direct(block.offset, data)
        if reason:
            logger.warning(
                "%s: no O_DIRECT here (%s): its pages go through the page cache and compete with DRAM for memory; "
                "a file system such as ext4 or xfs on a local disk takes O_DIRECT",
                self.path,
                reason,
            )
            self._file.write(block.offset, data)
            back = pages(len(data))
            self._file.read(block.offset, back)
            if back[:] != data[:]:
                raise StorageFailed(f"{self.path}: other bytes came back than were written; use another disk")
        self._file.sync()
        self.superblock = block
        if is_new:  # both copies, so that a file with one damaged copy is never taken for one that was not finished
            self.write_superblock((), ())
        self._file.set_length(self.size_bytes)
        if missing := self._file.missing_bytes:
            logger.warning(
                "%s: the disk has %d bytes less free than --ssd names; the tier will be smaller until there is room",
                self.path,
                missing,
            )

    @property
    def path(self) -> Path:
        """The file."""
        return self._file.path

    @property
    def descriptor(self) -> int:
        """The open file's number, for what moves payloads by other means than `read_all` and `write_all`."""
        return self._file.descriptor

    @property
    def direct(self) -> bool:
        """False: through the page cache."""
        return self._file.direct

    @property
    def size_bytes(self) -> int:
        """The file never gets longer."""
        return self.superblock.size_bytes

    @property
    def slots_start(self) -> int:
        """Extents lie from here to `size_bytes`."""
        return self.superblock.slots_start

    def read(self, offset: int, into: Buffer) -> None:
        """Fill `into` (page-aligned memory) from `offset`; both multiples of 4096 bytes.

        Raises StorageFailed.
        """
        self._file.read(offset, into)

    def write(self, offset: int, data: Buffer) -> None:
        """Write page-aligned `data` at `offset`, both multiples of 4096. It may be torn when this raises.

        Raises CapacityExhausted where the disk has no room (what was written once stays writable) and StorageFailed.
        """
        assert self.slots_start <= offset and offset + len(data) <= self.size_bytes
        self._file.write(offset, data)

    def read_all(self, offset: int, into: Sequence[Buffer]) -> None:
        """As `read`, into several pieces that lie side by side in the file; at most 1,024 of them."""
        self._file.read_all(offset, into)

    def write_all(self, offset: int, data: Sequence[Buffer]) -> None:
        """As `write`, from several pieces that come to lie side by side; at most 1,024 of them."""
        assert self.slots_start <= offset and offset + sum(map(len, data)) <= self.size_bytes
        self._file.write_all(offset, data)

    def sync(self) -> None:
        """What was written before this call survives a loss of power."""
        writes = self._header_writes
        self._file.sync()
        self._synced_header_writes = writes

    @property
    def has_unsynced_headers(self) -> bool:
        """True if a loss of power could bring back a header that was emptied, or take one that was written."""
        return self._header_writes != self._synced_header_writes

    def write_superblock(self, namespaces: Iterable[StoredNamespace], extents: Iterable[ExtentPlace]) -> None:
        """Note namespaces (append only: their places are their numbers) and extents, durably.

        Raises LimitExceeded, with nothing written, where they do not fit. After a failure the older copy counts and the
        next call writes over the broken one.
        """
        with self._superblock_lock:
            before = self.superblock
            block = replace(
                before, sequence=before.sequence + 1, namespaces=tuple(namespaces), extents=tuple(sorted(extents))
            )
            data = _padded(block.pack())
            self._file.sync()  # the header blocks of its extents before itself
            self._file.write(block.offset, data)
            self._file.sync()
            self.superblock = block
            with self._headers_lock:
                listed = set(block.extents)
                for extent in [each for each in self._extents.values() if each not in listed]:
                    self._forget(extent)

    def format_extent(self, extent: ExtentPlace) -> None:
        """Empty the header block of an extent; write a superblock with it before anything goes into its slots."""
        assert extent.is_sound(self.slots_start, self.size_bytes)
        with self._headers_lock:
            for other in [each for each in self._extents.values() if each.start < extent.stop]:
                if extent.start < other.stop:
                    self._forget(other)
            empty = pages(header_block_bytes(extent.slot_count))
            self._file.write(extent.start, empty)
            self._extents[extent.start] = extent
            bisect.insort(self._starts, extent.start)
            self._headers[extent.start] = bytearray(len(empty))

    def _forget(self, extent: ExtentPlace) -> None:
        del self._extents[extent.start]
        self._starts.remove(extent.start)
        self._headers.pop(extent.start, None)

    def write_headers(self, batch: Sequence[tuple[int, SlotHeader | None]]) -> None:
        """Set (slot, header) or empty (slot, None) headers; each page is written once, the lower ones first.

        After a failure all of them count as empty: the next write of their page says so to the disk.
        """
        with self._headers_lock:
            touched: dict[tuple[int, int], bytearray] = {}
            places = [self._place(slot) for slot, _ in batch]
            for (extent, at), (slot, header) in zip(places, batch, strict=True):
                assert header is None or (header.slot == slot and header.payload_bytes <= extent.slot_bytes)
                block = self._headers[extent.start]
                block[at : at + HEADER_BYTES] = header.pack(self.superblock.file_id) if header else _NO_HEADER
                touched[extent.start, at // UNIT_BYTES * UNIT_BYTES] = block
            try:
                for (start, page), block in sorted(touched.items()):
                    self._page[:] = block[page : page + UNIT_BYTES]
                    self._file.write(start + page, self._page)
            except KvStoreError:
                for extent, at in places:
                    self._headers[extent.start][at : at + HEADER_BYTES] = _NO_HEADER
                raise
            finally:
                self._header_writes += 1

    def has_slot(self, slot: int) -> bool:
        """True if a slot of a known extent begins there."""
        with self._headers_lock:
            place = bisect.bisect_right(self._starts, slot * UNIT_BYTES) - 1
            return place >= 0 and self._extents[self._starts[place]].index(slot) is not None

    def _place(self, slot: int) -> tuple[ExtentPlace, int]:
        extent = self._extents[self._starts[bisect.bisect_right(self._starts, slot * UNIT_BYTES) - 1]]
        index = extent.index(slot)
        assert index is not None, f"no slot begins at {slot}"
        if extent.start not in self._headers:
            self._load(extent, pages(header_block_bytes(extent.slot_count)))
        return extent, index * HEADER_BYTES

    def scan(self) -> Iterator[SlotHeader]:
        """All valid headers, extent by extent; only header blocks are read. At start, before any header is written.

        A header counts if it lies in its own place, is of a namespace of the superblock and fits its slot. What does
        not count is emptied with the next write of its page. Two may have the same (key, shard).
        """
        longest = max((header_block_bytes(extent.slot_count) for extent in self.superblock.extents), default=0)
        if not longest:
            return
        with memoryview(pages(longest)) as buffer:
            for extent in self.superblock.extents:
                with self._headers_lock, buffer[: header_block_bytes(extent.slot_count)] as block:
                    found = self._load(extent, block)
                yield from found

    def _load(self, extent: ExtentPlace, buffer: Buffer) -> list[SlotHeader]:
        self._file.read(extent.start, buffer)
        found = list(valid_headers(self.superblock, extent, buffer))
        kept = bytearray(len(buffer))
        for index, _ in found:
            at = index * HEADER_BYTES
            kept[at : at + HEADER_BYTES] = buffer[at : at + HEADER_BYTES]
        self._headers[extent.start] = kept
        return [header for _, header in found]

    def close(self) -> None:
        """Unlock and close the file; nothing may be under way."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def valid_headers(superblock: Superblock, extent: ExtentPlace, block: Buffer) -> Iterator[tuple[int, SlotHeader]]:
    """(place in the extent, header) of those in a header block that count, see `SsdArena.scan`."""
    with memoryview(block) as view:
        for index in range(extent.slot_count):
            header = SlotHeader.unpack(view[index * HEADER_BYTES : (index + 1) * HEADER_BYTES], superblock.file_id)
            if (
                header is not None
                and header.slot == extent.slot(index)
                and 0 < header.payload_bytes <= extent.slot_bytes
                and 1 <= header.namespace_number <= len(superblock.namespaces)
            ):
                yield index, header


def read_superblocks(file: SsdFile) -> tuple[Superblock | None, Superblock | None]:
    """Both copies, None where damaged. Where the first is, the second's place is looked for.

    Raises LayoutMismatch for another format version.
    """
    first = _superblock_at(file, 0)
    if first is not None:
        return first, _superblock_at(file, first.region_bytes)
    head = file.first_bytes(REGION_MOST_BYTES + UNIT_BYTES)
    at = head.find(SUPERBLOCK_MAGIC, UNIT_BYTES)
    while at >= 0:
        found = _superblock_at(file, at) if at % UNIT_BYTES == 0 else None
        if found is not None and found.region_bytes == at:
            return None, found
        at = head.find(SUPERBLOCK_MAGIC, at + 1)
    return None, None


def _superblock_at(file: SsdFile, offset: int) -> Superblock | None:
    if file.length_bytes < offset + UNIT_BYTES:
        return None
    head = pages(UNIT_BYTES)
    file.read(offset, head)
    length = bytes_to_read(head[:])
    if not length or file.length_bytes < offset + len(data := pages(length)):
        return None
    file.read(offset, data)
    return Superblock.unpack(data[:])


def _own_superblock(file: SsdFile, size_bytes: int, node_id: str) -> Superblock | None:
    """The newest superblock, None for a file that is new or whose first superblock was never finished."""
    copies = [copy for copy in read_superblocks(file) if copy is not None]
    if not copies:
        if _is_blank(file):
            return None
        raise ConfigurationError(
            f"{file.path} is no SSD file of a node, or both copies of its superblock are damaged; "
            "name another SSD file, or delete this one if nobody needs it (cached pages in it are lost)"
        )
    newest = max(copies, key=lambda copy: copy.sequence)
    if newest.node_id != node_id:
        raise ConfigurationError(
            f"the SSD file {file.path} belongs to node {newest.node_id}, and this is node {node_id}; start it with "
            f"that node id, name another SSD file, or delete this one (the pages cached in it are lost)"
        )
    if size_bytes < newest.slots_start + LEAST_ROOM_BYTES:
        raise ConfigurationError(
            f"the SSD file {file.path} was made for {newest.size_bytes} bytes and cannot shrink to {size_bytes}; "
            "delete it (the pages cached in it are lost) or use a larger --ssd"
        )
    return newest


def _is_blank(file: SsdFile) -> bool:
    """True if it is empty, or nothing but (a part of) a first superblock was ever written into it."""
    head = file.first_bytes(2 * REGION_MOST_BYTES)
    rest = head[UNIT_BYTES:] if head[: len(SUPERBLOCK_MAGIC)] == SUPERBLOCK_MAGIC else head
    return rest.count(0) == len(rest)


def _padded(data: bytes) -> mmap.mmap:
    padded = pages(len(data))
    padded[: len(data)] = data
    return padded
