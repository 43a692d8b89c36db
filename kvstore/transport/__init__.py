"""Moving bytes out of another node's arena into the client's own staging (never straight into memory that
somebody else may reuse).

`Transport` is the protocol of the package: `tcp` is a plain framed stream; others follow the same contract
(`tests/contract/transport_suite.py`). A failure is a value in the result, not an exception. A transport knows
nothing of keys: the caller resolves keys to slots first (`NodeService.Acquire`) and judges the fence itself.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvstore.model.values import NodeInfo

SLOT_UNIT_BYTES = 4096
"""Slots are named by their offset in the arena in units of this size."""


class ReadStatus(enum.StrEnum):
    """How a read ended."""

    DONE = "done"
    DEADLINE = "deadline"
    UNREACHABLE = "unreachable"
    REFUSED = "refused"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class ReadDescriptor:
    """`length` bytes from `offset` (bytes) of the remote arena into `staging_offset` (bytes) of local staging.

    `slot` (4096-byte units) names the slot whose generation is asked for after the payload.
    """

    slot: int
    offset: int
    length: int
    staging_offset: int


@dataclass(frozen=True, slots=True)
class ReadResult:
    """`generations[i]` is the generation word of descriptor i's slot, read by the owner only after this side
    had reported the last payload byte; empty unless `status` is DONE. `ended` None: no byte of this read can reach the
    staging any more; else not before it answers True (law 6).
    """

    status: ReadStatus
    generations: tuple[int, ...] = ()
    payload_bytes: int = 0
    detail: str = ""
    ended: Callable[[], bool] | None = None


class Exchange(Protocol):
    """A read under way, in two steps. Both end by the deadline that it was started with. It keeps its staging alive."""

    def payload(self) -> ReadResult:
        """Wait until all bytes lie in staging; no generations yet.

        Of several exchanges in the order in which they were started, by the thread that started them. Whatever the
        answer, no byte of this one can come any more, unless it has `ended`.
        """

    def fence(self) -> ReadResult:
        """The generation words, asked for now. Once, when the payload is DONE, also while later payloads move.

        From any thread, for one exchange at a time, in their order.
        """


class Connection(Protocol):
    """A path to one node incarnation (address and epoch). It belongs to one thread, but for `cancel` and fences."""

    @property
    def name(self) -> str:
        """Of its transport."""

    @property
    def is_open(self) -> bool:
        """False once either side has closed, as far as this side can have heard of it.

        Costs no message and never waits. Whoever keeps connections asks before he uses one again: an owner drops
        connections that are idle. True is no promise: the owner may close right after the answer.
        """

    def read(
        self, descriptors: Sequence[ReadDescriptor], staging: npt.NDArray[np.uint8], deadline_s: float
    ) -> ReadResult:
        """`start`, `payload` and `fence` in one, with nothing else under way.

        When this returns no byte of the read can reach `staging` any more, unless the result has `ended`. After any
        status but DONE the connection is of no use and must be made anew.
        """

    def start(
        self, descriptors: Sequence[ReadDescriptor], staging: npt.NDArray[np.uint8], deadline_s: float
    ) -> Exchange | None:
        """Ask for the descriptors' bytes and return; `deadline_s` is a duration from now, for all steps of it.

        `staging` is one-dimensional and contiguous; descriptors must not overlap in it. Earlier exchanges may be under
        way; None means that this one cannot be until they have ended. Raises InvalidRequest, before anything was sent,
        for places that do not exist in `staging` and for numbers that do not fit the format; every other failure is in
        the results. Each exchange that was started must be taken to its end, or the connection be closed.
        """

    def cancel(self) -> None:
        """End what is going on, from another thread: it returns CANCELLED, unless it was done.

        The connection is of no use afterwards: a later read returns CANCELLED too. Idempotent.
        """

    def close(self) -> None:
        """End the path. Idempotent. Not while another thread reads: `cancel` first."""


class Transport(Protocol):
    """Makes connections. `name` is what `--transport` and statistics call it."""

    @property
    def name(self) -> str:
        """`tcp` or `nixl`."""

    @property
    def path(self) -> str:
        """The way that bytes go, for logs, metrics and `kvstore doctor`."""

    def connect(self, node: NodeInfo, deadline_s: float) -> Connection:
        """Connect to a node at its addresses and check that its epoch is the one named.

        Raises Unreachable, StaleReference (another epoch), Unauthorized or DeadlineExceeded.
        """

    def close(self) -> None:
        """Give back what it holds for all its connections, which are closed already. Idempotent."""
