"""SchedulerService: picks workers by a local copy of the index and issues the handoff ticket.

The copy follows the metadata service in a thread (`RemoteIndex.watch`); every change is applied on the event
loop, which owns index and cluster state, before the thread takes the next one, so that nothing piles up. While
the metadata service is away the last copy is used until the leases in it end; then picks go by load alone.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from typing import Any, Final

from kvstore.errors import ConfigurationError, DeadlineExceeded, InvalidRequest, StaleReference
from kvstore.metadata import Batch, Index, NodeMatch
from kvstore.metadata.embedded import EmbeddedIndex
from kvstore.metadata.remote import RemoteIndex
from kvstore.model.layout import GEOMETRY_RECTANGLES_LIMIT, Geometry, Rectangle
from kvstore.model.prefix import Keys
from kvstore.model.ticket import Ticket, TicketRank
from kvstore.rpc import serving, wire
from kvstore.rpc.v1 import scheduler_pb2, scheduler_pb2_grpc
from kvstore.scheduler import Candidate, Policy, Request, Worker, WorkerRole, make_policy
from kvstore.scheduler.state import ClusterState, Runs

logger = logging.getLogger(__name__)

LEASE_DEFAULT_MS: Final = 3_000
LEASE_LIMIT_MS: Final = 60_000
NAMESPACES_LIMIT: Final = 4_096
"""Namespaces whose whole rectangle is remembered for tickets; the oldest is forgotten first."""

TICKET_ID_BYTES: Final = 16
_APPLY_DEADLINE_S: Final = 30.0
_ANY_CHUNK_TOKENS: Final = (1 << 32) - 1
"""The scheduler does not know a namespace's chunk size, and needs none to compare keys."""


class SchedulerService(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Owned by one event loop. `clock` is monotonic, in seconds."""

    def __init__(self, index: Index, policy: Policy, clock: Callable[[], float] = time.monotonic) -> None:
        self._index = index
        self._default_policy = policy
        self._decode_policy = make_policy("least_queued")
        self._state = ClusterState()
        self._clock = clock
        self._wholes: dict[bytes, Rectangle] = {}

    def follow(self, batch: Batch) -> None:
        """Apply one batch of the watched index. Raises StaleReference where the copy has a gap (it may have given
        up a node that the service still believed in), which makes the watch start again from a snapshot."""
        for namespace_id, geometry in batch.geometries:
            self._wholes[namespace_id] = _whole(geometry)
            if len(self._wholes) > NAMESPACES_LIMIT:
                del self._wholes[next(iter(self._wholes))]
        if self._index.publish(batch).resync:
            raise StaleReference(f"the scheduler's copy of node {batch.node.node_id} has a gap")

    def forget_node(self, node_id: str) -> None:
        """The metadata service says that the node is gone."""
        self._index.drop_node(node_id)

    async def Pick(self, request: scheduler_pb2.PickRequest, context: Any) -> scheduler_pb2.PickResponse:
        """Choose a prefill worker, and a decode worker where there is one; count both decisions."""
        asked = _request_from_message(request)
        policy = _named_policy(request.policy) if request.policy else self._default_policy
        now_s = self._clock()
        view = self._state.view(WorkerRole.PREFILL, self._runs(asked.keys), now_s)
        decision = policy.pick(asked, view)
        prefill = decision.chosen.worker
        self._state.assign(prefill.worker_id, asked.request_id, asked.prompt_tokens, now_s)
        decoders = self._state.view(WorkerRole.DECODE, lambda worker: (0, 0), now_s)
        decode_id = ""
        if decoders.candidates:
            decode_id = self._decode_policy.pick(asked, decoders).chosen.worker.worker_id
            self._state.assign(decode_id, asked.request_id, asked.prompt_tokens, now_s)
        return scheduler_pb2.PickResponse(
            prefill_worker_id=prefill.worker_id,
            decode_worker_id=decode_id,
            local_run=decision.chosen.local_run,
            pool_run=decision.chosen.pool_run,
            policy=decision.policy,
            candidates=[_candidate_to_message(*one) for one in zip(view.candidates, decision.reasons, strict=True)],
            ticket=wire.ticket_to_message(self._ticket(asked, request.chain.last_tokens, prefill)),
        )

    async def Report(self, request: scheduler_pb2.ReportRequest, context: Any) -> scheduler_pb2.ReportResponse:
        """Renew a worker's lease, count what has ended."""
        worker = _worker_from_message(request.worker)
        wire.check_count("finished_request_ids", len(request.finished_request_ids))
        self._state.finish(worker.worker_id, request.finished_request_ids)
        if request.leaving:
            self._state.leave(worker.worker_id)
        else:
            lease_ms = min(request.lease_ms or LEASE_DEFAULT_MS, LEASE_LIMIT_MS)
            self._state.report(worker, lease_ms / 1000, self._clock())
        return scheduler_pb2.ReportResponse()

    def _runs(self, keys: Keys) -> Runs:
        """Runs of a prompt for a worker: the minimum over its rectangles, because all its ranks must agree.

        A suspect node counts as empty: it would be read last, if at all.
        """
        found: dict[Rectangle | None, dict[str, int]] = {}

        def by_node(rectangle: Rectangle | None) -> dict[str, int]:
            if rectangle not in found:
                found[rectangle] = _run_by_node(self._index.match(keys, rectangle))
            return found[rectangle]

        def runs(worker: Worker) -> tuple[int, int]:
            matches = [by_node(rectangle) for rectangle in worker.rectangles or (None,)]
            return (
                min(match.get(worker.node_id, 0) for match in matches),
                min(max(match.values(), default=0) for match in matches),
            )

        return runs

    def _ticket(self, asked: Request, last_tokens: int, worker: Worker) -> Ticket:
        """The handoff of what `worker` will have written. Without ranks where its node or the namespace's extent
        is not known yet; the reader then finds the chunks by the index."""
        keys = asked.keys
        node = next((one.node for one in self._index.nodes() if one.node.node_id == worker.node_id), None)
        whole = self._wholes.get(keys.namespace_id)
        rectangles = worker.rectangles or ((whole,) if whole else ())
        ranks = tuple(TicketRank(node.node_id, node.epoch, one) for one in rectangles) if node else ()
        return Ticket(
            secrets.token_bytes(TICKET_ID_BYTES), keys.namespace_id, keys[0], keys[-1], len(keys), last_tokens, ranks
        )


class Router:
    """A running scheduler. `address` is the bound host:port."""

    def __init__(
        self, address: str, server: serving.Server, remote: RemoteIndex, end_watch: Callable[[], None]
    ) -> None:
        self.address = address
        self._server = server
        self._remote = remote
        self._end_watch = end_watch

    async def stop(self) -> None:
        """End the watch first (its thread needs the loop), then the server. Idempotent."""
        await asyncio.to_thread(self._end_watch)
        await self._server.stop()
        await asyncio.to_thread(self._remote.close)


async def serve_router(address: str, metadata_address: str, *, policy: str, insecure: bool) -> Router:
    """Start a scheduler that follows the index of the metadata service, which may come up later.

    Raises ConfigurationError for an unknown policy or an address that cannot be bound.
    """
    service = SchedulerService(EmbeddedIndex(), make_policy(policy))
    name = scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"].full_name
    server = serving.Server((name,))
    server.add(scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server, service)
    bound_address = await server.start(address, insecure=insecure)
    loop = asyncio.get_running_loop()
    remote = RemoteIndex(metadata_address)
    end_watch = await asyncio.to_thread(
        remote.watch, _on_loop(loop, service.follow), _on_loop(loop, service.forget_node)
    )
    return Router(bound_address, server, remote, end_watch)


def _on_loop(loop: asyncio.AbstractEventLoop, apply: Callable[[Any], None]) -> Callable[[Any], None]:
    """`apply` on the loop's thread; the caller waits, which is what bounds the queue."""

    async def applied(value: Any) -> None:
        apply(value)

    def call(value: Any) -> None:
        try:
            asyncio.run_coroutine_threadsafe(applied(value), loop).result(_APPLY_DEADLINE_S)
        except TimeoutError as exc:
            raise DeadlineExceeded(f"the event loop did not run for {_APPLY_DEADLINE_S:g} s") from exc

    return call


def _run_by_node(matches: list[NodeMatch]) -> dict[str, int]:
    return {match.node.node_id: match.run for match in matches if not match.suspect}


def _whole(geometry: Geometry) -> Rectangle:
    """The extent that a geometry tiles."""
    last = geometry.rectangles[-1]
    return Rectangle(0, last.layer_stop, 0, max(one.head_stop for one in geometry.rectangles))


def _named_policy(name: str) -> Policy:
    try:
        return make_policy(name)
    except ConfigurationError as exc:
        raise InvalidRequest(str(exc)) from exc


def _candidate_to_message(candidate: Candidate, reason: str) -> scheduler_pb2.Candidate:
    return scheduler_pb2.Candidate(
        worker_id=candidate.worker.worker_id,
        local_run=candidate.local_run,
        pool_run=candidate.pool_run,
        queued_tokens=candidate.queued_tokens,
        reason=reason,
    )


def _request_from_message(message: scheduler_pb2.PickRequest) -> Request:
    wire.check_text("request_id", message.request_id, required=True)
    keys = wire.keys_from_message(message.chain, _ANY_CHUNK_TOKENS)
    if not len(keys):
        raise InvalidRequest("chain.keys is empty; a prompt has at least one chunk")
    if not message.prompt_tokens:
        raise InvalidRequest("prompt_tokens is 0")
    return Request(message.request_id, keys, message.prompt_tokens)


def _worker_from_message(message: scheduler_pb2.WorkerStatus) -> Worker:
    wire.check_text("worker.worker_id", message.worker_id, required=True)
    wire.check_text("worker.node_id", message.node_id)
    wire.check_count("worker.rectangles", len(message.rectangles), GEOMETRY_RECTANGLES_LIMIT)
    try:
        role = WorkerRole(message.role)
    except ValueError as exc:
        raise InvalidRequest("worker.role must be WORKER_ROLE_PREFILL or WORKER_ROLE_DECODE") from exc
    rectangles = tuple(wire.rectangle_from_message(one) for one in message.rectangles)
    return Worker(message.worker_id, role, message.node_id, rectangles)
