"""What a stranger can do through the ports (F08), and what a tenant can learn about another's prompts (F09)."""

from __future__ import annotations

import ast
import os
import pickle
import random
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import engine_adapter
import kvstore
from kvstore.client import Cache
from kvstore.metadata.server import serve_metadata
from kvstore.model.namespace import Namespace
from kvstore.model.values import MissReason
from kvstore.rpc.serving import parse_address
from kvstore.scheduler.server import serve_router
from tests.chaos.tier_node import TierNode
from tests.unit.client.pages import LAYOUT
from tests.unit.scheduler.test_scheduler_server import Loop

UNPICKLING = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
A, B = (Namespace("pages", "r1", LAYOUT, tenant=tenant) for tenant in "AB")
GUESSES = 20


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TierNode]:
    node = TierNode(tmp_path, monkeypatch)
    yield node
    node.close()


# --- F08: ports ----------------------------------------------------------------------------------------------


class Planted:
    """Makes a folder where somebody unpickles it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def send(family: int, kind: int, address: object, data: bytes) -> None:
    """Send it, and read until the other side has closed or says no more for a moment."""
    with socket.socket(family, kind) as talking:
        talking.settimeout(0.05)
        talking.connect(address)
        with suppress(OSError):  # the other side may hang up at any byte
            talking.sendall(data)
            while talking.recv(4096):
                pass


def test_f08_random_bytes_and_pickles_harm_no_port(node: TierNode, tmp_path: Path) -> None:
    loop, rng, trap = Loop(), random.Random(8), tmp_path / "unpickled"
    metadata = loop.run(serve_metadata("127.0.0.1:0"))
    router = loop.run(serve_router("127.0.0.1:0", metadata.address, policy="longest_prefix", insecure=False))
    keys = node.write(1, 8)
    evil = [pickle.dumps(Planted(trap), protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    noise = [rng.randbytes(size) for size in (1, 8, 64, 4096, 1 << 16)]
    framed = [len(one).to_bytes(4, order) + one for one in evil for order in ("little", "big")]
    info = node.node.info
    for data in (*evil, *framed, *noise):
        for address in (info.control_address, info.data_address, metadata.address, router.address):
            send(socket.AF_INET, socket.SOCK_STREAM, parse_address(address), data)
        send(socket.AF_UNIX, socket.SOCK_SEQPACKET, info.socket_path, data)
    assert not trap.exists()
    assert node.read(keys).chunks == 8
    assert node.read(node.write(2, 8)).chunks == 8
    node.check()
    loop.run(router.stop())
    loop.run(metadata.stop(0.1))
    loop.close()
    pickle.loads(evil[0])
    assert trap.exists()  # it would have been seen


def test_f08_nothing_here_can_unpickle() -> None:
    sources = [path for package in (kvstore, engine_adapter) for path in Path(package.__path__[0]).rglob("*.py")]
    assert len(sources) > 100
    for path in sources:
        for statement in ast.walk(ast.parse(path.read_text())):
            if isinstance(statement, ast.Import):
                named = {alias.name.split(".")[0] for alias in statement.names}
            elif isinstance(statement, ast.ImportFrom):
                named = {(statement.module or "").split(".")[0]}
            elif isinstance(statement, ast.Call) and isinstance(statement.func, ast.Attribute | ast.Name):
                called = ast.unparse(statement.func)
                assert called not in ("eval", "exec", "torch.load"), f"{path}: {called}"
                allowed = any(word.arg == "allow_pickle" for word in statement.keywords)
                assert not allowed, f"{path}: {called} with allow_pickle"
                continue
            else:
                continue
            assert not named & UNPICKLING, f"{path}: {named & UNPICKLING}"


# --- F09: guesses --------------------------------------------------------------------------------------------


def seen_by(node: TierNode, cache: Cache) -> list[object]:
    """What a guesser sees of each prompt at the first contact: the look-up, then the read."""
    seen: list[object] = []
    for prompt in range(1, GUESSES + 1):
        keys = node.keys(prompt, 8, cache)
        match = cache.match(keys)
        result = node.read(keys, cache=cache)
        seen.append((match.pool_chunks, result.chunks, result.ssd_tokens, result.reason))
    return seen


@pytest.mark.parametrize("tier", ["dram", "ssd"])
def test_f09_a_guessed_prompt_of_another_tenant_looks_like_any_other(node: TierNode, tier: str) -> None:
    owner = node.client.bind(A, secret=b"one")
    (node.on_ssd if tier == "ssd" else node.write)(7, 8, owner)
    guessers = {
        "another tenant": node.client.bind(B, secret=b"two"),
        "the owner's name, another secret": node.client.bind(A, secret=b"two"),
        "the owner's name, no secret": node.client.bind(A),
        "no tenant": node.client.bind(Namespace("pages", "r1", LAYOUT)),
    }
    for name, guesser in guessers.items():
        assert set(seen_by(node, guesser)) == {(0, 0, 0, MissReason.ABSENT)}, name
    hits = [one for one in seen_by(node, owner) if one != (0, 0, 0, MissReason.ABSENT)]
    assert len(hits) == 1  # who has the secret sees the one prompt
    node.check()
