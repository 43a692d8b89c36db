"""`persist` while the cleaner works on the same chunks: it says neither less nor more than is true."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest

from kvstore.node.arena.ssd_file import Calls
from kvstore.node.tiers import saving
from tests.unit.node.small_node import WIDE, keys_of, namespace
from tests.unit.node.tiered_node import WAIT_S, TieredNode


def test_what_the_cleaner_has_in_hand_is_no_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "BATCH_CHUNKS", 4)

    async def persist() -> None:
        space = namespace(WIDE)
        node = TieredNode(tmp_path / "file", 4 << 20, slots=96)
        node.tiers.start()
        keys = keys_of(space, 1, 12)
        node.store(space, keys)
        await node.until(lambda: node.tiers._saver.begun)  # the first four
        assert await node.tiers.persist(keys, time.monotonic() + WAIT_S) == (12, "")
        longer = keys_of(space, 1, 14)
        assert await node.tiers.persist(longer, time.monotonic() + WAIT_S) == (12, "absent")
        await node.tiers.stop()

    asyncio.run(persist())


def test_what_is_written_behind_the_sync_does_not_count(tmp_path: Path) -> None:
    in_sync, go_on = threading.Event(), threading.Event()
    go_on.set()

    def fdatasync(fd: int) -> None:
        if not go_on.is_set():
            in_sync.set()
            assert go_on.wait(WAIT_S)

    async def persist() -> None:
        space = namespace(WIDE)
        node = TieredNode(tmp_path / "file", 4 << 20, slots=96, calls=Calls(fdatasync=fdatasync))
        pool, saver = node.core.pool, node.tiers._saver
        keys = keys_of(space, 1, 2)
        node.store(space, keys)
        node.tiers.start()
        await node.rest()
        last = pool.forest.chunks[keys[1]]
        go_on.clear()
        asking = asyncio.create_task(node.tiers.persist(keys, time.monotonic() + WAIT_S))
        await node.until(in_sync.is_set)
        pool.evict_from_ssd(last)  # it had to make room, and then came back
        pool.touch([last.key])
        await saver._save_now([last])
        assert last.is_saved
        go_on.set()
        assert await asking == (1, "ssd_full")
        await node.tiers.stop()

    asyncio.run(persist())
