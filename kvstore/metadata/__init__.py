"""The index: which node holds which shard of which prefix. A hint, never the truth.

`Index` is the protocol of the package; `embedded` keeps it in memory, `remote` speaks to the metadata
service (`server`), both pass `tests/contract/index_suite.py`. Only what a node has published is in it; leaf-first makes
the presence of a chain a prefix per node.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from kvstore.model.layout import Geometry, Rectangle
from kvstore.model.prefix import Keys
from kvstore.model.values import NodeInfo, Tier

EVENTS_A_BATCH_LIMIT: Final = 4_096
"""Most events of one batch: they are applied in one piece, and nobody else is served meanwhile."""

LEASE_LIMIT_MS: Final = 600_000
"""Longest lease of a node."""

NODES_LIMIT: Final = 1_024
"""Most nodes of one index."""

NAMESPACES_A_NODE_LIMIT: Final = 4096
GEOMETRIES_A_NAMESPACE_LIMIT: Final = 64

SHARDS_A_NODE_LIMIT: Final = 16_777_216
"""Most shards of one node."""


class EventKind(enum.IntEnum):
    """What happened to a shard on a node."""

    PUBLISH = 1
    WITHDRAW = 2


@dataclass(frozen=True, slots=True)
class IndexEvent:
    """One change of one shard on one node. `parent_key` is the namespace id for the first chunk of a prompt.

    A node has one tier a shard: PUBLISH replaces the one known, WITHDRAW of another than the one known does nothing.
    """

    kind: EventKind
    namespace_id: bytes
    key: bytes
    parent_key: bytes
    shard: int
    tier: Tier


@dataclass(frozen=True, slots=True)
class Batch:
    """Events of one node in order. `first_sequence` numbers the first; an epoch counts 1, 2, 3, … without gaps.

    An empty batch is a heartbeat. `snapshot_begin`: the events start a full list of what the node holds, so
    everything older of this node is forgotten first. `geometries`: (namespace id, geometry) pairs needed to
    judge coverage, repeats are harmless. `lease_ms`: the node counts as suspect when it was silent for this
    long, as dead after twice that. `leaving`: drop the node now.
    """

    node: NodeInfo
    first_sequence: int
    events: Sequence[IndexEvent] = ()
    geometries: Sequence[tuple[bytes, Geometry]] = ()
    snapshot_begin: bool = False
    lease_ms: int = 3000
    leaving: bool = False


@dataclass(frozen=True, slots=True)
class Applied:
    """Answer to a batch: the highest sequence applied of this epoch; `resync` asks for a snapshot."""

    sequence: int
    resync: bool


@dataclass(frozen=True, slots=True)
class NodeMatch:
    """`run` chunks from the first are wholly covered by this node; `tier` is the slowest among them."""

    node: NodeInfo
    run: int
    tier: Tier
    suspect: bool


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """One known node. `silent_ms` is the time since its last batch."""

    node: NodeInfo
    suspect: bool
    applied_sequence: int
    shard_count: int
    silent_ms: int


class Index(Protocol):
    """Synchronous, one owner, no locks inside. Unknown nodes and keys are empty answers, never errors."""

    def publish(self, batch: Batch) -> Applied:
        """Apply a batch if its epoch is the node's newest and its sequence continues; else ask for a resync.

        Events already applied (by their sequence) change nothing. An older epoch is ignored: sequence 0, `resync`
        False. A newer epoch forgets the node's old entries; unless it is a snapshot or starts at sequence 1,
        resync is asked. Any batch of the newest epoch renews the lease. Raises InvalidRequest, LimitExceeded (a
        bound of this module), LayoutMismatch (two geometries with one digest) or CapacityExhausted (too many nodes
        or shards), and has then changed nothing of what the node holds.
        """

    def match(self, keys: Keys, rectangle: Rectangle | None = None) -> list[NodeMatch]:
        """Nodes with a run > 0, longest first, suspects last. `rectangle` None: any shard counts as presence.

        Coverage is judged per node and chunk by one geometry at a time.
        """

    def drop_node(self, node_id: str) -> None:
        """Forget a node and all that it holds."""

    def nodes(self) -> list[NodeStatus]:
        """All nodes that are not dead, by node id."""

    def snapshot(self) -> Iterable[Batch]:
        """The whole index, as of this call, as batches with `snapshot_begin` on each node's first; parents before
        children. To be applied to an index that does not know the node: sequence numbers count back from the
        last one applied, so they do not name the original events."""


class WatchedIndex(Index, Protocol):
    """An index that also tells others of its changes."""

    def watch(self, on_batch: Callable[[Batch], None], on_dropped: Callable[[str], None]) -> Callable[[], None]:
        """Call back with everything known, then with each change, in order: a copy fed by it stays equal.

        Each known node is told as dropped, then by its snapshot; later each applied batch and each dropped node. An
        implementation that loses touch starts again in the same way. Calls come from the thread that changes the
        index, or from a thread of the watch where the index is remote. Returns a function that ends the watch:
        after it returned there are no more calls.
        """
