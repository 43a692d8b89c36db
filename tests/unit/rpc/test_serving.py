"""What every server of the pool promises, shown on a real server on loopback."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvstore.errors import (
    CapacityExhausted,
    ConfigurationError,
    DeadlineExceeded,
    ForkedProcess,
    InvalidRequest,
    KvStoreError,
    LimitExceeded,
    Unreachable,
)
from kvstore.rpc.channel import Channel, format_address, parse_address
from kvstore.rpc.serving import Server, is_loopback
from kvstore.rpc.v1 import metadata_pb2, metadata_pb2_grpc

SERVICE = "kvstore.v1.MetadataService"


class Loop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


class Servicer(metadata_pb2_grpc.MetadataServiceServicer):
    """Publish fails as told; Match waits until it is let go; Watch counts and fails."""

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.entered = threading.Event()
        self.cancelled = threading.Event()

    async def Publish(self, request: Any, context: Any) -> Any:
        if self.failure is not None:
            raise self.failure
        return metadata_pb2.PublishResponse(applied_sequence=7)

    async def Match(self, request: Any, context: Any) -> Any:
        self.entered.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        for sequence in range(3):
            batch = metadata_pb2.PublishRequest(first_sequence=sequence)
            yield metadata_pb2.WatchResponse(batch=batch)
        raise LimitExceeded("at most 3")


class Running:
    def __init__(self, loop: Loop, **options: Any) -> None:
        self.loop = loop
        self.servicer = Servicer()
        self.address = loop.run(self._start(options))
        self.channel = Channel(self.address)
        self.stub: Any = self.channel.stub(metadata_pb2_grpc.MetadataServiceStub)

    async def _start(self, options: dict[str, Any]) -> str:
        self.server = Server([SERVICE], **options)
        self.server.add(metadata_pb2_grpc.add_MetadataServiceServicer_to_server, self.servicer)
        return await self.server.start("127.0.0.1:0")

    def publish(self) -> Any:
        return self.channel.call(self.stub.Publish, metadata_pb2.PublishRequest(), 5)

    def close(self) -> None:
        self.channel.close()
        self.loop.run(self.server.stop(0))


async def start_bare(address: str) -> str:
    return await Server([]).start(address)


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture
def running(loop: Loop) -> Iterator[Running]:
    running = Running(loop, without_deadline=[f"/{SERVICE}/Watch"])
    yield running
    running.close()


def test_an_answer(running: Running) -> None:
    assert running.publish().applied_sequence == 7


def test_an_error_of_the_tree_arrives_as_the_same_class(running: Running) -> None:
    running.servicer.failure = LimitExceeded("65 of at most 64")
    with pytest.raises(LimitExceeded, match="65 of at most 64") as caught:
        running.publish()
    assert isinstance(caught.value.__cause__, grpc.RpcError)
    assert caught.value.__cause__.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_an_unexpected_error_is_internal_and_logged(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    running.servicer.failure = ZeroDivisionError("secret detail")
    with caplog.at_level(logging.ERROR, "kvstore.rpc.serving"), pytest.raises(KvStoreError, match="INTERNAL") as caught:
        running.publish()
    assert "secret detail" not in str(caught.value)
    assert "secret detail" in caplog.text


def test_a_call_without_a_deadline_is_refused(running: Running) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        running.stub.Publish(metadata_pb2.PublishRequest())
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "deadline" in str(caught.value.details())


def test_a_named_stream_needs_no_deadline_and_maps_its_errors(running: Running) -> None:
    stream = running.channel.stream(running.stub.Watch, metadata_pb2.WatchRequest(), None)
    assert [next(stream).batch.first_sequence for _ in range(3)] == [0, 1, 2]
    with pytest.raises(LimitExceeded, match="at most 3"):
        next(stream)


def test_other_streams_need_one(loop: Loop) -> None:
    running = Running(loop)
    with pytest.raises(InvalidRequest, match="deadline"):
        next(running.channel.stream(running.stub.Watch, metadata_pb2.WatchRequest(), None))
    running.close()


def test_the_deadline_ends_the_call_on_both_sides(running: Running) -> None:
    with pytest.raises(DeadlineExceeded):
        running.channel.call(running.stub.Match, metadata_pb2.MatchRequest(), 0.2)
    assert running.servicer.cancelled.wait(5)
    with pytest.raises(DeadlineExceeded):
        running.channel.call(running.stub.Match, metadata_pb2.MatchRequest(), 0)


def test_too_many_calls_at_once_are_refused(loop: Loop) -> None:
    running = Running(loop, concurrent_calls_limit=1)
    held = running.stub.Match.future(metadata_pb2.MatchRequest(), timeout=10)
    assert running.servicer.entered.wait(5)
    with pytest.raises(CapacityExhausted):
        running.publish()
    held.cancel()
    assert running.servicer.cancelled.wait(5)
    running.close()


def test_health_and_reflection_answer_without_deadline(running: Running) -> None:
    health: Any = running.channel.stub(health_pb2_grpc.HealthStub)
    for service in ("", SERVICE):
        answer = health.Check(health_pb2.HealthCheckRequest(service=service))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    reflection: Any = running.channel.stub(reflection_pb2_grpc.ServerReflectionStub)
    asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    (answer,) = reflection.ServerReflectionInfo(asked, timeout=5)
    assert SERVICE in {service.name for service in answer.list_services_response.service}


def test_a_taken_port_is_a_clear_error(running: Running) -> None:
    with pytest.raises(ConfigurationError, match="port 0"):
        running.loop.run(start_bare(running.address))
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigurationError, match="cannot listen"):
        running.loop.run(start_bare(f"127.0.0.1:{taken.getsockname()[1]}"))


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "10.1.2.3:7420", "some-host:0"])
def test_addresses_that_others_can_reach_need_insecure(loop: Loop, address: str) -> None:
    with pytest.raises(ConfigurationError, match="--insecure"):
        loop.run(start_bare(address))


def test_insecure_allows_any_address(loop: Loop) -> None:
    async def start_and_stop() -> str:
        server = Server([])
        bound = await server.start("0.0.0.0:0", insecure=True)
        await server.stop(0)
        return bound

    host, port = parse_address(loop.run(start_and_stop()))
    assert host == "0.0.0.0" and port > 0


@pytest.mark.parametrize("address", ["", "7420", "host", "host:", ":7420", "host:x", "host:65536"])
def test_what_is_no_address(loop: Loop, address: str) -> None:
    with pytest.raises(InvalidRequest, match="HOST:PORT"):
        parse_address(address)
    with pytest.raises(ConfigurationError, match="HOST:PORT"):
        loop.run(start_bare(address))


def test_addresses_of_both_families() -> None:
    for address in ("127.0.0.1:1", "[::1]:7420", "name:80"):
        assert format_address(*parse_address(address)) == address
    assert is_loopback("127.9.9.9") and is_loopback("::1") and is_loopback("localhost")
    assert not is_loopback("0.0.0.0") and not is_loopback("example")


def test_a_stopped_server_ends_waiting_calls(loop: Loop) -> None:
    running = Running(loop)
    held = running.stub.Match.future(metadata_pb2.MatchRequest(), timeout=30)
    assert running.servicer.entered.wait(5)
    running.loop.run(running.server.stop(0.05))
    assert held.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    with pytest.raises(Unreachable, match=running.address):
        running.publish()
    running.close()


def test_a_closed_channel_says_so(running: Running) -> None:
    running.channel.close()
    running.channel.close()
    with pytest.raises(Unreachable, match="closed"):
        running.publish()


def _outcome_in_child(call: Callable[[], Any], answers: Any) -> None:
    try:
        call()
    except KvStoreError as exc:
        answers.put(type(exc).__name__)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_b14_a_forked_child_is_refused_and_the_parent_goes_on(running: Running) -> None:
    fork = multiprocessing.get_context("fork")
    answers = fork.SimpleQueue()
    child = fork.Process(target=_outcome_in_child, args=(running.publish, answers))
    child.start()
    child.join(20)
    assert answers.get() == ForkedProcess.__name__
    assert running.publish().applied_sequence == 7
