"""The threads that copy pages for a client: the pieces of one batch are shared among the caller and a few helpers.

One core moves less than the memory can (10 against 15 GB/s on a machine of two cores), and takes checksums in the same
time. numpy and `kvstore.model.checksum` give the interpreter's lock up during each larger piece of work, so threads are
enough.

Invariant: when `each` returns or raises, no call of `work` is under way, whoever makes it. So what was copied may be
looked at again, committed or handed on, and memory may be given back. Pieces are handed out in order, and no later one
is begun when one of them did not come to its end.

The caller copies too and waits for nothing but pieces that a helper has begun: helpers that are busy elsewhere, or that
cannot be had any more because the interpreter ends, cost time and never the batch.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

THREADS_LIMIT = 4
"""Threads that copy for one call where the client is not told how many; more add little, the memory is the bound."""
PIECE_BYTES = 512 << 10
"""Least piece: between smaller ones threads wait for the interpreter's lock longer than they copy (at 256 KiB reads
still gain a third, writes with checksums lose)."""
SHARE_BYTES = 2 << 20
"""Least bytes a thread: below it waking one costs more than it copies."""

Answer = TypeVar("Answer")


class Copiers:
    """Up to `threads` threads a call, the caller's among them; 0 = one a usable CPU, at most 4. Thread-safe.

    Not for use in a forked child. `close` ends the helpers.
    """

    def __init__(self, threads: int = 0) -> None:
        self.threads = threads or min(THREADS_LIMIT, len(os.sched_getaffinity(0)))
        self._helpers: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def each(
        self, places: Sequence[int], piece_bytes: int, work: Callable[[int], Answer | None]
    ) -> tuple[int, Answer | None]:
        """Call `work` with each place, several at a time: (leading places that came to their end, what the next said).

        A piece that answers anything but None did not come to its end. What `work` raises is raised, whoever called it.
        `piece_bytes` are copied in one call of it; they tell how many threads are worth it.
        """
        helpers = min(self.threads, len(places), len(places) * piece_bytes // SHARE_BYTES) - 1
        if helpers <= 0 or piece_bytes < PIECE_BYTES:
            for number, place in enumerate(places):
                if (answer := work(place)) is not None:
                    return number, answer
            return len(places), None
        shares = _Shares(places, work)
        futures: list[Future[None]] = []
        try:
            self._call(shares, helpers, futures)
            shares.run()
        finally:
            try:
                shares.end()
            finally:
                shares.end()  # a signal's handler may have raised in the first one
            came = [future for future in futures if not future.cancel()]
        for future in came:
            future.result()  # raises what a helper's piece raised
        return shares.stop, shares.answer

    def _call(self, shares: _Shares[Answer], helpers: int, futures: list[Future[None]]) -> None:
        """Ask helpers to take part; without them where the interpreter ends or no thread is to be had."""
        with self._lock:
            if self._helpers is None:
                self._helpers = ThreadPoolExecutor(max(1, self.threads - 1), thread_name_prefix="kvstore-copy")
            pool = self._helpers
        try:
            for _ in range(helpers):
                futures.append(pool.submit(shares.run))
        except RuntimeError:
            return

    def close(self) -> None:
        """End the helpers; calls after it copy alone."""
        with self._lock:
            pool = self._helpers
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)


class _Shares(Generic[Answer]):
    """Places that several threads take one by one. `stop`: the first that did not come to its end, else their count."""

    def __init__(self, places: Sequence[int], work: Callable[[int], Answer | None]) -> None:
        self.stop = len(places)
        self.answer: Answer | None = None
        self._places = places
        self._work = work
        self._next = self._under_way = 0
        self._ended = threading.Condition()

    def run(self) -> None:
        """Take and do pieces until there are none."""
        while (number := self._take()) is not None:
            done, answer = False, None
            try:
                answer = self._work(self._places[number])
                done = answer is None
            finally:
                self._leave(number, done, answer)

    def _take(self) -> int | None:
        with self._ended:
            if self._next >= self.stop:
                return None
            self._under_way += 1
            self._next += 1
            return self._next - 1

    def _leave(self, number: int, done: bool, answer: Answer | None) -> None:
        with self._ended:
            self._under_way -= 1
            if not done and number < self.stop:
                self.stop, self.answer = number, answer
            self._ended.notify_all()

    def end(self) -> None:
        """Begin nothing more; return when nothing is under way."""
        with self._ended:
            self._next = len(self._places)
            self._ended.wait_for(lambda: not self._under_way)


ALONE = Copiers(1)
"""The caller's thread only."""
