"""What the cleaner takes next: nothing waits for ever behind what cannot be saved, and no batch is without bound."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from kvstore.model.layout import Geometry
from kvstore.node.tiers import saving
from tests.unit.node.small_node import WIDE, keys_of, namespace
from tests.unit.node.tiered_node import WAIT_S, TieredNode


def test_orphans_do_not_hold_up_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "BATCH_CHUNKS", 4)
    monkeypatch.setattr(saving, "IDLE_S", 0.001)

    async def save() -> None:
        space, shard = namespace(WIDE), Geometry.whole(WIDE).shard(0)
        node = TieredNode(tmp_path / "file", 4 << 20, slots=96)
        failing, other = (node.core.open_session(name, shared=True).number for name in ("failing", "other"))
        for session in (failing, other):
            node.core.register_namespace(session, space, Geometry.whole(WIDE), ())
        for prompt in range(4):  # the writer of a parent gives up after another one has stored the child
            keys = keys_of(space, 10 + prompt, 2)
            begun = node.core.reserve(failing, keys.slice(0, 1), shard, b"")
            child = node.core.reserve(other, keys, shard, b"")
            node.core.commit(other, child.attempt, [1], [7], True)
            node.core.abort(failing, begun.attempt)
        assert all(chunk.is_orphan for chunk in node.core.pool.backlog.waiting)
        keys = keys_of(space, 1, 6)
        node.store(space, keys)
        node.tiers.start()
        await node.until(lambda: set(node.on_ssd()) == set(keys))
        await node.tiers.stop()

    asyncio.run(save())


def test_what_waits_for_its_parent_to_be_written_is_saved_afterwards(tmp_path: Path) -> None:
    """Context-parallel writers commit in any order. The cleaner once found no room for a child of what is still being
    written, and never looked at it again."""

    async def save() -> None:
        space, shard = namespace(WIDE), Geometry.whole(WIDE).shard(0)
        node = TieredNode(tmp_path / "file", 4 << 20, slots=96)
        even, odd = (node.core.open_session(name, shared=True).number for name in ("even", "odd"))
        for session in (even, odd):
            node.core.register_namespace(session, space, Geometry.whole(WIDE), ())
        keys = keys_of(space, 1, 6)
        begun = node.core.reserve(even, keys, shard, b"", [0, 2, 4])
        others = node.core.reserve(odd, keys, shard, b"", [1, 3, 5])
        node.core.commit(odd, others.attempt, [1, 3, 5], [7] * 3, True)
        pool = node.core.pool
        assert node.tiers._saver._cut(pool.backlog.coldest(8)) == []
        assert not await node.tiers._saver._save_now(pool.backlog.coldest(8))
        assert pool.counts["ssd_no_room"] == 0 and len(pool.backlog.waiting) == 3
        node.core.commit(even, begun.attempt, [0, 2, 4], [7] * 3, True)
        assert node.tiers._saver._cut(pool.backlog.coldest(8))[0].key == keys[0]
        while pool.backlog.waiting:
            assert await node.tiers._saver._save_now(pool.backlog.coldest(8))
        assert set(node.on_ssd()) == set(keys)
        await node.tiers.stop()

    asyncio.run(save())


def test_a_long_chain_is_saved_in_several_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "BATCH_CHUNKS", 4)

    async def save() -> None:
        space = namespace(WIDE)
        node = TieredNode(tmp_path / "file", 4 << 20, slots=96)
        keys = keys_of(space, 1, 10)
        node.store(space, keys)
        last = node.core.pool.forest.chunks[keys[9]]
        assert [chunk.key for chunk in node.tiers._saver._cut([last])] == list(keys)[:4]
        assert await node.tiers.persist(keys.slice(9, 10), time.monotonic() + WAIT_S) == (1, "")
        assert set(node.on_ssd()) == set(keys)
        await node.tiers.stop()

    asyncio.run(save())


def test_a_chain_without_room_does_not_come_back_by_its_tail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tail, behind the bound of a batch, kept its place and brought the head into every batch: nothing else was
    saved any more."""
    monkeypatch.setattr(saving, "BATCH_CHUNKS", 4)
    monkeypatch.setattr(saving, "IDLE_S", 0.001)

    async def save() -> None:
        space = namespace(WIDE)
        node = TieredNode(tmp_path / "file", 4 << 20, slots=96)
        long, other = keys_of(space, 1, 12), keys_of(space, 2, 2)
        node.store(space, long)
        node.store(space, other)
        saver, pool = node.tiers._saver, node.core.pool
        take = saver._take
        monkeypatch.setattr(saver, "_take", lambda chunk, shard: None if chunk.key in set(long) else take(chunk, shard))
        node.tiers.start()
        await node.until(lambda: set(node.on_ssd()) == set(other))
        await node.until(lambda: not pool.backlog.waiting)  # and nothing is tried for ever
        await node.tiers.stop()

    asyncio.run(save())
