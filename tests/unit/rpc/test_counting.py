"""Every call is counted once, under its status code, whichever way it came and however it ended."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from test_serving import SERVICE, Loop, Running

from kvstore.client import connect
from kvstore.errors import (
    CapacityExhausted,
    DeadlineExceeded,
    InvalidRequest,
    KvStoreError,
    LimitExceeded,
    NotFound,
    StorageFailed,
)
from kvstore.rpc.counting import counted
from kvstore.rpc.v1 import admin_pb2, admin_pb2_grpc, metadata_pb2, node_pb2
from tests.chaos.node_thread import NodeThread
from tests.unit.client.pages import namespace
from tests.unit.samples import Samples


def count(before: Samples, method: str, code: str, via: str = "grpc", service: str = "MetadataService") -> float:
    return before.gained("requests_total", service=service, method=method, via=via, code=code)


@pytest.fixture
def running() -> Any:
    loop = Loop()
    running = Running(loop, without_deadline=[f"/{SERVICE}/Watch"])
    yield running
    running.close()
    loop.close()


def ended(before: Samples, method: str, code: str) -> bool:
    """The client may have its answer a moment before the server's handler is left."""
    never, end_s = threading.Event(), time.monotonic() + 10
    while count(before, method, code) != 1 and time.monotonic() < end_s:
        never.wait(0.001)
    return count(before, method, code) == 1


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (None, "OK"),
        (LimitExceeded("x"), "INVALID_ARGUMENT"),
        (NotFound("x"), "NOT_FOUND"),
        (CapacityExhausted("x"), "RESOURCE_EXHAUSTED"),
        (ZeroDivisionError("x"), "INTERNAL"),
    ],
)
def test_unary_calls_by_status_code(running: Running, failure: Exception | None, code: str) -> None:
    before = Samples()
    running.servicer.failure = failure
    try:
        running.publish()
    except KvStoreError:
        assert failure is not None
    assert ended(before, "Publish", code)
    assert before.by("requests_total", "code") == {code: 1}
    labels = {"service": "MetadataService", "method": "Publish", "via": "grpc"}
    assert before.gained("request_seconds_count", **labels) == 1


def test_streams_are_counted_when_they_end(running: Running) -> None:
    before = Samples()
    with pytest.raises(LimitExceeded):
        list(running.channel.stream(running.stub.Watch, metadata_pb2.WatchRequest(), 5))
    assert ended(before, "Watch", "INVALID_ARGUMENT")
    assert before.by("requests_total", "code") == {"INVALID_ARGUMENT": 1}


def test_a_call_that_was_given_up_is_cancelled(running: Running) -> None:
    before = Samples()
    with pytest.raises(DeadlineExceeded):
        running.channel.call(running.stub.Match, metadata_pb2.MatchRequest(), 0.2)
    assert ended(before, "Match", "CANCELLED")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (StorageFailed("x"), "UNAVAILABLE"),
        (asyncio.CancelledError(), "CANCELLED"),
        (GeneratorExit(), "CANCELLED"),
        (ValueError("x"), "INTERNAL"),
    ],
)
def test_the_error_that_leaves_the_block_names_the_code(error: BaseException, code: str) -> None:
    before = Samples()
    with pytest.raises(type(error)), counted("Service", "Method", "socket"):
        raise error
    assert before.by("requests_total", "code") == {code: 1}


def test_what_the_call_was_told_goes_before_the_error() -> None:
    before = Samples()
    with pytest.raises(ValueError), counted("Service", "Method", "grpc", lambda: grpc.StatusCode.ABORTED):
        raise ValueError
    with counted("Service", "Method", "grpc", lambda: grpc.StatusCode.OK):
        pass
    assert before.by("requests_total", "code") == {"ABORTED": 1, "OK": 1}


def test_verbs_on_the_socket_and_the_operators_service_count_too(tmp_path: Path) -> None:
    node = NodeThread(tmp_path, dram_bytes=1 << 20)
    try:
        before = Samples()
        with connect(node.info.socket_path) as client:
            client.bind(namespace())
            host: Any = client.host()
            host.api.release([1], [], 5.0)
            with pytest.raises(InvalidRequest):
                host.api.release([], [b"short"], 5.0)
            with pytest.raises(InvalidRequest, match="not a request message"):
                host.api._direct("Release", b"\xff", 5.0)
            other = node_pb2.ReleaseRequest(session=5).SerializeToString()
            with pytest.raises(KvStoreError, match="own session"):
                host.api._direct("Release", other, 5.0)
        kinds = before.by("requests_total", "code")
        assert count(before, "Release", "OK", "socket", "NodeService") == 1
        assert count(before, "Release", "INVALID_ARGUMENT", "socket", "NodeService") == 2
        assert count(before, "Release", "PERMISSION_DENIED", "socket", "NodeService") == 1, kinds
        with grpc.insecure_channel(node.info.control_address) as channel:
            admin_pb2_grpc.AdminServiceStub(channel).ListPins(admin_pb2.ListPinsRequest(), timeout=5)
        assert count(before, "ListPins", "OK", service="AdminService") == 1
    finally:
        node.stop()
