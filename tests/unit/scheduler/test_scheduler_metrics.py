"""A scheduler alone has a metrics page of its own, where its calls are counted."""

from __future__ import annotations

import asyncio
import contextlib
import urllib.request

import grpc

from kvstore.assemble import _start_router
from kvstore.config import RouterSettings
from kvstore.rpc.v1 import scheduler_pb2, scheduler_pb2_grpc
from tests.unit.samples import Samples


def test_calls_of_the_scheduler_are_on_its_page() -> None:
    async def main() -> str:
        settings = RouterSettings(address="127.0.0.1:0", metrics_address="127.0.0.1:0")
        async with contextlib.AsyncExitStack() as stack:
            facts = await _start_router(settings, "127.0.0.1:1", stack)
            async with grpc.aio.insecure_channel(facts["control_address"]) as channel:
                stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
                worker = scheduler_pb2.WorkerStatus(worker_id="w", role=scheduler_pb2.WORKER_ROLE_PREFILL, node_id="n")
                await stub.Report(scheduler_pb2.ReportRequest(worker=worker), timeout=5)
            return str(facts["metrics_address"])

    before = Samples()
    address = asyncio.run(main())
    labels = {"service": "SchedulerService", "method": "Report", "via": "grpc"}
    assert before.gained("requests_total", **labels, code="OK") == 1
    assert before.gained("request_seconds_count", **labels) == 1
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer:
        assert 'service="SchedulerService"' in answer.read().decode()


def test_it_is_off_unless_asked_for() -> None:
    assert RouterSettings().metrics_address == ""
