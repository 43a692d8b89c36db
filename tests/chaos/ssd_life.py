"""The life of a node with an SSD tier, disk call by disk call, with what it promised at each of them.

`live` does a workload that takes every path of the tier. Its record is a list of disk calls and a list of states, each
noted when something was promised or taken back; `due` says what holds after a crash at a given call.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstore.errors import KvStoreError
from kvstore.model.layout import Geometry, Rectangle
from kvstore.model.namespace import Namespace
from kvstore.model.prefix import Keys
from kvstore.model.values import Outcome
from kvstore.node.arena import Run, SsdIo
from kvstore.node.arena.ssd import SsdArena
from kvstore.node.arena.ssd_file import Buffer, Calls
from kvstore.node.arena.ssd_io import open_ssd_io
from kvstore.node.steps import finish
from tests.unit.node.small_node import WIDE, keys_of, namespace
from tests.unit.node.ssd_setting import Event, Recorder
from tests.unit.node.tiered_node import Bytes, TieredNode

SSD_BYTES = (128 + 192) << 10
"""Two superblocks, three extents of four whole slots, one of four halves (`small_extents`)."""
DRAM_SLOTS = 24
"""Eight whole chunks, two of which are kept for what comes back."""
FIRST, SECOND = namespace(WIDE, "r1"), namespace(WIDE, "r2")
WHOLE, HALVES = Geometry.whole(WIDE), Geometry.parallel(WIDE, tp=2)
RECTANGLES: Sequence[Rectangle] = (*WHOLE.rectangles, *HALVES.rectangles)

Saved = frozenset[tuple[bytes, int]]


@dataclass(frozen=True)
class State:
    """What the node owes after `calls` disk calls: shards on the SSD, those that were persisted, and the version in
    which each key may be found (absent: its removal was acknowledged, or nobody wrote it)."""

    calls: int
    saved: Saved
    persisted: Saved
    versions: dict[bytes, int]


class GatedDisk(Recorder):
    """A recorder that can hold one write before it happens. `header_first`: payloads wait for the next header."""

    def __init__(self, *, header_first: bool = False) -> None:
        super().__init__()
        self._header_first = header_first
        self._late: list[tuple[int, bytes]] = []
        self._wanted: Callable[[int, bytes], bool] | None = None
        self._reached = threading.Event()
        self._go_on = threading.Event()

    @property
    def calls(self) -> Calls:
        return Calls(pwritev=self._held_pwritev, fdatasync=self._fdatasync, ftruncate=self._ftruncate)

    def hold(self, offset: int, data: bytes) -> None:
        """A write is about to begin: it waits here if it is the one that is wanted."""
        if self._wanted is not None and self._wanted(offset, data):
            self._wanted = None
            self._reached.set()
            assert self._go_on.wait(10)

    def _held_pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        self.hold(offset, b"".join(map(bytes, buffers)))
        if not self._header_first:
            return self._pwritev(fd, buffers, offset)
        data = b"".join(map(bytes, buffers))
        if is_payload(offset, data):
            self._late.append((offset, data))
            os.pwritev(fd, buffers, offset)
        else:
            self._pwritev(fd, buffers, offset)
            if is_header(data):
                self.events += [Event(*late) for late in self._late]
                self._late.clear()
        return len(data)

    @contextlib.asynccontextmanager
    async def holding(self, wanted: Callable[[int, bytes], bool], begin: Callable[[], Any]) -> AsyncIterator[None]:
        """Begin something and wait until it wants to do such a write; the write goes on after the block."""
        self._reached.clear()
        self._go_on.clear()
        self._wanted = wanted
        begin()
        try:
            while not self._reached.is_set():
                await asyncio.sleep(0.001)
            yield
        finally:
            self._go_on.set()


class RecordedIo:
    """A way of payloads that are no system calls of ours, whose writes are held and recorded as those are."""

    def __init__(self, io: SsdIo, disk: GatedDisk) -> None:
        self._io, self._disk = io, disk
        self.name, self.detail, self.read, self.close = io.name, io.detail, io.read, io.close

    def write(self, runs: Sequence[Run]) -> list[KvStoreError | None]:
        errors: list[KvStoreError | None] = []
        for run in runs:
            data = b"".join(map(bytes, run.pieces))
            self._disk.hold(run.offset, data)
            self._disk.events.append(Event(run.offset, data))
            errors += self._io.write([run])
        assert self._io.name == self.name, "it was not NIXL that wrote"
        return errors


def is_payload(offset: int, data: bytes) -> bool:
    return len(data) > 1 << 12


def is_header(data: bytes) -> bool:
    return len(data) == 1 << 12 and b"KVSLOTH1" in data


def is_header_of(key: bytes) -> Callable[[int, bytes], bool]:
    return lambda offset, data: len(data) == 1 << 12 and key in data


@dataclass
class Life:
    """A node that lives, and the record of it."""

    path: Path
    disk: GatedDisk = field(default_factory=GatedDisk)
    way: str = "threads"
    states: list[State] = field(default_factory=list)
    versions: dict[bytes, int] = field(default_factory=dict)
    persisted: set[tuple[bytes, int]] = field(default_factory=set)
    chains: dict[tuple[bytes, int], Keys] = field(default_factory=dict)

    calls: int | None = None
    """How many disk calls it made before its end."""

    @property
    def events(self) -> list[Event]:
        return self.disk.events[: self.calls]

    def begin(self) -> None:
        """Inside a running loop."""
        open_io = None if self.way == "threads" else self._recorded
        self.node = node = TieredNode(self.path, SSD_BYTES, slots=DRAM_SLOTS, calls=self.disk.calls, open_io=open_io)
        self._note_after(node.core.pool, "save")
        self._note_after(node.core.pool.ssd, "leave")
        self.note()
        node.tiers.start()

    def _recorded(self, arena: SsdArena, memory: Bytes) -> RecordedIo:
        return RecordedIo(open_ssd_io(self.way, arena, memory), self.disk)

    def _note_after(self, owner: Any, name: str) -> None:
        method = getattr(owner, name)

        def noted(*arguments: Any, **named: Any) -> Any:
            result = method(*arguments, **named)
            self.note()
            return result

        setattr(owner, name, noted)

    def note(self) -> None:
        saved = {(key, shard) for key, shards in self.node.on_ssd().items() for shard in shards}
        self.persisted &= saved
        self.states.append(State(len(self.events), frozenset(saved), frozenset(self.persisted), dict(self.versions)))

    # --- steps -------------------------------------------------------------------------------------------

    def keys(self, space: Namespace, prompt: int, chunks: int) -> Keys:
        keys = keys_of(space, prompt, chunks)
        if len(self.chains.get((space.id, prompt), ())) < chunks:
            self.chains[space.id, prompt] = keys
        return keys

    def write(self, space: Namespace, prompt: int, chunks: int, version: int = 0, **more: Any) -> Keys:
        keys = self.keys(space, prompt, chunks)
        self.versions.update({key: version for key in keys if key not in self.versions})
        self.note()
        outcomes = self.node.store(space, keys, version, **more)
        assert {Outcome.COMMITTED, Outcome.PRESENT} >= set(outcomes), outcomes
        return keys

    async def store(self, space: Namespace, prompt: int, chunks: int, version: int = 0, **more: Any) -> Keys:
        keys = self.write(space, prompt, chunks, version, **more)
        await self.rest()
        return keys

    async def persist(self, keys: Keys) -> None:
        run, reason = await self.node.tiers.persist(keys, asyncio.get_running_loop().time() + 10)
        assert (run, reason) == (len(keys), "")
        self.persisted |= {(key, shard) for key, shards in self.node.on_ssd().items() for shard in shards}
        self.note()

    async def read(self, space: Namespace, keys: Keys) -> int:
        versions, _ = await self.node.read(space, keys)
        assert versions == [self.versions[key] for key in list(keys)[: len(versions)]]
        self.node.core.check()
        return len(versions)

    async def remove(self, space: Namespace, key: bytes) -> int:
        below = [chunk.key for chunk in self.node.core.pool.forest.subtree(self.node.core.pool.forest.chunks[key])]
        removed = await self.node.remove(space, key)
        self.acknowledged(below)
        return removed

    def acknowledged(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            del self.versions[key]
        self.note()
        self.node.core.check()

    async def rest(self) -> None:
        await self.node.rest()
        self.node.core.check()
        self.note()


async def live(life: Life) -> None:
    """Every path of the tier once."""
    life.begin()
    node, pool = life.node, life.node.core.pool
    one = await life.store(FIRST, 1, 4)
    await life.persist(one)
    await life.store(FIRST, 2, 3, with_checksums=False)
    half_saved = await life.store(SECOND, 3, 2, geometry=HALVES, numbers=[0])
    await life.store(SECOND, 3, 2, geometry=HALVES, numbers=[1])
    await life.persist(half_saved)
    four = await life.store(FIRST, 4, 5)
    assert pool.ssd is not None and pool.counts["demotions"], "the DRAM was to become full"
    five = await life.store(FIRST, 5, 3)
    assert pool.counts["removed_evicted"] + pool.counts["ssd_copies_dropped"], "the SSD was to become full"
    await life.persist(five)
    assert await life.read(FIRST, one)
    assert await life.read(FIRST, four) and pool.counts["promotions"]
    await removed_and_written_anew(life, four)
    await removed_while_it_is_written(life)
    await evicted_and_removed(life, WHOLE, 100)
    await extents_change_their_class(life)
    await evicted_and_removed(life, HALVES, 200)
    await evicted_and_removed(life, HALVES, 300)
    life.note()
    life.calls = len(life.events)
    await node.die()


async def removed_and_written_anew(life: Life, keys: Keys) -> None:
    await life.remove(FIRST, keys[2])
    await life.store(FIRST, 4, 5, version=1)
    await life.remove(FIRST, keys[0])
    again = await life.store(FIRST, 4, 2, version=2)
    await life.persist(again)


async def removed_while_it_is_written(life: Life) -> None:
    node = life.node
    for prompt, stage in ((6, is_payload), (7, is_header_of(keys_of(FIRST, 7, 2)[1]))):
        async with life.disk.holding(stage, lambda prompt=prompt: life.write(FIRST, prompt, 2)):  # type: ignore[misc]
            session = next(iter(node.sessions.values())).number
            keys = life.chains[FIRST.id, prompt]
            assert node.core.remove(session, FIRST.id, [keys[0]]) == 2
            life.note()
        await node.tiers.forget_removed()
        life.acknowledged(list(keys))
        await life.rest()
        await life.store(FIRST, prompt, 2, version=1)


async def evicted_and_removed(life: Life, geometry: Geometry, prompt: int) -> None:
    """A chunk that is in DRAM loses its place on the SSD to others, which may not need all of it, and is removed."""
    node, pool = life.node, life.node.core.pool
    keys = await life.store(FIRST, prompt, 1, geometry=geometry)
    await life.persist(keys)
    old = pool.forest.chunks[keys[0]]
    lease = node.core.holds.lease(1, old, node.clock() + 60)
    other = prompt
    while old.ssd:
        other += 1
        await life.store(FIRST, other, 1, geometry=geometry, numbers=[0])
        assert other < prompt + 40
    node.core.holds.end_lease(lease)
    assert old.copies
    await life.remove(FIRST, keys[0])
    await life.store(FIRST, other + 1, 1, geometry=geometry, numbers=[0])
    await life.store(FIRST, prompt, 1, version=1, geometry=geometry)


async def extents_change_their_class(life: Life) -> None:
    node = life.node
    before = [key for key, chunk in node.core.pool.forest.chunks.items() if chunk.space.id == SECOND.id]
    assert finish(node.operations.remove_namespace(SECOND.id)) == len(before)
    await node.tiers.forget_removed()
    life.acknowledged([key for key in list(life.versions) if key in life.chains[SECOND.id, 3]])
    for prompt in range(41, 46):
        await life.store(FIRST, prompt, 2)
    assert node.ssd.superblock.extents and all(e.slot_bytes == 3 << 12 for e in node.ssd.superblock.extents)
    for prompt in range(46, 49):
        await life.store(FIRST, prompt, 2, geometry=HALVES)
    assert {extent.slot_bytes for extent in node.ssd.superblock.extents} == {2 << 12, 3 << 12}


# --- what is owed -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Due:
    """`saved` must be found; a key that is found has one of its versions, and none is back without one."""

    saved: Saved
    versions: dict[bytes, set[int]]


def due(states: Sequence[State], calls: int, *, torn: bool, power_lost: bool = False) -> Due:
    """What holds after so many whole calls (and a part of the next). Between two calls every state may be the last one;
    once the next call has begun, only the newest. `power_lost`: only what was persisted has to be there."""
    now = [state for state in states if state.calls == calls]
    before = [state for state in states if state.calls < calls][-1:]
    possible = (now or before)[-1:] if torn else before + now
    versions: dict[bytes, set[int]] = {}
    for state in possible:
        for key, version in state.versions.items():
            versions.setdefault(key, set()).add(version)
    saved = frozenset().union(*(state.persisted if power_lost else state.saved for state in possible))
    return Due(saved, versions)


async def wrong_after(
    path: Path, image: bytes, owed: Due, chains: Sequence[Keys], *, is_power_loss: bool = False, goes_on: bool = True
) -> list[str]:
    """Start a node on this file, read all, and with `goes_on` do more work on it. What it does wrongly."""
    path.write_bytes(image)
    node = TieredNode(path, SSD_BYTES, epoch=2, slots=256)
    wrong: list[str] = []
    try:
        there = {(key, shard) for key, shards in node.on_ssd().items() for shard in shards}
        wrong += [f"{key.hex()[:8]}/{shard:x} is lost" for key, shard in owed.saved - there]
        wrong += [f"{key.hex()[:8]} is back" for key, _ in there if key not in owed.versions]
        spaces = {FIRST.id: FIRST, SECOND.id: SECOND}
        for keys in chains:
            for rectangle in RECTANGLES:
                if keys.namespace_id not in node.core.pool.spaces:
                    continue
                versions, _ = await node.read(spaces[keys.namespace_id], keys, rectangle)
                for key, version in zip(keys, versions, strict=False):
                    if version not in owed.versions.get(key, ()):
                        wrong.append(f"{key.hex()[:8]} has version {version}")
        node.core.check()
        after = {(key, shard) for key, shards in node.on_ssd().items() for shard in shards}
        wrong += [f"{key.hex()[:8]}/{shard:x} is broken" for key, shard in owed.saved & (there - after)]
        if not is_power_loss and node.core.pool.counts["ssd_checksum_failures"]:
            wrong.append("a header stood without its payload")
        if goes_on:
            await work_on(node)
    finally:
        await node.die()
    return wrong


async def work_on(node: TieredNode) -> None:
    """The node is as good as new."""
    keys = keys_of(FIRST, 99, 3)
    node.store(FIRST, keys)
    run, reason = await node.tiers.persist(keys, asyncio.get_running_loop().time() + 10)
    assert (run, reason) == (3, "")
    node.core.check()
    assert await node.remove(FIRST, keys[2]) == 1
    assert await node.read(FIRST, keys.slice(0, 2)) == ([0, 0], None)
    assert node.on_ssd().keys() >= {keys[0], keys[1]}
    node.core.check()
