"""A node with two tiers against dicts: which shards lie where, who holds what, what was promised.

The pool decides what leaves a tier; the machine looks at every change and says whether it was allowed:

- each tier keeps a prefix of every chain (orphans only after damage or the loss of the SSD);
- what is held stays, also in DRAM; groups stay within their bounds and above their minimum;
- every byte in DRAM is what its writer put there, and every read of the SSD is right or a miss;
- an index that was fed with the events knows each shard with its tier;
- after a restart all that was on the SSD is there, and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import tempfile
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstore.errors import NotFound, StorageFailed
from kvstore.metadata.embedded import EmbeddedIndex
from kvstore.model.layout import Geometry
from kvstore.model.namespace import Namespace
from kvstore.model.prefix import KeyChain, Keys
from kvstore.model.values import Outcome, Tier
from kvstore.node.arena.ssd_file import Buffer, Calls
from kvstore.node.catalog import UNIT_BYTES
from kvstore.node.chunks import Chunk
from kvstore.node.core import CoreSettings
from kvstore.node.quotas import Quota
from kvstore.node.steps import finish
from kvstore.node.tier import Bounds
from tests.unit.node.small_node import WIDE
from tests.unit.node.tiered_node import DramMemory, TieredNode

T = TypeVar("T")
SSD_BYTES = (128 + 192) << 10
DRAM_SLOTS = 24
READ_BACK_BYTES = 24 << 10
PROMPTS = ((1, 2, 3, 4), (1, 2, 3, 5, 6), (1, 2, 7), (8, 9, 10, 11, 12), (8, 9, 13), (14,))
SPACES = (Namespace("model", "r1", WIDE), Namespace("bounded", "r1", WIDE))
GEOMETRIES = (Geometry.whole(WIDE), Geometry.parallel(WIDE, tp=2))
KIB = 1 << 10
QUOTAS = (Quota("bounded", Bounds(24 * KIB, 60 * KIB), Bounds(24 * KIB, 96 * KIB)),)
RANDOM = st.integers(0, 1 << 32).map(random.Random)
Where = dict[tuple[bytes, int], int]
"""(key, shard) -> slot."""


class BreakableDisk:
    """The system calls; all fail once `broken` is set."""

    def __init__(self) -> None:
        self.broken = False

    @property
    def calls(self) -> Calls:
        return Calls(preadv=self._preadv, pwritev=self._pwritev, fdatasync=lambda fd: None)

    def _preadv(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        self._fail()
        return os.preadv(fd, buffers, offset)

    def _pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        self._fail()
        return os.pwritev(fd, buffers, offset)

    def _fail(self) -> None:
        if self.broken:
            raise OSError(errno.EIO, "broken")


class TierMachine(RuleBasedStateMachine):
    """`eviction` is set by the variants."""

    eviction = "lru"

    @initialize()
    def start(self) -> None:
        self.runner = asyncio.Runner()
        self.folder = tempfile.TemporaryDirectory()
        self.settings = CoreSettings(self.eviction, session_share=1.0, quotas=QUOTAS)
        self.epoch = 0
        self.chains: list[tuple[Namespace, Keys]] = []
        for space in SPACES:
            chain, size = KeyChain(space), WIDE.chunk_tokens
            self.chains += [(space, chain.keys([n for n in prompt for _ in range(size)])) for prompt in PROMPTS]
        self.parents = {k: keys[i - 1] if i else None for _, keys in self.chains for i, k in enumerate(keys)}
        self.leases: dict[int, tuple[Chunk, float]] = {}
        self._begin(None)
        self.stored: set[bytes] = set()
        self.removed: set[bytes] = set()
        self._remember()
        self.allowed: set[bytes] | None = set()

    def _begin(self, memory: DramMemory | None) -> None:
        self.epoch += 1
        self.disk = BreakableDisk()
        path = Path(self.folder.name) / "ssd"
        clock = self.node.clock if self.epoch > 1 else None
        self.node = TieredNode(
            path, SSD_BYTES, epoch=self.epoch, slots=DRAM_SLOTS, memory=memory, calls=self.disk.calls,
            settings=self.settings, clock=clock,
        )  # fmt: skip
        self.core, self.pool = self.node.core, self.node.core.pool
        self.index, self.acknowledged = EmbeddedIndex(self.node.clock), 0
        self.may_orphan = False
        self.leases.clear()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    # --- steps -------------------------------------------------------------------------------------------

    @rule(rng=RANDOM)
    def store(self, rng: random.Random) -> None:
        space, chain = rng.choice(self.chains)
        keys = chain.slice(0, rng.randint(1, len(chain)))
        geometry = rng.choice(GEOMETRIES)
        numbers = rng.sample(range(len(geometry.rectangles)), rng.randint(1, len(geometry.rectangles)))
        self.writer = space
        outcomes = self.node.store(space, keys, geometry=geometry, numbers=numbers)
        self.stored |= {
            key for key, each in zip(keys, outcomes, strict=True) if each in (Outcome.COMMITTED, Outcome.PRESENT)
        }
        self.stored |= set(self.pool.forest.chunks) & set(keys)
        self.removed -= self.stored

    @rule(rng=RANDOM)
    def persist(self, rng: random.Random) -> None:
        self._persist(rng.choice(self.chains)[1])

    @rule()
    def save_the_coldest(self) -> None:
        for chunk in self.pool.backlog.coldest(2):
            keys = next(keys for _, keys in self.chains if chunk.key in list(keys))
            self._persist(keys.slice(0, list(keys).index(chunk.key) + 1))

    def _persist(self, keys: Keys) -> None:
        if self.pool.ssd is None or self.core.pool.spaces.get(keys.namespace_id) is None:
            return
        self.writer = next(space for space, chain in self.chains if chain.namespace_id == keys.namespace_id)
        run, _ = self._run(self.node.tiers.persist(keys, time.monotonic() + 10))
        # Where its time was up first, a batch goes on.
        self._run(self.node.until(lambda: self.pool.ssd is None or not (self.pool.ssd.kept or self.core.holds.moving)))
        assert all(self.pool.forest.chunks[key].ssd for key in list(keys)[:run])

    @rule(rng=RANDOM)
    def read(self, rng: random.Random) -> None:
        space, keys = rng.choice(self.chains)
        if space.id in self.pool.spaces:
            self.writer = space
            rectangle = rng.choice([r for geometry in GEOMETRIES for r in geometry.rectangles])
            versions, _ = self._run(self.node.read(space, keys, rectangle, deadline_s=0.5))
            self._run(self.node.until(lambda: not self.core.holds.moving))
            assert set(versions) <= {0}

    @rule(rng=RANDOM)
    def remove(self, rng: random.Random) -> None:
        space, keys = rng.choice(self.chains)
        key = rng.choice(list(keys))
        if key in self.pool.forest.chunks and self.node.sessions:
            self.allowed = {chunk.key for chunk in self.pool.forest.subtree(self.pool.forest.chunks[key])}
            promised = self.node.tiers.failed is None
            with contextlib.nullcontext() if promised else pytest.raises(StorageFailed):
                self._run(self.node.remove(space, key))
            assert not self.allowed & self.pool.forest.chunks.keys()
            if promised:
                self.removed |= self.allowed
            self.stored -= self.allowed

    @rule(rng=RANDOM)
    def lease(self, rng: random.Random) -> None:
        chunks = [chunk for chunk in self.pool.forest.chunks.values() if chunk.is_committed]
        if chunks:
            ends_s = self.node.clock() + rng.choice([1, 40])
            chunk = rng.choice(chunks)
            self.leases[self.core.holds.lease(1, chunk, ends_s)] = (chunk, ends_s)

    @rule(rng=RANDOM)
    def release(self, rng: random.Random) -> None:
        for number in [number for number in self.leases if rng.random() < 0.6]:
            self.core.holds.end_lease(number)
            del self.leases[number]

    @rule(rng=RANDOM)
    def pin(self, rng: random.Random) -> None:
        space, keys = rng.choice(self.chains)
        try:
            finish(self.node.operations.pin("pin", space.id, keys[rng.randrange(len(keys))], 60.0))
        except NotFound:
            self.node.operations.unpin("pin")

    @rule(rng=RANDOM)
    def time_passes(self, rng: random.Random) -> None:
        self.node.clock.now += rng.choice([0.5, 2.0, 61.0])
        self.core.tick()
        self.leases = {n: each for n, each in self.leases.items() if each[1] > self.node.clock.now}

    @rule(rng=RANDOM)
    def damage(self, rng: random.Random) -> None:
        """One byte of a slot on the SSD: the next read of it is a miss."""
        on_ssd = [(chunk, shard) for chunk in self.pool.forest.chunks.values() for shard in chunk.ssd]
        if not on_ssd:
            return
        chunk, shard = rng.choice(sorted(on_ssd, key=lambda each: (each[0].key, each[1])))
        at = chunk.ssd[shard].slot * UNIT_BYTES + rng.randrange(chunk.space.kinds[shard].payload_bytes)
        with self.node.path.open("r+b") as file:
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 1]))
        assert self._run(self.node.tiers.is_broken(chunk, shard))
        self.allowed, self.may_orphan = {each.key for each in self.pool.forest.subtree(chunk)}, True
        self.node.tiers.drop_broken(chunk)
        with contextlib.suppress(StorageFailed):  # it has failed before: the removal was not acknowledged either
            self._run(self.node.tiers.forget_removed())

    @rule()
    def ssd_fails(self) -> None:
        if self.pool.ssd is None or not any(chunk.ssd for chunk in self.pool.forest.chunks.values()):
            return
        self.allowed, self.may_orphan = None, True
        self.disk.broken = True
        chunk = next(chunk for chunk in self.pool.forest.chunks.values() if chunk.ssd)
        self._run(self._fail(chunk))

    async def _fail(self, chunk: Chunk) -> None:
        await self.node.tiers.is_broken(chunk, next(iter(chunk.ssd)))
        await self.node.until(lambda: self.pool.ssd is None)

    @rule()
    def restart_the_worker(self) -> None:
        self._restart(self.node.memory)

    @rule()
    def restart_the_host(self) -> None:
        self._restart(None)

    def _restart(self, memory: DramMemory | None) -> None:
        was_failed, before, dram = self.pool.ssd is None, self._on(Tier.SSD), self._on(Tier.DRAM)
        self._run(self.node.die())
        self._begin(memory)
        after = self._on(Tier.SSD)
        assert was_failed or before.items() <= after.items(), "the SSD has not what it had"
        # What was evicted may be there again, what was removed may not (unless the disk failed before the removal).
        assert was_failed or not {key for key, _ in after} & self.removed, "removed, and back"
        self.removed.clear()
        assert memory is None or self._on(Tier.DRAM) == dram, "DRAM has not what it had"
        assert memory is not None or not self._on(Tier.DRAM)
        self.allowed, self.may_orphan = None, memory is not None
        self.stored |= {key for key, _ in after}
        self.pool.trim()  # as the next commit does it

    # --- laws --------------------------------------------------------------------------------------------

    @invariant()
    def laws(self) -> None:
        self.core.check()
        assert self.pool.ssd is None or not self.pool.ssd.kept, "kept without being written"
        assert not self.core.holds.moving and not self.core.own_slots
        self.what_left_was_allowed_to()
        self.presence_is_a_prefix()
        self.groups_keep_their_bounds()
        for chunk in self.pool.forest.chunks.values():
            for shard in chunk.copies:
                assert self.node.version_of(chunk, chunk.space.kinds[shard].rectangle) == 0
        self.the_index_knows_every_shard_with_its_tier()
        self._remember()

    def _remember(self) -> None:
        self.before = {Tier.DRAM: self._on(Tier.DRAM), Tier.SSD: self._on(Tier.SSD)}
        self.bytes_before = [dict(tier.group_bytes) for tier in self.pool.tiers]
        self.allowed = set()
        self.writer = SPACES[0]
        self.held, self.held_in_dram = self._held(), self._held(in_dram=True)

    def _on(self, tier: Tier) -> Where:
        return {
            (key, shard): copy.slot
            for key, chunk in self.pool.forest.chunks.items()
            for shard, copy in (chunk.copies if tier is Tier.DRAM else chunk.ssd).items()
        }

    def _held(self, *, in_dram: bool = False) -> set[bytes]:
        """What leases and pins keep, with all ancestors; `in_dram`: of those that are in DRAM."""
        held = set()
        pinned = [chunk for pin in self.core.holds.named.values() for chunk in pin.chunks]
        for chunk in [*(each[0] for each in self.leases.values()), *pinned]:
            above: Chunk | None = chunk if self.pool.forest.get(chunk.key) is chunk else None
            while above is not None and (above.copies or not in_dram):
                held.add(above.key)
                above = above.parent
        return held

    def what_left_was_allowed_to(self) -> None:
        if self.allowed is None:  # the SSD failed, or the node was restarted
            return
        here = {key for key, chunk in self.pool.forest.chunks.items() if chunk.is_committed}
        for key in (self.held_in_dram & self._held()) - self.allowed:
            assert self.pool.forest.chunks[key].copies, "held, and gone from DRAM all the same"
        was = {key for tier in self.before.values() for key, _ in tier}
        gone = was - here - self.allowed
        assert not gone & self.held, "held, and gone all the same"
        assert here <= self.stored, "nobody stored it"

    def presence_is_a_prefix(self) -> None:
        if not self.may_orphan:
            assert not self.pool.forest.orphans, "a child stayed behind"

    def groups_keep_their_bounds(self) -> None:
        for number, tier in enumerate(self.pool.tiers):
            for group, bounds in tier.bounds.items():
                # What is read back meanwhile is not counted yet; the next commit evicts what is too much.
                coming = READ_BACK_BYTES if tier is self.pool.dram else 0
                assert tier.group_bytes[group] <= bounds.max_bytes + coming, "over its bound"
                if self.writer is SPACES[0] and self.allowed == set() and not self.may_orphan:
                    least = min(bounds.min_bytes, self.bytes_before[number].get(group, 0))
                    assert tier.group_bytes[group] >= least, "below its minimum for others"

    def the_index_knows_every_shard_with_its_tier(self) -> None:
        while self.acknowledged < self.core.news.last_sequence or self.core.news._overflowed:
            for batch in self.core.news.take_batch(self.acknowledged, 100, resync=False, lease_ms=600_000):
                self.acknowledged = self.index.publish(batch).sequence
        told = {(event.key, event.shard): event.tier for batch in self.index.snapshot() for event in batch.events}
        assert told == {
            (chunk.key, shard): Tier.DRAM if shard in chunk.copies else Tier.SSD
            for chunk in self.pool.forest.chunks.values()
            if chunk.published
            for shard in chunk.shards
        }

    def teardown(self) -> None:
        if not hasattr(self, "node"):
            return
        self._run(self.node.die())
        self.runner.close()
        self.folder.cleanup()


class ScanResistantTierMachine(TierMachine):
    """Another policy on both tiers."""

    eviction = "s3fifo"
