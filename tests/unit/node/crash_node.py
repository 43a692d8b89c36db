"""A node whose worker can die at any store into the catalog: memory that stays, cores that come and go over it."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvstore.model.layout import Dtype, Geometry, PageLayout
from kvstore.model.namespace import Namespace
from kvstore.model.prefix import KeyChain, Keys
from kvstore.model.values import NodeInfo, Outcome
from kvstore.node.catalog import UNIT_BYTES, CatalogShape, CatalogWriter, create_catalog
from kvstore.node.core import CoreSettings, NodeCore, Session
from kvstore.node.lookup import CatalogReader
from kvstore.node.recovery import FormerWriters, Recovered, recover
from kvstore.node.slots import SlotAllocator

SMALL = PageLayout(2, 2, 4, Dtype.FP32, 4, 1)
"""Whole chunks and halves of this layout have slots of 4096 bytes."""
WIDE = PageLayout(2, 2, 64, Dtype.FP32, 4, 1)
"""A whole chunk of this layout has a slot of 12288 bytes, a half (TP 2) one of 8192."""
NARROW = Namespace("model", "r1", SMALL)
BROAD = Namespace("model", "r2", WIDE)


class Crash(Exception):
    """The worker died."""


class CountedStores:
    """A memory whose stores are counted; the one after `limit` kills the worker instead."""

    def __init__(self, memory: Any, node: CrashNode) -> None:
        self._memory = memory
        self._node = node

    def __getitem__(self, place: Any) -> Any:
        return self._memory[place]

    def __setitem__(self, place: Any, value: Any) -> None:
        self._node.count_store()
        self._memory[place] = value

    def release(self) -> None:
        self._memory.release()


def keys_of(space: Namespace, prompt: int, chunks: int) -> Keys:
    """Keys of `chunks` full chunks; a longer one begins with the shorter."""
    tokens = space.layout.chunk_tokens
    return KeyChain(space).keys([prompt * 100_000 + i for i in range(chunks * tokens)])


@dataclass
class CrashNode:
    """`restart()` is a new worker: a fresh core over the same memory. `core` is the worker that lives now."""

    slots: int = 16
    settings: CoreSettings = field(default_factory=lambda: CoreSettings(session_share=1.0))
    limit: int | None = None
    owner: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        self.arena_bytes = self.slots * UNIT_BYTES
        self.shape = CatalogShape.make(self.arena_bytes, self.slots)
        self.catalog_fd, self.memory = create_catalog(self.shape)
        self.arena = np.zeros(self.arena_bytes, dtype=np.uint8)
        self.now = 1000.0
        self.epoch = 0
        self.stores = 0
        self.generations: set[int] = set()
        self._new_core()

    def _new_core(self) -> None:
        self.epoch += 1
        self.info = NodeInfo("node-a", self.epoch, "host", "127.0.0.1:1", "127.0.0.1:2")
        self.writer = CatalogWriter(self.memory, self.shape, self.epoch)
        self._count(self.writer)
        allocator = SlotAllocator(self.arena_bytes, self.arena_bytes)
        self.core = NodeCore(self.info, self.writer, allocator, lambda: self.now, self.settings)
        self.sessions: dict[Geometry, Session] = {}

    def _count(self, writer: Any) -> None:
        writer._words = CountedStores(writer._words, self)
        writer._tags = CountedStores(writer._tags, self)
        writer._memory = CountedStores(writer._memory, self)
        writer._store, writer._store_tag = writer._words.__setitem__, writer._tags.__setitem__
        raise_generation = writer.raise_generation

        def noted(slot: int) -> int:
            generation: int = raise_generation(slot)
            assert generation not in self.generations, "a generation was given out twice"
            self.generations.add(generation)
            return generation

        writer.raise_generation = noted

    def count_store(self) -> None:
        if self.limit is not None and self.stores >= self.limit:
            raise Crash
        self.stores += 1

    def before_recovery(self) -> None:
        """For tests that break the recovery."""

    def restart(self, limit: int | None = None) -> Recovered:
        """The old worker is gone, whatever it was doing; a new one recovers and checks itself."""
        self.limit, self.stores = limit, 0
        self._new_core()
        self.before_recovery()
        recovered = recover(self.core, self.memory, self.now)
        self.core.settle()
        self.core.check()
        return recovered

    def close(self) -> None:
        os.close(self.catalog_fd)

    # --- what clients do ---------------------------------------------------------------------------------

    def session(self, space: Namespace, geometry: Geometry | None = None) -> Session:
        geometry = geometry or Geometry.whole(space.layout)
        session = self.core.open_session("test", shared=True, owner=self.owner)
        self.core.register_namespace(session.number, space, geometry, ())
        return session

    def state(self, slot: int) -> int:
        """State in the slot's record."""
        at = self.shape.records_offset + slot * 64
        return int.from_bytes(self.memory[at : at + 4], "little")

    def fill(self, slot: int, key: bytes, shard: int) -> None:
        self.arena[slot * UNIT_BYTES :][:20] = np.frombuffer(key + shard.to_bytes(4, "little"), dtype=np.uint8)

    def store(self, session: Session, keys: Keys, shard: int) -> list[Outcome]:
        """Reserve, fill, commit."""
        answer = self.core.reserve(session.number, keys, shard, b"")
        granted = [i for i, outcome in enumerate(answer.outcomes) if outcome is Outcome.GRANTED]
        for index in granted:
            self.fill(answer.slots[index], keys[index], shard)
        outcomes = list(answer.outcomes)
        if answer.attempt:
            done = self.core.commit(session.number, answer.attempt, granted, [7] * len(granted), True)
            for index, outcome in zip(granted, done.outcomes, strict=True):
                outcomes[index] = outcome
        return outcomes

    # --- what readers see --------------------------------------------------------------------------------

    def reader(self) -> CatalogReader:
        return CatalogReader(mmap.mmap(self.catalog_fd, self.shape.total_bytes, prot=mmap.PROT_READ))

    def resident(self, keys: Keys, space: Namespace) -> int:
        return self.reader().find(keys, space.layout.whole).run

    def check_bytes(self) -> int:
        """Every visible entry leads to the bytes of its key and shard; returns how many there are."""
        reader = self.reader()
        rows = reader.entry_rows
        visible = 0
        for row in rows[(rows[:, 3] & np.uint64(1) == 0) & (rows[:, 3] != 0)].tolist():
            slot, shard = row[5] & 0xFFFFFFFF, row[6] & 0xFFFFFFFF
            if self.writer.generation(slot) != row[3]:
                continue  # no reader accepts it
            expected = b"".join(word.to_bytes(8, "little") for word in row[:2]) + shard.to_bytes(4, "little")
            assert self.arena[slot * UNIT_BYTES :][:20].tobytes() == expected, "wrong bytes"
            visible += 1
        return visible

    def release_former(self, recovered: Recovered) -> None:
        """The writers of before have ended."""
        FormerWriters(self.core, recovered.holders, None).poll()
