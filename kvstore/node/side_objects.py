"""Side objects of handoffs: small named tensors that a node keeps for the reader of a ticket. Pure, synchronous.

Law: all or nothing. The objects of a ticket are handed out only while every chunk that their writers named is
readable on this node; they are put whole or not at all; a name never changes its bytes. They are no part of the cache:
they lie in the node's own memory, bounded for each ticket and in all, and end with Release of the ticket or when the
time that their writer asked for is up. The end of the session that wrote them changes nothing: the reader may come
after it. A writer that gives up leaves a mark in their place, so that a reader need not wait for what will not come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvstore.errors import CapacityExhausted, InvalidRequest, KvStoreError, LimitExceeded, NotFound, StaleReference
from kvstore.model.side_object import SIDE_BYTES_A_TICKET, SIDE_OBJECTS_A_TICKET, NeededChunks, SideObject
from kvstore.model.values import MissReason
from kvstore.node import TICKET_LIFETIME_MS, SideAnswer
from kvstore.node.chunks import Chunk
from kvstore.node.pool import Pool
from kvstore.node.steps import Steps

SIDE_BYTES: Final = 64 << 20
"""Most bytes of side objects on a node."""
SIDE_TICKETS: Final = 4096
"""Most tickets with side objects, or with the mark of a writer that gave up, on a node."""
STEP_CHUNKS: Final = 1024
"""Chunks that are looked at in one turn of the event loop: about 1 ms."""


@dataclass(slots=True, eq=False)
class _Handoff:
    """What is kept for one ticket. `dropped`: its writer gave up; then nothing else is kept."""

    expires_s: float
    objects: dict[str, SideObject] = field(default_factory=dict)
    needed: set[NeededChunks] = field(default_factory=set)
    dropped: bool = False

    @property
    def size_bytes(self) -> int:
        return sum(len(each.data) for each in self.objects.values())


class SideObjects:
    """All side objects of a node. `clock` gives monotonic seconds; counts go to the pool's."""

    def __init__(self, pool: Pool, clock: Callable[[], float]) -> None:
        self._pool = pool
        self._clock = clock
        self._handoffs: dict[bytes, _Handoff] = {}
        self._bytes = 0

    def put(self, ticket_id: bytes, needed: NeededChunks, objects: Sequence[SideObject], lifetime_ms: int) -> int:
        """Keep these objects for a ticket, all of them or, where this raises, none; returns their lifetime in ms.

        They live for `lifetime_ms`, at most 60 s, from now on, and what the ticket had before at least as long. An
        object that is there already with the same bytes is no error. Raises InvalidRequest (no object, other bytes
        under the same name), LimitExceeded (16 objects or 16 MiB a ticket), CapacityExhausted (the node is full),
        NotFound (unknown namespace), LayoutMismatch (a rectangle outside the layout), StaleReference (after `drop`).
        """
        try:
            self._check_needed(needed)
            handoff = self._live(ticket_id) or _Handoff(0.0)
            if handoff.dropped:
                raise StaleReference("the writer gave this handoff up; use a new ticket")
            fresh = _fresh(handoff, objects)
            self._check_room(ticket_id, handoff, needed, fresh)
        except KvStoreError:
            self._pool.counts["side_puts_refused"] += 1
            raise
        lifetime_ms = min(lifetime_ms, TICKET_LIFETIME_MS)
        handoff.expires_s = max(handoff.expires_s, self._clock() + lifetime_ms / 1000)
        handoff.objects |= fresh
        handoff.needed.add(needed)
        self._handoffs[ticket_id] = handoff
        self._bytes += sum(len(each.data) for each in fresh.values())
        self._pool.counts["side_objects_put"] += len(fresh)
        return lifetime_ms

    def _check_needed(self, needed: NeededChunks) -> None:
        space = self._pool.spaces.get(needed.namespace_id)
        if space is None:
            raise NotFound(f"namespace {needed.namespace_id.hex()[:8]} is not registered on this node")
        space.layout.check_rectangle(needed.rectangle)

    def _check_room(
        self, ticket_id: bytes, handoff: _Handoff, needed: NeededChunks, fresh: dict[str, SideObject]
    ) -> None:
        count, more_bytes = len(handoff.objects) + len(fresh), sum(len(each.data) for each in fresh.values())
        if count > SIDE_OBJECTS_A_TICKET or len(handoff.needed | {needed}) > SIDE_OBJECTS_A_TICKET:
            raise LimitExceeded(f"a ticket has at most {SIDE_OBJECTS_A_TICKET} side objects; this would make {count}")
        if handoff.size_bytes + more_bytes > SIDE_BYTES_A_TICKET:
            raise LimitExceeded(
                f"side objects of a ticket have at most {SIDE_BYTES_A_TICKET} bytes; these would make "
                f"{handoff.size_bytes + more_bytes}"
            )
        self._check_place(ticket_id)
        if self._bytes + more_bytes > SIDE_BYTES:
            raise CapacityExhausted(f"this node keeps at most {SIDE_BYTES} bytes of side objects; try again later")

    def _check_place(self, ticket_id: bytes) -> None:
        if ticket_id not in self._handoffs and len(self._handoffs) >= SIDE_TICKETS:
            raise CapacityExhausted(f"this node keeps side objects of at most {SIDE_TICKETS} tickets; try again later")

    def look(self, ticket_id: bytes, names: Sequence[str] = ()) -> Steps[SideAnswer]:
        """The objects of these names, or all that are there; in steps. Not counted: that is `count`.

        A chunk that leaves while its prefix is walked takes the last one with it, or left behind it (leaves go first),
        so that one is looked at again in the end.
        """
        handoff = self._live(ticket_id)
        if handoff is None:
            return SideAnswer((), MissReason.ABSENT)
        if handoff.dropped:
            return SideAnswer((), MissReason.DROPPED)
        if any(name not in handoff.objects for name in names):
            return SideAnswer((), MissReason.ABSENT)
        needed = tuple(handoff.needed)
        for each in needed:
            if not (yield from self._readable(each)):
                return SideAnswer((), MissReason.CHUNK_MISSING)
        if self._handoffs.get(ticket_id) is not handoff or any(self._last(each) is None for each in needed):
            return SideAnswer((), MissReason.CHUNK_MISSING)
        return SideAnswer(tuple(handoff.objects[name] for name in names or handoff.objects), None)

    def _last(self, needed: NeededChunks) -> Chunk | None:
        """The last chunk of a prefix, if a reader of the rectangle finds it on some tier."""
        chunk = self._pool.forest.get(needed.last_key)
        if chunk is None or chunk.space.id != needed.namespace_id:
            return None
        return chunk if chunk.covering_anywhere(needed.rectangle) is not None else None

    def _readable(self, needed: NeededChunks) -> Steps[bool]:
        """True if a reader of the rectangle finds all of the prefix."""
        chunk, seen = self._last(needed), 0
        while chunk is not None:
            if chunk.covering_anywhere(needed.rectangle) is None:
                return False
            if chunk.is_root:
                return True
            chunk, seen = chunk.parent, seen + 1
            if seen % STEP_CHUNKS == 0:
                yield
        return False

    def count(self, answer: SideAnswer) -> None:
        """This was the answer to a reader."""
        if answer.reason is not None:
            self._pool.counts[f"side_miss_{answer.reason.value}"] += 1
        self._pool.counts["side_objects_read"] += len(answer.objects)

    def size(self, ticket_id: bytes) -> int:
        """How many objects a ticket has: it grows while its writers go on."""
        handoff = self._live(ticket_id)
        return 0 if handoff is None else len(handoff.objects)

    def dropped(self, ticket_id: bytes) -> bool:
        """True if the ticket's writer gave up."""
        handoff = self._live(ticket_id)
        return handoff is not None and handoff.dropped

    def drop(self, ticket_id: bytes) -> None:
        """The writer gives the handoff up: its objects go, and for 60 s readers are told so. Idempotent.

        Raises CapacityExhausted where there is no room for the mark; then readers wait as for any other ticket.
        """
        if not self.dropped(ticket_id):
            self._check_place(ticket_id)
            self.end(ticket_id)
            self._pool.counts["side_tickets_dropped"] += 1
        self._handoffs[ticket_id] = _Handoff(self._clock() + TICKET_LIFETIME_MS / 1000, dropped=True)

    def end(self, ticket_id: bytes) -> None:
        """The ticket has ended. Unknown tickets are no error."""
        handoff = self._handoffs.pop(ticket_id, None)
        if handoff is not None:
            self._bytes -= handoff.size_bytes

    def expire(self) -> None:
        """End what has run out."""
        for ticket_id in list(self._handoffs):
            self._live(ticket_id)

    def _live(self, ticket_id: bytes) -> _Handoff | None:
        """What is kept for a ticket; it ends here if its time is up."""
        handoff = self._handoffs.get(ticket_id)
        if handoff is None or handoff.expires_s > self._clock():
            return handoff
        self.end(ticket_id)
        self._pool.counts["side_tickets_expired"] += not handoff.dropped
        return None

    def figures(self) -> dict[str, int]:
        """For Stats: how much is kept."""
        return {"side_tickets": len(self._handoffs), "side_bytes": self._bytes}

    def check(self) -> None:
        """Every invariant of this table."""
        assert self._bytes == sum(each.size_bytes for each in self._handoffs.values()) <= SIDE_BYTES, "side bytes"
        assert len(self._handoffs) <= SIDE_TICKETS
        for handoff in self._handoffs.values():
            assert handoff.dropped != bool(handoff.objects), "a ticket without objects"
            assert bool(handoff.needed) == bool(handoff.objects), "objects that belong to no chunk"
            assert max(len(handoff.objects), len(handoff.needed)) <= SIDE_OBJECTS_A_TICKET
            assert handoff.size_bytes <= SIDE_BYTES_A_TICKET
            assert all(name == each.name for name, each in handoff.objects.items())


def _fresh(handoff: _Handoff, objects: Sequence[SideObject]) -> dict[str, SideObject]:
    """Those that are not there yet; raises InvalidRequest where a name would have two meanings."""
    if not objects:
        raise InvalidRequest("there is no side object in this call")
    fresh: dict[str, SideObject] = {}
    for each in objects:
        known = handoff.objects.get(each.name) or fresh.get(each.name)
        if known is None:
            fresh[each.name] = each
        elif known != each:
            raise InvalidRequest(f"side object {each.name!r} of this ticket is there already, with other bytes")
    return fresh
