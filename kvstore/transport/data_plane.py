"""How a reader learns where a node's memory lies for NIXL: one gRPC call, answered only to peers with the secret."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from kvstore.errors import LimitExceeded, StaleReference, Unauthorized
from kvstore.rpc.channel import Channel
from kvstore.rpc.v1 import data_plane_pb2, data_plane_pb2_grpc

CREDENTIAL_LIMIT_BYTES = 4096


@dataclass(frozen=True, slots=True)
class DataPlane:
    """One node's memory as NIXL peers see it. Addresses are the node's own; sizes in bytes."""

    epoch: int
    backend: str
    agent_metadata: bytes
    arena_address: int
    arena_bytes: int
    rdma_devices: tuple[str, ...] = ()


class Ask(Protocol):
    """Asks a node for its data plane."""

    def __call__(self, address: str, epoch: int, credential: bytes, deadline_s: float) -> DataPlane:
        """Raises Unreachable, DeadlineExceeded, StaleReference, Unauthorized, NotFound (it offers none)."""


def ask(address: str, epoch: int, credential: bytes, deadline_s: float) -> DataPlane:
    """See Ask; `address` is the node's gRPC address."""
    channel = Channel(address)
    try:
        stub = channel.stub(data_plane_pb2_grpc.DataPlaneServiceStub)
        request = data_plane_pb2.OpenDataPlaneRequest(epoch=epoch, credential=credential)
        answer = channel.call(stub.OpenDataPlane, request, deadline_s)
    finally:
        channel.close()
    return DataPlane(
        answer.epoch,
        answer.backend,
        answer.agent_metadata,
        answer.arena_address,
        answer.arena_bytes,
        tuple(answer.rdma_devices),
    )


class DataPlaneServicer(data_plane_pb2_grpc.DataPlaneServiceServicer):
    """The owner's side. `plane()`: what NIXL offers now, or NotFound. `secret` empty lets everyone in."""

    def __init__(self, epoch: int, plane: Callable[[], DataPlane], secret: bytes = b"") -> None:
        self._epoch = epoch
        self._plane = plane
        self._secret = secret

    async def OpenDataPlane(
        self, request: data_plane_pb2.OpenDataPlaneRequest, _: Any
    ) -> data_plane_pb2.OpenDataPlaneResponse:
        """See the proto."""
        if len(request.credential) > CREDENTIAL_LIMIT_BYTES:
            raise LimitExceeded(f"a credential has at most {CREDENTIAL_LIMIT_BYTES} bytes")
        if not shows_secret(self._secret, request.credential):
            raise Unauthorized("the credential was not accepted")
        if request.epoch != self._epoch:
            raise StaleReference(f"the node's epoch is {self._epoch}, not {request.epoch}")
        plane = self._plane()
        return data_plane_pb2.OpenDataPlaneResponse(
            epoch=plane.epoch,
            backend=plane.backend,
            agent_metadata=plane.agent_metadata,
            arena_address=plane.arena_address,
            arena_bytes=plane.arena_bytes,
            rdma_devices=plane.rdma_devices,
        )


def shows_secret(secret: bytes, credential: bytes) -> bool:
    """True if `credential` is the secret, or none is set; takes the same time for every wrong one."""
    return not secret or hmac.compare_digest(secret, credential)
