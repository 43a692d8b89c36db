"""The commands as a user types them: exit codes, error lines, `status` and `stats` against a server."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from kvstore.cli import main
from kvstore.cli.settings_table import settings_markdown
from kvstore.errors import ConfigurationError
from kvstore.rpc.v1 import metadata_pb2, metadata_pb2_grpc, node_pb2, node_pb2_grpc

REPOSITORY = Path(__file__).resolve().parents[3]
INFO = node_pb2.NodeInfo(node_id="n1", epoch=7, host_id="h", control_address="127.0.0.1:1", data_address="127.0.0.1:2")


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.upper().startswith("KVSTORE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    captured = capsys.readouterr()
    assert isinstance(caught.value.code, int)
    return caught.value.code, captured.out, captured.err


class _Metadata(metadata_pb2_grpc.MetadataServiceServicer):
    def ListNodes(self, request: object, context: object) -> metadata_pb2.ListNodesResponse:
        status = metadata_pb2.NodeStatus(node=INFO, suspect=True, applied_sequence=3, shard_count=12345, silent_ms=40)
        return metadata_pb2.ListNodesResponse(nodes=[status])


class _Node(node_pb2_grpc.NodeServiceServicer):
    def Stats(self, request: object, context: object) -> node_pb2.StatsResponse:
        return node_pb2.StatsResponse(node=INFO, json='{"evicted_chunks": 5, "eviction": "lru"}')


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A server that answers what the protos say, without a pool behind it."""
    with ThreadPoolExecutor(1) as threads:
        server = grpc.server(threads)
        metadata_pb2_grpc.add_MetadataServiceServicer_to_server(_Metadata(), server)  # type: ignore[no-untyped-call]
        node_pb2_grpc.add_NodeServiceServicer_to_server(_Node(), server)  # type: ignore[no-untyped-call]
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"127.0.0.1:{port}"
        server.stop(0).wait()


def test_status(capsys: pytest.CaptureFixture[str], address: str) -> None:
    code, out, err = _run(capsys, "status", "--metadata", address)
    assert (code, err) == (0, "")
    assert "n1" in out
    assert "suspect" in out
    assert "12,345" in out


def test_status_as_json(capsys: pytest.CaptureFixture[str], address: str) -> None:
    code, out, _ = _run(capsys, "status", "--metadata", address, "--json")
    assert code == 0
    answer = json.loads(out)
    assert answer["metadata_address"] == address
    assert answer["nodes"][0]["node_id"] == "n1"
    assert answer["nodes"][0]["shard_count"] == 12345


def test_stats(capsys: pytest.CaptureFixture[str], address: str) -> None:
    code, out, _ = _run(capsys, "stats", "--node", address)
    assert code == 0
    assert "evicted_chunks" in out
    code, out, _ = _run(capsys, "stats", "--node", address, "--json")
    assert out == '{"evicted_chunks": 5, "eviction": "lru"}\n'


def test_addresses_come_from_the_configuration(
    capsys: pytest.CaptureFixture[str], address: str, tmp_path: Path
) -> None:
    file = tmp_path / "some.toml"
    file.write_text(f'[node]\ncontrol_address = "{address}"\n[metadata]\naddress = "{address}"\n')
    assert _run(capsys, "stats", "--config", str(file), "--json")[0] == 0
    assert _run(capsys, "status", "--config", str(file), "--json")[0] == 0


@pytest.mark.parametrize(("command", "option"), [("status", "--metadata"), ("stats", "--node")])
def test_nobody_there_is_one_line_that_says_what_to_do(
    capsys: pytest.CaptureFixture[str], command: str, option: str
) -> None:
    code, out, err = _run(capsys, command, option, "127.0.0.1:1")
    assert (code, out) == (1, "")
    assert err.startswith("error: nothing answers at 127.0.0.1:1; start ")
    assert err.count("\n") == 1


def test_silent_peer_ends_at_the_deadline(capsys: pytest.CaptureFixture[str]) -> None:
    with ThreadPoolExecutor(1) as threads:
        server = grpc.server(threads, maximum_concurrent_rpcs=None)
        port = server.add_insecure_port("127.0.0.1:0")
        code, _, err = _run(capsys, "stats", "--node", f"127.0.0.1:{port}", "--deadline-s", "0.05")
        server.stop(0).wait()
    assert code == 1
    assert "within 0.05 s" in err or "nothing answers" in err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["node", "--dran", "1GiB"], "No such option: --dran"),
        (["node", "--dram", "8 potatoes"], "[node] dram (command line): '8 potatoes' is not a size"),
        (["node", "--dram"], "--dram"),
        (["fly"], "No such command 'fly'; see `kvstore --help`"),
        (["metadata", "--address", "0.0.0.0:7410"], "--insecure"),
        (["status", "--config", "gone.toml"], "there is no such file"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    code, out, err = _run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert expected in err
    assert err.count("\n") == 1


def test_unknown_variable_stops_every_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSTORE_NODE_DRUM", "1GiB")
    code, _, err = _run(capsys, "metadata")
    assert code == 2
    assert err == "error: unknown environment variable KVSTORE_NODE_DRUM; did you mean KVSTORE_NODE_DRAM?\n"


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_DEBUG", "1")
    with pytest.raises(ConfigurationError):
        main(["node", "--dram", "0"])


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--help"]):
        code, out, _ = _run(capsys, *arguments)
        assert code == 0
        for name in ("up", "node", "metadata", "router", "status", "stats", "drain", "demo", "replay"):
            assert f" {name} " in out
        assert "settings-table" not in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(capsys, "--version") == (0, "0.1.0\n", "")


def test_settings_page_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    page = (REPOSITORY / "docs" / "settings.md").read_text()
    assert page == settings_markdown(), "run `kvstore settings-table > docs/settings.md`"
    assert _run(capsys, "settings-table")[1] == page
