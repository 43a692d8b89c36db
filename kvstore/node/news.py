"""What the index has to be told of this node, as numbered events and snapshots. Pure, synchronous.

Events are kept until they are acknowledged, up to a bound; beyond it, and after a restart, the next thing told is a
snapshot of what the forest holds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from itertools import islice, takewhile

from kvstore.metadata import Batch, EventKind, IndexEvent
from kvstore.model.layout import Geometry
from kvstore.model.values import NodeInfo, Tier
from kvstore.node.chunks import Chunk, Forest
from kvstore.node.steps import Steps, finish

EVENTS_LIMIT = 200_000
"""Index events kept for the publisher; beyond that it must send a snapshot."""
SNAPSHOT_STEP_CHUNKS = 1000
"""Chunks of a snapshot that are looked at in one turn of the loop: about 2 ms."""

_Event = tuple[EventKind, bytes, bytes, bytes, int, Tier]
"""An IndexEvent as a tuple: one is made for every commit and eviction."""


class News:
    """The events of one node. `info` gives what the node says of itself; `on_event` is called when there is news."""

    def __init__(self, info: Callable[[], NodeInfo], forest: Forest) -> None:
        self.on_event: Callable[[], None] = lambda: None
        self._info = info
        self._forest = forest
        self._events: deque[_Event] = deque()
        self._news = False
        self._first_sequence = 1
        self._overflowed = False
        self._geometries: dict[tuple[bytes, Geometry], int] = {}
        """(namespace id, geometry) -> number of the newest event when it became known; these numbers only grow."""

    def __len__(self) -> int:
        """Events that are not acknowledged yet."""
        return len(self._events)

    def know(self, namespace_id: bytes, geometry: Geometry) -> None:
        """A geometry of this node, to be told with the events that need it."""
        self._geometries.setdefault((namespace_id, geometry), self.last_sequence)

    def take_batch(self, acknowledged: int, limit: int, *, resync: bool, lease_ms: int) -> list[Batch]:
        """All steps of `batch_steps` in one go."""
        return finish(self.batch_steps(acknowledged, limit, resync=resync, lease_ms=lease_ms))

    def batch_steps(self, acknowledged: int, limit: int, *, resync: bool, lease_ms: int) -> Steps[list[Batch]]:
        """What to publish next: events after `acknowledged`, or with `resync` (or after an overflow) a snapshot.

        A generator that returns it; other calls of the core may come between its steps, but no second one of this.
        Sequence numbers go on through a snapshot, so that a lost answer is only a repeat. A geometry is sent with
        every snapshot, and otherwise until an event that came after it is acknowledged.
        """
        self._news = False
        if resync or self._overflowed or acknowledged + 1 < self._first_sequence:
            return (yield from self._snapshot_steps(limit, lease_ms))
        while self._events and self._first_sequence <= acknowledged:
            self._events.popleft()
            self._first_sequence += 1
        events = [IndexEvent(*event) for event in islice(self._events, limit)]
        new = takewhile(lambda known: known[1] >= acknowledged, reversed(self._geometries.items()))
        return [Batch(self._info(), self._first_sequence, events, [pair for pair, _ in new], lease_ms=lease_ms)]

    def forget(self) -> None:
        """Drop events that nobody will publish (a pool without an index)."""
        self._first_sequence += len(self._events)
        self._events.clear()

    def start_anew(self) -> None:
        """What is here came without events (a restart): the next batch is a snapshot."""
        self.forget()
        self._overflowed = True

    @property
    def last_sequence(self) -> int:
        """Number of the newest event."""
        return self._first_sequence + len(self._events) - 1

    def _snapshot_steps(self, limit: int, lease_ms: int) -> Steps[list[Batch]]:
        """Everything that the index may know, under fresh sequence numbers; parents mostly before children.

        Events that happen between the steps are numbered behind the snapshot, whether it saw their effect or not.
        The index does not mind: a PUBLISH of what it has sets the same again, a WITHDRAW of what it has not does
        nothing, and a shard without such an event did not change. So it is right after the last of them.
        """
        first = self.last_sequence + 1
        self._first_sequence = first
        self._events.clear()
        self._overflowed = False
        done = False
        try:
            events: list[IndexEvent] = []
            for number, chunk in enumerate(list(self._forest.chunks.values()), 1):
                if chunk.published:
                    for shard in chunk.shards:
                        tier = Tier.DRAM if shard in chunk.copies else Tier.SSD
                        events.append(
                            IndexEvent(EventKind.PUBLISH, chunk.space.id, chunk.key, chunk.parent_key, shard, tier)
                        )
                if not number % SNAPSHOT_STEP_CHUNKS:
                    yield
            done = True
        finally:
            if not done:  # given up: the events from before are gone, so it has to be another snapshot
                self._overflowed = True
        self._first_sequence += len(events)  # an overflow meanwhile has moved it on, and leaves a gap
        batches = [
            Batch(self._info(), first + start, events[start : start + limit], lease_ms=lease_ms)
            for start in range(0, max(len(events), 1), limit)
        ]
        # Geometries that became known meanwhile are among them: nobody else gets a turn from here on.
        batches[0] = replace(batches[0], geometries=list(self._geometries), snapshot_begin=True)
        return batches

    def add(self, kind: EventKind, chunk: Chunk, shard: int, tier: Tier) -> None:
        """One event, numbered next."""
        if len(self._events) >= EVENTS_LIMIT:
            self._first_sequence += len(self._events)
            self._events.clear()
            self._overflowed = True
        self._events.append((kind, chunk.space.id, chunk.key, chunk.parent_key, shard, tier))
        if not self._news:  # once until the next look, not once an event
            self._news = True
            self.on_event()
