"""A part of many small chunks is prepared in short turns of the event loop."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise
from pathlib import Path

import pytest

from kvstore.node.tiers import read_back
from tests.unit.node.small_node import WIDE, keys_of, namespace
from tests.unit.node.tiered_node import WAIT_S, TieredNode


def test_others_get_their_turn_while_a_part_is_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_back, "STEP_CHUNKS", 4)
    monkeypatch.setattr("kvstore.node.pool.READ_BACK_SHARE", 1 / 2)

    async def read() -> None:
        space = namespace(WIDE)
        node = TieredNode(tmp_path / "file", 4 << 20, slots=192)
        node.tiers.start()
        keys, pool = keys_of(space, 1, 20), node.core.pool
        node.store(space, keys)
        await node.rest()
        for other in range(2, 5):
            node.store(space, keys_of(space, other, 20))
            await node.rest()
        assert not any(pool.forest.chunks[key].copies for key in keys)
        under_way = [0]

        async def look() -> None:
            while True:
                under_way.append(len(node.tiers._read_back.under_way))
                await asyncio.sleep(0)

        looking = asyncio.create_task(look())
        assert await node.tiers.stage(keys, WIDE.whole, 0, time.monotonic() + WAIT_S) == (20, None)
        looking.cancel()
        assert max(under_way) >= 12
        assert max(after - before for before, after in pairwise(under_way)) <= 4
        await node.tiers.stop()

    asyncio.run(read())
