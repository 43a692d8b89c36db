"""Before and while a node starts: `--check`, what is refused, progress on standard error."""

from __future__ import annotations

import io
import json
import os
import signal
import time
from pathlib import Path

import pytest
from console_run import Console

from kvstore.analytics.processes import Children
from kvstore.cli.output import announcer
from kvstore.cli.progress import LINE_EVERY_S, StartProgress
from kvstore.client import connect
from kvstore.config import NodeSettings
from kvstore.node.operators import limits
from tests.unit.client.pages import namespace, pages_of, prompt

GIB = 1 << 30


@pytest.fixture
def console(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Console:
    return Console(capsys, monkeypatch, tmp_path)


# --- --check -------------------------------------------------------------------------------------------------


def test_f13_check_prints_what_is_in_force_and_makes_nothing(
    console: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kvstore.toml").write_text('[node]\ndram = "16MiB"\nroom_chunks = 7\n')
    monkeypatch.setenv("KVSTORE_NODE_EVICTION", "lru")
    monkeypatch.setenv("KVSTORE_NODE_ROOM_CHUNKS", "8")
    folders = ["--data-dir", str(tmp_path / "data"), "--socket-dir", str(tmp_path / "run")]
    facts = console.json("node", "--check", "--host-id", "here", *folders)
    node = facts["node"]
    assert (node["dram"], node["room_chunks"], node["slots"], node["host_id"]) == (16 << 20, 8, 256, "here")
    assert (node["data_dir"], node["node_id"]) == (str(tmp_path / "data"), "")
    assert facts["limits"]["room_chunks"] == 8 and facts["limits"]["pinned_bytes"] == 4 << 20
    assert facts["memory_bytes"] > 16 << 20
    assert [path.name for path in tmp_path.iterdir()] == ["kvstore.toml"]
    out = console.ok("node", "--check", *folders)
    assert "16777216" in out and "pinned_bytes" in out and "memory of the whole node" in out


def test_f13_what_check_prints_is_what_a_start_uses(tmp_path: Path) -> None:
    settings = NodeSettings(dram=GIB, data_dir=str(tmp_path / "d"), socket_dir=str(tmp_path / "s"))
    before = settings.planned()
    used = settings.resolved()
    assert used.model_dump(exclude={"node_id"}) == before.model_dump(exclude={"node_id"})
    assert (before.node_id, settings.planned()) == ("", used)


def test_f13_check_of_a_whole_pool(console: Console, tmp_path: Path) -> None:
    facts = console.json("up", "--check", "--no-router", "--dram", "16MiB")
    assert facts["metadata"]["address"] == "127.0.0.1:7410" and "router" not in facts
    assert "settings of the router table" in console.ok("up", "--check", "--dram", "16MiB")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[node]\ndran = 1\n", "did you mean dram?"),
        ("[nodes]\ndram = 1\n", "did you mean node?"),
        ("[node]\nreplicas = 2\n", "unknown setting [node] replicas"),
        ('[node]\nslots = "many"\n', "[node] slots ("),
        ("[node]\ndram = 0\n", "is not a size above 0"),
        ("[node]\nslots = -1\n", "[node] slots ("),
    ],
)
def test_f13_check_names_key_and_near_match(console: Console, tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "kvstore.toml").write_text(text)
    assert expected in console.refused(2, "node", "--check")


def test_c07_too_much_memory_is_refused_by_check_and_by_the_start(
    console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "available_bytes", lambda: 8 * GIB)
    monkeypatch.setattr("os.execv", lambda *_: pytest.fail("started"))
    for arguments in (["node"], ["node", "--check"], ["up"], ["up", "--check"]):
        error = console.refused(2, *arguments, "--dram", "8GiB")
        assert "not of one rank" in error and "pages 8GiB + its catalog" in error and "only 8GiB" in error


def test_f12_a_limit_that_comes_out_as_nothing_is_refused(console: Console) -> None:
    assert "pinned_bytes" in console.refused(2, "node", "--check", "--dram", "8KiB")


# --- progress and announcement -------------------------------------------------------------------------------


class Screen(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal
        self.now_s = 0.0

    def isatty(self) -> bool:
        return self._terminal

    def progress(self, *, announced: bool = True) -> StartProgress:
        return StartProgress(self, announced=announced, clock=lambda: self.now_s)


def test_a_terminal_gets_a_bar_that_goes_when_all_is_done() -> None:
    screen = Screen(terminal=True)
    progress = screen.progress()
    for done in (256 << 20, 257 << 20, 512 << 20):
        progress("populating", done, GIB)  # the second one comes too soon after the first
        screen.now_s += 0.05
    screen.now_s += 0.1
    progress("populating", GIB, GIB)
    parts = screen.getvalue().split("\r\x1b[K")
    assert parts[1].startswith("populating [#######...") and "256MiB of 1GiB (25 %)" in parts[1]
    assert "512MiB of 1GiB (50 %)" in parts[2] and parts[3:] == [""]


def test_others_get_a_line_at_times_and_nothing_if_it_was_quick() -> None:
    screen = Screen(terminal=False)
    progress = screen.progress()
    progress("populating", 1 << 20, GIB)
    progress("populating", GIB, GIB)
    assert screen.getvalue() == ""
    progress = screen.progress()
    screen.now_s += LINE_EVERY_S
    progress("populating", 300 << 20, GIB)
    progress("populating", 301 << 20, GIB)
    progress("populating", GIB, GIB)
    assert screen.getvalue() == "populating: 300MiB of 1GiB (29 %)\npopulating: 1GiB of 1GiB (100 %)\n"


def test_nothing_is_drawn_into_the_announcement() -> None:
    screen = Screen(terminal=True)
    progress = screen.progress(announced=False)
    progress("recovering", 0, 0)
    assert screen.getvalue() == ""
    progress.announced()
    progress("recovering", 0, 0)
    assert "recovering [" in screen.getvalue()


def test_f12_limits_are_announced_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    announcer(as_json=False)({"role": "node", "limits": {"pinned_bytes": 262144, "room_chunks": "none"}})
    assert "pinned bytes 262,144, room chunks none" in capsys.readouterr().err


# --- processes -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_worker_comes_back_with_pins_and_their_chunks(console: Console) -> None:
    ends_s = time.monotonic() + 60
    with Children() as children:
        node = children.start_node("pinned", "", "--dram", "16MiB")
        assert node.announcement["limits"]["pinned_bytes"] == 4 << 20
        address = node.announcement["control_address"]
        with connect(node.announcement["socket_path"]) as client:
            cache = client.bind(namespace())
            keys = cache.keys(prompt(1, 48))
            while cache.match(keys).local_chunks < 3:  # it may still be populating
                assert time.monotonic() < ends_s
                cache.write(keys, pages_of(keys))
        key = ["--namespace", "r1", "--key", keys[-1].hex()]
        console.ok("pin", "system", *key, "--node", address)
        (worker,) = Path(f"/proc/{node.pid}/task/{node.pid}/children").read_text().split()
        os.kill(int(worker), signal.SIGKILL)
        while True:
            code, out, _ = console.run("pins", "--node", address, "--json")
            if code == 0:
                break
            assert time.monotonic() < ends_s
        (pin,) = json.loads(out)["pins"]
        assert (pin["name"], pin["chunks"]) == ("system", 3)
        assert console.json("check", "--node", address)["broken"] == 0
