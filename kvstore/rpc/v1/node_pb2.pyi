from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_UNSPECIFIED: _ClassVar[Outcome]
    OUTCOME_GRANTED: _ClassVar[Outcome]
    OUTCOME_PRESENT: _ClassVar[Outcome]
    OUTCOME_IN_PROGRESS: _ClassVar[Outcome]
    OUTCOME_COMMITTED: _ClassVar[Outcome]
    OUTCOME_LEFT_TO_OTHERS: _ClassVar[Outcome]
    OUTCOME_REFUSED_FULL: _ClassVar[Outcome]
    OUTCOME_REFUSED_CATALOG_FULL: _ClassVar[Outcome]
    OUTCOME_REFUSED_PARENT_MISSING: _ClassVar[Outcome]
    OUTCOME_REFUSED_SESSION_LIMIT: _ClassVar[Outcome]
    OUTCOME_REFUSED_STALE: _ClassVar[Outcome]
    OUTCOME_REFUSED_COLLISION: _ClassVar[Outcome]
    OUTCOME_REFUSED_QUOTA: _ClassVar[Outcome]
    OUTCOME_REFUSED_DRAINING: _ClassVar[Outcome]
OUTCOME_UNSPECIFIED: Outcome
OUTCOME_GRANTED: Outcome
OUTCOME_PRESENT: Outcome
OUTCOME_IN_PROGRESS: Outcome
OUTCOME_COMMITTED: Outcome
OUTCOME_LEFT_TO_OTHERS: Outcome
OUTCOME_REFUSED_FULL: Outcome
OUTCOME_REFUSED_CATALOG_FULL: Outcome
OUTCOME_REFUSED_PARENT_MISSING: Outcome
OUTCOME_REFUSED_SESSION_LIMIT: Outcome
OUTCOME_REFUSED_STALE: Outcome
OUTCOME_REFUSED_COLLISION: Outcome
OUTCOME_REFUSED_QUOTA: Outcome
OUTCOME_REFUSED_DRAINING: Outcome

class Rectangle(_message.Message):
    __slots__ = ("layer_start", "layer_stop", "head_start", "head_stop")
    LAYER_START_FIELD_NUMBER: _ClassVar[int]
    LAYER_STOP_FIELD_NUMBER: _ClassVar[int]
    HEAD_START_FIELD_NUMBER: _ClassVar[int]
    HEAD_STOP_FIELD_NUMBER: _ClassVar[int]
    layer_start: int
    layer_stop: int
    head_start: int
    head_stop: int
    def __init__(self, layer_start: _Optional[int] = ..., layer_stop: _Optional[int] = ..., head_start: _Optional[int] = ..., head_stop: _Optional[int] = ...) -> None: ...

class Chain(_message.Message):
    __slots__ = ("namespace_id", "parent_key", "keys", "fingerprints", "last_tokens")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    PARENT_KEY_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINTS_FIELD_NUMBER: _ClassVar[int]
    LAST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    parent_key: bytes
    keys: bytes
    fingerprints: _containers.RepeatedScalarFieldContainer[int]
    last_tokens: int
    def __init__(self, namespace_id: _Optional[bytes] = ..., parent_key: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., fingerprints: _Optional[_Iterable[int]] = ..., last_tokens: _Optional[int] = ...) -> None: ...

class OpenSessionRequest(_message.Message):
    __slots__ = ("client_name",)
    CLIENT_NAME_FIELD_NUMBER: _ClassVar[int]
    client_name: str
    def __init__(self, client_name: _Optional[str] = ...) -> None: ...

class OpenSessionResponse(_message.Message):
    __slots__ = ("session", "node", "idle_limit_ms")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    IDLE_LIMIT_MS_FIELD_NUMBER: _ClassVar[int]
    session: int
    node: NodeInfo
    idle_limit_ms: int
    def __init__(self, session: _Optional[int] = ..., node: _Optional[_Union[NodeInfo, _Mapping]] = ..., idle_limit_ms: _Optional[int] = ...) -> None: ...

class NodeInfo(_message.Message):
    __slots__ = ("node_id", "epoch", "host_id", "control_address", "data_address", "socket_path")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    CONTROL_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DATA_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SOCKET_PATH_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    epoch: int
    host_id: str
    control_address: str
    data_address: str
    socket_path: str
    def __init__(self, node_id: _Optional[str] = ..., epoch: _Optional[int] = ..., host_id: _Optional[str] = ..., control_address: _Optional[str] = ..., data_address: _Optional[str] = ..., socket_path: _Optional[str] = ...) -> None: ...

class RegisterNamespaceRequest(_message.Message):
    __slots__ = ("session", "namespace", "geometry", "written_here")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_HERE_FIELD_NUMBER: _ClassVar[int]
    session: int
    namespace: bytes
    geometry: _containers.RepeatedCompositeFieldContainer[Rectangle]
    written_here: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session: _Optional[int] = ..., namespace: _Optional[bytes] = ..., geometry: _Optional[_Iterable[_Union[Rectangle, _Mapping]]] = ..., written_here: _Optional[_Iterable[int]] = ...) -> None: ...

class RegisterNamespaceResponse(_message.Message):
    __slots__ = ("namespace_id", "namespace_number", "geometry_digest")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_DIGEST_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    namespace_number: int
    geometry_digest: int
    def __init__(self, namespace_id: _Optional[bytes] = ..., namespace_number: _Optional[int] = ..., geometry_digest: _Optional[int] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("session", "chain", "shard", "ticket_id", "wanted")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    session: int
    chain: Chain
    shard: int
    ticket_id: bytes
    wanted: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session: _Optional[int] = ..., chain: _Optional[_Union[Chain, _Mapping]] = ..., shard: _Optional[int] = ..., ticket_id: _Optional[bytes] = ..., wanted: _Optional[_Iterable[int]] = ...) -> None: ...

class ReserveResponse(_message.Message):
    __slots__ = ("attempt", "outcomes", "slots", "lifetime_ms")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    LIFETIME_MS_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    outcomes: _containers.RepeatedScalarFieldContainer[Outcome]
    slots: _containers.RepeatedScalarFieldContainer[int]
    lifetime_ms: int
    def __init__(self, attempt: _Optional[int] = ..., outcomes: _Optional[_Iterable[_Union[Outcome, str]]] = ..., slots: _Optional[_Iterable[int]] = ..., lifetime_ms: _Optional[int] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("session", "attempt", "indices", "table_hashes", "last")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    TABLE_HASHES_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    session: int
    attempt: int
    indices: _containers.RepeatedScalarFieldContainer[int]
    table_hashes: _containers.RepeatedScalarFieldContainer[int]
    last: bool
    def __init__(self, session: _Optional[int] = ..., attempt: _Optional[int] = ..., indices: _Optional[_Iterable[int]] = ..., table_hashes: _Optional[_Iterable[int]] = ..., last: bool = ...) -> None: ...

class CommitResponse(_message.Message):
    __slots__ = ("outcomes", "waiting_indices", "waiting_outcomes", "waiting_slots")
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    WAITING_INDICES_FIELD_NUMBER: _ClassVar[int]
    WAITING_OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    WAITING_SLOTS_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedScalarFieldContainer[Outcome]
    waiting_indices: _containers.RepeatedScalarFieldContainer[int]
    waiting_outcomes: _containers.RepeatedScalarFieldContainer[Outcome]
    waiting_slots: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, outcomes: _Optional[_Iterable[_Union[Outcome, str]]] = ..., waiting_indices: _Optional[_Iterable[int]] = ..., waiting_outcomes: _Optional[_Iterable[_Union[Outcome, str]]] = ..., waiting_slots: _Optional[_Iterable[int]] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("session", "attempt")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    session: int
    attempt: int
    def __init__(self, session: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AcquireRequest(_message.Message):
    __slots__ = ("session", "chain", "rectangle", "lease_ms", "ticket_id", "wait_ms")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    RECTANGLE_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    session: int
    chain: Chain
    rectangle: Rectangle
    lease_ms: int
    ticket_id: bytes
    wait_ms: int
    def __init__(self, session: _Optional[int] = ..., chain: _Optional[_Union[Chain, _Mapping]] = ..., rectangle: _Optional[_Union[Rectangle, _Mapping]] = ..., lease_ms: _Optional[int] = ..., ticket_id: _Optional[bytes] = ..., wait_ms: _Optional[int] = ...) -> None: ...

class ShardPlace(_message.Message):
    __slots__ = ("index", "shard", "slot", "slot_generation", "table_hash", "rectangle", "tier")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    SLOT_GENERATION_FIELD_NUMBER: _ClassVar[int]
    TABLE_HASH_FIELD_NUMBER: _ClassVar[int]
    RECTANGLE_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    index: int
    shard: int
    slot: int
    slot_generation: int
    table_hash: int
    rectangle: Rectangle
    tier: int
    def __init__(self, index: _Optional[int] = ..., shard: _Optional[int] = ..., slot: _Optional[int] = ..., slot_generation: _Optional[int] = ..., table_hash: _Optional[int] = ..., rectangle: _Optional[_Union[Rectangle, _Mapping]] = ..., tier: _Optional[int] = ...) -> None: ...

class AcquireResponse(_message.Message):
    __slots__ = ("run", "places", "lease", "lease_ms", "miss_reason", "epoch", "more", "ssd_tokens")
    RUN_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    MISS_REASON_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    SSD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    run: int
    places: _containers.RepeatedCompositeFieldContainer[ShardPlace]
    lease: int
    lease_ms: int
    miss_reason: str
    epoch: int
    more: bool
    ssd_tokens: int
    def __init__(self, run: _Optional[int] = ..., places: _Optional[_Iterable[_Union[ShardPlace, _Mapping]]] = ..., lease: _Optional[int] = ..., lease_ms: _Optional[int] = ..., miss_reason: _Optional[str] = ..., epoch: _Optional[int] = ..., more: bool = ..., ssd_tokens: _Optional[int] = ...) -> None: ...

class PrefetchRequest(_message.Message):
    __slots__ = ("session", "chain", "rectangle")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    RECTANGLE_FIELD_NUMBER: _ClassVar[int]
    session: int
    chain: Chain
    rectangle: Rectangle
    def __init__(self, session: _Optional[int] = ..., chain: _Optional[_Union[Chain, _Mapping]] = ..., rectangle: _Optional[_Union[Rectangle, _Mapping]] = ...) -> None: ...

class PrefetchResponse(_message.Message):
    __slots__ = ("present_chunks", "dram_chunks")
    PRESENT_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    DRAM_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    present_chunks: int
    dram_chunks: int
    def __init__(self, present_chunks: _Optional[int] = ..., dram_chunks: _Optional[int] = ...) -> None: ...

class PersistRequest(_message.Message):
    __slots__ = ("session", "chain")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    session: int
    chain: Chain
    def __init__(self, session: _Optional[int] = ..., chain: _Optional[_Union[Chain, _Mapping]] = ...) -> None: ...

class PersistResponse(_message.Message):
    __slots__ = ("ssd_chunks", "reason")
    SSD_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ssd_chunks: int
    reason: str
    def __init__(self, ssd_chunks: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("session", "leases", "ticket_ids")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    TICKET_IDS_FIELD_NUMBER: _ClassVar[int]
    session: int
    leases: _containers.RepeatedScalarFieldContainer[int]
    ticket_ids: bytes
    def __init__(self, session: _Optional[int] = ..., leases: _Optional[_Iterable[int]] = ..., ticket_ids: _Optional[bytes] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RemoveRequest(_message.Message):
    __slots__ = ("session", "namespace_id", "keys")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    session: int
    namespace_id: bytes
    keys: bytes
    def __init__(self, session: _Optional[int] = ..., namespace_id: _Optional[bytes] = ..., keys: _Optional[bytes] = ...) -> None: ...

class RemoveResponse(_message.Message):
    __slots__ = ("removed_chunks",)
    REMOVED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    removed_chunks: int
    def __init__(self, removed_chunks: _Optional[int] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatsResponse(_message.Message):
    __slots__ = ("node", "json")
    NODE_FIELD_NUMBER: _ClassVar[int]
    JSON_FIELD_NUMBER: _ClassVar[int]
    node: NodeInfo
    json: str
    def __init__(self, node: _Optional[_Union[NodeInfo, _Mapping]] = ..., json: _Optional[str] = ...) -> None: ...

class PutHeader(_message.Message):
    __slots__ = ("session", "chain", "shard")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    session: int
    chain: Chain
    shard: int
    def __init__(self, session: _Optional[int] = ..., chain: _Optional[_Union[Chain, _Mapping]] = ..., shard: _Optional[int] = ...) -> None: ...

class PutRequest(_message.Message):
    __slots__ = ("header", "data", "payload_hash")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_HASH_FIELD_NUMBER: _ClassVar[int]
    header: PutHeader
    data: bytes
    payload_hash: int
    def __init__(self, header: _Optional[_Union[PutHeader, _Mapping]] = ..., data: _Optional[bytes] = ..., payload_hash: _Optional[int] = ...) -> None: ...

class PutResponse(_message.Message):
    __slots__ = ("outcomes",)
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedScalarFieldContainer[Outcome]
    def __init__(self, outcomes: _Optional[_Iterable[_Union[Outcome, str]]] = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("session", "chain", "rectangle")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    RECTANGLE_FIELD_NUMBER: _ClassVar[int]
    session: int
    chain: Chain
    rectangle: Rectangle
    def __init__(self, session: _Optional[int] = ..., chain: _Optional[_Union[Chain, _Mapping]] = ..., rectangle: _Optional[_Union[Rectangle, _Mapping]] = ...) -> None: ...

class GetHead(_message.Message):
    __slots__ = ("index", "payload_bytes", "payload_hash")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_HASH_FIELD_NUMBER: _ClassVar[int]
    index: int
    payload_bytes: int
    payload_hash: int
    def __init__(self, index: _Optional[int] = ..., payload_bytes: _Optional[int] = ..., payload_hash: _Optional[int] = ...) -> None: ...

class GetResponse(_message.Message):
    __slots__ = ("head", "data", "end_reason")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    END_REASON_FIELD_NUMBER: _ClassVar[int]
    head: GetHead
    data: bytes
    end_reason: str
    def __init__(self, head: _Optional[_Union[GetHead, _Mapping]] = ..., data: _Optional[bytes] = ..., end_reason: _Optional[str] = ...) -> None: ...

class SideObject(_message.Message):
    __slots__ = ("name", "dtype", "shape", "data", "checksum")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    checksum: int
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ..., checksum: _Optional[int] = ...) -> None: ...

class PutSideObjectsRequest(_message.Message):
    __slots__ = ("session", "ticket_id", "namespace_id", "last_key", "rectangle", "lifetime_ms", "objects")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    LAST_KEY_FIELD_NUMBER: _ClassVar[int]
    RECTANGLE_FIELD_NUMBER: _ClassVar[int]
    LIFETIME_MS_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    session: int
    ticket_id: bytes
    namespace_id: bytes
    last_key: bytes
    rectangle: Rectangle
    lifetime_ms: int
    objects: _containers.RepeatedCompositeFieldContainer[SideObject]
    def __init__(self, session: _Optional[int] = ..., ticket_id: _Optional[bytes] = ..., namespace_id: _Optional[bytes] = ..., last_key: _Optional[bytes] = ..., rectangle: _Optional[_Union[Rectangle, _Mapping]] = ..., lifetime_ms: _Optional[int] = ..., objects: _Optional[_Iterable[_Union[SideObject, _Mapping]]] = ...) -> None: ...

class PutSideObjectsResponse(_message.Message):
    __slots__ = ("lifetime_ms",)
    LIFETIME_MS_FIELD_NUMBER: _ClassVar[int]
    lifetime_ms: int
    def __init__(self, lifetime_ms: _Optional[int] = ...) -> None: ...

class GetSideObjectsRequest(_message.Message):
    __slots__ = ("session", "ticket_id", "names", "wait_ms")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    session: int
    ticket_id: bytes
    names: _containers.RepeatedScalarFieldContainer[str]
    wait_ms: int
    def __init__(self, session: _Optional[int] = ..., ticket_id: _Optional[bytes] = ..., names: _Optional[_Iterable[str]] = ..., wait_ms: _Optional[int] = ...) -> None: ...

class GetSideObjectsResponse(_message.Message):
    __slots__ = ("objects", "miss_reason")
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    MISS_REASON_FIELD_NUMBER: _ClassVar[int]
    objects: _containers.RepeatedCompositeFieldContainer[SideObject]
    miss_reason: str
    def __init__(self, objects: _Optional[_Iterable[_Union[SideObject, _Mapping]]] = ..., miss_reason: _Optional[str] = ...) -> None: ...

class DropTicketRequest(_message.Message):
    __slots__ = ("session", "ticket_id")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    session: int
    ticket_id: bytes
    def __init__(self, session: _Optional[int] = ..., ticket_id: _Optional[bytes] = ...) -> None: ...

class DropTicketResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
