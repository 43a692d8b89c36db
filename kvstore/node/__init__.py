"""The node: the daemon that owns one host's share of the pool.

`NodeApi` is what a client needs of a node, as values; `kvstore.node.core` answers it, in the same process or
behind gRPC (`kvstore.rpc.remote_node`). Below it, from pure to world: `slots`, `chunks`, `catalog`, `pool`,
`reservations`, `holds`, `core`, `sessions`, `server`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # the supervisor imports modules of this package, and must not get numpy by it
    from kvstore.model.layout import Geometry, Rectangle
    from kvstore.model.namespace import Namespace
    from kvstore.model.prefix import Keys
    from kvstore.model.side_object import NeededChunks, SideObject
    from kvstore.model.values import MissReason, Outcome

RESERVATION_LIFETIME_MS = 30_000
TICKET_LIFETIME_MS = 60_000
LEASE_LIMIT_MS = 60_000
HANDOFF_WAIT_MS = 500
KEYS_LIMIT = 65_536
"""Most keys of one call."""


@dataclass(frozen=True, slots=True)
class ReserveAnswer:
    """`outcomes` and `slots` (4096-byte units, 0 where nothing was granted) are parallel to the keys."""

    attempt: int
    outcomes: list[Outcome]
    slots: list[int]


@dataclass(frozen=True, slots=True)
class CommitAnswer:
    """`outcomes` are parallel to the indices committed. `waiting`: (index, outcome, slot) of keys that were in
    progress at Reserve; a GRANTED one has a slot and waits for another Commit of the same attempt."""

    outcomes: list[Outcome]
    waiting: list[tuple[int, Outcome, int]]


@dataclass(frozen=True, slots=True)
class ShardPlace:
    """One stored shard that a read needs. `slot` is in 4096-byte units of the arena."""

    index: int
    shard: int
    slot: int
    generation: int
    table_hash: int
    rectangle: Rectangle


@dataclass(frozen=True, slots=True)
class AcquireAnswer:
    """`run` chunks from the first are covered; `places` lie in chunk order. `lease` 0 = nothing is leased."""

    run: int
    places: list[ShardPlace]
    lease: int
    lease_ms: int
    reason: MissReason | None
    epoch: int
    more: bool = False
    """The chunk after the run is on a slower tier of this node: ask again, starting there."""
    ssd_tokens: int = 0
    """Tokens of the run that this call found on the SSD."""


@dataclass(frozen=True, slots=True)
class SideAnswer:
    """Side objects of a ticket: all that were asked for, or none and why."""

    objects: tuple[SideObject, ...]
    reason: MissReason | None


class NodeApi(Protocol):
    """A node as seen by one session. Every call is bounded by `deadline_s` (a duration).

    Raises StaleReference/SessionLost, NotFound (unknown namespace), Unreachable, DeadlineExceeded.
    """

    def register_namespace(
        self, namespace: Namespace, geometry: Geometry | None, written_here: Sequence[int], deadline_s: float
    ) -> None:
        """Tell the node of a namespace and, for writers, how they cut its chunks. Idempotent."""

    def reserve(
        self, keys: Keys, shard: int, ticket_id: bytes, deadline_s: float, wanted: Sequence[int] = ()
    ) -> ReserveAnswer:
        """Ask for slots for one shard of each key of a whole chain. `ticket_id` may be empty.

        `wanted`: places to ask for, where other writers store the rest of the chain; none = all.
        """

    def commit(
        self, attempt: int, indices: Sequence[int], table_hashes: Sequence[int], last: bool, deadline_s: float
    ) -> CommitAnswer:
        """Make written shards visible. `last`: what was granted and not committed is given back."""

    def abort(self, attempt: int, deadline_s: float) -> None:
        """Give all slots of a reservation back; the caller has stopped writing into them."""

    def acquire(
        self, keys: Keys, rectangle: Rectangle, lease_ms: int, ticket_id: bytes, wait_ms: int, deadline_s: float
    ) -> AcquireAnswer:
        """Resolve keys to slots, leased for `lease_ms` (0: a probe that keeps nothing and reads nothing)."""

    def prefetch(self, keys: Keys, rectangle: Rectangle, deadline_s: float) -> tuple[int, int]:
        """A hint: begin to bring keys from slower tiers into DRAM. Returns (leading chunks on the node, in DRAM)."""

    def persist(self, keys: Keys, deadline_s: float) -> tuple[int, str]:
        """Wait until keys are on the SSD. Returns (leading chunks that are, why not the next; empty if all are)."""

    def release(self, leases: Sequence[int], ticket_ids: Sequence[bytes], deadline_s: float) -> None:
        """End leases and tickets. Unknown ones are no error."""

    def remove(self, namespace_id: bytes, keys: Sequence[bytes], deadline_s: float) -> int:
        """Remove keys and all below them. Returns how many chunks went."""

    def put_side_objects(
        self,
        ticket_id: bytes,
        needed: NeededChunks,
        objects: Sequence[SideObject],
        lifetime_ms: int,
        deadline_s: float,
    ) -> int:
        """Keep side objects for a ticket, all or none, until Release or for the lifetime returned (at most 60 s)."""

    def get_side_objects(self, ticket_id: bytes, names: Sequence[str], wait_ms: int, deadline_s: float) -> SideAnswer:
        """Side objects of these names (none: all that are there), once their chunks are readable on this node.

        Waits as long as objects or chunks of the ticket keep arriving within `wait_ms`; 0 does not wait.
        """

    def drop_ticket(self, ticket_id: bytes, deadline_s: float) -> None:
        """The writer gives the handoff up: its side objects and pins end, and who waits for it hears at once."""
