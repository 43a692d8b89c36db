"""A removal that the disk did not take is not acknowledged: the next start may find the chunks again."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvstore.errors import StorageFailed
from kvstore.node.arena.ssd_file import Buffer, Calls
from tests.unit.node.small_node import WIDE, keys_of, namespace
from tests.unit.node.tiered_node import TieredNode


@pytest.mark.parametrize("failed_before", [True, False])
def test_a_removal_says_that_it_may_not_hold(tmp_path: Path, failed_before: bool) -> None:
    broken = False

    def pwritev(fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        if broken:
            raise OSError(errno.EIO, "broken")
        return os.pwritev(fd, buffers, offset)

    async def remove() -> None:
        nonlocal broken
        space = namespace(WIDE)
        node = TieredNode(tmp_path / "file", 4 << 20, calls=Calls(fdatasync=lambda fd: None, pwritev=pwritev))
        node.tiers.start()
        keys = keys_of(space, 1, 3)
        node.store(space, keys)
        await node.rest()
        broken = True
        if failed_before:
            node.tiers.fail(StorageFailed("the disk is broken"), "write")
            await node.until(lambda: node.core.pool.ssd is None)
        with pytest.raises(StorageFailed, match="delete that file before the next start"):
            await node.remove(space, keys[0])
        assert not any(key in node.core.pool.forest.chunks for key in keys)
        await node.tiers.stop()

    asyncio.run(remove())
