from kvstore.rpc.v1 import node_pb2 as _node_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListNamespacesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NamespaceFigures(_message.Message):
    __slots__ = ("namespace_id", "namespace", "geometries", "chunks", "dram_bytes", "ssd_bytes", "evicted_chunks", "dram_hit_tokens", "ssd_hit_tokens", "dram_min_bytes", "dram_max_bytes", "ssd_min_bytes", "ssd_max_bytes")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    GEOMETRIES_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    DRAM_BYTES_FIELD_NUMBER: _ClassVar[int]
    SSD_BYTES_FIELD_NUMBER: _ClassVar[int]
    EVICTED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    DRAM_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SSD_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAM_MIN_BYTES_FIELD_NUMBER: _ClassVar[int]
    DRAM_MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    SSD_MIN_BYTES_FIELD_NUMBER: _ClassVar[int]
    SSD_MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    namespace: bytes
    geometries: _containers.RepeatedCompositeFieldContainer[Geometry]
    chunks: int
    dram_bytes: int
    ssd_bytes: int
    evicted_chunks: int
    dram_hit_tokens: int
    ssd_hit_tokens: int
    dram_min_bytes: int
    dram_max_bytes: int
    ssd_min_bytes: int
    ssd_max_bytes: int
    def __init__(self, namespace_id: _Optional[bytes] = ..., namespace: _Optional[bytes] = ..., geometries: _Optional[_Iterable[_Union[Geometry, _Mapping]]] = ..., chunks: _Optional[int] = ..., dram_bytes: _Optional[int] = ..., ssd_bytes: _Optional[int] = ..., evicted_chunks: _Optional[int] = ..., dram_hit_tokens: _Optional[int] = ..., ssd_hit_tokens: _Optional[int] = ..., dram_min_bytes: _Optional[int] = ..., dram_max_bytes: _Optional[int] = ..., ssd_min_bytes: _Optional[int] = ..., ssd_max_bytes: _Optional[int] = ...) -> None: ...

class Geometry(_message.Message):
    __slots__ = ("rectangles", "written_here")
    RECTANGLES_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_HERE_FIELD_NUMBER: _ClassVar[int]
    rectangles: _containers.RepeatedCompositeFieldContainer[_node_pb2.Rectangle]
    written_here: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, rectangles: _Optional[_Iterable[_Union[_node_pb2.Rectangle, _Mapping]]] = ..., written_here: _Optional[_Iterable[int]] = ...) -> None: ...

class ListNamespacesResponse(_message.Message):
    __slots__ = ("namespaces",)
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    namespaces: _containers.RepeatedCompositeFieldContainer[NamespaceFigures]
    def __init__(self, namespaces: _Optional[_Iterable[_Union[NamespaceFigures, _Mapping]]] = ...) -> None: ...

class ListChunksRequest(_message.Message):
    __slots__ = ("namespace_id", "up_to_key")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    UP_TO_KEY_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    up_to_key: bytes
    def __init__(self, namespace_id: _Optional[bytes] = ..., up_to_key: _Optional[bytes] = ...) -> None: ...

class ChunkRecord(_message.Message):
    __slots__ = ("key", "parent_key", "fingerprint", "parent_fingerprint", "token_count", "dram_shards", "ssd_shards", "unused_ms")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PARENT_KEY_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PARENT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    DRAM_SHARDS_FIELD_NUMBER: _ClassVar[int]
    SSD_SHARDS_FIELD_NUMBER: _ClassVar[int]
    UNUSED_MS_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    parent_key: bytes
    fingerprint: int
    parent_fingerprint: int
    token_count: int
    dram_shards: _containers.RepeatedScalarFieldContainer[int]
    ssd_shards: _containers.RepeatedScalarFieldContainer[int]
    unused_ms: int
    def __init__(self, key: _Optional[bytes] = ..., parent_key: _Optional[bytes] = ..., fingerprint: _Optional[int] = ..., parent_fingerprint: _Optional[int] = ..., token_count: _Optional[int] = ..., dram_shards: _Optional[_Iterable[int]] = ..., ssd_shards: _Optional[_Iterable[int]] = ..., unused_ms: _Optional[int] = ...) -> None: ...

class ListChunksResponse(_message.Message):
    __slots__ = ("chunks",)
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    chunks: _containers.RepeatedCompositeFieldContainer[ChunkRecord]
    def __init__(self, chunks: _Optional[_Iterable[_Union[ChunkRecord, _Mapping]]] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("name", "namespace_id", "key", "lifetime_ms")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    LIFETIME_MS_FIELD_NUMBER: _ClassVar[int]
    name: str
    namespace_id: bytes
    key: bytes
    lifetime_ms: int
    def __init__(self, name: _Optional[str] = ..., namespace_id: _Optional[bytes] = ..., key: _Optional[bytes] = ..., lifetime_ms: _Optional[int] = ...) -> None: ...

class PinResponse(_message.Message):
    __slots__ = ("pinned_chunks", "pinned_bytes", "refused_chunks")
    PINNED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    REFUSED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    pinned_chunks: int
    pinned_bytes: int
    refused_chunks: int
    def __init__(self, pinned_chunks: _Optional[int] = ..., pinned_bytes: _Optional[int] = ..., refused_chunks: _Optional[int] = ...) -> None: ...

class UnpinRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UnpinResponse(_message.Message):
    __slots__ = ("found",)
    FOUND_FIELD_NUMBER: _ClassVar[int]
    found: bool
    def __init__(self, found: bool = ...) -> None: ...

class ListPinsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PinFigures(_message.Message):
    __slots__ = ("name", "namespace_id", "key", "chunks", "bytes", "left_ms")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    LEFT_MS_FIELD_NUMBER: _ClassVar[int]
    name: str
    namespace_id: bytes
    key: bytes
    chunks: int
    bytes: int
    left_ms: int
    def __init__(self, name: _Optional[str] = ..., namespace_id: _Optional[bytes] = ..., key: _Optional[bytes] = ..., chunks: _Optional[int] = ..., bytes: _Optional[int] = ..., left_ms: _Optional[int] = ...) -> None: ...

class ListPinsResponse(_message.Message):
    __slots__ = ("pins",)
    PINS_FIELD_NUMBER: _ClassVar[int]
    pins: _containers.RepeatedCompositeFieldContainer[PinFigures]
    def __init__(self, pins: _Optional[_Iterable[_Union[PinFigures, _Mapping]]] = ...) -> None: ...

class WarmRequest(_message.Message):
    __slots__ = ("namespace_id", "key")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    key: bytes
    def __init__(self, namespace_id: _Optional[bytes] = ..., key: _Optional[bytes] = ...) -> None: ...

class WarmResponse(_message.Message):
    __slots__ = ("dram_chunks", "asked_chunks", "promoted_chunks")
    DRAM_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    ASKED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    PROMOTED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    dram_chunks: int
    asked_chunks: int
    promoted_chunks: int
    def __init__(self, dram_chunks: _Optional[int] = ..., asked_chunks: _Optional[int] = ..., promoted_chunks: _Optional[int] = ...) -> None: ...

class RemoveNamespaceRequest(_message.Message):
    __slots__ = ("namespace_id",)
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    def __init__(self, namespace_id: _Optional[bytes] = ...) -> None: ...

class RemoveNamespaceResponse(_message.Message):
    __slots__ = ("removed_chunks",)
    REMOVED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    removed_chunks: int
    def __init__(self, removed_chunks: _Optional[int] = ...) -> None: ...

class CheckRequest(_message.Message):
    __slots__ = ("sample_chunks", "repair")
    SAMPLE_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    REPAIR_FIELD_NUMBER: _ClassVar[int]
    sample_chunks: int
    repair: bool
    def __init__(self, sample_chunks: _Optional[int] = ..., repair: bool = ...) -> None: ...

class Finding(_message.Message):
    __slots__ = ("kind", "text", "key", "repaired")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    REPAIRED_FIELD_NUMBER: _ClassVar[int]
    kind: str
    text: str
    key: bytes
    repaired: bool
    def __init__(self, kind: _Optional[str] = ..., text: _Optional[str] = ..., key: _Optional[bytes] = ..., repaired: bool = ...) -> None: ...

class CheckResponse(_message.Message):
    __slots__ = ("chunks", "sampled_chunks", "findings")
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    chunks: int
    sampled_chunks: int
    findings: _containers.RepeatedCompositeFieldContainer[Finding]
    def __init__(self, chunks: _Optional[int] = ..., sampled_chunks: _Optional[int] = ..., findings: _Optional[_Iterable[_Union[Finding, _Mapping]]] = ...) -> None: ...

class ReplicateRequest(_message.Message):
    __slots__ = ("namespace", "geometries", "chain", "source")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    GEOMETRIES_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    geometries: _containers.RepeatedCompositeFieldContainer[Geometry]
    chain: _node_pb2.Chain
    source: _node_pb2.NodeInfo
    def __init__(self, namespace: _Optional[bytes] = ..., geometries: _Optional[_Iterable[_Union[Geometry, _Mapping]]] = ..., chain: _Optional[_Union[_node_pb2.Chain, _Mapping]] = ..., source: _Optional[_Union[_node_pb2.NodeInfo, _Mapping]] = ...) -> None: ...

class ReplicateResponse(_message.Message):
    __slots__ = ("held_chunks", "pulled_chunks", "pulled_bytes", "reason")
    HELD_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    PULLED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    PULLED_BYTES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    held_chunks: int
    pulled_chunks: int
    pulled_bytes: int
    reason: str
    def __init__(self, held_chunks: _Optional[int] = ..., pulled_chunks: _Optional[int] = ..., pulled_bytes: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("targets",)
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    targets: _containers.RepeatedCompositeFieldContainer[_node_pb2.NodeInfo]
    def __init__(self, targets: _Optional[_Iterable[_Union[_node_pb2.NodeInfo, _Mapping]]] = ...) -> None: ...

class DrainProgress(_message.Message):
    __slots__ = ("chunks", "moved_chunks", "failed_chunks", "reason")
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    MOVED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    FAILED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    chunks: int
    moved_chunks: int
    failed_chunks: int
    reason: str
    def __init__(self, chunks: _Optional[int] = ..., moved_chunks: _Optional[int] = ..., failed_chunks: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...
