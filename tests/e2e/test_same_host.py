"""Who shares memory: a client and the very node that it named, on one host, by hand-over and by host id."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import store_service_processes as processes

import kvstore
from kvstore.client import Cache, Client, host, pool_client
from kvstore.errors import ConfigurationError, Unreachable
from kvstore.model.layout import Dtype, PageLayout
from kvstore.model.namespace import Namespace
from kvstore.model.values import NodeInfo
from kvstore.rpc import handshake

pytestmark = pytest.mark.slow
LAYOUT = PageLayout(layers=2, kv_heads=2, head_dim=16, dtype=Dtype.FP16, page_tokens=16, pages_per_chunk=1)
TOKENS = np.arange(64)


def bind(client: Client) -> Cache:
    return client.bind(Namespace("same-host", "1", LAYOUT))


def paths(client: Client) -> set[str]:
    """How this client reads what lies on its node."""
    cache = bind(client)
    keys = cache.keys(TOKENS)
    result = cache.read(keys, cache.empty(len(keys)))
    assert result.chunks == len(keys)
    return set(result.bytes_by_path)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Two nodes with the same pages, announced: their host ids are a and b."""
    folder = tmp_path_factory.mktemp("nodes")
    with (
        processes.node(folder / "a", "16MiB", host_id="a") as one,
        processes.node(folder / "b", "16MiB", host_id="b") as other,
    ):
        for facts in (one, other):
            with kvstore.connect(facts["control_address"], transport="shm") as client:
                cache = bind(client)
                keys = cache.keys(TOKENS)
                assert cache.write(keys, cache.empty(len(keys))).visible == len(keys)
        yield one, other


@contextmanager
def moved_away(path: Path) -> Iterator[None]:
    """The node's socket is not at its path, as seen from another host."""
    away = path.with_suffix(".away")
    path.rename(away)
    try:
        yield
    finally:
        away.replace(path)


@pytest.fixture
def path(nodes: tuple[dict[str, Any], dict[str, Any]]) -> Iterator[Path]:
    """Node a's socket path, free for a test to put something else there."""
    place = Path(nodes[0]["socket_path"])
    with moved_away(place):
        yield place
        place.unlink(missing_ok=True)


@pytest.mark.parametrize(("host_id", "expected"), [("a", "shm"), ("", "shm"), ("b", "tcp")])
def test_the_host_id_must_be_equal_where_one_is_named(nodes: Any, host_id: str, expected: str) -> None:
    with kvstore.connect(nodes[0]["control_address"], host_id=host_id) as client:
        assert paths(client) == {expected}
        assert client.node is not None and client.node.node_id == nodes[0]["node_id"]


def test_shared_memory_cannot_be_forced_across_hosts(nodes: Any) -> None:
    for named in (nodes[0]["control_address"], nodes[0]["socket_path"]):
        with pytest.raises(ConfigurationError, match="host a"):
            kvstore.connect(named, transport="shm", host_id="b")


def test_without_a_socket_it_is_tcp(nodes: Any, path: Path) -> None:
    with kvstore.connect(nodes[0]["control_address"]) as client:
        assert paths(client) == {"tcp"}
    with pytest.raises(ConfigurationError, match="shares no memory"):
        kvstore.connect(nodes[0]["control_address"], transport="shm")


def test_a_socket_that_a_dead_node_left_is_none(nodes: Any, path: Path) -> None:
    """The node answers on the network, so it lives elsewhere."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(path))
    with kvstore.connect(nodes[0]["control_address"]) as client:
        assert paths(client) == {"tcp"}
    with pytest.raises(ConfigurationError, match="shares no memory"):
        kvstore.connect(nodes[0]["control_address"], transport="shm")


def test_another_node_at_the_same_path_is_not_taken_for_the_named_one(nodes: Any, path: Path) -> None:
    """Two hosts may keep their sockets at equal paths; who asks for A must not write into B's memory."""
    path.symlink_to(nodes[1]["socket_path"])
    with kvstore.connect(nodes[0]["control_address"]) as client:
        assert client.node is not None and client.node.node_id == nodes[0]["node_id"]
        assert paths(client) == {"tcp"}
    with pytest.raises(ConfigurationError, match="shares no memory"):
        kvstore.connect(nodes[0]["control_address"], transport="shm")


def test_going_by_the_path_alone_would_take_the_wrong_node(
    nodes: Any, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the guard is for."""

    def by_path(info: NodeInfo, host_id: str, name: str, deadline_s: float) -> host.SocketHost | None:
        return host.SocketHost(info.socket_path, name, deadline_s) if Path(info.socket_path).exists() else None

    monkeypatch.setattr(pool_client, "same_host", by_path)
    path.symlink_to(nodes[1]["socket_path"])
    with kvstore.connect(nodes[0]["control_address"]) as client:
        assert client.node is not None and client.node.node_id == nodes[1]["node_id"]
        assert paths(client) == {"shm"}


def test_a_node_of_this_host_that_refuses_is_an_error_and_not_a_slow_path(nodes: Any, path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen(1)

        def refuse() -> None:
            peer = listener.accept()[0]
            with peer:
                peer.recv(handshake.PACKET_BYTES)
                peer.send(handshake.describe(handshake.Kind.REFUSED, {"reason": "too many sessions"}))

        refusing = threading.Thread(target=refuse)
        refusing.start()
        with pytest.raises(Unreachable, match="too many sessions"):
            kvstore.connect(nodes[0]["control_address"])
        refusing.join(10.0)
        assert not refusing.is_alive()
