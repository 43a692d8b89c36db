"""Which way is used, and what happens where it cannot be: D10, B13, B14, B15, the nodes' secret, node to node."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.client import Client, connect
from kvstore.client import transports as transports_module
from kvstore.client.counters import Counters
from kvstore.client.transports import Transports, Way
from kvstore.errors import ConfigurationError, Unauthorized, Unreachable
from kvstore.model.layout import Geometry
from kvstore.model.values import MissReason, NodeInfo
from kvstore.rpc import wire
from kvstore.rpc.channel import Channel
from kvstore.rpc.v1 import admin_pb2, admin_pb2_grpc
from kvstore.transport import Connection, data_plane
from kvstore.transport.nixl import NixlTransport
from kvstore.transport.nixl_agent import rdma_devices
from kvstore.transport.tcp import TcpTransport
from tests.chaos.nixl_nodes import NixlNode, nixl_node, nixl_processes, only_tcp
from tests.chaos.pool_processes import ROOT, Processes, stats_of, until
from tests.contract.transport_owner import poisoned as staging_of
from tests.unit.client import pages as test_pages
from tests.unit.client.pages import MIB, namespace, pages_of, prompt
from tests.unit.client.test_remote_read import AlwaysThere

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="needs the nixl package"),
    pytest.mark.nixl,
    pytest.mark.xdist_group("nixl"),
]
CHUNKS = 6


@pytest.fixture(autouse=True)
def over_tcp() -> Iterator[None]:
    with only_tcp():
        yield


# --- D10: what was asked for is used, or it does not start -------------------------------------------------


def refused(processes: Processes, folder: Path, **settings: Any) -> str:
    """Standard error of a node that does not start."""
    places = {"socket_dir": str(folder), "data_dir": str(folder), "control_address": "127.0.0.1:0"}
    arguments = {
        "settings": {"metrics_address": "", "dram": 1 << 20, "slots": 256, **places, **settings},
        "patches": {},
    }
    script = Path(__file__).with_name("pool_processes.py")
    done = subprocess.run(
        [sys.executable, "-c", HIDDEN.format(script=str(script)), "node", json.dumps(arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "HIDE_NIXL": str(settings.get("node_id", "") == "bare")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode != 0 and not done.stdout
    return done.stderr


HIDDEN = """
import importlib.util, os, runpy, sys
if os.environ["HIDE_NIXL"] == "True":
    find = importlib.util.find_spec
    importlib.util.find_spec = lambda name, package=None: None if name == "nixl" else find(name, package)
runpy.run_path({script!r}, run_name="__main__")
"""
"""Runs a process of `pool_processes`, if asked to as on a host without the package."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"nixl_devices": "mlx5_9:1"}, "mlx5_9:1"),
        ({"nixl_devices": "mlx5_9:1,mlx5_8:2"}, "port 1 of a device, not mlx5_8:2"),
        ({"node_id": "bare"}, r"pip install 'kvstore\[nixl\]'"),
    ],
)
def test_d10_a_node_that_must_use_nixl_and_cannot_does_not_start(
    processes: Processes, tmp_path: Path, settings: dict[str, str], says: str
) -> None:
    started = time.monotonic()
    errors = refused(processes, tmp_path, transport="nixl", **settings)
    assert time.monotonic() - started < 20.0
    lines = [line for line in errors.splitlines() if "ConfigurationError" in line]
    assert lines and re.search(says, lines[-1]), errors


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["tcp", "auto"])
def test_d10_a_node_without_nixl_touches_none_of_it(processes: Processes, transport: str) -> None:
    if transport == "auto" and rdma_devices():
        pytest.skip("this host has RDMA devices")
    node = processes.node("plain", transport=transport)
    assert node.said["data_paths"] == ["tcp"]
    assert stats_of(node)["data_paths"] == "tcp"
    assert not nixl_processes(node.pid)
    assert "nixl" not in Path(f"/proc/{node.pid}/maps").read_text()


def test_d10_a_node_tells_its_way(processes: Processes, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    from tests.chaos.node_thread import NodeThread

    with caplog.at_level(logging.INFO, "kvstore"):
        node = NodeThread(tmp_path, transport="nixl")
    try:
        assert node.facts["data_paths"] == ["tcp", "nixl UCX (tcp)"]
        assert "other hosts read this node over tcp or nixl UCX (tcp)" in caplog.text
        assert nixl_processes(os.getpid())
    finally:
        node.stop()
    assert not nixl_processes(os.getpid())


def test_d10_a_client_that_must_use_nixl_and_cannot_does_not_open(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="mlx5_9:1"):
        connect(metadata="127.0.0.1:1", transport="nixl", nixl_devices=["mlx5_9:1"])
    monkeypatch.setattr(transports_module, "is_installed", lambda: False)
    with pytest.raises(ConfigurationError, match=r"kvstore\[nixl\]"):
        connect(metadata="127.0.0.1:1", transport="nixl")


def test_d10_a_client_that_may_use_nixl_says_that_it_cannot(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(transports_module, "rdma_devices", lambda: ("mlx5_9",))
    counters = Counters()
    transports = Transports(Way("auto", nixl_devices=("mlx5_9:1",)), staging_of(4096), counters)
    assert transports.path == "tcp" and counters.snapshot() == {"nixl_fallbacks": 1}
    told = [record for record in caplog.records if record.name.startswith("kvstore")]
    assert [record.levelname for record in told] == ["WARNING"] and "mlx5_9:1" in caplog.text
    transports.close()


def test_d10_a_client_that_fell_back_to_tcp_tries_nixl_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection over tcp from the time when the peer's NIXL process was starting was kept for good."""

    def starts_again(*_: object) -> Connection:
        raise Unreachable("the node's NIXL process is starting again")

    class AnyConnection:
        name, is_open = "tcp", True

        def read(self, *_: object) -> None: ...

        start = cancel = close = read

    monkeypatch.setattr(transports_module, "rdma_devices", lambda: ("any",))
    monkeypatch.setattr(NixlTransport, "connect", starts_again)
    monkeypatch.setattr(TcpTransport, "connect", lambda *_: AnyConnection())
    monkeypatch.setattr(transports_module, "SUBSTITUTE_S", 0.05)
    transports = Transports(Way("auto"), staging_of(4096), Counters())
    connection = transports.connect(NodeInfo("n", 1, "h", "", ""), 1.0)
    assert connection.name == "tcp"
    until(lambda: not connection.is_open)
    transports.close()


# --- B13: memory that cannot be registered -----------------------------------------------------------------


NO_REGISTRATION = """
import sys
from kvstore.errors import CapacityExhausted
from kvstore.transport.nixl_agent import Agent

def register(self, address, length_bytes, kind="DRAM", device=0):
    raise CapacityExhausted(f"{length_bytes} bytes could not be registered for the network")

Agent.register = register
"""


@pytest.fixture
def no_registration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In processes that are started from here no memory can be registered."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nif 'kvstore.transport.nixl_owner' in sys.orig_argv:\n" + textwrap.indent(NO_REGISTRATION, "    ")
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")


@pytest.mark.slow
def test_b13_a_node_whose_memory_cannot_be_registered(
    no_registration: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that must use NIXL does not start and says why; one that may goes on over tcp, with one line in the log."""
    from kvstore.node import data_paths
    from tests.chaos.node_thread import NodeThread

    with pytest.raises(ConfigurationError, match=f"did not start: {4 << 20} bytes could not be registered"):
        NodeThread(tmp_path, transport="nixl")
    assert not nixl_processes(os.getpid())
    monkeypatch.setattr(data_paths, "rdma_devices", lambda: ("mlx5_0",))
    caplog.clear()
    node = NodeThread(tmp_path, transport="auto")
    assert node.facts["data_paths"] == ["tcp"]
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "mlx5_0" in line and "could not be registered" in line
    node.stop()


# --- a node and its readers --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def secret_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("secret") / "secret"
    path.write_text("open sesame\n")
    return path


@pytest.fixture(scope="module")
def node(shared_processes: Processes, secret_file: Path) -> NixlNode:
    with only_tcp():
        node = nixl_node(shared_processes, "source", dram=16 << 20, peer_secret_file=str(secret_file))
        with connect(node.socket_path) as writer:
            cache = writer.bind(namespace(layout=MIB))
            keys = cache.keys(prompt(1, 64 * CHUNKS))
            assert cache.write(keys, pages_of(keys, MIB)).stored == CHUNKS
        return node


def reader_of(*infos: NodeInfo, transport: str, secret: bytes = b"open sesame") -> Client:
    return Client(None, None, AlwaysThere(infos=list(infos)), way=Way(transport, secret=secret), staging_bytes=16 << 20)


def read_of(client: Client) -> tuple[int, MissReason | None]:
    cache = client.bind(namespace(layout=MIB))
    keys, target = cache.keys(prompt(1, 64 * CHUNKS)), test_pages.poisoned(cache, CHUNKS)
    result = cache.read(keys, target)
    assert np.array_equal(target[: result.chunks], pages_of(keys, MIB)[: result.chunks])
    return result.chunks, result.reason


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["nixl", "tcp"])
def test_the_secret_opens_and_nothing_else_does(node: NixlNode, transport: str) -> None:
    with reader_of(node.info, transport=transport) as client:
        assert read_of(client) == (CHUNKS, None)
        assert client.stats()[f"read_bytes_{transport}"] >= CHUNKS * MIB.chunk_bytes
    for wrong in (b"", b"open sesam", b"open sesame\n"):
        with reader_of(node.info, transport=transport, secret=wrong) as client:
            assert read_of(client) == (0, MissReason.UNREACHABLE)
        with pytest.raises(Unauthorized):
            TcpTransport(wrong).connect(node.info, 5.0)
        with pytest.raises(Unauthorized):
            data_plane.ask(node.info.control_address, node.info.epoch, wrong, 5.0)


FORK = """
import os, sys
import numpy as np
from tests.chaos.test_nixl_choices import *
from kvstore.errors import ForkedProcess

info = NodeInfo(*json.loads(sys.argv[1]))
client = reader_of(info, transport="nixl")
assert read_of(client) == (CHUNKS, None)
child = os.fork()
if not child:
    said = []
    for verb in (lambda: read_of(client), lambda: client.staging.acquire(1, 1.0), client.close):
        try:
            verb()
            said.append("nothing")
        except ForkedProcess as exc:
            said.append(str(exc))
    assert all("fork" in text for text in said), said
    assert all("spawn" in text or "there" in text for text in said), said
    sys.exit(0)  # with the interpreter's clean-up
deadline = time.monotonic() + 20
while not (ended := os.waitpid(child, os.WNOHANG))[0]:
    if time.monotonic() > deadline:
        os.kill(child, 9)
        sys.exit("the child hangs")
    time.sleep(0.01)
assert ended[1] == 0, ended
assert read_of(client) == (CHUNKS, None)
client.close()
"""


@pytest.mark.slow
def test_b14_a_forked_child_is_told_and_its_parent_goes_on(node: NixlNode) -> None:
    info = node.info
    facts = [info.node_id, info.epoch, info.host_id, info.control_address, info.data_address, info.socket_path]
    done = subprocess.run(
        [sys.executable, "-c", FORK, json.dumps(facts)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_b15_a_node_whose_data_do_not_come_is_left_for_its_replica(
    shared_processes: Processes, node: NixlNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gRPC is fine all the time. After the first failure no read meets it until it is tried again, seldom."""
    sick = NodeInfo("sick", node.info.epoch, "x", node.info.control_address, node.info.data_address)
    works = [False]
    plain = NixlTransport.connect

    def connect_or_fail(self: NixlTransport, info: NodeInfo, deadline_s: float) -> Connection:
        if info.node_id == "sick" and not works[0]:
            raise Unreachable("its network card fails")
        return plain(self, info, deadline_s)

    monkeypatch.setattr(NixlTransport, "connect", connect_or_fail)
    monkeypatch.setattr("kvstore.client.nodes.random.choice", lambda found: min(found, key=by_name))
    with reader_of(sick, node.info, transport="nixl") as client:
        for _ in range(20):
            assert read_of(client) == (CHUNKS, None)
        assert 1 <= client.stats()["data_path_failures"] <= 3
        assert client.stats().get("misses_unreachable", 0) == 0
        works[0] = True
        failures = client.stats()["data_path_failures"]

        def asked() -> bool:
            assert read_of(client) == (CHUNKS, None)
            return ("sick", sick.epoch) in client._peers and bool(client._peers["sick", sick.epoch]._idle)

        until(asked)
        assert client.stats()["data_path_failures"] == failures


def by_name(match: Any) -> bool:
    return bool(match.node.node_id != "sick")


@pytest.mark.slow
def test_nodes_pull_over_nixl_with_the_secret(
    shared_processes: Processes, node: NixlNode, secret_file: Path, tmp_path: Path
) -> None:
    """Replicate, then Drain back the other way; the bytes are right, came by NIXL, and not without the secret."""
    wrong = tmp_path / "wrong"
    wrong.write_text("close sesame")
    stranger = nixl_node(shared_processes, "stranger", dram=16 << 20, peer_secret_file=str(wrong))
    assert replicate(stranger, node) == (0, "unreachable")
    target = nixl_node(shared_processes, "target", dram=16 << 20, peer_secret_file=str(secret_file))
    assert replicate(target, node) == (CHUNKS, "")
    stats = target.stats()
    assert stats["pulled_bytes_nixl"] >= CHUNKS * MIB.chunk_bytes and stats["pulled_bytes_tcp"] == 0
    last = nixl_node(shared_processes, "last", dram=16 << 20, peer_secret_file=str(secret_file))
    channel = Channel(target.info.control_address)
    stub = channel.stub(admin_pb2_grpc.AdminServiceStub)
    request = admin_pb2.DrainRequest(targets=[wire.node_info_to_message(last.info)])
    progress = list(channel.stream(stub.Drain, request, 30.0))[-1]
    channel.close()
    assert (progress.chunks, progress.moved_chunks, progress.failed_chunks) == (CHUNKS, CHUNKS, 0)
    assert last.stats()["pulled_bytes_nixl"] >= CHUNKS * MIB.chunk_bytes
    for copy in (target, last):
        with reader_of(copy.info, transport="nixl") as client:
            assert read_of(client) == (CHUNKS, None)


def replicate(target: NixlNode, source: NixlNode) -> tuple[int, str]:
    with connect(source.socket_path) as client:
        keys = client.bind(namespace(layout=MIB)).keys(prompt(1, 64 * CHUNKS))
    channel = Channel(target.info.control_address)
    stub = channel.stub(admin_pb2_grpc.AdminServiceStub)
    cut = admin_pb2.Geometry(rectangles=wire.geometry_to_messages(Geometry.whole(MIB)), written_here=[0])
    request = admin_pb2.ReplicateRequest(
        namespace=namespace(layout=MIB).canonical,
        geometries=[cut],
        chain=wire.chain_to_message(keys),
        source=wire.node_info_to_message(source.info),
    )
    answer = channel.call(stub.Replicate, request, 20.0)
    channel.close()
    return answer.held_chunks, answer.reason
