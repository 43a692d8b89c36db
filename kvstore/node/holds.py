"""What keeps chunks from being evicted for a while: leases of readers and pins of tickets. Pure, synchronous.

Both hold single chunks; leaf-first eviction then keeps the ancestors. Nothing here keeps a chunk for ever: every
hold has an end, the tables are bounded, and where a bound is reached the answer is "no lease", never a failure
(the fence of the read protects it all the same).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstore.node.chunks import Chunk

LEASES_PER_SESSION = 1024
LEASES = 65_536
TICKETS = 65_536
PINNED_SHARE = 0.25
"""Pins take at most this part of the tier."""


@dataclass(slots=True, eq=False)
class Lease:
    """`chunk` is the last one of the run that is being read."""

    session: int
    chunk: Chunk
    expires_s: float


@dataclass(slots=True, eq=False)
class TicketPins:
    """Chunks pinned for the reader of a ticket."""

    expires_s: float
    chunks: dict[Chunk, int] = field(default_factory=dict)
    """Chunk -> bytes that its pin counts."""


class Holds:
    """All leases and pins of a node."""

    def __init__(self, tier_bytes: int) -> None:
        self._limit_bytes = int(tier_bytes * PINNED_SHARE)
        self._next = 1
        self.leases: dict[int, Lease] = {}
        self.by_session: dict[int, set[int]] = {}
        self.tickets: dict[bytes, TicketPins] = {}
        self.pinned_bytes = 0

    def lease(self, session: int, chunk: Chunk, expires_s: float) -> int:
        """Number of a new lease; 0 where the session or the node has too many already."""
        mine = self.by_session.setdefault(session, set())
        if len(mine) >= LEASES_PER_SESSION or len(self.leases) >= LEASES:
            return 0
        number, self._next = self._next, self._next + 1
        chunk.holds += 1
        self.leases[number] = Lease(session, chunk, expires_s)
        mine.add(number)
        return number

    def end_lease(self, number: int) -> None:
        """Unknown numbers are no error: the lease may have run out."""
        lease = self.leases.pop(number, None)
        if lease is not None:
            lease.chunk.holds -= 1
            self.by_session[lease.session].discard(number)

    def end_session(self, session: int) -> None:
        """All leases of a session."""
        for number in list(self.by_session.get(session, ())):
            self.end_lease(number)
        self.by_session.pop(session, None)

    def pin(self, ticket_id: bytes, chunks: Sequence[Chunk], size_of: Callable[[Chunk], int], expires_s: float) -> int:
        """Pin chunks for a ticket, as far as the share of the tier allows. Returns how many were not pinned."""
        pins = self.tickets.get(ticket_id)
        if pins is None:
            if len(self.tickets) >= TICKETS:
                return len(chunks)
            pins = self.tickets[ticket_id] = TicketPins(expires_s)
        pins.expires_s = expires_s
        left_out = 0
        for chunk in chunks:
            # A chunk may have grown by a shard since it was pinned.
            before, size = pins.chunks.pop(chunk, None), size_of(chunk)
            self.pinned_bytes += size - (before or 0)
            chunk.holds += before is None
            pins.chunks[chunk] = size
            if self.pinned_bytes > self._limit_bytes:
                del pins.chunks[chunk]
                self.pinned_bytes -= size
                chunk.holds -= 1
                left_out += 1
        return left_out

    def end_ticket(self, ticket_id: bytes) -> None:
        """Unknown tickets are no error."""
        pins = self.tickets.pop(ticket_id, None)
        if pins is not None:
            for chunk, size in pins.chunks.items():
                chunk.holds -= 1
                self.pinned_bytes -= size

    def expire(self, now_s: float) -> None:
        """End what has run out."""
        for number in [n for n, lease in self.leases.items() if lease.expires_s <= now_s]:
            self.end_lease(number)
        for ticket_id in [t for t, pins in self.tickets.items() if pins.expires_s <= now_s]:
            self.end_ticket(ticket_id)

    def check(self, chunks: Sequence[Chunk]) -> None:
        """Every hold of a resident chunk is a lease or a pin of this table."""
        holds: dict[Chunk, int] = {}
        for lease in self.leases.values():
            holds[lease.chunk] = holds.get(lease.chunk, 0) + 1
        for pins in self.tickets.values():
            for chunk in pins.chunks:
                holds[chunk] = holds.get(chunk, 0) + 1
        for chunk in chunks:
            assert chunk.holds == holds.get(chunk, 0), "holds"
        assert self.pinned_bytes == sum(sum(pins.chunks.values()) for pins in self.tickets.values())
        assert self.pinned_bytes <= self._limit_bytes
