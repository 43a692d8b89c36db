"""A disk that stands still: callers whose time is up leave nothing behind that waits for it."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from kvstore.node.arena.ssd_file import Buffer, Calls
from tests.unit.node.small_node import WIDE, keys_of, namespace
from tests.unit.node.tiered_node import WAIT_S, TieredNode


def test_what_waits_for_a_stuck_disk_is_bounded(tmp_path: Path) -> None:
    go_on = threading.Event()
    go_on.set()

    def pwritev(fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        assert go_on.wait(WAIT_S)
        return os.pwritev(fd, buffers, offset)

    async def wait() -> None:
        space = namespace(WIDE)
        node = TieredNode(tmp_path / "file", 1 << 20, slots=96, calls=Calls(fdatasync=lambda fd: None, pwritev=pwritev))
        keys, others = keys_of(space, 1, 3), keys_of(space, 2, 3)
        node.store(space, keys)
        assert await node.tiers.persist(keys, time.monotonic() + WAIT_S) == (3, "")
        node.store(space, others)
        go_on.clear()
        for _ in range(20):
            assert await node.tiers.persist(others, time.monotonic() + 0.001) == (0, "deadline")
            removal = asyncio.create_task(node.remove(space, keys[2]))
            await asyncio.sleep(0.001)
            removal.cancel()
            await asyncio.wait([removal])
        assert len(node.tiers._saver.begun) == 1
        go_on.set()
        assert await node.tiers.persist(others, time.monotonic() + WAIT_S) == (3, "")
        await node.tiers.forget_removed()
        await node.tiers.stop()

    asyncio.run(wait())
