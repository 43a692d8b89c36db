"""`NodeApi` of a node in another process, for one session: by gRPC, or over the session's own Unix socket."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import Message

from kvstore.errors import InvalidRequest, KvStoreError
from kvstore.model.layout import Geometry, Rectangle
from kvstore.model.namespace import Namespace
from kvstore.model.prefix import Keys
from kvstore.model.side_object import NeededChunks, SideObject
from kvstore.model.values import NodeInfo, Outcome
from kvstore.node import AcquireAnswer, CommitAnswer, ReserveAnswer, SideAnswer, messages
from kvstore.rpc import handshake, wire
from kvstore.rpc.channel import Channel
from kvstore.rpc.v1 import node_pb2, node_pb2_grpc

NAME_LIMIT_BYTES = 128

Direct = Callable[[str, bytes, float], bytes]
"""(verb, request, deadline in seconds) -> response, over the Unix socket of the session."""


class RemoteNode:
    """One session with the node at `address`. Thread-safe. `session` 0 opens a session without shared memory.

    Raises Unreachable if the node does not answer within `deadline_s`.
    """

    def __init__(
        self, address: str, session: int = 0, name: str = "", deadline_s: float = 5.0, direct: Direct | None = None
    ) -> None:
        self._direct = direct
        self._channel = Channel(address)
        self._stub = self._channel.stub(node_pb2_grpc.NodeServiceStub)
        self.session = session
        self.info: NodeInfo | None = None
        if not session:
            request = node_pb2.OpenSessionRequest(client_name=_short(name))
            answer = self._channel.call(self._stub.OpenSession, request, deadline_s)
            self.session = answer.session
            self.info = wire.node_info_from_message(answer.node)

    def _verb(self, verb: str, request: Message, deadline_s: float) -> Any:
        """One of `handshake.VERBS`: over the session's socket where there is one and the request fits, else by gRPC."""
        if self._direct is not None and request.ByteSize() <= handshake.CALL_LIMIT_BYTES:
            response = self._direct(verb, request.SerializeToString(), deadline_s)
            return getattr(node_pb2, f"{verb}Response").FromString(response)
        return self._channel.call(getattr(self._stub, verb), request, deadline_s)

    def register_namespace(
        self, namespace: Namespace, geometry: Geometry | None, written_here: Sequence[int], deadline_s: float
    ) -> None:
        """See NodeApi."""
        request = node_pb2.RegisterNamespaceRequest(
            session=self.session,
            namespace=namespace.canonical,
            geometry=[] if geometry is None else wire.geometry_to_messages(geometry),
            written_here=written_here,
        )
        self._verb("RegisterNamespace", request, deadline_s)

    def reserve(
        self, keys: Keys, shard: int, ticket_id: bytes, deadline_s: float, wanted: Sequence[int] = ()
    ) -> ReserveAnswer:
        """See NodeApi."""
        request = node_pb2.ReserveRequest(
            session=self.session, chain=wire.chain_to_message(keys), shard=shard, ticket_id=ticket_id, wanted=wanted
        )
        answer = messages.reserve_from_message(self._verb("Reserve", request, deadline_s))
        _check_length(len(keys), answer.outcomes, answer.slots)
        return answer

    def commit(
        self, attempt: int, indices: Sequence[int], table_hashes: Sequence[int], last: bool, deadline_s: float
    ) -> CommitAnswer:
        """See NodeApi."""
        request = node_pb2.CommitRequest(
            session=self.session, attempt=attempt, indices=indices, table_hashes=table_hashes, last=last
        )
        answer = messages.commit_from_message(self._verb("Commit", request, deadline_s))
        _check_length(len(indices), answer.outcomes)
        return answer

    def abort(self, attempt: int, deadline_s: float) -> None:
        """See NodeApi."""
        request = node_pb2.AbortRequest(session=self.session, attempt=attempt)
        self._verb("Abort", request, deadline_s)

    def acquire(
        self, keys: Keys, rectangle: Rectangle, lease_ms: int, ticket_id: bytes, wait_ms: int, deadline_s: float
    ) -> AcquireAnswer:
        """See NodeApi."""
        request = node_pb2.AcquireRequest(
            session=self.session,
            chain=wire.chain_to_message(keys),
            rectangle=wire.rectangle_to_message(rectangle),
            lease_ms=lease_ms,
            ticket_id=ticket_id,
            wait_ms=wait_ms,
        )
        answer = messages.acquire_from_message(self._channel.call(self._stub.Acquire, request, deadline_s))
        if answer.run > len(keys):
            raise InvalidRequest(f"the node answered {answer.run} chunks for {len(keys)} keys; update one of the two")
        return answer

    def prefetch(self, keys: Keys, rectangle: Rectangle, deadline_s: float) -> tuple[int, int]:
        """See NodeApi."""
        request = node_pb2.PrefetchRequest(
            session=self.session, chain=wire.chain_to_message(keys), rectangle=wire.rectangle_to_message(rectangle)
        )
        answer = self._channel.call(self._stub.Prefetch, request, deadline_s)
        return answer.present_chunks, answer.dram_chunks

    def persist(self, keys: Keys, deadline_s: float) -> tuple[int, str]:
        """See NodeApi."""
        request = node_pb2.PersistRequest(session=self.session, chain=wire.chain_to_message(keys))
        answer = self._channel.call(self._stub.Persist, request, deadline_s)
        return answer.ssd_chunks, answer.reason

    def release(self, leases: Sequence[int], ticket_ids: Sequence[bytes], deadline_s: float) -> None:
        """See NodeApi."""
        request = node_pb2.ReleaseRequest(session=self.session, leases=leases, ticket_ids=b"".join(ticket_ids))
        self._verb("Release", request, deadline_s)

    def remove(self, namespace_id: bytes, keys: Sequence[bytes], deadline_s: float) -> int:
        """See NodeApi."""
        request = node_pb2.RemoveRequest(session=self.session, namespace_id=namespace_id, keys=b"".join(keys))
        return int(self._verb("Remove", request, deadline_s).removed_chunks)

    def put_side_objects(
        self,
        ticket_id: bytes,
        needed: NeededChunks,
        objects: Sequence[SideObject],
        lifetime_ms: int,
        deadline_s: float,
    ) -> int:
        """See NodeApi."""
        request = node_pb2.PutSideObjectsRequest(
            session=self.session,
            ticket_id=ticket_id,
            namespace_id=needed.namespace_id,
            last_key=needed.last_key,
            rectangle=wire.rectangle_to_message(needed.rectangle),
            lifetime_ms=lifetime_ms,
            objects=wire.side_objects_to_messages(objects),
        )
        return int(self._verb("PutSideObjects", request, deadline_s).lifetime_ms)

    def get_side_objects(self, ticket_id: bytes, names: Sequence[str], wait_ms: int, deadline_s: float) -> SideAnswer:
        """See NodeApi."""
        request = node_pb2.GetSideObjectsRequest(
            session=self.session, ticket_id=ticket_id, names=names, wait_ms=wait_ms
        )
        return messages.side_from_message(self._channel.call(self._stub.GetSideObjects, request, deadline_s))

    def drop_ticket(self, ticket_id: bytes, deadline_s: float) -> None:
        """See NodeApi."""
        self._verb("DropTicket", node_pb2.DropTicketRequest(session=self.session, ticket_id=ticket_id), deadline_s)

    def put(
        self, keys: Keys, shard: int, payloads: Iterable[npt.NDArray[np.uint8]], deadline_s: float
    ) -> list[Outcome]:
        """Send one shard of each key of a chain, for the node to store; one outcome a key.

        The shard's geometry must be registered. `payloads`: contiguous uint8 arrays of the shard's size, asked for
        one by one in another thread, so that one buffer can serve for all. Raises what they raise, CapacityExhausted
        if not even the first chunk fits, SessionLost, LayoutMismatch, NotFound, DeadlineExceeded, Unreachable.
        """
        source = _Payloads(payloads)
        requests = messages.put_requests(self.session, keys, shard, source)
        try:
            answer = self._channel.call(self._stub.Put, requests, min(deadline_s, messages.STREAM_LIMIT_S - 1))
        except KvStoreError:
            if source.error is not None:
                raise source.error from None
            raise
        outcomes = messages.put_from_message(answer)
        _check_length(len(keys), outcomes)
        return outcomes

    def stats(self, deadline_s: float) -> str:
        """The node's figures as a flat JSON object."""
        return str(self._channel.call(self._stub.Stats, node_pb2.StatsRequest(), deadline_s).json)

    def close(self) -> None:
        """End the connection."""
        self._channel.close()


class _Payloads:
    """Keeps the error of a source that fails in gRPC's thread, where it would only end the call."""

    def __init__(self, payloads: Iterable[npt.NDArray[np.uint8]]) -> None:
        self._payloads = payloads
        self.error: Exception | None = None

    def __iter__(self) -> Iterator[npt.NDArray[np.uint8]]:
        try:
            yield from self._payloads
        except Exception as exc:
            self.error = exc
            raise


def _short(name: str) -> str:
    return name.encode()[:NAME_LIMIT_BYTES].decode(errors="ignore")


def _check_length(count: int, *answers: Sequence[object]) -> None:
    if any(len(answer) != count for answer in answers):
        raise InvalidRequest("the node's answer has not one place for each that was asked; update one of the two")


def ask_info(address: str, deadline_s: float) -> NodeInfo:
    """What the node at a gRPC address says of itself; opens no session. Raises Unreachable, DeadlineExceeded."""
    channel = Channel(address)
    try:
        stub = channel.stub(node_pb2_grpc.NodeServiceStub)
        return wire.node_info_from_message(channel.call(stub.Stats, node_pb2.StatsRequest(), deadline_s).node)
    finally:
        channel.close()
