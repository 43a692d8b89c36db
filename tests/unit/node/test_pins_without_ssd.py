"""A pinned prefix whose copies on the SSD are lost: its pin counts it no more, and takes it up when it comes again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvstore.errors import StorageFailed
from kvstore.node.steps import finish
from tests.unit.node.small_node import WIDE, keys_of, namespace
from tests.unit.node.tiered_node import TieredNode


@pytest.mark.parametrize("fails", [True, False])
def test_a_pin_outlives_the_loss_of_what_it_keeps(tmp_path: Path, fails: bool) -> None:
    async def lose() -> None:
        space = namespace(WIDE)
        node = TieredNode(tmp_path / "file", 4 << 20, slots=96)
        node.tiers.start()
        keys, pool = keys_of(space, 1, 3), node.core.pool
        for each in (keys, keys_of(space, 2, 28)):
            node.store(space, each)
            await node.rest()
        assert finish(node.operations.pin("prompt", space.id, keys[2], 1000.0)).chunks == 3
        if fails:
            node.tiers.fail(StorageFailed("the disk is gone"), "write")
            await node.until(lambda: pool.ssd is None)
        else:
            node.tiers.drop_broken(pool.forest.chunks[keys[0]])
        assert not any(key in pool.forest.chunks for key in keys)
        assert node.core.holds.pinned_bytes == 0
        node.store(space, keys)
        node.operations.tick()
        assert [pool.forest.chunks[key].holds for key in keys] == [1, 1, 1]
        node.core.check()
        await node.tiers.stop()

    asyncio.run(lose())
