"""What the scheduler knows of its workers: who lives, and how many tokens each has been sent.

Invariants (`check`): every queued request belongs to a known worker; a worker's queued tokens are the sum of its
queued requests. Load is counted here when the decision is made, not when a worker tells of it, so that a burst
does not see the same value eight times. Synchronous, one owner, no locks; the clock is passed in.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from kvstore.errors import CapacityExhausted, NotFound
from kvstore.scheduler import Candidate, ClusterView, Worker, WorkerRole

WORKERS_LIMIT: Final = 4_096
"""Workers known at one time; a further one is refused until another leaves."""

QUEUED_REQUESTS_LIMIT: Final = 16_384
"""Queued requests of one worker; the oldest is forgotten first."""

QUEUED_REQUEST_LIFETIME_S: Final = 600.0
"""A request that nobody reported as ended stops counting after this long."""

Runs = Callable[[Worker], tuple[int, int]]
"""(local run, pool run) of a request for a worker, in chunks."""


@dataclass(slots=True)
class _Queued:
    tokens: int
    ends_at_s: float


@dataclass(slots=True)
class _Entry:
    worker: Worker
    lease_ends_at_s: float
    last_picked: int = 0
    queued_tokens: int = 0
    queued: OrderedDict[str, _Queued] = field(default_factory=OrderedDict)

    def forget(self, request_id: str) -> None:
        gone = self.queued.pop(request_id, None)
        if gone is not None:
            self.queued_tokens -= gone.tokens


class ClusterState:
    """Workers by id with leases. Every `now_s` comes from one monotonic clock of the owner."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._picks = 0

    def report(self, worker: Worker, lease_s: float, now_s: float) -> None:
        """The worker lives for another `lease_s` seconds. What it was sent stays counted.

        Raises CapacityExhausted for a new worker above WORKERS_LIMIT.
        """
        self.expire(now_s)
        entry = self._entries.get(worker.worker_id)
        if entry is not None:
            entry.worker, entry.lease_ends_at_s = worker, now_s + lease_s
        elif len(self._entries) >= WORKERS_LIMIT:
            raise CapacityExhausted(f"the scheduler knows {WORKERS_LIMIT} workers, its limit")
        else:
            self._entries[worker.worker_id] = _Entry(worker, now_s + lease_s)

    def finish(self, worker_id: str, request_ids: Iterable[str]) -> None:
        """These requests have ended on the worker. Unknown ones are ignored."""
        entry = self._entries.get(worker_id)
        if entry is not None:
            for request_id in request_ids:
                entry.forget(request_id)

    def leave(self, worker_id: str) -> None:
        """Forget a worker and what it was sent. Unknown ones are ignored."""
        self._entries.pop(worker_id, None)

    def expire(self, now_s: float) -> None:
        """Forget workers whose lease ended and requests that nobody reported as ended."""
        for worker_id in [key for key, entry in self._entries.items() if entry.lease_ends_at_s <= now_s]:
            del self._entries[worker_id]
        for entry in self._entries.values():
            while entry.queued:
                request_id, oldest = next(iter(entry.queued.items()))
                if oldest.ends_at_s > now_s:
                    break
                entry.forget(request_id)

    def view(self, role: WorkerRole, runs: Runs, now_s: float) -> ClusterView:
        """The live workers of a role, by id, with their runs for one request."""
        self.expire(now_s)
        candidates = []
        for _, entry in sorted(self._entries.items()):
            if entry.worker.role is role:
                local_run, pool_run = runs(entry.worker)
                candidates.append(Candidate(entry.worker, local_run, pool_run, entry.queued_tokens, entry.last_picked))
        return ClusterView(tuple(candidates))

    def assign(self, worker_id: str, request_id: str, tokens: int, now_s: float) -> None:
        """Count a decision. A request that is picked again is counted once, where it went last of its role.

        Raises NotFound for a worker that is not known (any more).
        """
        entry = self._entries.get(worker_id)
        if entry is None:
            raise NotFound(f"unknown worker {worker_id!r}")
        for other in self._entries.values():
            if other.worker.role is entry.worker.role:
                other.forget(request_id)
        self._picks += 1
        entry.last_picked = self._picks
        entry.queued[request_id] = _Queued(tokens, now_s + QUEUED_REQUEST_LIFETIME_S)
        entry.queued_tokens += tokens
        if len(entry.queued) > QUEUED_REQUESTS_LIMIT:
            entry.forget(next(iter(entry.queued)))

    def check(self) -> None:
        """Assert the invariants (tests call it after every step)."""
        assert len(self._entries) <= WORKERS_LIMIT
        for worker_id, entry in self._entries.items():
            assert entry.worker.worker_id == worker_id
            assert entry.queued_tokens == sum(one.tokens for one in entry.queued.values())
            assert len(entry.queued) <= QUEUED_REQUESTS_LIMIT
