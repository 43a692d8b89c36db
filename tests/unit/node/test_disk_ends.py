"""A node that stops while its disk stands still: what was not read is never shown."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvstore.node import tiers
from kvstore.node.arena.ssd_file import Buffer, Calls
from kvstore.node.tiers import disk
from tests.unit.node.small_node import WIDE, keys_of, namespace
from tests.unit.node.tiered_node import WAIT_S, TieredNode


def test_a_read_that_was_taken_back_shows_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "STOP_SAVING_S", 0.05)
    monkeypatch.setattr(disk, "JOB_BYTES", 1)
    monkeypatch.setattr(disk, "LARGE_JOB_BYTES", 1)
    monkeypatch.setattr(disk, "READERS", 1)
    go_on = threading.Event()

    def preadv(fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        assert go_on.wait(WAIT_S)
        return os.preadv(fd, buffers, offset)

    async def stop_while_reading() -> None:
        space = namespace(WIDE)
        calls = Calls(fdatasync=lambda fd: None)
        node = TieredNode(tmp_path / "file", 4 << 20, slots=96, calls=calls)
        node.tiers.start()
        keys, others = keys_of(space, 1, 3), keys_of(space, 2, 28)
        for each in (keys, others):
            node.store(space, each)
            await node.rest()
        chunks = [node.core.pool.forest.chunks[key] for key in keys]
        assert not any(chunk.copies for chunk in chunks)
        calls.preadv = preadv
        reader = asyncio.create_task(node.tiers.stage(keys, WIDE.whole, 0, time.monotonic() + WAIT_S))
        await node.until(lambda: len(node.tiers._read_back.under_way) == 3)
        try:
            await node.tiers.stop()
            await node.until(lambda: len(node.tiers._read_back.under_way) == 1)  # two were taken back
            assert not any(chunk.copies for chunk in chunks)
            assert all(chunk.ssd for chunk in chunks)
        finally:
            go_on.set()
        await node.until(lambda: not node.tiers._read_back.under_way)
        assert node.version_of(chunks[0], WIDE.whole) == 0  # the one that was under way came after all
        await reader
        node.core.check()

    asyncio.run(stop_while_reading())
