"""The index's values <-> messages. Pure; incoming messages are distrusted as in `kvstore.rpc.wire`."""

from __future__ import annotations

from typing import Final

from kvstore.errors import InvalidRequest, LayoutMismatch
from kvstore.metadata import (
    EVENTS_A_BATCH_LIMIT,
    GEOMETRIES_A_NAMESPACE_LIMIT,
    NAMESPACES_A_NODE_LIMIT,
    Batch,
    EventKind,
    IndexEvent,
    NodeMatch,
    NodeStatus,
)
from kvstore.model.layout import Geometry
from kvstore.model.prefix import KEY_BYTES
from kvstore.model.values import Tier
from kvstore.rpc import wire
from kvstore.rpc.v1 import metadata_pb2

_KIND_TO_MESSAGE: Final = {
    EventKind.PUBLISH: metadata_pb2.EVENT_KIND_PUBLISH,
    EventKind.WITHDRAW: metadata_pb2.EVENT_KIND_WITHDRAW,
}
_KINDS: Final = {message: kind for kind, message in _KIND_TO_MESSAGE.items()}
_TIERS: Final = {int(tier): tier for tier in Tier}


def batch_to_message(batch: Batch) -> metadata_pb2.PublishRequest:
    """A batch as its publisher sends it and as watchers get it."""
    return metadata_pb2.PublishRequest(
        node=wire.node_info_to_message(batch.node),
        first_sequence=batch.first_sequence,
        events=[
            metadata_pb2.IndexEvent(
                kind=_KIND_TO_MESSAGE[event.kind],
                namespace_id=event.namespace_id,
                key=event.key,
                parent_key=event.parent_key,
                shard=event.shard,
                tier=event.tier.value,
            )
            for event in batch.events
        ],
        geometries=[
            metadata_pb2.NamespaceGeometry(
                namespace_id=namespace_id,
                geometry_digest=geometry.digest,
                rectangles=wire.geometry_to_messages(geometry),
            )
            for namespace_id, geometry in batch.geometries
        ],
        snapshot_begin=batch.snapshot_begin,
        lease_ms=batch.lease_ms,
        leaving=batch.leaving,
    )


def batch_from_message(message: metadata_pb2.PublishRequest) -> Batch:
    """Raises InvalidRequest, LimitExceeded or LayoutMismatch naming the field."""
    wire.check_count("events", len(message.events), EVENTS_A_BATCH_LIMIT)
    wire.check_count("geometries", len(message.geometries), NAMESPACES_A_NODE_LIMIT * GEOMETRIES_A_NAMESPACE_LIMIT)
    return Batch(
        wire.node_info_from_message(message.node),
        message.first_sequence,
        [_event_from_message(event) for event in message.events],
        [_geometry_from_message(geometry) for geometry in message.geometries],
        message.snapshot_begin,
        message.lease_ms,
        message.leaving,
    )


def _event_from_message(message: metadata_pb2.IndexEvent) -> IndexEvent:
    kind, tier = _KINDS.get(message.kind), _TIERS.get(message.tier)
    namespace_id, key, parent_key = message.namespace_id, message.key, message.parent_key
    if not len(namespace_id) == len(key) == len(parent_key) == KEY_BYTES:
        raise InvalidRequest(f"namespace_id, key and parent_key of an event have {KEY_BYTES} bytes each")
    if kind is None or tier is None:
        raise InvalidRequest(f"an event of kind {message.kind} on tier {message.tier}: no such kind or tier")
    return IndexEvent(kind, namespace_id, key, parent_key, message.shard, tier)


def _geometry_from_message(message: metadata_pb2.NamespaceGeometry) -> tuple[bytes, Geometry]:
    geometry = wire.geometry_from_messages(message.rectangles)
    if geometry.digest != message.geometry_digest:
        raise LayoutMismatch(
            f"geometry_digest is {message.geometry_digest:06x}, but its rectangles give {geometry.digest:06x}"
        )
    return wire.check_key("geometries.namespace_id", message.namespace_id), geometry


def match_to_message(match: NodeMatch) -> metadata_pb2.NodeMatch:
    """One node's run."""
    return metadata_pb2.NodeMatch(
        node=wire.node_info_to_message(match.node), run=match.run, tier=match.tier.value, suspect=match.suspect
    )


def match_from_message(message: metadata_pb2.NodeMatch) -> NodeMatch:
    """Raises InvalidRequest on an unknown tier."""
    tier = _TIERS.get(message.tier)
    if tier is None:
        raise InvalidRequest(f"node match on tier {message.tier}: no such tier")
    return NodeMatch(wire.node_info_from_message(message.node), message.run, tier, message.suspect)


def status_to_message(status: NodeStatus) -> metadata_pb2.NodeStatus:
    """One known node."""
    return metadata_pb2.NodeStatus(
        node=wire.node_info_to_message(status.node),
        suspect=status.suspect,
        applied_sequence=status.applied_sequence,
        shard_count=status.shard_count,
        silent_ms=status.silent_ms,
    )


def status_from_message(message: metadata_pb2.NodeStatus) -> NodeStatus:
    """Raises InvalidRequest or LimitExceeded naming the field."""
    return NodeStatus(
        wire.node_info_from_message(message.node),
        message.suspect,
        message.applied_sequence,
        message.shard_count,
        message.silent_ms,
    )
