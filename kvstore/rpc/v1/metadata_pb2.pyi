from kvstore.rpc.v1 import node_pb2 as _node_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EventKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EVENT_KIND_UNSPECIFIED: _ClassVar[EventKind]
    EVENT_KIND_PUBLISH: _ClassVar[EventKind]
    EVENT_KIND_WITHDRAW: _ClassVar[EventKind]
EVENT_KIND_UNSPECIFIED: EventKind
EVENT_KIND_PUBLISH: EventKind
EVENT_KIND_WITHDRAW: EventKind

class IndexEvent(_message.Message):
    __slots__ = ("kind", "namespace_id", "key", "parent_key", "shard", "tier")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    PARENT_KEY_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    kind: EventKind
    namespace_id: bytes
    key: bytes
    parent_key: bytes
    shard: int
    tier: int
    def __init__(self, kind: _Optional[_Union[EventKind, str]] = ..., namespace_id: _Optional[bytes] = ..., key: _Optional[bytes] = ..., parent_key: _Optional[bytes] = ..., shard: _Optional[int] = ..., tier: _Optional[int] = ...) -> None: ...

class NamespaceGeometry(_message.Message):
    __slots__ = ("namespace_id", "geometry_digest", "rectangles")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_DIGEST_FIELD_NUMBER: _ClassVar[int]
    RECTANGLES_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    geometry_digest: int
    rectangles: _containers.RepeatedCompositeFieldContainer[_node_pb2.Rectangle]
    def __init__(self, namespace_id: _Optional[bytes] = ..., geometry_digest: _Optional[int] = ..., rectangles: _Optional[_Iterable[_Union[_node_pb2.Rectangle, _Mapping]]] = ...) -> None: ...

class PublishRequest(_message.Message):
    __slots__ = ("node", "first_sequence", "events", "geometries", "snapshot_begin", "lease_ms", "leaving")
    NODE_FIELD_NUMBER: _ClassVar[int]
    FIRST_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    GEOMETRIES_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_BEGIN_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    node: _node_pb2.NodeInfo
    first_sequence: int
    events: _containers.RepeatedCompositeFieldContainer[IndexEvent]
    geometries: _containers.RepeatedCompositeFieldContainer[NamespaceGeometry]
    snapshot_begin: bool
    lease_ms: int
    leaving: bool
    def __init__(self, node: _Optional[_Union[_node_pb2.NodeInfo, _Mapping]] = ..., first_sequence: _Optional[int] = ..., events: _Optional[_Iterable[_Union[IndexEvent, _Mapping]]] = ..., geometries: _Optional[_Iterable[_Union[NamespaceGeometry, _Mapping]]] = ..., snapshot_begin: bool = ..., lease_ms: _Optional[int] = ..., leaving: bool = ...) -> None: ...

class PublishResponse(_message.Message):
    __slots__ = ("applied_sequence", "resync")
    APPLIED_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    RESYNC_FIELD_NUMBER: _ClassVar[int]
    applied_sequence: int
    resync: bool
    def __init__(self, applied_sequence: _Optional[int] = ..., resync: bool = ...) -> None: ...

class MatchRequest(_message.Message):
    __slots__ = ("chain", "rectangle")
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    RECTANGLE_FIELD_NUMBER: _ClassVar[int]
    chain: _node_pb2.Chain
    rectangle: _node_pb2.Rectangle
    def __init__(self, chain: _Optional[_Union[_node_pb2.Chain, _Mapping]] = ..., rectangle: _Optional[_Union[_node_pb2.Rectangle, _Mapping]] = ...) -> None: ...

class NodeMatch(_message.Message):
    __slots__ = ("node", "run", "tier", "suspect")
    NODE_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    SUSPECT_FIELD_NUMBER: _ClassVar[int]
    node: _node_pb2.NodeInfo
    run: int
    tier: int
    suspect: bool
    def __init__(self, node: _Optional[_Union[_node_pb2.NodeInfo, _Mapping]] = ..., run: _Optional[int] = ..., tier: _Optional[int] = ..., suspect: bool = ...) -> None: ...

class MatchResponse(_message.Message):
    __slots__ = ("nodes",)
    NODES_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[NodeMatch]
    def __init__(self, nodes: _Optional[_Iterable[_Union[NodeMatch, _Mapping]]] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("batch", "dropped_node_id", "snapshot_end")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    DROPPED_NODE_ID_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_END_FIELD_NUMBER: _ClassVar[int]
    batch: PublishRequest
    dropped_node_id: str
    snapshot_end: bool
    def __init__(self, batch: _Optional[_Union[PublishRequest, _Mapping]] = ..., dropped_node_id: _Optional[str] = ..., snapshot_end: bool = ...) -> None: ...

class ListNodesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NodeStatus(_message.Message):
    __slots__ = ("node", "suspect", "applied_sequence", "shard_count", "silent_ms")
    NODE_FIELD_NUMBER: _ClassVar[int]
    SUSPECT_FIELD_NUMBER: _ClassVar[int]
    APPLIED_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SHARD_COUNT_FIELD_NUMBER: _ClassVar[int]
    SILENT_MS_FIELD_NUMBER: _ClassVar[int]
    node: _node_pb2.NodeInfo
    suspect: bool
    applied_sequence: int
    shard_count: int
    silent_ms: int
    def __init__(self, node: _Optional[_Union[_node_pb2.NodeInfo, _Mapping]] = ..., suspect: bool = ..., applied_sequence: _Optional[int] = ..., shard_count: _Optional[int] = ..., silent_ms: _Optional[int] = ...) -> None: ...

class ListNodesResponse(_message.Message):
    __slots__ = ("nodes",)
    NODES_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[NodeStatus]
    def __init__(self, nodes: _Optional[_Iterable[_Union[NodeStatus, _Mapping]]] = ...) -> None: ...
