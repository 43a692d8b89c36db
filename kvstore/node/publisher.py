"""Tells the index what this node holds: a thread of its own, so that a busy event loop still has a heartbeat.

Every heartbeat (and sooner when there is news) the thread asks the loop for the next batch and publishes it. How
long the loop took to answer is the node's loop lag. The serving loop never waits for the index: events queue up
in the core within a bound, and after an overflow or a gap a snapshot is sent. A large snapshot takes many turns of
the loop; heartbeats alone keep the lease meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout

from kvstore.errors import CapacityExhausted, InvalidRequest, KvStoreError
from kvstore.metadata import Batch, Index
from kvstore.node.core import NodeCore

logger = logging.getLogger(__name__)
HEARTBEAT_S = 1.0
LEASE_MS = int(3 * HEARTBEAT_S * 1000)
NEWS_DELAY_S = 0.01
BATCH_EVENTS = 4096
REFUSED_PAUSE_S = 10.0
"""Only heartbeats for so long after the index refused a batch."""


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
        self._complaint = ""
        self._asked: Future[list[Batch]] | None = None
        self._asked_at_s = 0.0
        self._begun = False
        self._silent_until_s = 0.0
        self.loop_lag_ms = 0.0
        self.published_batches = 0
        self.failed_batches = 0
        self._thread = threading.Thread(target=self._run, name="kvstore-publisher", daemon=True)
        core.news.on_event = self._news.set

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
        if self._asked is not None:
            self._asked.cancel()
        try:
            self._index.publish(Batch(self._core.info, self._acknowledged + 1, leaving=True))
        except KvStoreError as exc:
            logger.info("could not tell the index that this node leaves: %s", exc)

    def _publish_next(self) -> bool:
        """Publish what is there now. True if more is waiting already."""
        silent = time.monotonic() < self._silent_until_s
        batches = None if silent else self._take()
        if batches is None:
            self._send([Batch(self._core.info, self._acknowledged + 1, lease_ms=LEASE_MS)], heartbeat=True)
            return not silent
        if not self._send(batches):
            return False
        return self._resync or any(len(batch.events) == BATCH_EVENTS for batch in batches)

    def _send(self, batches: list[Batch], *, heartbeat: bool = False) -> bool:
        """Publish; False if it failed. A mere heartbeat never takes back that a snapshot is due."""
        try:
            for batch in batches:
                applied = self._index.publish(batch)
                self._acknowledged = applied.sequence
                self._resync = applied.resync or (heartbeat and self._resync)
                self.published_batches += 1
                if applied.resync:
                    break
        except (InvalidRequest, CapacityExhausted) as exc:
            # The same batch would be refused for ever. The lease goes on, and a snapshot is tried after a while.
            self._complain(f"the index refuses what this node holds, trying a snapshot in {REFUSED_PAUSE_S:g} s: {exc}")
            self._resync = True
            self._silent_until_s = time.monotonic() + REFUSED_PAUSE_S
            return False
        except KvStoreError as exc:
            self._complain(f"the index cannot be reached, trying on: {exc}")
            return False
        if not heartbeat:
            self._complaint = ""
        return True

    def _complain(self, text: str) -> None:
        """Count a failure, and log the first of a row and each change of its kind."""
        self.failed_batches += 1
        kind = text.partition(":")[0]
        if kind != self._complaint:
            logger.warning("%s", text)
        self._complaint = kind
        self._news.clear()

    def _take(self) -> list[Batch] | None:
        """What the core has to say; None if it takes longer than a heartbeat, then ask again for the same answer."""
        if self._asked is None:
            self._asked_at_s, self._begun = time.monotonic(), False
            self._asked = asyncio.run_coroutine_threadsafe(self._batches(), self._loop)
        try:
            batches = self._asked.result(HEARTBEAT_S)
        except FutureTimeout:
            if not self._begun:
                self.loop_lag_ms = (time.monotonic() - self._asked_at_s) * 1000
            return None
        self._asked = None
        return batches

    async def _batches(self) -> list[Batch]:
        self._begun = True
        self.loop_lag_ms = (time.monotonic() - self._asked_at_s) * 1000
        steps = self._core.news.batch_steps(self._acknowledged, BATCH_EVENTS, resync=self._resync, lease_ms=LEASE_MS)
        with contextlib.closing(steps):
            while True:
                try:
                    next(steps)
                except StopIteration as end:
                    batches: list[Batch] = end.value
                    return batches
                await asyncio.sleep(0)
