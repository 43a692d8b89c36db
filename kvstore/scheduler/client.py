"""The synchronous client of the scheduler, for workers, gateways and the demo."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from kvstore.model.prefix import Keys
from kvstore.model.ticket import Ticket
from kvstore.rpc import wire
from kvstore.rpc.channel import Channel
from kvstore.rpc.v1 import scheduler_pb2, scheduler_pb2_grpc
from kvstore.scheduler import Worker


@dataclass(frozen=True, slots=True)
class Rated:
    """One candidate of a pick: its runs in chunks, its load in prompt tokens, and why it was (not) taken."""

    worker_id: str
    local_run: int
    pool_run: int
    queued_tokens: int
    reason: str


@dataclass(frozen=True, slots=True)
class Pick:
    """Where a request goes. `decode_worker_id` is empty where no decode worker is known; runs are in chunks."""

    prefill_worker_id: str
    decode_worker_id: str
    local_run: int
    pool_run: int
    policy: str
    candidates: tuple[Rated, ...]
    ticket: Ticket


class SchedulerClient:
    """One scheduler. Thread-safe, a context manager. Calls raise the errors of `kvstore.errors`."""

    def __init__(self, address: str) -> None:
        self._channel = Channel(address)
        self._stub = self._channel.stub(scheduler_pb2_grpc.SchedulerServiceStub)

    def __enter__(self) -> SchedulerClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the connection. Idempotent."""
        self._channel.close()

    def pick(
        self, request_id: str, keys: Keys, prompt_tokens: int, *, policy: str = "", deadline_s: float = 1.0
    ) -> Pick:
        """Choose workers for a prompt and get its ticket; raises NotFound while no prefill worker lives."""
        request = scheduler_pb2.PickRequest(
            request_id=request_id,
            chain=wire.chain_to_message(keys, with_fingerprints=False),
            prompt_tokens=prompt_tokens,
            policy=policy,
        )
        answer = self._channel.call(self._stub.Pick, request, deadline_s)
        return Pick(
            answer.prefill_worker_id,
            answer.decode_worker_id,
            answer.local_run,
            answer.pool_run,
            answer.policy,
            tuple(
                Rated(one.worker_id, one.local_run, one.pool_run, one.queued_tokens, one.reason)
                for one in answer.candidates
            ),
            wire.ticket_from_message(answer.ticket),
        )

    def report(
        self,
        worker: Worker,
        *,
        finished: Sequence[str] = (),
        lease_s: float = 3.0,
        leaving: bool = False,
        deadline_s: float = 1.0,
    ) -> None:
        """The worker lives for another `lease_s` seconds; these of its requests have ended."""
        request = scheduler_pb2.ReportRequest(
            worker=scheduler_pb2.WorkerStatus(
                worker_id=worker.worker_id,
                role=f"WORKER_ROLE_{worker.role.name}",
                node_id=worker.node_id,
                rectangles=[wire.rectangle_to_message(one) for one in worker.rectangles],
            ),
            finished_request_ids=finished,
            lease_ms=max(1, round(lease_s * 1000)),
            leaving=leaving,
        )
        self._channel.call(self._stub.Report, request, deadline_s)
