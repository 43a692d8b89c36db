"""A chunk in several shards, one of which is back in DRAM: the others are as safe as before."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from kvstore.model.layout import Geometry
from tests.unit.node.small_node import WIDE, keys_of, namespace
from tests.unit.node.tiered_node import WAIT_S, TieredNode

HALVES = Geometry.parallel(WIDE, tp=2)


def test_a_held_chunk_keeps_the_shard_that_is_on_the_ssd_only(tmp_path: Path) -> None:
    async def press() -> None:
        space = namespace(WIDE)
        node = TieredNode(tmp_path / "file", 1 << 20, slots=24)
        node.tiers.start()
        keys, pool = keys_of(space, 1, 2), node.core.pool
        node.store(space, keys, geometry=HALVES)
        await node.rest()
        node.store(space, keys_of(space, 2, 6), geometry=HALVES)
        await node.rest()
        assert await node.tiers.stage(keys, HALVES.rectangles[0], 0, time.monotonic() + WAIT_S) == (2, None)
        first, last = (pool.forest.chunks[key] for key in keys)
        assert len(last.copies) == 1 and len(last.ssd) == 2
        assert pool.ssd is not None
        node.core.holds.keep(last)
        for slot in pool.ssd.take(8192, 1000):
            pool.ssd.allocator.release(slot)
        assert len(first.ssd) == len(last.ssd) == 2
        node.core.holds.let(last)
        for slot in pool.ssd.take(8192, 1000):
            pool.ssd.allocator.release(slot)
        assert not last.ssd
        await node.die()

    asyncio.run(press())
