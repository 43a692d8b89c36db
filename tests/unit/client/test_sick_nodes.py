"""Nodes that answer and cannot be read: what a client that asks again and again costs them (B15)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.client import Client, connect
from kvstore.client import nodes as nodes_module
from kvstore.errors import Unreachable
from kvstore.model.prefix import Keys
from kvstore.model.values import MissReason, NodeInfo
from kvstore.transport import Connection
from kvstore.transport.tcp import TcpTransport
from tests.chaos.node_thread import NodeThread
from tests.unit.client.pages import namespace, pages_of, poisoned, prompt
from tests.unit.client.test_remote_read import AlwaysThere

READERS = 8
CHUNKS = 6


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeThread]:
    node = NodeThread(tmp_path, node_id="far")
    with connect(node.info.socket_path) as writer:
        cache = writer.bind(namespace())
        keys = cache.keys(prompt(1, 16 * CHUNKS))
        assert cache.write(keys, pages_of(keys)).stored == CHUNKS
    yield node
    node.stop()


def remote_sessions(node: NodeThread) -> int:
    return node.call(lambda: sum(not session.shared for session in node.core.sessions.values()))


def read(client: Client) -> tuple[int, MissReason | None]:
    cache = client.bind(namespace())
    keys: Keys = cache.keys(prompt(1, 16 * CHUNKS))
    target = poisoned(cache, CHUNKS)
    result = cache.read(keys, target)
    assert np.array_equal(target[: result.chunks], pages_of(keys)[: result.chunks])
    return result.chunks, result.reason


def test_b15_a_node_that_cannot_be_read_is_left_alone_for_a_moment(
    node: NodeThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each read opened a session that the node kept for two minutes: a few such clients shut all others out."""
    works, tried = [False], []
    plain = TcpTransport.connect

    def connect_or_fail(self: TcpTransport, info: NodeInfo, deadline_s: float) -> Connection:
        tried.append(info)
        if not works[0]:
            raise Unreachable("its network card fails")
        return plain(self, info, deadline_s)

    monkeypatch.setattr(TcpTransport, "connect", connect_or_fail)
    monkeypatch.setattr(nodes_module, "RETRY_EVERY_S", 600.0)
    with Client(None, None, AlwaysThere(infos=[node.info])) as client:
        for _ in range(20):
            assert read(client) == (0, MissReason.UNREACHABLE)
        assert len(tried) == 1 and remote_sessions(node) == 1
        assert client.degraded_nodes() == ("far",)
        works[0] = True
        client._bad_until.clear()  # the moment is over
        assert read(client) == (CHUNKS, None)
        assert client.degraded_nodes() == ()


def test_b02_a_restarted_node_is_not_left_alone_for_what_it_was_before(node: NodeThread) -> None:
    info = node.info
    old = NodeInfo(info.node_id, info.epoch - 1, info.host_id, info.control_address, info.data_address)
    with Client(None, None, AlwaysThere(infos=[old])) as client:
        assert read(client) == (0, MissReason.UNREACHABLE)
        client._index = AlwaysThere(infos=[info])
        assert read(client) == (CHUNKS, None)


def test_b02_threads_that_connect_at_once_get_one_session(node: NodeThread) -> None:
    with Client(None, None, AlwaysThere(infos=[node.info])) as client:
        together, answers = threading.Barrier(READERS), []

        def work() -> None:
            together.wait(10.0)
            answers.append(read(client))

        threads = [threading.Thread(target=work) for _ in range(READERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20.0)
        assert answers == [(CHUNKS, None)] * READERS
        assert remote_sessions(node) == 1
