"""How nodes can be read, as `kvstore status` says it: really connected to, and by what they say of themselves (B15)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import grpc
import pytest

from kvstore.cli import main
from kvstore.cli.reach import DataPaths, look_at
from kvstore.model.values import NodeInfo
from kvstore.rpc import wire
from kvstore.rpc.v1 import metadata_pb2, metadata_pb2_grpc, node_pb2, node_pb2_grpc
from kvstore.transport.tcp_server import TcpServer

WAIT_S = 5.0
EPOCH = 7


class Servers(node_pb2_grpc.NodeServiceServicer, metadata_pb2_grpc.MetadataServiceServicer):
    """A node's answer and a metadata service's, without a pool behind them; and real data addresses."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.figures: dict[str, Any] = {"data_paths": "tcp, nixl UCX"}
        self.suspect = False
        self.address = ""
        self.nodes: list[NodeInfo] = []

    def Stats(self, request: object, context: object) -> node_pb2.StatsResponse:
        return node_pb2.StatsResponse(json=json.dumps(self.figures))

    def ListNodes(self, request: object, context: object) -> metadata_pb2.ListNodesResponse:
        nodes = [metadata_pb2.NodeStatus(node=wire.node_info_to_message(n), suspect=self.suspect) for n in self.nodes]
        return metadata_pb2.ListNodesResponse(nodes=nodes)

    def data_address(self, secret: bytes = b"") -> str:
        arena_fd = os.memfd_create("arena")
        self._stack.callback(os.close, arena_fd)
        os.ftruncate(arena_fd, 4096)
        server = TcpServer(
            arena_fd, 4096, lambda slots: [2] * len(slots), EPOCH, "127.0.0.1", 0, authorize=lambda c: c == secret
        )
        self._stack.callback(server.stop)
        return server.address

    def node(self, **changes: Any) -> NodeInfo:
        node = NodeInfo("n1", EPOCH, "h", self.address, "", "")
        self.nodes = [replace(node, **changes)]
        return self.nodes[0]


@pytest.fixture
def servers() -> Iterator[Servers]:
    with ExitStack() as stack, ThreadPoolExecutor(4) as threads:
        servers = Servers(stack)
        server = grpc.server(threads)
        node_pb2_grpc.add_NodeServiceServicer_to_server(servers, server)  # type: ignore[no-untyped-call]
        metadata_pb2_grpc.add_MetadataServiceServicer_to_server(servers, server)  # type: ignore[no-untyped-call]
        servers.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        yield servers
        server.stop(0).wait()


def test_a_node_that_can_be_read_has_no_trouble(servers: Servers) -> None:
    well = DataPaths("tcp, nixl UCX", "")
    assert look_at([servers.node(data_address=servers.data_address())], WAIT_S) == [well]
    secured = servers.node(data_address=servers.data_address(b"open sesame"))
    assert look_at([secured], WAIT_S) == [well], "who has the secret can read it"
    assert look_at([], WAIT_S) == []


def test_b15_a_node_that_answers_and_cannot_be_read_is_degraded(servers: Servers) -> None:
    (paths,) = look_at([servers.node(data_address="127.0.0.1:1")], WAIT_S)
    assert paths.offered == "tcp, nixl UCX" and paths.trouble.startswith("tcp: ") and "127.0.0.1:1" in paths.trouble
    (paths,) = look_at([servers.node(data_address=servers.data_address(), epoch=EPOCH + 1)], WAIT_S)
    assert "epoch" in paths.trouble, "another node listens there"


def test_b15_what_a_node_knows_of_itself_is_said(servers: Servers) -> None:
    servers.figures["data_path_trouble"] = "nixl: down: it was ended by SIGABRT"
    both = [servers.node(data_address=servers.data_address()), servers.node(data_address="127.0.0.1:1")]
    first, second = look_at(both, WAIT_S)
    assert first.trouble == "nixl: down: it was ended by SIGABRT"
    assert second.trouble.startswith("nixl: down: it was ended by SIGABRT; tcp: ")
    gone = servers.node(control_address="127.0.0.1:1", data_address=servers.data_address())
    assert look_at([gone], WAIT_S) == [DataPaths("", "control: 127.0.0.1:1 does not answer")]


def test_b15_status_shows_it_and_shows_when_it_is_over(servers: Servers, capsys: pytest.CaptureFixture[str]) -> None:
    def status(*more: str) -> str:
        with pytest.raises(SystemExit, match="0"):
            main(["status", "--metadata", servers.address, *more])
        return capsys.readouterr().out

    servers.node(data_address="127.0.0.1:1")
    text = status()
    assert "degraded" in text and "n1: tcp: " in text
    servers.node(data_address=servers.data_address())
    (node,) = json.loads(status("--json"))["nodes"]
    assert (node["state"], node["data_paths"], node["trouble"]) == ("live", "tcp, nixl UCX", "")
    servers.suspect = True
    assert json.loads(status("--json"))["nodes"][0]["state"] == "suspect"
