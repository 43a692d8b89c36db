"""The metadata service: slow watchers, wrong addresses, silent nodes, its end."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from typing import Any

import pytest

from kvstore.errors import CapacityExhausted, ConfigurationError, InvalidRequest, StaleReference, Unreachable
from kvstore.metadata import EVENTS_A_BATCH_LIMIT, Batch, EventKind, IndexEvent
from kvstore.metadata.remote import RemoteIndex
from kvstore.metadata.server import WATCHERS_LIMIT, MetadataServer, serve_metadata
from kvstore.model.prefix import Keys
from kvstore.model.values import NodeInfo, Tier
from kvstore.rpc.channel import Channel
from kvstore.rpc.v1 import metadata_pb2, metadata_pb2_grpc

NAMESPACE = b"n" * 16
BACKLOG_EVENTS = 8_192
BATCHES = 30
WAIT_S = 10.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Service:
    """A metadata service in a thread with an event loop of its own."""

    def __init__(self) -> None:
        self.clock = Clock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._server: MetadataServer = self._run(
            serve_metadata("127.0.0.1:0", clock=self.clock, backlog_limit_events=BACKLOG_EVENTS)
        )
        self.address = self._server.address
        self.index = RemoteIndex(self.address)
        self.channel = Channel(self.address)
        self.stub: Any = self.channel.stub(metadata_pb2_grpc.MetadataServiceStub)

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_S)

    def node(self, number: int = 1) -> NodeInfo:
        return NodeInfo(f"node-{number}", 1, "host", self.address, "127.0.0.1:1")

    def watch(self) -> Any:
        return self.channel.stream(self.stub.Watch, metadata_pb2.WatchRequest(), None)

    def stop(self) -> None:
        if not self._loop.is_closed():
            self._run(self._server.stop())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(WAIT_S)
            self._loop.close()

    def close(self) -> None:
        self.index.close()
        self.channel.close()
        self.stop()


@pytest.fixture
def service() -> Iterator[Service]:
    service = Service()
    yield service
    service.close()


def some_events(first: int, count: int) -> list[IndexEvent]:
    keys = [number.to_bytes(16, "big") for number in range(first, first + count)]
    return [IndexEvent(EventKind.PUBLISH, NAMESPACE, key, NAMESPACE, 1 << 8, Tier.DRAM) for key in keys]


@pytest.mark.slow
def test_b08_a_slow_watcher_is_cut_off_and_nobody_waits_for_it(service: Service) -> None:
    slow = service.watch()
    assert next(slow).snapshot_end
    published = 0
    # Enough to fill the connection's buffers and then the backlog; a Publish that waited would miss its deadline.
    for _ in range(BATCHES):
        events = some_events(published + 1, EVENTS_A_BATCH_LIMIT)
        applied = service.index.publish(Batch(service.node(), published + 1, events))
        published += len(events)
        assert not applied.resync and applied.sequence == published
    delivered = 0
    with pytest.raises(StaleReference, match=str(BACKLOG_EVENTS)):
        for response in slow:
            delivered += len(response.batch.events)
    assert delivered < published
    again = service.watch()
    total = 0
    for response in again:
        if response.snapshot_end:
            break
        total += len(response.batch.events)
    assert total == published
    again.cancel()


@pytest.mark.parametrize("address", ["closed port", "0.0.0.0:7420", "[::]:7420", "nonsense", ""])
def test_b12_an_address_that_does_not_answer_is_refused_by_name(service: Service, address: str) -> None:
    if address == "closed port":
        with socket.create_server(("127.0.0.1", 0)) as listener:
            address = f"127.0.0.1:{listener.getsockname()[1]}"
    wrong = replace(service.node(), control_address=address)
    with pytest.raises(ConfigurationError, match="advertises the control address") as caught:
        service.index.publish(Batch(wrong, 1))
    assert repr(address) in str(caught.value)
    assert service.index.nodes() == []


def test_the_address_is_called_once_an_epoch(service: Service) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        node = replace(service.node(), control_address=f"127.0.0.1:{listener.getsockname()[1]}")
        service.index.publish(Batch(node, 1, some_events(1, 1)))
    assert service.index.publish(Batch(node, 2, some_events(2, 1))).sequence == 2
    for changed in (replace(node, epoch=2), replace(node, control_address="127.0.0.1:1")):
        with pytest.raises(ConfigurationError):
            service.index.publish(Batch(changed, 3))
    service.index.publish(Batch(node, 3, leaving=True))
    assert service.index.nodes() == []


def test_watchers_hear_of_a_node_that_went_silent(service: Service) -> None:
    dropped = threading.Event()
    known = threading.Event()
    end = service.index.watch(lambda batch: known.set(), lambda node_id: dropped.set() if known.is_set() else None)
    service.index.publish(Batch(service.node(), 1, some_events(1, 1), lease_ms=3000))
    assert known.wait(WAIT_S)
    service.clock.now_s += 4
    assert service.index.nodes()[0].suspect
    service.clock.now_s += 2
    assert dropped.wait(WAIT_S)
    assert service.index.nodes() == []
    end()


def test_watchers_are_bounded(service: Service) -> None:
    streams = [service.watch() for _ in range(WATCHERS_LIMIT)]
    for stream in streams:
        assert next(stream).snapshot_end
    with pytest.raises(CapacityExhausted, match=str(WATCHERS_LIMIT)):
        next(service.watch())
    for stream in streams:
        stream.cancel()


def test_stopping_ends_watches_at_once(service: Service) -> None:
    stream = service.watch()
    assert next(stream).snapshot_end
    service.stop()
    with pytest.raises(Unreachable):
        next(stream)
    with pytest.raises(Unreachable, match=service.address):
        service.index.nodes()


def test_hand_made_requests_are_checked(service: Service) -> None:
    node = metadata_pb2.PublishRequest().node
    node.node_id, node.epoch, node.control_address = "n", 1, service.address
    good = {"kind": 1, "namespace_id": NAMESPACE, "key": b"k" * 16, "parent_key": NAMESPACE, "shard": 256, "tier": 1}
    for change in (
        {"key": b"short"},
        {"parent_key": b""},
        {"namespace_id": b""},
        {"kind": 0},
        {"kind": 9},
        {"tier": 0},
    ):
        event: Any = {**good, **change}
        request = metadata_pb2.PublishRequest(
            node=node, first_sequence=1, lease_ms=1000, events=[metadata_pb2.IndexEvent(**event)]
        )
        with pytest.raises(InvalidRequest):
            service.channel.call(service.stub.Publish, request, 5)
    geometry = metadata_pb2.NamespaceGeometry(namespace_id=NAMESPACE, geometry_digest=1)
    geometry.rectangles.add(layer_stop=1, head_stop=1)
    request = metadata_pb2.PublishRequest(node=node, first_sequence=1, lease_ms=1000, geometries=[geometry])
    with pytest.raises(InvalidRequest, match="geometry_digest"):
        service.channel.call(service.stub.Publish, request, 5)
    with pytest.raises(InvalidRequest, match=r"chain\.namespace_id"):
        service.channel.call(service.stub.Match, metadata_pb2.MatchRequest(), 5)


def test_a_service_that_is_away_is_unreachable_at_once(service: Service) -> None:
    keys = Keys(NAMESPACE, NAMESPACE, b"k" * 16, None, 16, 16)
    nobody = RemoteIndex("127.0.0.1:1")
    with pytest.raises(Unreachable):
        nobody.match(keys)
    nobody.close()
    assert service.index.match(keys) == []
