"""The suite of ways to the SSD file over threads, over NIXL with both kinds of queue, and over a fake of NIXL."""

from __future__ import annotations

import pytest

from kvstore.nixl_library import load_nixl
from kvstore.node.arena import SsdIo
from kvstore.node.arena.ssd import SsdArena
from kvstore.node.arena.ssd_io import ThreadedIo
from kvstore.node.arena.ssd_nixl import QUEUES, NixlIo, make_agent
from tests.contract.fake_nixl import FakeNixl
from tests.contract.ssd_io_suite import Bytes, OpenIo, SsdIoSuite


class TestThreads(SsdIoSuite):
    way = "threads"

    @pytest.fixture
    def open_io(self) -> OpenIo:
        return lambda arena, memory: ThreadedIo(arena)


@pytest.mark.nixl
class TestNixl(SsdIoSuite):
    @pytest.fixture(params=QUEUES)
    def open_io(self, request: pytest.FixtureRequest) -> OpenIo:
        def opened(arena: SsdArena, memory: Bytes) -> SsdIo:
            library, queues = load_nixl(), {request.param: QUEUES[request.param]}
            io = NixlIo(arena, memory, library, *make_agent(library, queues))
            assert io.detail == f"nixl ({QUEUES[request.param]})"
            return io

        return opened


class TestNixlFake(SsdIoSuite):
    @pytest.fixture
    def open_io(self) -> OpenIo:
        library = FakeNixl().loaded
        return lambda arena, memory: NixlIo(arena, memory, library, *make_agent(library))
