"""The index in memory: nodes with their epochs, sequences and leases; `presence` keeps what each one holds.

Invariants (`check()`): a node's entries are exactly the effect of its events 1..applied_sequence of its epoch, or
of a snapshot that ends there; every bound of `kvstore.metadata` holds; a dead node is gone. Liveness is a lease
on the clock of this index: suspect after `lease_ms` of silence, dropped after twice that. Synchronous, one owner.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from kvstore.errors import CapacityExhausted, InvalidRequest, KvStoreError, LayoutMismatch, LimitExceeded
from kvstore.metadata import (
    EVENTS_A_BATCH_LIMIT,
    GEOMETRIES_A_NAMESPACE_LIMIT,
    LEASE_LIMIT_MS,
    NAMESPACES_A_NODE_LIMIT,
    NODES_LIMIT,
    SHARDS_A_NODE_LIMIT,
    Applied,
    Batch,
    EventKind,
    IndexEvent,
    NodeMatch,
    NodeStatus,
)
from kvstore.metadata.presence import Presence, Shards
from kvstore.model.layout import Geometry, Rectangle
from kvstore.model.prefix import Keys
from kvstore.model.values import NodeInfo

_SNAPSHOT_EVENTS: Final = 1_024
"""Events of one batch of a snapshot."""


class _Node:
    """One node in one epoch."""

    __slots__ = ("applied_sequence", "heard_at_s", "info", "lease_ms", "presences")

    def __init__(self, info: NodeInfo) -> None:
        self.info = info
        self.applied_sequence = 0
        self.lease_ms = 0
        self.heard_at_s = 0.0
        self.presences: dict[bytes, Presence] = {}

    @property
    def shard_count(self) -> int:
        return sum(presence.shard_count for presence in self.presences.values())

    @property
    def geometries(self) -> list[tuple[bytes, Geometry]]:
        return [(name, geometry) for name, held in self.presences.items() for geometry in held.geometries.values()]

    def presence(self, namespace_id: bytes) -> Presence:
        """What it holds of a namespace, made on first use."""
        found = self.presences.get(namespace_id)
        if found is None:
            found = self.presences[namespace_id] = Presence(namespace_id)
        return found

    def forget_entries(self) -> None:
        """Forget what it holds, but not its geometries, which hold for the epoch."""
        geometries = self.geometries
        self.presences = {}
        self.add_geometries(geometries)

    def add_geometries(self, geometries: Sequence[tuple[bytes, Geometry]]) -> None:
        for namespace_id, geometry in geometries:
            self.presence(namespace_id).add_geometry(geometry)


class EmbeddedIndex:
    """`WatchedIndex` in memory. `clock` gives monotonic seconds; callbacks run inside the call that caused them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._nodes: dict[str, _Node] = {}
        self._listeners: list[tuple[Callable[[Batch], None], Callable[[str], None]]] = []

    def publish(self, batch: Batch) -> Applied:
        """See `Index.publish`."""
        _check_batch(batch)
        self.expire()
        node = self._nodes.get(batch.node.node_id)
        if node is not None and batch.node.epoch < node.info.epoch:
            return Applied(0, resync=False)
        if batch.leaving:
            self.drop_node(batch.node.node_id)
            return Applied(node.applied_sequence if node else 0, resync=False)
        is_new = node is None or batch.node.epoch > node.info.epoch
        known = _Node(batch.node) if node is None or is_new else node
        self._check_room(known, batch)
        self._nodes[batch.node.node_id] = known
        known.info, known.lease_ms, known.heard_at_s = batch.node, batch.lease_ms, self._clock()
        expected = known.applied_sequence + 1
        starts_over = batch.snapshot_begin and batch.first_sequence >= expected
        has_gap = not starts_over and batch.first_sequence > expected
        if starts_over:
            known.forget_entries()
            expected = batch.first_sequence
        known.add_geometries(batch.geometries)
        events = () if has_gap else batch.events[expected - batch.first_sequence :]
        _apply(known, events)
        known.applied_sequence = expected + len(events) - 1
        # Watchers get what was really applied, at least as a heartbeat; where an epoch begins with a gap, an empty
        # snapshot tells them to forget the one before.
        told = replace(
            batch, first_sequence=expected, events=events, snapshot_begin=starts_over or (is_new and has_gap)
        )
        for on_batch, _ in tuple(self._listeners):
            on_batch(told)
        return Applied(known.applied_sequence, resync=has_gap)

    def match(self, keys: Keys, rectangle: Rectangle | None = None) -> list[NodeMatch]:
        """See `Index.match`. Takes a dozen probes a node where its chains have no holes, else one a chunk."""
        self.expire()
        found = []
        for node in self._nodes.values():
            presence = node.presences.get(keys.namespace_id)
            run = presence.run(keys.blob, rectangle) if presence is not None else None
            if run is not None:
                found.append(NodeMatch(node.info, *run, suspect=self._is_suspect(node)))
        return sorted(found, key=lambda match: (match.suspect, -match.run, match.node.node_id))

    def drop_node(self, node_id: str) -> None:
        """See `Index.drop_node`."""
        if self._nodes.pop(node_id, None) is not None:
            for _, on_dropped in tuple(self._listeners):
                on_dropped(node_id)

    def nodes(self) -> list[NodeStatus]:
        """See `Index.nodes`."""
        self.expire()
        return [
            NodeStatus(
                node.info,
                self._is_suspect(node),
                node.applied_sequence,
                node.shard_count,
                int(self._silent_ms(node)),
            )
            for _, node in sorted(self._nodes.items())
        ]

    def snapshot(self) -> Iterator[Batch]:
        """See `Index.snapshot`. The copy is taken now (about 0.2 µs a chunk), the batches are built as asked for."""
        self.expire()
        frozen = [
            (
                Batch(node.info, 1, geometries=tuple(node.geometries), lease_ms=node.lease_ms),
                node.applied_sequence - node.shard_count + 1,
                [(namespace_id, held.frozen()) for namespace_id, held in node.presences.items()],
            )
            for _, node in sorted(self._nodes.items())
        ]
        return (batch for node in frozen for batch in _node_snapshot(*node))

    def watch(self, on_batch: Callable[[Batch], None], on_dropped: Callable[[str], None]) -> Callable[[], None]:
        """See `WatchedIndex.watch`. What is known is told before this returns."""
        for batch in self.snapshot():
            if batch.snapshot_begin:
                on_dropped(batch.node.node_id)
            on_batch(batch)
        return self.listen(on_batch, on_dropped)

    def listen(self, on_batch: Callable[[Batch], None], on_dropped: Callable[[str], None]) -> Callable[[], None]:
        """`watch` without what is known already: for callers that pass on a snapshot taken in the same step."""
        listener = (on_batch, on_dropped)
        self._listeners.append(listener)

        def end() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)

        return end

    def expire(self) -> None:
        """Drop nodes that were silent for twice their lease. Every other call does it first."""
        dead = [name for name, node in self._nodes.items() if self._silent_ms(node) >= 2 * node.lease_ms]
        for node_id in dead:
            self.drop_node(node_id)

    def check(self) -> None:
        """Raise KvStoreError unless all invariants hold."""
        if len(self._nodes) > NODES_LIMIT:
            raise KvStoreError(f"index invariant broken: {len(self._nodes)} nodes")
        for node_id, node in self._nodes.items():
            if node.info.node_id != node_id or not 0 <= node.shard_count <= node.applied_sequence:
                raise KvStoreError(f"index invariant broken: node {node_id}")
            for presence in node.presences.values():
                presence.check()

    def _silent_ms(self, node: _Node) -> float:
        return (self._clock() - node.heard_at_s) * 1000

    def _is_suspect(self, node: _Node) -> bool:
        return self._silent_ms(node) >= node.lease_ms

    def _check_room(self, node: _Node, batch: Batch) -> None:
        """Raise unless nodes, shards, namespaces and geometries stay within their bounds after this batch."""
        if batch.node.node_id not in self._nodes and len(self._nodes) >= NODES_LIMIT:
            raise CapacityExhausted(f"the index has {NODES_LIMIT} nodes already")
        if node.shard_count + len(batch.events) > SHARDS_A_NODE_LIMIT:
            raise CapacityExhausted(f"node {batch.node.node_id} would pass {SHARDS_A_NODE_LIMIT} shards")
        names = {event.namespace_id for event in batch.events} | {name for name, _ in batch.geometries}
        if len(names | node.presences.keys()) > NAMESPACES_A_NODE_LIMIT:
            raise LimitExceeded(f"node {batch.node.node_id} would pass {NAMESPACES_A_NODE_LIMIT} namespaces")
        known: dict[bytes, dict[int, Geometry]] = {}
        for namespace_id, geometry in (*(node.geometries if batch.geometries else ()), *batch.geometries):
            of_namespace = known.setdefault(namespace_id, {})
            if of_namespace.setdefault(geometry.digest, geometry) != geometry:
                raise LayoutMismatch(
                    f"two geometries of namespace {namespace_id.hex()} have the digest {geometry.digest:06x}: "
                    f"{of_namespace[geometry.digest].canonical.decode()} and {geometry.canonical.decode()}"
                )
            if len(of_namespace) > GEOMETRIES_A_NAMESPACE_LIMIT:
                raise LimitExceeded(f"a namespace has at most {GEOMETRIES_A_NAMESPACE_LIMIT} geometries on a node")


def _check_batch(batch: Batch) -> None:
    if not batch.node.node_id or batch.node.epoch < 1:
        raise InvalidRequest("a batch needs a node id and an epoch of at least 1")
    if batch.first_sequence < 1:
        raise InvalidRequest(f"first_sequence is {batch.first_sequence}; events are numbered from 1")
    if not 1 <= batch.lease_ms <= LEASE_LIMIT_MS:
        raise LimitExceeded(f"lease_ms is {batch.lease_ms}; it must be in 1..{LEASE_LIMIT_MS}")
    if len(batch.events) > EVENTS_A_BATCH_LIMIT:
        raise LimitExceeded(f"a batch has at most {EVENTS_A_BATCH_LIMIT} events, not {len(batch.events)}")
    for event in batch.events:
        if event.key == event.parent_key or event.key == event.namespace_id:
            raise InvalidRequest(f"key {event.key.hex()} is its own parent or its namespace's id")


def _apply(node: _Node, events: Sequence[IndexEvent]) -> None:
    for event in events:
        presence = node.presence(event.namespace_id)
        if event.kind is EventKind.PUBLISH:
            presence.publish(event.key, event.parent_key, event.shard, event.tier)
        else:
            presence.withdraw(event.key, event.shard, event.tier)


def _node_snapshot(
    first: Batch, first_sequence: int, held: list[tuple[bytes, Iterator[tuple[bytes, bytes, Shards]]]]
) -> Iterator[Batch]:
    """Batches of one node; `first` is the empty one that the others are made from."""
    events: list[IndexEvent] = []
    batch = replace(first, first_sequence=first_sequence, snapshot_begin=True)
    for namespace_id, chunks in held:
        for key, parent_key, shards in chunks:
            for shard, tier in shards:
                events.append(IndexEvent(EventKind.PUBLISH, namespace_id, key, parent_key, shard, tier))
            if len(events) >= _SNAPSHOT_EVENTS:
                yield replace(batch, events=events)
                batch = replace(first, first_sequence=batch.first_sequence + len(events), geometries=())
                events = []
    if events or batch.snapshot_begin:
        yield replace(batch, events=events)
