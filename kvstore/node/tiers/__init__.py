"""The SSD tier of a running node: starts, stops and takes out of service what moves bytes between DRAM and SSD.

The pool decides what lies where, on the event loop; `read_back.py` and `saving.py` say when something moves, threads
(`disk.py`) only read and write bytes. Nothing here makes Reserve wait for a disk.

When the disk fails, the tier goes out of service and the node lives on: what was only there is a miss for readers, the
rest stays in DRAM.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import time
from collections.abc import Sequence

from kvstore.errors import KvStoreError, StorageFailed
from kvstore.node.arena import SsdIo
from kvstore.node.arena.ssd import SsdArena
from kvstore.node.arena.ssd_io import WAYS
from kvstore.node.chunks import KnownNamespace
from kvstore.node.core import NodeCore
from kvstore.node.tiers.disk import Bytes, Disk
from kvstore.node.tiers.read_back import ReadBack
from kvstore.node.tiers.saving import Saver

logger = logging.getLogger(__name__)
STEP_CHUNKS = 256
"""Chunks that one turn of the event loop drops: a few milliseconds."""
STOP_SAVING_S = 10.0
"""At an orderly end, time to save what is only in DRAM."""


class SsdState(enum.IntEnum):
    """How the SSD tier does. FULL: the disk had no room; slots that were written before are used on."""

    IN_SERVICE = 0
    FULL = 1
    FAILED = 2


class TierStack:
    """`memory`, `io`: see `Disk`. `failed`: why the tier is out of service, None while it serves."""

    def __init__(self, core: NodeCore, memory: Bytes, arena: SsdArena, io: SsdIo | None = None) -> None:
        self.failed: KvStoreError | None = None
        self._ending = False
        self._pool = core.pool
        self._disk = Disk(arena, memory, io)
        self._saver = Saver(core, self._disk, self.fail, lambda: self.failed is not None)
        self._read_back = ReadBack(core, self._disk, self.fail, lambda: self.failed is not None or self._ending)
        self._task: asyncio.Task[None] | None = None
        self._leaving: asyncio.Task[None] | None = None
        self.stage = self._read_back.stage
        self.stage_all = self._read_back.stage_all
        self.promote = self._read_back.promote
        self.is_broken = self._read_back.is_broken
        self.drop_broken = self._read_back.drop_broken
        self.persist = self._saver.persist
        self.forget_removed = self._saver.forget_removed

    @property
    def state(self) -> SsdState:
        """How the tier does."""
        if self.failed is not None:
            return SsdState.FAILED
        return SsdState.FULL if self._saver.is_full else SsdState.IN_SERVICE

    def figures(self) -> dict[str, int]:
        """What only the tier itself knows, for the node's figures."""
        ways = {f"ssd_io_{way}": int(way == self._disk.io.name) for way in WAYS}
        return {"ssd_state": int(self.state), "ssd_direct": int(self._disk.arena.direct), **ways}

    def take_up(self, spaces: Sequence[KnownNamespace]) -> None:
        """See `Saver.take_up`; after the recovery, before `start`."""
        self._saver.take_up(spaces)

    def start(self) -> None:
        """Start the cleaner."""
        self._task = asyncio.get_running_loop().create_task(self._saver.clean())
        self._task.add_done_callback(self._cleaner_ended)

    def _cleaner_ended(self, task: asyncio.Task[None]) -> None:
        """It runs until the tier ends; an error that nobody thought of takes the tier out of service, not the node."""
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the cleaner of the SSD tier has ended", exc_info=error)
            self.fail(StorageFailed(f"the cleaner has ended: {error!r}; please report this as a bug"), "write")

    def wake(self) -> None:
        """Something was committed, removed or came free."""
        self._saver.wake()
        self._read_back.wake()

    async def stop(self) -> None:
        """Save what is only in DRAM, and close the file. What the disk does not do in 10 s is left."""
        ends_s = time.monotonic() + STOP_SAVING_S
        self._ending = True
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_SAVING_S):
                while self.failed is None and self._pool.backlog.waiting and await self._saver.save_coldest():
                    pass
        under_way = [*self._saver.begun, *self._read_back.under_way.values()]
        if under_way:
            await asyncio.wait(under_way, timeout=max(0.0, ends_s - time.monotonic()))
        is_idle = all(each.done() for each in under_way)
        self._disk.close(is_idle=is_idle)
        if not is_idle:
            logger.warning("the disk stands still: what is on its way there is given up")
            for task in self._saver.begun:
                task.cancel()
            await asyncio.gather(*self._saver.begun, return_exceptions=True)

    def fail(self, error: KvStoreError, kind: str) -> None:
        """Out of service: nothing is read or written any more, and what was there is forgotten in small steps.

        `kind`: read or write.
        """
        self._pool.counts[f"ssd_errors_{kind}"] += 1
        if self.failed is not None or self._ending:
            return
        self.failed = error
        self._pool.counts["ssd_failures"] += 1
        logger.error("the SSD tier is out of service until the node is restarted: %s", error)
        self._leaving = asyncio.get_running_loop().create_task(self._forget_all())

    async def _forget_all(self) -> None:
        """Drop all SSD copies, those first that came last: children mostly before their parents."""
        for read in list(self._read_back.under_way.values()):
            await asyncio.wait([read])
        async with self._saver.lock:
            while on_ssd := [chunk for chunk in self._pool.forest.chunks.values() if chunk.ssd]:
                for number, chunk in enumerate(reversed(on_ssd), 1):
                    if self._pool.forest.get(chunk.key) is chunk and chunk.ssd:
                        self._pool.evict_from_ssd(chunk)
                        self._read_back.let_pins_wait(chunk)
                    if not number % STEP_CHUNKS:
                        await asyncio.sleep(0)
            self._pool.close_ssd()

    def check(self) -> None:
        """Every invariant of the tier that `NodeCore.check` does not see."""
        if self._pool.ssd is not None:
            self._saver.check()
            self._read_back.check()
