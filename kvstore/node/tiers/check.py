"""Checks, and on demand repairs, the SSD file of a node that does not run.

Everything that a starting node would believe is looked at, and what it believes only at the first read as well: every
payload against its checksum table and the table against its header. Repair takes headers away, never bytes of payload,
and writes the damaged copy of a superblock anew; a pool may forget.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from kvstore.errors import InvalidRequest, StorageFailed
from kvstore.model import checksum
from kvstore.model.layout import PageLayout, Rectangle
from kvstore.model.namespace import Namespace
from kvstore.node.arena.ssd import SsdArena, read_superblocks, valid_headers
from kvstore.node.arena.ssd_file import Calls, SsdFile, pages
from kvstore.node.arena.ssd_format import (
    HEADER_BYTES,
    ExtentPlace,
    SlotHeader,
    StoredNamespace,
    Superblock,
    header_block_bytes,
)
from kvstore.node.memory import UNIT_BYTES
from kvstore.node.slots import slot_bytes


class Fault(enum.StrEnum):
    """What is wrong."""

    SUPERBLOCK = "superblock"
    """A copy of the superblock is damaged."""
    LENGTH = "length"
    """The file is not as long as its superblock says."""
    HEADER = "header"
    """A header that is neither empty nor valid."""
    NAMESPACE = "namespace"
    """A namespace description that this version does not understand."""
    SHARD = "shard"
    """A header of a shard that its namespace does not have, or of another size."""
    DUPLICATE = "duplicate"
    """An older copy of a shard that is there twice."""
    CHECKSUM = "checksum"
    """Payload or table are not what was written."""
    UNREADABLE = "unreadable"
    """The disk does not give a slot or header block back."""
    ORPHAN = "orphan"
    """A chunk whose parent is not there."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault. `key`: of the chunk that is lost by it, None where no single one is.

    A namespace cannot be repaired, because the others are named by their places; its headers are emptied.
    """

    kind: Fault
    text: str
    key: bytes | None = None
    repaired: bool = False


@dataclass(frozen=True, slots=True)
class SsdReport:
    """What a check saw. `unverified_slots` were stored without checksums."""

    path: Path
    node_id: str
    slots: int
    chunks: int
    verified_bytes: int
    unverified_slots: int
    findings: tuple[Finding, ...]


Progress = Callable[[int, int], None]
"""Called with slots looked at so far and slots in all."""


def check_ssd_file(
    path: Path, *, repair: bool = False, progress: Progress | None = None, calls: Calls | None = None
) -> SsdReport:
    """Look at the whole file; holds one slot and all headers in memory.

    Raises ConfigurationError where it cannot be opened or is in use, LayoutMismatch for another format version,
    StorageFailed where the superblock cannot be read or a repair cannot be written.
    """
    with SsdFile.open(Path(path), make=False, writable=repair, calls=calls) as file:
        copies = read_superblocks(file)
        known = [copy for copy in copies if copy is not None]
        if not known:
            text = "both copies are damaged, or this is no SSD file; delete it, the node makes a new one"
            return SsdReport(file.path, "", 0, 0, 0, 0, (Finding(Fault.SUPERBLOCK, text),))
        check = _Check(file, max(known, key=lambda copy: copy.sequence), progress)
        if len(known) < len(copies):
            check.note(Fault.SUPERBLOCK, "one of the two copies is damaged")
        report = check.run()
        if repair and report.findings:
            check.repair()
            findings = (replace(each, repaired=each.kind is not Fault.NAMESPACE) for each in report.findings)
            report = replace(report, findings=tuple(findings))
        return report


class _Check:
    def __init__(self, file: SsdFile, superblock: Superblock, progress: Progress | None) -> None:
        self._file = file
        self._superblock = superblock
        self._progress = progress or (lambda done, total: None)
        self._findings: list[Finding] = []
        self._spaces = [self._shards_of(number, space) for number, space in enumerate(superblock.namespaces, 1)]
        self._good: dict[tuple[bytes, int], SlotHeader] = {}
        self._broken: set[int] = set()
        """Slots whose headers a repair empties,"""
        self._lost: list[ExtentPlace] = []
        """extents whose header blocks it writes anew."""
        self._verified_bytes = 0
        self._unverified = 0

    def note(self, kind: Fault, text: str, header: SlotHeader | None = None) -> None:
        """Keep a finding; its header, if it has one, is broken."""
        self._findings.append(Finding(kind, text, None if header is None else header.key))
        if header is not None:
            self._broken.add(header.slot)

    def run(self) -> SsdReport:
        """Headers first, then the payloads in the order of the file, then who has a parent."""
        block = self._superblock
        length = self._file.length_bytes
        if length != block.size_bytes:
            self.note(Fault.LENGTH, f"the file has {length} bytes, its superblock says {block.size_bytes}")
        extents = [extent for extent in block.extents if extent.slots_start <= length]
        for extent in extents:
            self._read_headers(extent)
        self._verify(extents)
        self._find_orphans()
        return SsdReport(
            self._file.path,
            block.node_id,
            len(self._good),
            len({header.key for header in self._good.values()}),
            self._verified_bytes,
            self._unverified,
            tuple(self._findings),
        )

    def _shards_of(self, number: int, space: StoredNamespace) -> tuple[bytes, PageLayout, dict[int, Rectangle]] | None:
        try:
            namespace = Namespace.from_canonical(space.canonical)
        except InvalidRequest as exc:
            self.note(Fault.NAMESPACE, f"namespace {number} is not understood: {exc}")
            return None
        shards = {
            geometry.shard(index): rectangle
            for geometry, _ in space.geometries
            for index, rectangle in enumerate(geometry.rectangles)
        }
        return namespace.id, namespace.layout, shards

    # --- headers -----------------------------------------------------------------------------------------

    def _read_headers(self, extent: ExtentPlace) -> None:
        block = pages(header_block_bytes(extent.slot_count))
        try:
            self._file.read(extent.start, block)
        except StorageFailed as exc:
            self.note(Fault.UNREADABLE, str(exc))
            self._lost.append(extent)
            return
        valid = dict(valid_headers(self._superblock, extent, block))
        for index in range(extent.slot_count):
            header = valid.get(index)
            if header is not None:
                self._take(extent, header)
            elif any(block[index * HEADER_BYTES : (index + 1) * HEADER_BYTES]):
                self._broken.add(extent.slot(index))
                self.note(Fault.HEADER, f"the header of slot {extent.slot(index)} is damaged")

    def _take(self, extent: ExtentPlace, header: SlotHeader) -> None:
        space = self._spaces[header.namespace_number - 1]
        rectangle = space[2].get(header.shard) if space is not None else None
        if space is None or rectangle is None:
            self.note(Fault.SHARD, f"slot {header.slot} has a shard that nobody registered", header)
        elif header.payload_bytes != space[1].payload_bytes(rectangle) or extent.slot_bytes != slot_bytes(
            space[1], rectangle
        ):
            self.note(Fault.SHARD, f"slot {header.slot} has another size than its shard", header)
        else:
            identity = header.key, header.shard
            other = self._good.get(identity)
            if other is None or other.generation < header.generation:
                self._good[identity] = header
            if other is not None:
                older = min(other, header, key=lambda each: each.generation)
                self.note(Fault.DUPLICATE, f"slot {older.slot} has an older copy of the same shard", older)

    # --- payloads ----------------------------------------------------------------------------------------

    def _verify(self, extents: list[ExtentPlace]) -> None:
        buffer = pages(max((extent.slot_bytes for extent in extents), default=UNIT_BYTES))
        headers = sorted(self._good.values(), key=lambda header: header.slot)
        for done, header in enumerate(headers):
            self._progress(done, len(headers))
            try:
                is_whole = self._is_whole(header, memoryview(buffer))
            except StorageFailed as exc:
                self.note(Fault.UNREADABLE, str(exc), header)
            else:
                if not is_whole:
                    self.note(Fault.CHECKSUM, f"slot {header.slot} does not match its checksums", header)
        self._progress(len(headers), len(headers))
        self._good = {name: header for name, header in self._good.items() if header.slot not in self._broken}

    def _is_whole(self, header: SlotHeader, buffer: memoryview) -> bool:
        space = self._spaces[header.namespace_number - 1]
        assert space is not None
        _, layout, shards = space
        rectangle = shards[header.shard]
        if not header.table_hash:
            self._unverified += 1
            return True
        view = buffer[: slot_bytes(layout, rectangle)]
        self._file.read(header.slot * UNIT_BYTES, view)
        slot = np.frombuffer(view, dtype=np.uint8)
        payload = slot[: header.payload_bytes]
        table = slot[header.payload_bytes : header.payload_bytes + checksum.table_bytes(rectangle)]
        self._verified_bytes += header.payload_bytes
        return checksum.table_hash(table) == header.table_hash and not checksum.differs(
            payload, table, layout, rectangle
        )

    # --- chunks ------------------------------------------------------------------------------------------

    def _find_orphans(self) -> None:
        children: dict[tuple[int, bytes], list[SlotHeader]] = {}
        for header in self._good.values():
            children.setdefault((header.namespace_number, header.parent_key), []).append(header)
        reached: set[int] = set()
        ends = [(number, space[0]) for number, space in enumerate(self._spaces, 1) if space is not None]
        while ends:
            end = ends.pop()
            for header in children.pop(end, ()):
                reached.add(header.slot)
                ends.append((end[0], header.key))
        for header in [each for each in self._good.values() if each.slot not in reached]:
            self.note(Fault.ORPHAN, f"the parent of the chunk in slot {header.slot} is not there", header)
        self._good = {name: header for name, header in self._good.items() if header.slot in reached}

    def repair(self) -> None:
        """Empty the broken headers, bring the file to its length, write the older copy of the superblock anew."""
        block = self._superblock
        self._file.set_length(block.size_bytes)
        arena = SsdArena(self._file, block)
        for extent in self._lost:
            arena.format_extent(extent)
        arena.write_headers([(slot, None) for slot in sorted(self._broken)])
        arena.write_superblock(block.namespaces, block.extents)
