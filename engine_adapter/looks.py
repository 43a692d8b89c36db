"""How much of a prompt the pool has, asked from an engine's scheduler, which never waits.

    own node       shared memory, at once
    other nodes    the index is asked in a thread; until it has answered: "ask again", at most `wait_s` long
    no session     opened again in a thread; until then what can be said at once is: nothing

An answer is a hint: what it names may be gone when it is read, and is then computed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from engine_adapter.session import PoolSession
from kvstore.model.prefix import Keys

T = TypeVar("T")
REOPEN_EVERY_S = 1.0
LOOKS_AT_ONCE = 4
WAITING_LIMIT = 1024
"""Look-ups under way; a prompt behind them gets what its own node has."""
ANSWER_KEPT_S = 1.0
"""So long an answer is given again to a request that the engine had no room for."""


@dataclass(slots=True)
class _Asked:
    """A look-up of other nodes, under way or answered. `late`: it was not answered in time."""

    future: Future[int]
    until_s: float
    late: bool = False


class Looks:
    """The look-ups of one engine. `sessions`: one a KV group. Belongs to the scheduler's thread."""

    def __init__(
        self,
        sessions: Sequence[PoolSession],
        *,
        others: bool,
        wait_s: float,
        clock: Callable[[], float] = time.monotonic,
        threads: ThreadPoolExecutor | None = None,
    ) -> None:
        """`others`: there may be other nodes that have it. `wait_s`: how long a request waits for their answer."""
        self._sessions = sessions
        self._others = others
        self._wait_s = wait_s
        self._clock = clock
        self._threads = threads or ThreadPoolExecutor(LOOKS_AT_ONCE, thread_name_prefix="kvstore-look")
        self._asked: dict[str, _Asked] = {}
        self._reopening: Future[bool] | None = None
        self._reopen_at_s = 0.0
        self.counts: Counter[str] = Counter()

    def ask(self, request_id: str, groups: Sequence[Keys]) -> int | None:
        """Leading chunks that the pool has of all groups; None = not known yet, ask again."""
        if not all(map(len, groups)):
            return 0
        here = self._here(groups)
        if here == len(groups[0]) or not self._others:
            self.forget(request_id)
            return here
        asked, now_s = self._asked.get(request_id), self._clock()
        if asked is not None and now_s >= asked.until_s + ANSWER_KEPT_S:
            self.forget(request_id)
            asked = None
        if asked is None:
            if len(self._asked) >= WAITING_LIMIT and not self._make_room(now_s):
                self.counts["looks_too_many"] += 1
                return here
            until_s = now_s + self._wait_s
            asked = self._asked[request_id] = _Asked(self._threads.submit(self._anywhere, groups), until_s)
        if asked.future.done():
            return max(here, asked.future.result())
        if now_s >= asked.until_s:
            self.counts["looks_too_late"] += not asked.late
            asked.late = True
            return here
        self.counts["looks_asked_again"] += 1
        return None

    def _make_room(self, now_s: float) -> bool:
        """Forget questions that nobody has come back for; True if there were any."""
        gone = [name for name, asked in self._asked.items() if now_s >= asked.until_s]
        for name in gone:
            self.forget(name)
        return bool(gone)

    def forget(self, request_id: str) -> None:
        """The request has its answer, or needs none."""
        asked = self._asked.pop(request_id, None)
        if asked is not None:
            asked.future.cancel()

    def later(self, call: Callable[[], T]) -> Future[T]:
        """Do something that waits, in a thread."""
        return self._threads.submit(call)

    def here(self, groups: Sequence[Keys]) -> int | None:
        """Leading chunks that the own node has of all groups; None without a session with it. In any thread."""
        run = len(groups[0])
        for session, keys in zip(self._sessions, groups, strict=True):
            found = session.present_here(keys if run == len(keys) else keys.slice(0, run), session.whole)
            if not found:
                return found
            run = found
        return run

    def _here(self, groups: Sequence[Keys]) -> int:
        found = self.here(groups)
        if found is None:
            self.counts["looks_without_node"] += 1
            self._reopen()
        return found or 0

    def _anywhere(self, groups: Sequence[Keys]) -> int:
        """In a thread: the best that all groups have, on whatever node."""
        return min(
            session.present_anywhere(keys, session.whole, deadline_s=self._wait_s)
            for session, keys in zip(self._sessions, groups, strict=True)
        )

    def _reopen(self) -> None:
        """Have a thread open the session again, one at a time."""
        now_s = self._clock()
        if now_s < self._reopen_at_s or (self._reopening is not None and not self._reopening.done()):
            return
        self._reopen_at_s = now_s + REOPEN_EVERY_S
        self._reopening = self._threads.submit(self._reopen_all)

    def _reopen_all(self) -> bool:
        opened = [session.reopen() for session in self._sessions]
        return all(opened)

    def close(self) -> None:
        """End the threads; what they still wait for has its own deadline."""
        self._threads.shutdown(wait=False, cancel_futures=True)
