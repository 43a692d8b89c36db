"""A whole node with an SSD tier in this process, whose disk does what a test tells it, and a client of it.

The disk is the seam below the SSD file (`Calls`): every system call is counted, and a test may hold or fail it.
Nothing here waits for a time to pass: a held call says so by an event, and goes on when the test says so.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from kvstore.client import Cache, Client, connect
from kvstore.client.values import ReadResult
from kvstore.model.layout import PageLayout
from kvstore.model.namespace import Namespace
from kvstore.model.prefix import Keys
from kvstore.node.arena import ssd_file
from kvstore.node.arena.ssd_file import Buffer, Calls
from kvstore.node.chunks import Chunk
from kvstore.node.tiers import TierStack
from tests.chaos.node_thread import NodeThread
from tests.chaos.pool_processes import until
from tests.unit.client.pages import LAYOUT, namespace, pages_of, poisoned, prompt

T = TypeVar("T")
WAIT_S = 20.0
SLOT_BYTES = 12 << 10
"""Of the layout `pages.LAYOUT`."""
DRAM_BYTES = 1 << 20
SSD_BYTES = 4 << 20

Before = Callable[[str, int, int], None]
"""(preadv, pwritev, fdatasync or ftruncate; offset; bytes): may wait, and may raise OSError."""


class Disk:
    """The system calls of SSD files. `before` is called ahead of each one, in the thread that makes it."""

    def __init__(self) -> None:
        self.before: Before = lambda name, offset, size: None
        self.done: Counter[str] = Counter()
        self.reads: list[range] = []
        """What was read of the file, in the order of the calls."""
        self._lock = threading.Lock()

    def calls(self) -> Calls:
        """What an SSD file is opened with."""
        return Calls(self._preadv, self._pwritev, self._fdatasync, os.ftruncate)

    def _begin(self, name: str, offset: int, size: int) -> None:
        self.before(name, offset, size)
        with self._lock:
            self.done[name] += 1
            if name == "preadv":
                self.reads.append(range(offset, offset + size))

    def _preadv(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        self._begin("preadv", offset, sum(map(len, buffers)))
        return os.preadv(fd, buffers, offset)

    def _pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        self._begin("pwritev", offset, sum(map(len, buffers)))
        return os.pwritev(fd, buffers, offset)

    def _fdatasync(self, fd: int) -> None:
        self._begin("fdatasync", 0, 0)
        os.fdatasync(fd)

    def fail(self, *names: str, number: int = errno.EIO) -> None:
        """These calls fail from now on."""

        def before(name: str, offset: int, size: int) -> None:
            if name in names:
                raise OSError(number, os.strerror(number))

        self.before = before

    def work(self) -> None:
        """All calls do what they should again."""
        self.before = lambda name, offset, size: None

    @contextmanager
    def held(self, *names: str, after: int = 0, at: Container[int] | None = None) -> Iterator[Hold]:
        """These calls stand still until `go_on` or the end of the block: but for the first `after` of them, and only
        those `at` these offsets."""
        hold = Hold(names, after, at)
        self.before = hold.before
        try:
            yield hold
        finally:
            self.work()
            hold.go_on()


class Hold:
    """Calls that stand still."""

    def __init__(self, names: Sequence[str], after: int, at: Container[int] | None) -> None:
        self._names = names
        self._after = after
        self._at = at
        self._passed = 0
        self._lock = threading.Lock()
        self._reached = threading.Event()
        self._go_on = threading.Event()

    def before(self, name: str, offset: int, size: int) -> None:
        if name in self._names and not self._go_on.is_set() and (self._at is None or offset in self._at):
            with self._lock:
                self._passed += 1
                if self._passed <= self._after:
                    return
            self._reached.set()
            assert self._go_on.wait(2 * WAIT_S), "a test held the disk and never let it go"

    def wait(self) -> None:
        """Until one stands still."""
        assert self._reached.wait(WAIT_S), "no such call was made"

    def go_on(self) -> None:
        self._go_on.set()


class TierNode:
    """The node, and one client that writes and reads the pages of `tests.unit.client.pages`."""

    def __init__(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        *,
        dram_bytes: int = DRAM_BYTES,
        ssd_bytes: int = SSD_BYTES,
        node_id: str = "tiers",
        space: Namespace | None = None,
        disk: Disk | None = None,
        ssd_path: Path | None = None,
        **more: Any,
    ) -> None:
        self.disk = disk or Disk()
        self.path = ssd_path or folder / "pages.kvssd"
        monkeypatch.setattr(ssd_file, "Calls", self.disk.calls)
        self.node = NodeThread(
            folder,
            dram_bytes,
            node_id,
            ssd=f"{self.path}:{ssd_bytes}",
            slots=more.pop("slots", (dram_bytes + ssd_bytes) // 4096),
            **more,
        )
        self.client = self.connect()
        self.cache = self.client.bind(space or namespace())
        self.part_chunks = 8
        """Stored at a time, as chunked prefill does: a session may reserve half of the DRAM."""
        self._stopped = False

    def connect(self) -> Client:
        return connect(self.node.info.socket_path)

    @property
    def core(self) -> Any:
        return self.node.core

    @property
    def tiers(self) -> TierStack:
        assert self.node.daemon.tiers is not None
        return self.node.daemon.tiers

    def call(self, function: Callable[[], T]) -> T:
        return self.node.call(function)

    def stats(self) -> dict[str, int]:
        return self.call(self.core.stats)

    def check(self) -> None:
        """All laws, of the core and of the tiers."""
        self.call(lambda: (self.core.check(), self.tiers.check()))

    def close(self) -> None:
        """Check the laws and stop. A second call does nothing."""
        if not self._stopped:
            self.check()
            self._stopped = True
            self.client.close()
            self.node.stop()

    # --- pages -------------------------------------------------------------------------------------------

    def keys(self, number: int, chunks: int, cache: Cache | None = None) -> Keys:
        cache = cache or self.cache
        return cache.keys(prompt(number, chunks * cache.layout.chunk_tokens))

    def write(self, number: int, chunks: int, cache: Cache | None = None) -> Keys:
        """Store a prompt; all of it is visible afterwards."""
        cache = cache or self.cache
        keys = self.keys(number, chunks, cache)
        step = self.part_chunks
        for stop in range(step, chunks + step, step):
            part = keys.slice(0, min(stop, chunks))
            result = cache.write(part, pages_of(part, cache.layout))
            assert result.visible == len(part), result.outcomes
        return keys

    def saved(self, number: int, chunks: int, cache: Cache | None = None) -> Keys:
        """Store a prompt, on the SSD too."""
        keys = self.write(number, chunks, cache)
        assert (cache or self.cache).persist(keys, deadline_s=WAIT_S) == (chunks, "")
        return keys

    def on_ssd(self, number: int, chunks: int, cache: Cache | None = None) -> Keys:
        """Store a prompt, on the SSD only."""
        keys = self.saved(number, chunks, cache)
        self.demote(keys)
        return keys

    def demote(self, keys: Keys) -> None:
        """Its copies leave DRAM, tail first, as they do for want of room."""

        def leave() -> None:
            pool = self.core.pool
            for key in reversed(list(keys)):
                chunk = pool.forest.chunks[key]
                assert chunk.is_saved and not chunk.holds
                if chunk.copies:
                    pool.dram._let_go(chunk)

        self.call(leave)

    def read(self, keys: Keys, *, deadline_s: float = WAIT_S, cache: Cache | None = None) -> ReadResult:
        """Read, and compare every byte that was delivered."""
        cache = cache or self.cache
        target = poisoned(cache, len(keys))
        result = cache.read(keys, target, deadline_s=deadline_s)
        assert np.array_equal(target[: result.chunks], pages_of(keys, cache.layout)[: result.chunks]), "wrong bytes"
        return result

    # --- where things are --------------------------------------------------------------------------------

    def chunks(self, keys: Keys) -> list[Chunk]:
        """Those of the keys that the node knows."""
        found = self.call(lambda: [self.core.pool.forest.get(key) for key in keys])
        return [chunk for chunk in found if chunk is not None]

    def places(self, keys: Keys) -> tuple[int, int]:
        """(chunks in DRAM, chunks on the SSD)."""
        chunks = self.chunks(keys)
        return sum(bool(chunk.copies) for chunk in chunks), sum(bool(chunk.ssd) for chunk in chunks)

    def offsets(self, keys: Keys) -> set[int]:
        """Where in the file the payloads of these keys are."""
        return {copy.slot * 4096 for chunk in self.chunks(keys) for copy in chunk.ssd.values()}

    def settle(self) -> None:
        """Wait until nothing waits for the cleaner, and nothing is under way."""
        pool = self.core.pool

        def quiet() -> bool:
            busy = (*pool.backlog.waiting, *pool.removed_slots, *self.core.own_slots, *self.tiers._saver.begun)
            return not busy

        until(lambda: self.call(quiet))


def wide() -> PageLayout:
    """A layout with slots of 44 KiB."""
    return PageLayout(layers=4, kv_heads=2, head_dim=40, dtype=LAYOUT.dtype, page_tokens=8, pages_per_chunk=2)
