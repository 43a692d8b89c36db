"""The index suite over `RemoteIndex` and a live metadata service on loopback."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from kvstore.metadata.remote import RemoteIndex
from kvstore.metadata.server import MetadataServer, serve_metadata
from tests.contract.index_suite import Copy, IndexSuite, Publisher, chain, events


class Service:
    """A metadata service in a thread with an event loop of its own."""

    def __init__(self, address: str = "127.0.0.1:0") -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._server = self._run(serve_metadata(address))
        self.address = self._server.address

    def _run(self, work: object) -> MetadataServer:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)  # type: ignore[arg-type]

    def stop(self) -> None:
        if self._loop.is_closed():
            return
        self._run(self._server.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


class TestRemoteIndex(IndexSuite):
    @pytest.fixture
    def service(self) -> Iterator[Service]:
        service = Service()
        yield service
        service.stop()

    @pytest.fixture
    def control_address(self, service: Service) -> str:
        return service.address

    @pytest.fixture
    def index(self, service: Service) -> Iterator[RemoteIndex]:
        index = RemoteIndex(service.address)
        yield index
        index.close()

    def test_a_watch_outlives_the_service(self, service: Service, one: Publisher, two: Publisher) -> None:
        one.send(events(chain(3)))
        two.send(events(chain(2)))
        watching = RemoteIndex(service.address)
        copy = Copy(watching)
        copy.wait(lambda: len(copy.index.nodes()) == 2)
        service.stop()
        again = Service(service.address)
        try:
            fresh = RemoteIndex(again.address)
            Publisher(fresh, one.node).send(events(chain(4)))
            copy.wait(lambda: self.runs(copy.index, chain(5)) == [("node-1", 4)])
            assert copy.dropped[-1] in ("node-1", "node-2")
            fresh.close()
        finally:
            watching.close()
            again.stop()
