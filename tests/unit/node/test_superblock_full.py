"""One namespace more than the superblock has room for: it is not saved, all others are."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import pytest

from kvstore.model.namespace import Namespace
from kvstore.node.arena import ssd_format
from tests.unit.node.small_node import WIDE, keys_of, namespace
from tests.unit.node.tiered_node import WAIT_S, TieredNode


def test_a_namespace_too_many_stops_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssd_format, "REGION_LEAST_BYTES", 4096)

    async def save() -> None:
        node = TieredNode(tmp_path / "file", 512 << 10, slots=96)
        first, rng = namespace(WIDE), random.Random(3)

        async def saved(space: Namespace, prompt: int) -> tuple[int, str]:
            keys = keys_of(space, prompt, 1)
            node.store(space, keys)
            return await node.tiers.persist(keys, time.monotonic() + WAIT_S)

        assert await saved(first, 1) == (1, "")
        names = (Namespace(rng.randbytes(250).hex(), rng.randbytes(250).hex(), WIDE) for _ in range(20))
        assert any([(await saved(space, 1)) == (0, "ssd_full") for space in names])
        assert await saved(first, 2) == (1, "")
        await node.die()
        after = TieredNode(tmp_path / "file", 512 << 10, epoch=2)
        assert keys_of(first, 2, 1)[0] in after.on_ssd()
        await after.tiers.stop()

    asyncio.run(save())
