"""Values <-> messages, and the error tree <-> gRPC status codes. Pure functions, no I/O.

Every `x_from_message` distrusts its input: lengths, ranges and limits are checked here, once, and a violation is
`InvalidRequest` or `LimitExceeded` naming field and bound. Keys travel as one `bytes` field of 16 bytes a key.
The values of the index have their conversions in `kvstore/metadata/messages.py`, because this module lies below
the index.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import grpc
import numpy as np

from kvstore import errors
from kvstore.errors import InvalidRequest, KvStoreError, LimitExceeded
from kvstore.model.layout import GEOMETRY_RECTANGLES_LIMIT, Geometry, Rectangle
from kvstore.model.prefix import KEY_BYTES, Keys
from kvstore.model.side_object import DIMENSIONS_LIMIT, SIDE_OBJECTS_A_TICKET, SideObject
from kvstore.model.ticket import Ticket, TicketRank
from kvstore.model.values import NodeInfo
from kvstore.rpc.v1 import node_pb2, scheduler_pb2

KEYS_A_CALL_LIMIT: Final = 65_536
"""Most keys (or index events) in one message."""

TEXT_LIMIT_BYTES: Final = 256
"""Longest name, address or path in a message, in bytes of UTF-8."""

TICKET_RANKS_LIMIT: Final = 1024
"""Most writing ranks of one ticket."""

MESSAGE_LIMIT_BYTES: Final = 17 << 20
"""Largest gRPC message, both ways: the largest legal one has the side objects of a ticket, 16 MiB."""

ERROR_METADATA_KEY: Final = "kvstore-error"
"""Trailing metadata that carries the class name of the error."""


# --- rectangles and geometries -------------------------------------------------------------------------------


def rectangle_to_message(rectangle: Rectangle) -> node_pb2.Rectangle:
    """One rectangle."""
    return node_pb2.Rectangle(
        layer_start=rectangle.layer_start,
        layer_stop=rectangle.layer_stop,
        head_start=rectangle.head_start,
        head_stop=rectangle.head_stop,
    )


def rectangle_from_message(message: node_pb2.Rectangle) -> Rectangle:
    """Raises LayoutMismatch on an empty rectangle. An absent field is the caller's to notice (`HasField`)."""
    return Rectangle(message.layer_start, message.layer_stop, message.head_start, message.head_stop)


def geometry_to_messages(geometry: Geometry) -> list[node_pb2.Rectangle]:
    """The rectangles in canonical order."""
    return [rectangle_to_message(rectangle) for rectangle in geometry.rectangles]


def geometry_from_messages(messages: Sequence[node_pb2.Rectangle]) -> Geometry:
    """Raises LimitExceeded or LayoutMismatch unless the rectangles are sorted and tile a chunk."""
    if len(messages) > GEOMETRY_RECTANGLES_LIMIT:
        raise LimitExceeded(f"a geometry has at most {GEOMETRY_RECTANGLES_LIMIT} rectangles, not {len(messages)}")
    return Geometry(tuple(rectangle_from_message(message) for message in messages))


# --- keys ----------------------------------------------------------------------------------------------------


def chain_to_message(keys: Keys, *, with_fingerprints: bool = True) -> node_pb2.Chain:
    """The chain of `keys`; without fingerprints where the receiver has no use for them (the index)."""
    fingerprints = keys.fingerprints if with_fingerprints else None
    return node_pb2.Chain(
        namespace_id=keys.namespace_id,
        parent_key=keys.parent,
        keys=keys.blob,
        fingerprints=None if fingerprints is None else fingerprints.tolist(),
        last_tokens=keys.last_tokens,
    )


def keys_from_message(message: node_pb2.Chain, chunk_tokens: int) -> Keys:
    """The keys of a chain whose namespace has `chunk_tokens` tokens a chunk.

    Raises InvalidRequest on a wrong length and LimitExceeded above KEYS_A_CALL_LIMIT keys. No key at all is legal.
    """
    check_key("chain.namespace_id", message.namespace_id)
    check_key("chain.parent_key", message.parent_key)
    check_key_blob("chain.keys", message.keys)
    count = len(message.keys) // KEY_BYTES
    fingerprints = None
    if len(message.fingerprints):
        if len(message.fingerprints) != count + 1:
            raise InvalidRequest(
                f"chain.fingerprints has {len(message.fingerprints)} values; {count} keys need {count + 1}"
            )
        fingerprints = np.fromiter(message.fingerprints, dtype=np.uint64, count=count + 1)
    last_tokens = (message.last_tokens or chunk_tokens) if count else 0
    return Keys(message.namespace_id, message.parent_key, message.keys, fingerprints, chunk_tokens, last_tokens)


def check_key(name: str, value: bytes) -> bytes:
    """`value`, or InvalidRequest naming the field unless it has 16 bytes."""
    if len(value) != KEY_BYTES:
        raise InvalidRequest(f"{name} has {len(value)} bytes; it needs {KEY_BYTES}")
    return value


def check_key_blob(name: str, value: bytes) -> bytes:
    """`value`, or an error naming the field unless it holds 0..KEYS_A_CALL_LIMIT keys or ids of 16 bytes each."""
    if len(value) % KEY_BYTES:
        raise InvalidRequest(f"{name} has {len(value)} bytes; it needs {KEY_BYTES} a key")
    check_count(name, len(value) // KEY_BYTES)
    return value


def check_count(name: str, count: int, limit: int = KEYS_A_CALL_LIMIT) -> None:
    """Raise LimitExceeded naming the field if it repeats more than `limit` times."""
    if count > limit:
        raise LimitExceeded(f"{name} has {count} entries; one call takes at most {limit}")


def check_text(name: str, value: str, *, required: bool = False) -> str:
    """`value`, or an error naming the field if it is longer than TEXT_LIMIT_BYTES or missing though required."""
    if required and not value:
        raise InvalidRequest(f"{name} is empty")
    if len(value.encode()) > TEXT_LIMIT_BYTES:
        raise LimitExceeded(f"{name} is longer than {TEXT_LIMIT_BYTES} bytes")
    return value


# --- nodes and tickets ---------------------------------------------------------------------------------------


def node_info_to_message(node: NodeInfo) -> node_pb2.NodeInfo:
    """What a node says of itself."""
    return node_pb2.NodeInfo(
        node_id=node.node_id,
        epoch=node.epoch,
        host_id=node.host_id,
        control_address=node.control_address,
        data_address=node.data_address,
        socket_path=node.socket_path,
    )


def node_info_from_message(message: node_pb2.NodeInfo) -> NodeInfo:
    """Raises InvalidRequest without node id or epoch, LimitExceeded on over-long text."""
    if not message.epoch:
        raise InvalidRequest("node.epoch is 0; epochs start at 1")
    return NodeInfo(
        check_text("node.node_id", message.node_id, required=True),
        message.epoch,
        check_text("node.host_id", message.host_id),
        check_text("node.control_address", message.control_address),
        check_text("node.data_address", message.data_address),
        check_text("node.socket_path", message.socket_path),
    )


def ticket_to_message(ticket: Ticket) -> scheduler_pb2.Ticket:
    """A handoff ticket."""
    return scheduler_pb2.Ticket(
        id=ticket.id,
        namespace_id=ticket.namespace_id,
        first_key=ticket.first_key,
        last_key=ticket.last_key,
        chunk_count=ticket.chunk_count,
        last_tokens=ticket.last_tokens,
        ranks=[
            scheduler_pb2.TicketRank(
                node_id=rank.node_id, epoch=rank.epoch, rectangle=rectangle_to_message(rank.rectangle)
            )
            for rank in ticket.ranks
        ],
    )


def ticket_from_message(message: scheduler_pb2.Ticket) -> Ticket:
    """Raises InvalidRequest or LimitExceeded naming the field."""
    check_count("ticket.ranks", len(message.ranks), TICKET_RANKS_LIMIT)
    check_count("ticket.chunk_count", message.chunk_count)
    return Ticket(
        check_key("ticket.id", message.id),
        check_key("ticket.namespace_id", message.namespace_id),
        check_key("ticket.first_key", message.first_key),
        check_key("ticket.last_key", message.last_key),
        message.chunk_count,
        message.last_tokens,
        tuple(
            TicketRank(
                check_text("ticket.ranks.node_id", rank.node_id, required=True),
                rank.epoch,
                rectangle_from_message(rank.rectangle),
            )
            for rank in message.ranks
        ),
    )


# --- side objects --------------------------------------------------------------------------------------------


def side_objects_to_messages(objects: Sequence[SideObject]) -> list[node_pb2.SideObject]:
    """In the same order."""
    return [
        node_pb2.SideObject(name=o.name, dtype=o.dtype, shape=o.shape, data=o.data, checksum=o.checksum)
        for o in objects
    ]


def side_objects_from_messages(messages: Sequence[node_pb2.SideObject]) -> list[SideObject]:
    """Raises InvalidRequest or LimitExceeded naming the object. Checksums are the reader's to compare."""
    check_count("objects", len(messages), SIDE_OBJECTS_A_TICKET)
    for message in messages:
        check_count("objects.shape", len(message.shape), DIMENSIONS_LIMIT)
    return [SideObject(m.name, m.dtype, tuple(m.shape), m.data, m.checksum) for m in messages]


# --- errors --------------------------------------------------------------------------------------------------

_STATUS_OF: Final[dict[type[KvStoreError], grpc.StatusCode]] = {
    KvStoreError: grpc.StatusCode.UNKNOWN,
    errors.ConfigurationError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.LayoutMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.StaleReference: grpc.StatusCode.ABORTED,
    errors.CapacityExhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.StorageFailed: grpc.StatusCode.UNAVAILABLE,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.Unreachable: grpc.StatusCode.UNAVAILABLE,
    errors.Unauthorized: grpc.StatusCode.PERMISSION_DENIED,
    errors.ForkedProcess: grpc.StatusCode.FAILED_PRECONDITION,
}
"""Status code of each class; a class that is not here has the code of its nearest base."""

_CLASS_OF: Final[dict[grpc.StatusCode, type[KvStoreError]]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidRequest,
    grpc.StatusCode.OUT_OF_RANGE: errors.LimitExceeded,
    grpc.StatusCode.FAILED_PRECONDITION: errors.LayoutMismatch,
    grpc.StatusCode.NOT_FOUND: errors.NotFound,
    grpc.StatusCode.ABORTED: errors.StaleReference,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.CapacityExhausted,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    grpc.StatusCode.UNAVAILABLE: errors.Unreachable,
    # gRPC ends calls in flight with CANCELLED when the server or the channel is closed under them.
    grpc.StatusCode.CANCELLED: errors.Unreachable,
    grpc.StatusCode.PERMISSION_DENIED: errors.Unauthorized,
    grpc.StatusCode.UNAUTHENTICATED: errors.Unauthorized,
}
"""Class for a status that came without a class name: from gRPC itself, a proxy or another implementation."""


def _tree(root: type[KvStoreError]) -> Iterable[type[KvStoreError]]:
    yield root
    for child in root.__subclasses__():
        yield from _tree(child)


_CLASS_BY_NAME: Final = {cls.__name__: cls for cls in _tree(KvStoreError) if cls.__module__ == errors.__name__}


def status_of(error: KvStoreError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]:
    """(status code, details, trailing metadata) that carry an error of the tree to the peer."""
    code = next(_STATUS_OF[cls] for cls in type(error).__mro__ if cls in _STATUS_OF)
    name = next(cls.__name__ for cls in type(error).__mro__ if cls.__name__ in _CLASS_BY_NAME)
    return code, str(error), ((ERROR_METADATA_KEY, name),)


def error_from_status(code: grpc.StatusCode, details: str, class_name: str = "") -> KvStoreError:
    """The error to raise: the named class of the tree, else by status code, else a plain KvStoreError."""
    cls = _CLASS_BY_NAME.get(class_name) or _CLASS_OF.get(code)
    return cls(details) if cls else KvStoreError(f"{code.name}: {details}")
