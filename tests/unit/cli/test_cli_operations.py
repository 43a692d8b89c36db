"""The operators' commands against a whole node in this process."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from console_run import Console

from kvstore.cli import contents
from kvstore.cli.choosing import choose_namespace, known_namespaces, prefix_key
from kvstore.cli.pinning import duration_s
from kvstore.client import Cache, connect
from kvstore.errors import ConfigurationError
from kvstore.model.namespace import Namespace
from kvstore.model.prefix import KeyChain, Keys
from kvstore.rpc.v1 import metadata_pb2, metadata_pb2_grpc, node_pb2
from tests.chaos.node_thread import NodeThread
from tests.unit.client.pages import LAYOUT, namespace, pages_of, prompt

SLOT = 12 << 10
ACME = Namespace("pages", "r2", LAYOUT, tenant="acme")
SECRET = b"s3cret"


class Setting:
    """One node with two namespaces; another node of the pool where a test asks for it."""

    def __init__(self, folder: Path, console: Console) -> None:
        self.console = console
        self.folder = folder
        self.node = NodeThread(folder, dram_bytes=64 * SLOT, node_id="cli-node")
        self.address = self.node.info.control_address
        self.client = connect(self.node.info.socket_path)
        self.plain: Cache = self.client.bind(namespace())
        self.acme: Cache = self.client.bind(ACME, secret=SECRET)

    def store(self, cache: Cache, number: int, chunks: int) -> Keys:
        keys = cache.keys(prompt(number, 16 * chunks))
        assert cache.write(keys, pages_of(keys)).stored == chunks
        return keys

    def tokens(self, number: int, count: int) -> str:
        path = self.folder / f"tokens-{number}-{count}.json"
        path.write_text(json.dumps(prompt(number, count)))
        return str(path)

    def ok(self, command: str, *arguments: str) -> str:
        return self.console.ok(command, *arguments, "--node", self.address)

    def json(self, command: str, *arguments: str, code: int = 0) -> Any:
        return self.console.json(command, *arguments, "--node", self.address, code=code)

    def refused(self, code: int, command: str, *arguments: str) -> str:
        return self.console.refused(code, command, *arguments, "--node", self.address)

    def close(self) -> None:
        self.client.close()
        self.node.stop()


@pytest.fixture
def console(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Console:
    return Console(capsys, monkeypatch, tmp_path)


@pytest.fixture
def setting(tmp_path: Path, console: Console) -> Iterator[Setting]:
    with contextlib.closing(Setting(tmp_path, console)) as made:
        yield made


# --- namespaces ----------------------------------------------------------------------------------------------


def test_namespaces(setting: Setting) -> None:
    setting.store(setting.plain, 1, 3)
    out = setting.ok("namespaces")
    assert "pages@r1 full" in out and "pages@r2" in out and "of acme" in out and "36,864" in out
    facts = setting.json("namespaces")
    assert facts["node"] == setting.address
    first, second = facts["namespaces"]
    assert (first["id"], first["chunks"], first["dram_bytes"]) == (namespace().id.hex(), 3, 3 * SLOT)
    assert (second["tenant"], second["chunks"]) == ("acme", 0)


def test_a_namespace_is_named_by_id_title_or_tenant(setting: Setting) -> None:
    known = known_namespaces(setting.address, 5)
    for text in ("r1", "R1 FULL", namespace().id.hex(), namespace().id.hex()[:6]):
        assert choose_namespace(known, text, "here").namespace == namespace()
    assert choose_namespace(known, "acme", "here").namespace == ACME
    error = setting.refused(1, "warm", "--namespace", "pages")
    assert "means 2 namespaces" in error and "pages@r1" in error and "give more" in error
    error = setting.refused(1, "warm", "--namespace", "llama")
    assert "no namespace 'llama'; it has: pages@r1" in error


# --- keys ----------------------------------------------------------------------------------------------------


def test_keys_of_tokens_are_those_of_their_full_chunks(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET + b"\n")

    def key_of(count: int, secret_file: Path | None = None) -> bytes:
        path = tmp_path / "tokens.json"
        path.write_text(json.dumps(prompt(1, count)))
        return prefix_key(ACME, path, "", secret_file)

    plain, keyed = KeyChain(ACME), KeyChain(ACME, SECRET)
    assert key_of(40) == key_of(32) == plain.keys(prompt(1, 32))[-1]
    assert key_of(40, secret) == keyed.keys(prompt(1, 32))[-1] != key_of(40)
    assert key_of(5) == plain.keys(prompt(1, 5))[-1], "less than a chunk is a prompt of its own"
    assert prefix_key(ACME, None, "ab" * 16, None) == bytes([0xAB] * 16)
    assert prefix_key(ACME, None, "", None) == b""


def test_tokens_come_from_standard_input_too(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    setting.store(setting.plain, 1, 2)
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(prompt(1, 32))))
    assert setting.json("warm", "--namespace", "r1", "--tokens", "-")["dram_chunks"] == 2


@pytest.mark.parametrize("text", ["", "{}", "[]", "[1, true]", '["1"]', "[1.5]", "[1"])
def test_other_files_than_token_ids_are_named(setting: Setting, text: str) -> None:
    (setting.folder / "t.json").write_text(text)
    assert "--tokens t.json: " in setting.refused(2, "warm", "--namespace", "r1", "--tokens", "t.json")


# --- pins ----------------------------------------------------------------------------------------------------


def test_pin_list_and_unpin(setting: Setting) -> None:
    keys = setting.store(setting.plain, 1, 3)
    tokens = setting.tokens(1, 40)
    out = setting.ok("pin", "system", "--namespace", "r1", "--tokens", tokens, "--lifetime", "2h")
    assert out == "pinned 2 chunks (24,576 bytes) as 'system' for 2h\n"
    facts = setting.json("pin", "by key", "--namespace", "r1", "--key", keys[2].hex())
    assert (facts["pinned_chunks"], facts["refused_chunks"], facts["lifetime_s"]) == (3, 0, 3600)
    out = setting.ok("pins")
    assert "system" in out and keys[1].hex() in out and "pages@r1" in out
    by_key, system = setting.json("pins")["pins"]
    assert (by_key["name"], by_key["chunks"], system["chunks"]) == ("by key", 3, 2)
    assert 7100 < system["left_s"] <= 7200
    assert setting.ok("unpin", "system") == "'system' is not pinned any more\n"
    assert "no pin 'system'" in setting.refused(1, "unpin", "system")
    assert setting.json("unpin", "system", code=1) == {"name": "system", "found": False}
    setting.node.call(setting.node.core.check)


def test_pin_of_a_tenant_needs_its_secret(setting: Setting) -> None:
    setting.store(setting.acme, 1, 2)
    (setting.folder / "secret").write_bytes(SECRET)
    arguments = ["pin", "a", "--namespace", "acme", "--tokens", setting.tokens(1, 32)]
    assert "serve the prompt once" in setting.refused(1, *arguments)
    assert setting.json(*arguments, "--secret-file", "secret")["pinned_chunks"] == 2
    assert "--secret-file gone" in setting.refused(2, *arguments, "--secret-file", "gone")


def test_what_pins_refuse_says_what_to_do(setting: Setting) -> None:
    setting.store(setting.plain, 1, 20)
    tokens = setting.tokens(1, 320)
    out = setting.ok("pin", "long", "--namespace", "r1", "--tokens", tokens)
    assert "pinned 16 chunks" in out and "the last 4 chunks" in out and "kvstore unpin" in out
    assert "with --tokens FILE or --key HEX" in setting.refused(2, "pin", "a", "--namespace", "r1")
    assert "kvstore namespaces" in setting.refused(2, "pin", "a", "--namespace", "", "--key", "ab" * 16)
    for lifetime in ("soon", "0s", "1 year", "-1h"):
        error = setting.refused(2, "pin", "a", "--namespace", "r1", "--tokens", tokens, "--lifetime", lifetime)
        assert "for example 1h" in error
    error = setting.refused(1, "pin", "a", "--namespace", "r1", "--tokens", tokens, "--lifetime", "31d")
    assert "at most 30 days" in error
    assert "32 hexadecimal digits" in setting.refused(2, "pin", "a", "--namespace", "r1", "--key", "xyz")
    assert "not both" in setting.refused(2, "pin", "a", "--namespace", "r1", "--key", "ab" * 16, "--tokens", tokens)


def test_durations() -> None:
    assert [duration_s(text) for text in ("90s", "30m", "1.5h", "30d", " 2 h ")] == [90, 1800, 5400, 2_592_000, 7200]
    with pytest.raises(ConfigurationError):
        duration_s("5")


def test_warm_reports(setting: Setting) -> None:
    setting.store(setting.plain, 1, 2)
    assert setting.ok("warm", "--namespace", "r1").startswith("2 of 2 chunks lie in DRAM")
    assert setting.json("warm", "--namespace", "r1")["promoted_chunks"] == 0


# --- remove --------------------------------------------------------------------------------------------------


def test_remove_a_namespace_a_tenant_and_a_prefix(setting: Setting) -> None:
    plain, acme = setting.store(setting.plain, 1, 4), setting.store(setting.acme, 1, 3)
    other = setting.store(setting.plain, 2, 2)
    assert setting.json("remove", "--key", plain[2].hex(), "--yes")["removed_chunks"] == {setting.address: 2}
    assert setting.plain.match(plain).local_chunks == 2
    tokens = setting.tokens(1, 32)
    assert setting.ok("remove", "--namespace", "r1", "--tokens", tokens, "--yes").endswith("1 chunks removed\n")
    assert setting.plain.match(plain).local_chunks == 1
    assert setting.json("remove", "--tenant", "acme", "--yes")["removed_chunks"] == {setting.address: 3}
    assert (setting.acme.match(acme).local_chunks, setting.plain.match(other).local_chunks) == (0, 2)
    assert setting.json("remove", "--namespace", "r1", "--yes")["removed_chunks"] == {setting.address: 3}
    assert setting.plain.match(other).local_chunks == 0
    setting.node.call(setting.node.core.check)


def test_remove_asks_and_needs_one_way_of_saying_what(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = setting.store(setting.plain, 1, 1)
    tokens = setting.tokens(1, 16)
    for arguments in (
        [],
        ["--namespace", "r1", "--tenant", "acme"],
        ["--key", "ab" * 16, "--tokens", tokens],
        ["--tenant", "acme", "--key", "ab" * 16],
    ):
        assert "say what to remove with one of" in setting.refused(2, "remove", "--yes", *arguments)
    assert "--tokens needs --namespace" in setting.refused(2, "remove", "--tokens", tokens, "--yes")
    assert "say --yes if that is meant" in setting.refused(2, "remove", "--namespace", "r1")
    assert "its tenants: acme" in setting.refused(1, "remove", "--tenant", "nobody", "--yes")
    assert setting.plain.match(keys).local_chunks == 1
    for answer, left in (("n", 1), ("y", 0)):
        monkeypatch.setattr(contents.sys, "stdin", SimpleNamespace(isatty=lambda: True))
        monkeypatch.setattr(contents.typer, "confirm", lambda text, answer=answer, **_: _confirm(answer))
        code, _, _ = setting.console.run("remove", "--namespace", "r1", "--node", setting.address)
        assert code == (130 if left else 0)
        assert setting.plain.match(keys).local_chunks == left


def _confirm(answer: str) -> None:
    if answer == "n":
        raise contents.typer.Abort


class _Metadata(metadata_pb2_grpc.MetadataServiceServicer):
    def __init__(self, nodes: dict[str, str]) -> None:
        self.nodes = nodes

    def ListNodes(self, request: object, context: object) -> metadata_pb2.ListNodesResponse:
        nodes = [node_pb2.NodeInfo(node_id=name, epoch=1, control_address=at) for name, at in self.nodes.items()]
        return metadata_pb2.ListNodesResponse(nodes=[metadata_pb2.NodeStatus(node=node) for node in nodes])


@contextlib.contextmanager
def metadata_service(nodes: dict[str, str]) -> Iterator[str]:
    with ThreadPoolExecutor(1) as threads:
        server = grpc.server(threads)
        metadata_pb2_grpc.add_MetadataServiceServicer_to_server(_Metadata(nodes), server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"127.0.0.1:{port}"
        server.stop(0).wait()


def test_remove_on_all_nodes_goes_on_after_a_failure(setting: Setting) -> None:
    keys = setting.store(setting.plain, 1, 2)
    with metadata_service({"z-gone": "127.0.0.1:1", "a-here": setting.address}) as metadata:
        arguments = ["remove", "--namespace", "r1", "--yes", "--all", "--metadata", metadata]
        code, out, err = setting.console.run(*arguments)
    assert code == 1 and "a-here: 2 chunks removed" in out and "nothing answers at 127.0.0.1:1" in err
    assert setting.plain.match(keys).local_chunks == 0
    with metadata_service({}) as metadata:
        error = setting.console.refused(1, "remove", "--namespace", "r1", "--yes", "--all", "--metadata", metadata)
    assert "knows no nodes" in error


def test_a_node_that_knows_nothing_of_it_is_no_failure_as_long_as_another_one_does(setting: Setting) -> None:
    (setting.folder / "other").mkdir()
    other = NodeThread(setting.folder / "other", dram_bytes=1 << 20, node_id="other")
    setting.store(setting.plain, 1, 2)
    with metadata_service({"other": other.info.control_address, "cli-node": setting.address}) as metadata:
        arguments = ["remove", "--yes", "--all", "--metadata", metadata]
        assert setting.console.json(*arguments, "--namespace", "r1")["removed_chunks"] == {"cli-node": 2}
        error = setting.console.refused(1, *arguments, "--namespace", "llama")
    other.stop()
    assert "cli-node has no namespace 'llama'" in error and "other has no namespace 'llama'" in error


# --- check ---------------------------------------------------------------------------------------------------


def test_check_of_a_node(setting: Setting) -> None:
    keys = setting.store(setting.plain, 1, 4)
    assert "nothing is broken (chunks 4, sampled chunks 2)" in setting.ok("check", "--sample", "2")
    slot = next(iter(setting.node.core.pool.forest.chunks[keys[1]].copies.values())).slot
    np.frombuffer(setting.node.daemon._memory.arena.memory, dtype=np.uint8)[slot * 4096 + 1] ^= 1
    code, out, err = setting.console.run("check", "--node", setting.address)
    assert (code, err) == (1, "") and "dram_checksum" in out and "kvstore check --repair" in out
    facts = setting.json("check", code=1)
    assert (facts["broken"], facts["findings"][0]["key"], facts["sampled_chunks"]) == (1, keys[1].hex(), 4)
    facts = setting.json("check", "--repair")
    assert facts["broken"] == 0 and facts["findings"][0]["repaired"]
    assert setting.plain.match(keys).local_chunks == 1
    assert setting.json("check")["findings"] == []


@dataclass(frozen=True)
class _Finding:
    kind: str
    text: str
    key: bytes | None
    repaired: bool


@dataclass(frozen=True)
class _Report:
    path: Path
    chunks: int
    findings: tuple[_Finding, ...]


def test_check_of_a_file(console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Path, bool]] = []

    def check_ssd_file(path: Path, *, repair: bool, progress: Any) -> _Report:
        asked.append((path, repair))
        progress(1, 2)
        lost = _Finding("checksum", "slot 7 differs", b"k" * 16, repair)
        stays = _Finding("namespace", "is not understood", None, False)
        return _Report(path, 5, (lost, stays) if path.name == "two" else (lost,))

    module = SimpleNamespace(check_ssd_file=check_ssd_file)
    monkeypatch.setitem(sys.modules, "kvstore.node.tiers.check", module)
    facts = console.json("check", "--ssd", "one", code=1)
    assert (facts["chunks"], facts["broken"], facts["findings"][0]["key"]) == (5, 1, b"k".hex() * 16)
    assert console.json("check", "--ssd", "one", "--repair")["broken"] == 0
    assert console.json("check", "--ssd", "two", "--repair", code=1)["broken"] == 1
    assert asked[:2] == [(Path("one"), False), (Path("one"), True)]
    code, out, _ = console.run("check", "--ssd", "two")
    assert code == 1 and "slot 7 differs" in out
    assert "neither --node nor --sample" in console.refused(2, "check", "--ssd", "one", "--sample", "3")


@pytest.mark.parametrize("command", ["namespaces", "pins", "check"])
def test_nobody_there_is_one_line_that_says_what_to_do(console: Console, command: str) -> None:
    assert "start one with `kvstore node`" in console.refused(1, command, "--node", "127.0.0.1:1")
