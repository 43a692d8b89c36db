"""A prompt larger than the DRAM comes back from the SSD in parts: no part waits for room that its reader holds."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from kvstore.model.values import MissReason
from tests.unit.node.small_node import WIDE, keys_of, namespace
from tests.unit.node.tiered_node import WAIT_S, TieredNode

SPACE = namespace(WIDE)


async def with_a_long_prompt(path: Path) -> TieredNode:
    """Eight chunks of DRAM; prompt 1 has twelve, all on the SSD, and the first eight are in DRAM."""
    node = TieredNode(path, 4 << 20, slots=24)
    node.tiers.start()
    for chunks in (4, 8, 12):
        node.store(SPACE, keys_of(SPACE, 1, chunks))
        await node.rest()
        for other in range(2):
            node.store(SPACE, keys_of(SPACE, 10 * chunks + other, 4))
            await node.rest()
    keys, first = keys_of(SPACE, 1, 12), 0
    while first < 8:
        staged, _ = await node.tiers.stage(keys, WIDE.whole, first, time.monotonic() + WAIT_S)
        first += staged
    assert [bool(node.core.pool.forest.chunks[key].copies) for key in keys] == [True] * 8 + [False] * 4
    return node


@pytest.mark.parametrize("ahead", [True, False])
def test_a_part_behind_what_is_there_does_not_wait_for_room(tmp_path: Path, ahead: bool) -> None:
    async def read() -> None:
        node = await with_a_long_prompt(tmp_path / "file")
        keys, ends_s = keys_of(SPACE, 1, 12), time.monotonic() + WAIT_S
        assert await node.tiers.stage(keys, WIDE.whole, 8, ends_s, ahead=ahead) == (0, None)
        # Who has copied the first eight asks for the others; these may push out what is before them.
        staged, reason = await node.tiers.stage(keys.slice(8, 12), WIDE.whole, 0, ends_s)
        assert staged and reason is None
        assert time.monotonic() < ends_s - WAIT_S / 2
        await node.tiers.stop()

    asyncio.run(read())


def test_the_first_chunk_waits_for_room(tmp_path: Path) -> None:
    async def read() -> None:
        node = await with_a_long_prompt(tmp_path / "file")
        keys = keys_of(SPACE, 1, 12)
        last_there = node.core.pool.forest.chunks[keys[7]]
        node.core.holds.keep(last_there)
        asked = await node.tiers.stage(keys.slice(8, 12), WIDE.whole, 0, time.monotonic() + 0.03)
        assert asked == (0, MissReason.STAGING_FULL)
        reader = asyncio.create_task(node.tiers.stage(keys.slice(8, 12), WIDE.whole, 0, time.monotonic() + WAIT_S))
        await asyncio.sleep(0)
        node.core.holds.let(last_there)
        node.tiers.wake()
        staged, reason = await reader
        assert staged and reason is None
        await node.tiers.stop()

    asyncio.run(read())
