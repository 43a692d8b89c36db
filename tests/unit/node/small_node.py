"""A node without a world around it, for tests: core, catalog and arena in this process, a clock that tests move."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstore.model.layout import Dtype, Geometry, PageLayout, Rectangle
from kvstore.model.namespace import Namespace
from kvstore.model.prefix import KeyChain, Keys
from kvstore.model.values import NodeInfo, Outcome
from kvstore.node import ReserveAnswer
from kvstore.node.catalog import UNIT_BYTES, CatalogShape, CatalogWriter, create_catalog
from kvstore.node.core import CoreSettings, NodeCore, Session
from kvstore.node.lookup import CatalogReader
from kvstore.node.slots import SlotAllocator

SMALL = PageLayout(2, 2, 4, Dtype.FP32, 4, 1)
"""Whole chunks and halves of this layout have slots of 4096 bytes."""
WIDE = PageLayout(2, 2, 64, Dtype.FP32, 4, 1)
"""A whole chunk of this layout has a slot of 12288 bytes, a half (TP 2) one of 8192."""
INFO = NodeInfo("node-a", 1, "host", "127.0.0.1:1", "127.0.0.1:2")


def namespace(layout: PageLayout = SMALL, revision: str = "r1") -> Namespace:
    return Namespace("model", revision, layout)


def keys_of(space: Namespace, prompt: int, chunks: int) -> Keys:
    """Keys of `chunks` full chunks; equal prompts give equal keys, a longer one begins with the shorter."""
    tokens = space.layout.chunk_tokens
    return KeyChain(space).keys([prompt * 100_000 + i for i in range(chunks * tokens)])


@dataclass
class FakeClock:
    """Monotonic seconds that tests move."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class SmallNode:
    """`slots` slots of 4096 bytes, all open; `entries` catalog entries are made for so many slots."""

    slots: int = 16
    entries: int = 0
    settings: CoreSettings = field(default_factory=lambda: CoreSettings(session_share=1.0))
    clock: FakeClock = field(default_factory=FakeClock)
    info: NodeInfo = INFO

    def __post_init__(self) -> None:
        arena_bytes = self.slots * UNIT_BYTES
        shape = CatalogShape.make(arena_bytes, self.entries or self.slots)
        self.catalog_fd, memory = create_catalog(shape)
        weakref.finalize(self, os.close, self.catalog_fd)
        self.writer = CatalogWriter(memory, shape, self.info.epoch)
        self.allocator = SlotAllocator(arena_bytes, arena_bytes)
        self.core = NodeCore(self.info, self.writer, self.allocator, self.clock, self.settings)
        self.arena: npt.NDArray[np.uint8] = np.zeros(arena_bytes, dtype=np.uint8)
        self.reader = CatalogReader(mmap.mmap(self.catalog_fd, shape.total_bytes, prot=mmap.PROT_READ))

    def open(self, space: Namespace, geometry: Geometry | None = None, *, shared: bool = True) -> Session:
        """A session that may write this namespace, whole chunks by default."""
        session = self.core.open_session("test", shared=shared)
        self.core.register_namespace(session.number, space, geometry or Geometry.whole(space.layout), ())
        return session

    def fill(self, slot: int, tag: int) -> None:
        """Write as a client would: the slot's first 8 bytes say what it holds."""
        self.arena[slot * UNIT_BYTES :][:8].view("<u8")[0] = tag

    def tag(self, slot: int) -> int:
        return int(self.arena[slot * UNIT_BYTES :][:8].view("<u8")[0])

    def reserve(
        self,
        session: Session,
        keys: Keys,
        *,
        shard: int | None = None,
        ticket: bytes = b"",
        wanted: Sequence[int] = (),
    ) -> ReserveAnswer:
        space = self.core.pool.spaces[keys.namespace_id]
        chosen = Geometry.whole(space.layout).shard(0) if shard is None else shard
        answer = self.core.reserve(session.number, keys, chosen, ticket, wanted)
        self.core.check()
        return answer

    def commit(self, session: Session, attempt: int, indices: Sequence[int], *, last: bool = True) -> list[Outcome]:
        answer = self.core.commit(session.number, attempt, indices, [7] * len(indices), last)
        self.core.check()
        return answer.outcomes

    def store(self, session: Session, keys: Keys, *, tag: int = 1, shard: int | None = None) -> list[Outcome]:
        """Reserve, fill with `tag + index` and commit; the outcomes of both steps, one a key."""
        answer = self.reserve(session, keys, shard=shard)
        granted = [i for i, outcome in enumerate(answer.outcomes) if outcome is Outcome.GRANTED]
        for index in granted:
            self.fill(answer.slots[index], tag + index)
        outcomes = list(answer.outcomes)
        for index, outcome in zip(granted, self.commit(session, answer.attempt, granted), strict=True):
            outcomes[index] = outcome
        return outcomes

    def resident(self, keys: Keys, rectangle: Rectangle | None = None) -> int:
        """Leading chunks that a same-host reader finds."""
        layout = self.core.pool.spaces[keys.namespace_id].layout
        return self.reader.find(keys, rectangle or layout.whole).run

    def tags(self, keys: Keys) -> list[int]:
        """What the leading chunks that a reader finds hold."""
        layout = self.core.pool.spaces[keys.namespace_id].layout
        found = self.reader.find(keys, layout.whole)
        return [self.tag(int(offset) // UNIT_BYTES) for offset in found.offsets[:, 0]] if found.run else []
