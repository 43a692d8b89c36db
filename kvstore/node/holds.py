"""What keeps chunks from being evicted for a while: leases of readers, pins of tickets, pins that an operator named,
moves of the node itself. Pure, synchronous.

All hold single chunks; leaf-first eviction then keeps the ancestors. Nothing here keeps a chunk for ever: every
hold has an end, the tables are bounded, and where a bound is reached the answer is "no lease", never a failure
(the fence of the read protects it all the same).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstore.errors import LimitExceeded
from kvstore.node.chunks import Chunk

LEASES_PER_SESSION = 1024
LEASES = 65_536
TICKETS = 65_536
NAMED_PINS = 1024
PIN_LIFETIME_LIMIT_S = 30 * 86_400.0
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
    arrived: int = 0
    """Chunks that came for it, pinned or not: it grows while its writers go on."""


@dataclass(slots=True, eq=False)
class NamedPin:
    """An operator's standing wish: keep the prefix that ends with `key`, as far as it is here, until `expires_s`.

    `waits`: something of it was not here, or was removed; it is to be looked for again.
    """

    name: str
    namespace_id: bytes
    key: bytes
    expires_s: float
    chunks: dict[Chunk, int] = field(default_factory=dict)
    """Chunk -> bytes that its pin counts."""
    waits: bool = True


class Holds:
    """All leases and pins of a node."""

    def __init__(self, tier_bytes: int) -> None:
        self._limit_bytes = int(tier_bytes * PINNED_SHARE)
        self._next = 1
        self.leases: dict[int, Lease] = {}
        self.by_session: dict[int, set[int]] = {}
        self.tickets: dict[bytes, TicketPins] = {}
        self.named: dict[str, NamedPin] = {}
        self.pinned_bytes = 0
        self.moving: Counter[Chunk] = Counter()

    def keep(self, chunk: Chunk) -> None:
        """Hold a chunk while the node itself moves its bytes; `let` ends that, once for each."""
        chunk.holds += 1
        self.moving[chunk] += 1

    def let(self, chunk: Chunk) -> None:
        """Undo one `keep`."""
        chunk.holds -= 1
        self.moving[chunk] -= 1
        if not self.moving[chunk]:
            del self.moving[chunk]

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
        pins.arrived += len(chunks)
        return sum(not self._hold(pins.chunks, chunk, size_of(chunk)) for chunk in chunks)

    def _hold(self, chunks: dict[Chunk, int], chunk: Chunk, size: int) -> bool:
        """Add a chunk to a pin's; False, and it is not held by this pin, if pins would take too much then."""
        before = chunks.pop(chunk, None)  # it may have grown by a shard since it was pinned
        self.pinned_bytes += size - (before or 0)
        chunk.holds += before is None
        chunks[chunk] = size
        if self.pinned_bytes <= self._limit_bytes:
            return True
        self._let_go(chunks, chunk)
        return False

    def _let_go(self, chunks: dict[Chunk, int], chunk: Chunk) -> None:
        self.pinned_bytes -= chunks.pop(chunk)
        chunk.holds -= 1

    def end_ticket(self, ticket_id: bytes) -> None:
        """Unknown tickets are no error."""
        pins = self.tickets.pop(ticket_id, None)
        if pins is not None:
            for chunk in list(pins.chunks):
                self._let_go(pins.chunks, chunk)

    def set_named(self, pin: NamedPin) -> None:
        """A new pin without chunks; one of the same name ends. Raises LimitExceeded over 1024 pins."""
        if pin.name not in self.named and len(self.named) >= NAMED_PINS:
            raise LimitExceeded(f"a node has at most {NAMED_PINS} pins; end some with `kvstore unpin`")
        self.end_named(pin.name)
        self.named[pin.name] = pin

    def extend_named(self, pin: NamedPin, chunks: Sequence[Chunk], size_of: Callable[[Chunk], int]) -> bool:
        """Keep these too, the next ones of the prefix; False as soon as pins would take too much."""
        return all(self._hold(pin.chunks, chunk, size_of(chunk)) for chunk in chunks)

    def end_named(self, name: str) -> bool:
        """True if there was such a pin."""
        pin = self.named.pop(name, None)
        if pin is None:
            return False
        for chunk in list(pin.chunks):
            self._let_go(pin.chunks, chunk)
        return True

    def forget(self, chunk: Chunk) -> None:
        """The chunk was removed although it was held: named pins, which last long, stop counting it and wait for it."""
        for pin in self.named.values():
            if chunk in pin.chunks:
                self._let_go(pin.chunks, chunk)
                pin.waits = True

    def expire(self, now_s: float) -> None:
        """End what has run out."""
        for number in [n for n, lease in self.leases.items() if lease.expires_s <= now_s]:
            self.end_lease(number)
        for ticket_id in [t for t, pins in self.tickets.items() if pins.expires_s <= now_s]:
            self.end_ticket(ticket_id)
        for name in [name for name, pin in self.named.items() if pin.expires_s <= now_s]:
            self.end_named(name)

    def figures(self) -> dict[str, int]:
        """For Stats: how much is held."""
        return {
            "leases": len(self.leases),
            "tickets": len(self.tickets),
            "pins": len(self.named),
            "pinned_bytes": self.pinned_bytes,
        }

    def check(self, chunks: Sequence[Chunk]) -> None:
        """Every hold of a resident chunk is a lease, a pin or a move of these tables."""
        holds: dict[Chunk, int] = dict(self.moving)
        for lease in self.leases.values():
            holds[lease.chunk] = holds.get(lease.chunk, 0) + 1
        pinned = [ticket.chunks for ticket in self.tickets.values()] + [pin.chunks for pin in self.named.values()]
        for each in pinned:
            for chunk in each:
                holds[chunk] = holds.get(chunk, 0) + 1
        for chunk in chunks:
            assert chunk.holds == holds.get(chunk, 0), "holds"
        assert self.pinned_bytes == sum(sum(each.values()) for each in pinned), "pinned bytes"
        assert self.pinned_bytes <= self._limit_bytes
