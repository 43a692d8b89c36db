"""`kvstore drain` against a server that answers what the protos say."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from kvstore.cli import main
from kvstore.rpc.v1 import admin_pb2, admin_pb2_grpc, metadata_pb2, metadata_pb2_grpc, node_pb2, node_pb2_grpc


class Pool(
    metadata_pb2_grpc.MetadataServiceServicer, node_pb2_grpc.NodeServiceServicer, admin_pb2_grpc.AdminServiceServicer
):
    """Four nodes at one address, one of them suspect. `says` is what a drain says."""

    def __init__(self) -> None:
        self.address = ""
        self.targets: list[str] = []
        self.says = [(10, 4, 0, ""), (10, 10, 0, "")]

    def _info(self, node_id: str) -> node_pb2.NodeInfo:
        return node_pb2.NodeInfo(node_id=node_id, epoch=7, control_address=self.address, data_address="127.0.0.1:2")

    def ListNodes(self, request: object, context: object) -> metadata_pb2.ListNodesResponse:
        nodes = [
            metadata_pb2.NodeStatus(node=self._info(name), suspect=name == "ill") for name in ("a", "b", "c", "ill")
        ]
        return metadata_pb2.ListNodesResponse(nodes=nodes)

    def Stats(self, request: object, context: object) -> node_pb2.StatsResponse:
        return node_pb2.StatsResponse(node=self._info("asked"), json="{}")

    def Drain(self, request: admin_pb2.DrainRequest, context: object) -> Iterator[admin_pb2.DrainProgress]:
        self.targets = [target.node_id for target in request.targets]
        for chunks, moved, failed, reason in self.says:
            yield admin_pb2.DrainProgress(chunks=chunks, moved_chunks=moved, failed_chunks=failed, reason=reason)


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Pool]:
    for name in [name for name in os.environ if name.upper().startswith("KVSTORE_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    pool = Pool()
    with ThreadPoolExecutor(2) as threads:
        server = grpc.server(threads)
        metadata_pb2_grpc.add_MetadataServiceServicer_to_server(pool, server)  # type: ignore[no-untyped-call]
        node_pb2_grpc.add_NodeServiceServicer_to_server(pool, server)  # type: ignore[no-untyped-call]
        admin_pb2_grpc.add_AdminServiceServicer_to_server(pool, server)  # type: ignore[no-untyped-call]
        pool.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        yield pool
        server.stop(0).wait()


def run(capsys: pytest.CaptureFixture[str], pool: Pool, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(["drain", *arguments, "--metadata", pool.address])
    captured = capsys.readouterr()
    assert isinstance(caught.value.code, int)
    return caught.value.code, captured.out, captured.err


def test_all_other_live_nodes_are_the_default(capsys: pytest.CaptureFixture[str], pool: Pool) -> None:
    code, out, _ = run(capsys, pool, "b", "--json")
    assert code == 0
    assert pool.targets == ["a", "c"]
    assert json.loads(out) == {
        "node_id": "b",
        "targets": ["a", "c"],
        "chunks": 10,
        "moved_chunks": 10,
        "failed_chunks": 0,
        "reason": "",
    }


def test_named_targets(capsys: pytest.CaptureFixture[str], pool: Pool) -> None:
    code, out, _ = run(capsys, pool, "b", "--to", "c", "--to", pool.address)
    assert (code, pool.targets) == (0, ["c", "asked"])
    assert out == "10 of 10 chunks of b are on other nodes now\n"


def test_what_was_not_moved_is_a_failure(capsys: pytest.CaptureFixture[str], pool: Pool) -> None:
    pool.says = [(10, 7, 3, "refused_full on c")]
    code, out, err = run(capsys, pool, "b", "--json")
    assert code == 1
    assert json.loads(out)["failed_chunks"] == 3
    assert err.splitlines()[-1] == "error: 3 of 10 chunks could not be moved: refused_full on c"


def test_unknown_nodes_are_named(capsys: pytest.CaptureFixture[str], pool: Pool) -> None:
    code, _, err = run(capsys, pool, "ill")
    assert code == 1
    assert err.startswith("error: no live node ill")
    pool.address = "127.0.0.1:1"
    code, _, err = run(capsys, pool, "b")
    assert code == 1
    assert "--metadata" in err
