"""Tells the index what this node holds: a thread of its own, so that a busy event loop still has a heartbeat.

Every heartbeat (and sooner when there is news) the thread asks the loop for the next batch and publishes it. How
long the loop took to answer is the node's loop lag. The serving loop never waits for the index: events queue up
in the core within a bound, and after an overflow or a gap a snapshot is sent.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from concurrent.futures import TimeoutError as FutureTimeout

from kvstore.errors import KvStoreError
from kvstore.metadata import Batch, Index
from kvstore.node.core import NodeCore

logger = logging.getLogger(__name__)
HEARTBEAT_S = 1.0
LEASE_MS = int(3 * HEARTBEAT_S * 1000)
NEWS_DELAY_S = 0.01
BATCH_EVENTS = 4096


class Publisher:
    """Feeds `index` from `core`, whose owner is `loop`."""

    def __init__(self, core: NodeCore, loop: asyncio.AbstractEventLoop, index: Index) -> None:
        self._core = core
        self._loop = loop
        self._index = index
        self._acknowledged = 0
        self._resync = False
        self._news = threading.Event()
        self._stopping = False
        self._complained = False
        self.loop_lag_ms = 0.0
        self.published_batches = 0
        self.failed_batches = 0
        self._thread = threading.Thread(target=self._run, name="kvstore-publisher", daemon=True)
        core.on_event = self._news.set

    def start(self) -> None:
        """Begin to publish."""
        self._thread.start()

    def stop(self, deadline_s: float = 2.0) -> None:
        """Tell the index that the node leaves, then end. Call it off the event loop."""
        self._stopping = True
        self._news.set()
        self._thread.join(deadline_s)

    def _run(self) -> None:
        while not self._stopping:
            # With nothing more to say, wait for news, at most until the next heartbeat.
            if not self._publish_next() and self._news.wait(HEARTBEAT_S):
                time.sleep(NEWS_DELAY_S)  # let a burst of commits become one batch
            self._news.clear()
        try:
            self._index.publish(Batch(self._core.info, self._acknowledged + 1, leaving=True))
        except KvStoreError as exc:
            logger.info("could not tell the index that this node leaves: %s", exc)

    def _publish_next(self) -> bool:
        """Publish what is there now. True if more is waiting already."""
        batches = self._take()
        try:
            for batch in batches:
                applied = self._index.publish(batch)
                self._acknowledged, self._resync = applied.sequence, applied.resync
                self.published_batches += 1
                if applied.resync:
                    break
        except KvStoreError as exc:
            self.failed_batches += 1
            if not self._complained:
                logger.warning("the index cannot be reached, trying on: %s", exc)
            self._complained = True
            self._news.clear()
            return False
        self._complained = False
        return self._resync or any(len(batch.events) == BATCH_EVENTS for batch in batches)

    def _take(self) -> list[Batch]:
        asked = time.monotonic()
        future = asyncio.run_coroutine_threadsafe(self._batches(), self._loop)
        try:
            batches = future.result(HEARTBEAT_S)
        except FutureTimeout:
            future.cancel()
            batches = [Batch(self._core.info, self._acknowledged + 1, lease_ms=LEASE_MS)]
        self.loop_lag_ms = (time.monotonic() - asked) * 1000
        return batches

    async def _batches(self) -> list[Batch]:
        return self._core.take_batch(self._acknowledged, BATCH_EVENTS, resync=self._resync, lease_ms=LEASE_MS)
