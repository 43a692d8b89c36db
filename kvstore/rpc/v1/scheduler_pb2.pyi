from kvstore.rpc.v1 import node_pb2 as _node_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_ROLE_UNSPECIFIED: _ClassVar[WorkerRole]
    WORKER_ROLE_PREFILL: _ClassVar[WorkerRole]
    WORKER_ROLE_DECODE: _ClassVar[WorkerRole]
WORKER_ROLE_UNSPECIFIED: WorkerRole
WORKER_ROLE_PREFILL: WorkerRole
WORKER_ROLE_DECODE: WorkerRole

class PickRequest(_message.Message):
    __slots__ = ("request_id", "chain", "prompt_tokens", "policy")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    chain: _node_pb2.Chain
    prompt_tokens: int
    policy: str
    def __init__(self, request_id: _Optional[str] = ..., chain: _Optional[_Union[_node_pb2.Chain, _Mapping]] = ..., prompt_tokens: _Optional[int] = ..., policy: _Optional[str] = ...) -> None: ...

class Candidate(_message.Message):
    __slots__ = ("worker_id", "local_run", "pool_run", "queued_tokens", "reason")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    LOCAL_RUN_FIELD_NUMBER: _ClassVar[int]
    POOL_RUN_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    local_run: int
    pool_run: int
    queued_tokens: int
    reason: str
    def __init__(self, worker_id: _Optional[str] = ..., local_run: _Optional[int] = ..., pool_run: _Optional[int] = ..., queued_tokens: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class TicketRank(_message.Message):
    __slots__ = ("node_id", "epoch", "rectangle")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RECTANGLE_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    epoch: int
    rectangle: _node_pb2.Rectangle
    def __init__(self, node_id: _Optional[str] = ..., epoch: _Optional[int] = ..., rectangle: _Optional[_Union[_node_pb2.Rectangle, _Mapping]] = ...) -> None: ...

class Ticket(_message.Message):
    __slots__ = ("id", "namespace_id", "first_key", "last_key", "chunk_count", "last_tokens", "ranks")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_KEY_FIELD_NUMBER: _ClassVar[int]
    LAST_KEY_FIELD_NUMBER: _ClassVar[int]
    CHUNK_COUNT_FIELD_NUMBER: _ClassVar[int]
    LAST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    id: bytes
    namespace_id: bytes
    first_key: bytes
    last_key: bytes
    chunk_count: int
    last_tokens: int
    ranks: _containers.RepeatedCompositeFieldContainer[TicketRank]
    def __init__(self, id: _Optional[bytes] = ..., namespace_id: _Optional[bytes] = ..., first_key: _Optional[bytes] = ..., last_key: _Optional[bytes] = ..., chunk_count: _Optional[int] = ..., last_tokens: _Optional[int] = ..., ranks: _Optional[_Iterable[_Union[TicketRank, _Mapping]]] = ...) -> None: ...

class PickResponse(_message.Message):
    __slots__ = ("prefill_worker_id", "decode_worker_id", "local_run", "pool_run", "policy", "candidates", "ticket")
    PREFILL_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    LOCAL_RUN_FIELD_NUMBER: _ClassVar[int]
    POOL_RUN_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    prefill_worker_id: str
    decode_worker_id: str
    local_run: int
    pool_run: int
    policy: str
    candidates: _containers.RepeatedCompositeFieldContainer[Candidate]
    ticket: Ticket
    def __init__(self, prefill_worker_id: _Optional[str] = ..., decode_worker_id: _Optional[str] = ..., local_run: _Optional[int] = ..., pool_run: _Optional[int] = ..., policy: _Optional[str] = ..., candidates: _Optional[_Iterable[_Union[Candidate, _Mapping]]] = ..., ticket: _Optional[_Union[Ticket, _Mapping]] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("worker_id", "role", "node_id", "rectangles")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    RECTANGLES_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: WorkerRole
    node_id: str
    rectangles: _containers.RepeatedCompositeFieldContainer[_node_pb2.Rectangle]
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[_Union[WorkerRole, str]] = ..., node_id: _Optional[str] = ..., rectangles: _Optional[_Iterable[_Union[_node_pb2.Rectangle, _Mapping]]] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("worker", "finished_request_ids", "lease_ms", "leaving")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    FINISHED_REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerStatus
    finished_request_ids: _containers.RepeatedScalarFieldContainer[str]
    lease_ms: int
    leaving: bool
    def __init__(self, worker: _Optional[_Union[WorkerStatus, _Mapping]] = ..., finished_request_ids: _Optional[_Iterable[str]] = ..., lease_ms: _Optional[int] = ..., leaving: bool = ...) -> None: ...

class ReportResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
