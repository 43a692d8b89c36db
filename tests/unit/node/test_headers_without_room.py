"""A disk that has no room for some of the headers: what is removed afterwards stays away all the same."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Sequence
from pathlib import Path

from kvstore.node.arena.ssd_file import Buffer, Calls
from kvstore.node.memory import UNIT_BYTES
from tests.unit.node.small_node import WIDE, keys_of, namespace
from tests.unit.node.tiered_node import WAIT_S, TieredNode

SPACE = namespace(WIDE)


class FullOnce:
    """A disk that refuses one write of headers: after `room` others."""

    def __init__(self) -> None:
        self.room: int | None = None

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        if self.room is not None and sum(map(len, buffers)) == UNIT_BYTES:
            self.room -= 1
            if self.room < 0:
                self.room = None
                raise OSError(errno.ENOSPC, "full")
        return os.pwritev(fd, buffers, offset)

    def begin(self, path: Path) -> TieredNode:
        calls = Calls(fdatasync=lambda fd: None, pwritev=self.pwritev)
        return TieredNode(path, 4 << 20, slots=400, calls=calls)


async def found_after_a_restart(node: TieredNode) -> set[bytes]:
    await node.die()
    after = TieredNode(node.path, 4 << 20, epoch=2)
    found = set(after.on_ssd())
    await after.tiers.stop()
    return found


def test_headers_of_a_batch_that_was_given_up_are_emptied(tmp_path: Path) -> None:
    async def remove() -> None:
        disk = FullOnce()
        node = disk.begin(tmp_path / "file")
        one, keys = keys_of(SPACE, 2, 1), keys_of(SPACE, 1, 40)
        node.store(SPACE, one)
        assert await node.tiers.persist(one, time.monotonic() + WAIT_S) == (1, "")
        node.store(SPACE, keys)
        disk.room = 3  # two pages are emptied, one of two is written
        assert (await node.tiers.persist(keys, time.monotonic() + WAIT_S))[1] == "ssd_full"
        assert disk.room is None
        await node.remove(SPACE, keys[0])
        assert await found_after_a_restart(node) <= set(one), "one may have had to make room"

    asyncio.run(remove())


def test_headers_that_could_not_be_emptied_are_emptied_later(tmp_path: Path) -> None:
    async def remove() -> None:
        disk = FullOnce()
        node = disk.begin(tmp_path / "file")
        long, one, other = keys_of(SPACE, 1, 32), keys_of(SPACE, 2, 1), keys_of(SPACE, 3, 1)
        for keys in (long, one):
            node.store(SPACE, keys)
            assert await node.tiers.persist(keys, time.monotonic() + WAIT_S) == (len(keys), "")
        chunks = node.core.pool.forest.chunks
        for key in (one[0], long[31]):  # one header on each page; the slot of the latter is used again first
            node.core.pool.evict_from_ssd(chunks[key])
        node.store(SPACE, other)
        disk.room = 0
        await node.tiers.persist(other, time.monotonic() + WAIT_S)
        assert disk.room is None
        await node.remove(SPACE, one[0])
        assert one[0] not in await found_after_a_restart(node)

    asyncio.run(remove())
