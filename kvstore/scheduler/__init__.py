"""The scheduler: which worker should take a request.

`Policy` is the protocol of the package. Policies are pure: they see a `ClusterView` and order it; they keep no
state, read no clock and talk to nobody, so that the same objects run live and in a replay. `state.py` keeps
what is known of the workers, `server.py` serves both over gRPC.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

from kvstore.errors import ConfigurationError
from kvstore.model.layout import Rectangle
from kvstore.model.prefix import Keys

DEFAULT_POLICY = "longest_prefix"


class WorkerRole(enum.IntEnum):
    """What a worker does with a request; the numbers are those of the protocol."""

    PREFILL = 1
    DECODE = 2


@dataclass(frozen=True, slots=True)
class Worker:
    """One engine instance. `node_id` names the node of its own host, `rectangles` what its ranks write;
    empty = one rank that writes whole chunks."""

    worker_id: str
    role: WorkerRole
    node_id: str
    rectangles: tuple[Rectangle, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """What a policy may know of a request."""

    request_id: str
    keys: Keys
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """One live worker as a policy sees it.

    Runs are leading chunks of the request: on the node of the worker's own host, and the best that any node has
    for all of the worker's rectangles. `queued_tokens` are the prompt tokens of requests that were sent to it
    and have not ended. `last_picked` numbers the pick that took it last, 0 = never.
    """

    worker: Worker
    local_run: int
    pool_run: int
    queued_tokens: int
    last_picked: int


@dataclass(frozen=True, slots=True)
class ClusterView:
    """The candidates for one request at one moment, by worker id."""

    candidates: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """The chosen worker, and for every candidate of the view, in its order, why it was (not) taken."""

    policy: str
    chosen: Candidate
    reasons: tuple[str, ...]


class Policy(Protocol):
    """Pure and synchronous."""

    name: str

    def pick(self, request: Request, view: ClusterView) -> Decision:
        """Choose among the candidates; raises NotFound if there is none."""


def make_policy(name: str) -> Policy:
    """The policy of that name, the default one for an empty name; raises ConfigurationError naming the known ones."""
    from kvstore.scheduler.policies.least_queued import LeastQueued
    from kvstore.scheduler.policies.longest_prefix import LongestPrefix

    known: dict[str, type[Policy]] = {LongestPrefix.name: LongestPrefix, LeastQueued.name: LeastQueued}
    try:
        return known[name or DEFAULT_POLICY]()
    except KeyError:
        raise ConfigurationError(f"unknown policy {name!r}; known: {', '.join(sorted(known))}") from None
