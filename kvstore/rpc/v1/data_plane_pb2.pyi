from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class OpenDataPlaneRequest(_message.Message):
    __slots__ = ("epoch", "credential")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CREDENTIAL_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    credential: bytes
    def __init__(self, epoch: _Optional[int] = ..., credential: _Optional[bytes] = ...) -> None: ...

class OpenDataPlaneResponse(_message.Message):
    __slots__ = ("epoch", "backend", "agent_metadata", "arena_address", "arena_bytes", "rdma_devices")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    AGENT_METADATA_FIELD_NUMBER: _ClassVar[int]
    ARENA_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    RDMA_DEVICES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    backend: str
    agent_metadata: bytes
    arena_address: int
    arena_bytes: int
    rdma_devices: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, epoch: _Optional[int] = ..., backend: _Optional[str] = ..., agent_metadata: _Optional[bytes] = ..., arena_address: _Optional[int] = ..., arena_bytes: _Optional[int] = ..., rdma_devices: _Optional[_Iterable[str]] = ...) -> None: ...
