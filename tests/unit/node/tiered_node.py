"""A node with DRAM and an SSD file and without sockets, for tests: core, catalog, `TierStack`, a clock that tests move.

Pages follow from key and version, so that a wrong or an older page is recognised; DRAM starts out poisoned.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import time
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvstore.model import checksum
from kvstore.model.layout import Geometry, PageLayout, Rectangle
from kvstore.model.namespace import Namespace
from kvstore.model.prefix import Keys
from kvstore.model.values import MissReason, NodeInfo, Outcome
from kvstore.node.arena import SsdIo
from kvstore.node.arena.ssd import SsdArena
from kvstore.node.arena.ssd_file import Calls
from kvstore.node.arena.ssd_format import HEADER_BYTES
from kvstore.node.catalog import UNIT_BYTES, CatalogShape, CatalogWriter, create_catalog
from kvstore.node.chunks import Chunk
from kvstore.node.core import CoreSettings, NodeCore, Session
from kvstore.node.operators.operations import Operations
from kvstore.node.recovery import recover
from kvstore.node.slots import SlotAllocator
from kvstore.node.tiers import TierStack
from kvstore.node.tiers.recovery import RecoveredSsd, recover_ssd
from tests.unit.node.small_node import FakeClock

POISON = 0xA5
ENTRIES = 256
WAIT_S = 10.0
Bytes = npt.NDArray[np.uint8]
OpenIo = Callable[[SsdArena, Bytes], SsdIo]
IO_WAYS = ["threads", pytest.param("nixl", marks=pytest.mark.nixl)]
"""Ways of `ssd_io`, to run a test over each."""


@cache
def page_bytes(key: bytes, version: int, layout: PageLayout) -> Bytes:
    """A whole chunk, (layers, pages, heads, bytes)."""
    rng = np.random.default_rng([version, *key])
    return rng.integers(0, 256, layout.shape(layout.whole), dtype=np.uint8)


def shard_bytes(key: bytes, version: int, layout: PageLayout, rectangle: Rectangle) -> Bytes:
    """What a writer puts into the slot of one shard: payload and checksum table."""
    part = page_bytes(key, version, layout)[
        rectangle.layer_start : rectangle.layer_stop, :, rectangle.head_start : rectangle.head_stop
    ]
    payload = np.ascontiguousarray(part).ravel()
    return np.concatenate([payload, checksum.table_of(payload, layout, rectangle).view(np.uint8).ravel()])


class DramMemory:
    """What a supervisor keeps of a node while its workers come and go."""

    def __init__(self, slots: int) -> None:
        self.arena_bytes = slots * UNIT_BYTES
        self.shape = CatalogShape.make(self.arena_bytes, ENTRIES)
        self.catalog_fd, self.catalog = create_catalog(self.shape)
        weakref.finalize(self, os.close, self.catalog_fd)
        self.arena: Bytes = np.frombuffer(mmap.mmap(-1, self.arena_bytes), dtype=np.uint8)
        self.arena[:] = POISON


class TieredNode:
    """One worker's life over an SSD file. `memory`: of the worker before it, None for a host that was restarted.
    `open_io`: how its payloads get there, None: by threads."""

    def __init__(
        self,
        path: Path,
        ssd_bytes: int,
        *,
        epoch: int = 1,
        slots: int = 64,
        memory: DramMemory | None = None,
        calls: Calls | None = None,
        settings: CoreSettings | None = None,
        clock: FakeClock | None = None,
        open_io: OpenIo | None = None,
    ) -> None:
        self.path = path
        self.clock = clock or FakeClock()
        self.memory = memory or DramMemory(slots)
        self.info = NodeInfo("node-a", epoch, "host", "127.0.0.1:1", "127.0.0.1:2")
        catalog = CatalogWriter(self.memory.catalog, self.memory.shape, epoch)
        allocator = SlotAllocator(self.memory.arena_bytes, self.memory.arena_bytes)
        self.ssd = ssd = SsdArena.open(
            path, ssd_bytes, "node-a", epoch, calls=calls or Calls(fdatasync=lambda fd: None)
        )
        on_ssd = SlotAllocator(ssd.size_bytes, ssd.size_bytes, start_bytes=ssd.slots_start, header_bytes=HEADER_BYTES)
        settings = settings or CoreSettings(session_share=1.0)
        self.core = core = NodeCore(self.info, catalog, allocator, self.clock, settings, on_ssd)
        self.operations = Operations(core, self.clock)
        if memory is not None:
            recover(core, memory.catalog, self.clock())
        self.found: RecoveredSsd = recover_ssd(core, ssd.superblock, ssd.scan(), self.clock())
        self.tiers = TierStack(core, self.memory.arena, ssd, open_io and open_io(ssd, self.memory.arena))
        self.tiers.take_up(self.found.spaces)
        core.settle()
        core.check()
        core.on_commit = self.tiers.wake
        self.sessions: dict[tuple[bytes, Geometry], Session] = {}

    # --- writing -----------------------------------------------------------------------------------------

    def session(self, space: Namespace, geometry: Geometry) -> Session:
        """A session that writes this geometry."""
        session = self.sessions.get((space.id, geometry))
        if session is None:
            session = self.sessions[space.id, geometry] = self.core.open_session("test", shared=True)
            self.core.register_namespace(session.number, space, geometry, ())
        return session

    def store(
        self,
        space: Namespace,
        keys: Keys,
        version: int = 0,
        *,
        geometry: Geometry | None = None,
        numbers: Sequence[int] | None = None,
        with_checksums: bool = True,
    ) -> list[Outcome]:
        """Write these rectangles of each chunk, as a client does it. The outcomes of the last one."""
        geometry = geometry or Geometry.whole(space.layout)
        outcomes: list[Outcome] = []
        for number in range(len(geometry.rectangles)) if numbers is None else numbers:
            outcomes = self._store(space, keys, version, geometry, number, with_checksums)
        return outcomes

    def _store(
        self, space: Namespace, keys: Keys, version: int, geometry: Geometry, number: int, with_checksums: bool
    ) -> list[Outcome]:
        session = self.session(space, geometry).number
        answer = self.core.reserve(session, keys, geometry.shard(number), b"")
        outcomes = list(answer.outcomes)
        granted = [i for i, outcome in enumerate(outcomes) if outcome is Outcome.GRANTED]
        hashes = []
        for index in granted:
            contents = shard_bytes(keys[index], version, space.layout, geometry.rectangles[number])
            self.memory.arena[answer.slots[index] * UNIT_BYTES :][: len(contents)] = contents
            table = contents[-checksum.table_bytes(geometry.rectangles[number]) :]
            if not with_checksums:
                table[:] = 0
            hashes.append(checksum.table_hash(table) if with_checksums else 0)
        if answer.attempt:
            done = self.core.commit(session, answer.attempt, granted, hashes, True).outcomes
            for index, outcome in zip(granted, done, strict=True):
                outcomes[index] = outcome
        self.core.check()
        return outcomes

    # --- reading -----------------------------------------------------------------------------------------

    async def read(
        self, space: Namespace, keys: Keys, rectangle: Rectangle | None = None, deadline_s: float = WAIT_S
    ) -> tuple[list[int], MissReason | None]:
        """Leading chunks that can be had, each by the version of its pages (see `version_of`); why not the next."""
        rectangle = rectangle or space.layout.whole
        versions: list[int] = []
        chunks = self.core.pool.forest.chunks
        while len(versions) < len(keys):
            chunk = chunks.get(keys[len(versions)])
            if chunk is None or chunk.covering_anywhere(rectangle) is None:
                return versions, MissReason.ABSENT
            if chunk.covering(rectangle) is not None:
                versions.append(self.version_of(chunk, rectangle))
                continue
            ends_s = time.monotonic() + deadline_s
            staged, reason = await self.tiers.stage(keys, rectangle, len(versions), ends_s)
            if not staged:
                return versions, reason
            for key in list(keys)[len(versions) : len(versions) + staged]:
                versions.append(self.version_of(chunks[key], rectangle))
        return versions, None

    def version_of(self, chunk: Chunk, rectangle: Rectangle, versions: int = 4) -> int:
        """Which version of its pages a chunk in DRAM has; AssertionError for bytes that nobody wrote."""
        shards = chunk.covering(rectangle)
        assert shards is not None
        found = set()
        for shard in shards:
            kind = chunk.space.kinds[shard]
            there = self.memory.arena[chunk.copies[shard].slot * UNIT_BYTES :][: kind.payload_bytes]
            same = [
                version
                for version in range(versions)
                if np.array_equal(
                    there, shard_bytes(chunk.key, version, chunk.space.layout, kind.rectangle)[: kind.payload_bytes]
                )
            ]
            assert same, f"wrong bytes in chunk {chunk.key.hex()}"
            found.add(same[0])
        assert len(found) == 1, f"chunk {chunk.key.hex()} is made of several versions"
        return found.pop()

    # --- removing and waiting ----------------------------------------------------------------------------

    async def remove(self, space: Namespace, key: bytes) -> int:
        """Returns when it is acknowledged."""
        session = next(iter(self.sessions.values())).number
        removed = self.core.remove(session, space.id, [key])
        await self.tiers.forget_removed()
        return removed

    async def rest(self) -> None:
        """Until the cleaner has nothing to do."""
        await self.until(
            lambda: not self.core.pool.backlog.waiting and not self.core.holds.moving and self._all_owned()
        )

    def _all_owned(self) -> bool:
        """No SSD slot is in use but for a shard that is there: nothing is written, nothing waits to be forgotten."""
        pool = self.core.pool
        owned = {copy.slot for chunk in pool.forest.chunks.values() for copy in chunk.ssd.values()}
        return pool.ssd is None or owned == pool.ssd.allocator.used_slots()

    async def until(self, condition: Callable[[], object]) -> None:
        """Let the loop run until the condition holds."""
        ends_s = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < ends_s, "it did not come true"
            await asyncio.sleep(0)

    def on_ssd(self) -> dict[bytes, set[int]]:
        """Key -> shards that the pool knows to be on the SSD."""
        return {key: set(chunk.ssd) for key, chunk in self.core.pool.forest.chunks.items() if chunk.ssd}

    async def die(self) -> None:
        """End without saving what is only in DRAM."""
        self.core.pool.backlog.waiting.clear()
        await self.tiers.stop()
