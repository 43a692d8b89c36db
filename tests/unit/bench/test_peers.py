"""The pure parts of the comparison with other stores: what is measured, in which order, and what counts as run."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from kvstore.errors import Unreachable

BENCH = Path(__file__).resolve().parents[3] / "bench"


@pytest.fixture(scope="module")
def peers() -> Iterator[ModuleType]:
    """`bench/peers.py` with its folder on the path."""
    sys.path.insert(0, str(BENCH))
    spec = importlib.util.spec_from_file_location("bench_of_peers", BENCH / "peers.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(BENCH))
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def drive(peers: ModuleType) -> ModuleType:
    return importlib.import_module("peers.drive")


class Memory:
    """A store in a dict; `lose` makes it deliver nothing."""

    def __init__(self, drive: ModuleType, lose: bool = False) -> None:
        self.pieces = drive.Pieces(4, 64)
        self.poison, self.check, self.copy = self.pieces.poison, self.pieces.check, self.pieces.copy
        self._held: list[Any] = []
        self._lose = lose

    def write(self) -> None:
        self._held = [piece.copy() for piece in self.pieces.sources()]

    def read(self) -> str:
        for piece, held in zip(self.pieces.targets(), self._held if not self._lose else [], strict=False):
            piece[:] = held
        return "shm"

    def forget(self) -> None:
        self._held = []


def test_a_piece_at_the_wrong_place_is_wrong_bytes(drive: ModuleType) -> None:
    pieces = drive.Pieces(4, 64)
    pieces.copy()
    assert pieces.check()
    pieces.target[[0, 1]] = pieces.target[[1, 0]]
    assert not pieces.check()
    pieces.copy()
    pieces.target[3, 63] ^= 1
    assert not pieces.check()


def test_what_an_earlier_read_delivered_does_not_count(drive: ModuleType) -> None:
    store = Memory(drive)
    drive.obey(store, {"verb": "write"})
    assert drive.obey(store, {"verb": "read"})["path"] == "shm"
    drive.obey(store, {"verb": "forget"})
    with pytest.raises(SystemExit, match="wrong bytes"):
        drive.obey(store, {"verb": "read"})


def test_source_and_destination_have_orders_of_their_own(drive: ModuleType) -> None:
    pieces = drive.Pieces(64, 64)
    assert sorted(pieces.out) == sorted(pieces.back) == list(range(64))
    assert len({tuple(pieces.out), tuple(pieces.back), tuple(range(64))}) == 3
    assert len(np.unique(pieces.source, axis=0)) == 64


class Answers:
    """A side that keeps what it was asked and takes `seconds` for it."""

    def __init__(self, name: str, log: list[tuple[str, str]], seconds: float, received_bytes: int = 0) -> None:
        self._name, self._log, self._seconds, self._received_bytes = name, log, seconds, received_bytes

    def ask(self, verb: str, **more: int) -> dict[str, Any]:
        self._log.append((self._name, verb))
        if verb in ("lookup", "match"):
            return {"seconds": [self._seconds] * more["calls"]}
        return {"seconds": self._seconds, "path": self._name, "received_bytes": self._received_bytes}


def test_sides_take_turns(peers: ModuleType) -> None:
    log: list[tuple[str, str]] = []
    row = peers.Row(peers.MOONCAKE, 4, 64, asks={"match": 2})
    rounds = peers.Rounds()
    peers.run_round(row, {"ours": Answers("ours", log, 1.0), "peer": Answers("peer", log, 3.0)}, rounds, linked=False)
    expected = "ours write, peer write, ours copy, ours read, peer read, ours copy, ours match, peer lookup, "
    assert ", ".join(map(" ".join, log)) == expected + "ours forget, peer forget"
    assert rounds.seconds["read"] == {"ours": [1.0], "peer": [3.0], "memcpy": [1.0]}
    assert rounds.paths == {"ours"}


def test_what_did_not_cross_the_link_was_not_read_from_the_other_host(peers: ModuleType) -> None:
    row, log = peers.Row(peers.MOONCAKE, 4, 64), []
    both = {"ours": Answers("ours", log, 1.0, 256), "peer": Answers("peer", log, 1.0, 255)}
    with pytest.raises(Unreachable, match="peer read less over the link"):
        peers.run_round(row, both, peers.Rounds(), linked=True)


def test_a_failure_outweighs_a_row_that_was_not_run(peers: ModuleType) -> None:
    assert [peers.worst_status(each) for each in ((), (0, 0), (0, 3), (3, 1, 0))] == [0, 0, 3, 1]


def test_an_environment_of_other_versions_is_missing(
    peers: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSTORE_PEERS", str(tmp_path))
    peer = peers.Peer("store", "store 1", "tcp", (("store==1",),))
    assert "`make peers` makes it" in peer.missing()
    peer.home.mkdir()
    stamp = peer.home / ".installed"
    stamp.write_text(repr((("store==2",),)))
    assert "other versions" in peer.missing()
    stamp.write_text(repr(peer.steps))
    assert peer.missing() == ""


def test_a_missing_peer_is_said_and_not_skipped(
    peers: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVSTORE_PEERS", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["peers.py", "--only", "redis"])
    with pytest.raises(SystemExit) as end:
        peers.main()
    assert end.value.code == peers.NOT_RUN
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and all('"op": "not_run"' in line and str(tmp_path) in line for line in lines)
