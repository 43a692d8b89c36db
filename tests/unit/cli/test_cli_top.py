"""Rates between two looks, and the view of nodes that come and go."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from console_run import Console
from rich.console import Console as RichConsole
from test_cli_operations import metadata_service

from kvstore.cli.asking import NodeName
from kvstore.cli.rates import Look, frame
from kvstore.cli.top import Watch, _table
from kvstore.client import connect
from tests.chaos.node_thread import NodeThread
from tests.unit.client.pages import namespace, pages_of, prompt


def look(at_s: float, epoch: int = 1, **figures: float) -> Look:
    return Look(at_s, "n1", epoch, figures)


# --- rates ---------------------------------------------------------------------------------------------------


def test_counters_become_rates() -> None:
    before = look(10.0, acquired_tokens=100, evictions=5, acquire_miss_absent=1, tcp_payload_bytes_sent=1000)
    # `acquire_miss_tokens_…` once showed as misses for a reason of that name.
    now = look(
        12.0,
        acquired_tokens=300,
        acquired_ssd_tokens=60,
        touched_tokens=10,
        acquire_miss_tokens_collision=128,
        ssd_read_bytes=4096,
        evictions=6,
        acquire_miss_absent=1,
        acquire_miss_collision=4,
        tcp_payload_bytes_sent=5000,
        loop_lag_ms=0.5,
        leases=3,
    )
    row = frame("title", "a:1", before, now)
    assert (row["node"], row["address"], row["state"]) == ("n1", "a:1", "live")
    assert row["hit_tokens_per_s"] == {"dram": 70.0, "ssd": 30.0}
    assert (row["touched_tokens_per_s"], row["miss_tokens_per_s"]) == (5.0, {"collision": 64.0})
    assert row["misses_per_s"] == {"absent": 0.0, "collision": 2.0}
    assert row["bytes_per_s"] == {"ssd_read": 2048.0, "tcp": 2000.0}
    assert (row["evictions_per_s"], row["commits_per_s"]) == (0.5, 0.0)
    assert (row["loop_lag_ms"], row["leases"], row["cleaner"], row["ssd"]) == (0.5, 3, {}, {})


def test_c08_bytes_by_what_they_are_doing() -> None:
    now = look(
        1.0,
        used_bytes=100,
        reserved_bytes=20,
        quarantined_bytes=30,
        free_bytes=900,
        largest_free_bytes=400,
        pinned_bytes=10,
    )
    assert frame("", "a:1", None, now)["bytes"] == {
        "committed": 50,
        "reserved": 20,
        "quarantined": 30,
        "free": 900,
        "largest_free": 400,
        "pinned": 10,
    }


@pytest.mark.parametrize(
    "before", [None, look(10.0, epoch=2, evictions=5), look(11.0, evictions=5)], ids=["first", "restarted", "same time"]
)
def test_without_an_earlier_look_at_the_same_start_there_are_no_rates(before: Look | None) -> None:
    row = frame("", "a:1", before, look(11.0, evictions=1))
    assert row["evictions_per_s"] is None and row["hit_tokens_per_s"] == {"dram": None, "ssd": None}


def test_a_node_that_does_not_answer_is_away_and_one_that_is_emptied_says_so() -> None:
    assert frame("title", "a:1", None, None) == {"node": "title", "address": "a:1", "state": "away"}
    assert frame("title", "a:1", look(1.0), None)["node"] == "n1"
    assert frame("", "a:1", None, look(1.0, draining=1))["state"] == "draining"


@pytest.mark.parametrize(("state", "text"), [(0, "in service"), (1, "full"), (2, "failed")])
def test_the_ssd_tier_and_the_cleaner_show(state: int, text: str) -> None:
    before = look(1.0, ssd_state=0, saves=4)
    row = frame("", "a:1", before, look(3.0, ssd_state=state, ssd_used_bytes=7, saves=10, cleaner_waiting_chunks=3))
    assert row["cleaner"] == {"waiting_chunks": 3}
    assert (row["ssd"]["state"], row["ssd"]["used_bytes"], row["ssd"]["saves_per_s"]) == (text, 7, 3.0)


# --- the view ------------------------------------------------------------------------------------------------


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeThread]:
    node = NodeThread(tmp_path, dram_bytes=1 << 20, node_id="watched")
    yield node
    node.stop()


@pytest.fixture
def console(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Console:
    return Console(capsys, monkeypatch, tmp_path)


def test_top_once(console: Console, node: NodeThread) -> None:
    with connect(node.info.socket_path) as client:
        cache = client.bind(namespace())
        keys = cache.keys(prompt(1, 32))
        cache.write(keys, pages_of(keys))
    arguments = ["top", "--node", node.info.control_address, "--once", "--interval-s", "0.05"]
    (row,) = console.json(*arguments)["nodes"]
    assert (row["node"], row["state"], row["chunks"]) == ("watched", "live", 2)
    assert row["bytes"]["committed"] == 2 * (12 << 10) and row["commits_per_s"] == 0.0
    out = console.ok(*arguments)
    assert "watched" in out and "bytes: largest free" in out and "24,576" in out
    (row,) = console.json("top", "--node", "127.0.0.1:1", "--once", "--interval-s", "0.05")["nodes"]
    assert row == {"node": "127.0.0.1:1", "address": "127.0.0.1:1", "state": "away"}


def test_nodes_that_leave_the_list_stay_in_view_as_away(node: NodeThread, tmp_path: Path) -> None:
    nodes = {"watched": node.info.control_address, "brief": "127.0.0.1:1"}
    with metadata_service(nodes) as metadata:
        watch = Watch("", True, metadata, None, 2.0)
        assert [(row["node"], row["state"]) for row in watch.look()] == [("brief", "away"), ("watched", "live")]
        del nodes["brief"]
        assert [(row["node"], row["state"]) for row in watch.look()] == [("brief", "away"), ("watched", "live")]
    rows = watch.look()  # the metadata service is gone: the last known list will do
    assert [row["state"] for row in rows] == ["away", "live"]
    text = RichConsole(width=200)
    with text.capture() as captured:
        text.print(_table(rows))
    assert "brief" in captured.get() and "away" in captured.get()


def test_a_node_that_came_back_elsewhere_is_one_row(node: NodeThread) -> None:
    watch = Watch(node.info.control_address, False, "", None, 2.0)
    watch._nodes = [NodeName("a", "x:1"), NodeName("b", "x:2")]
    assert watch._with_departed([NodeName("a", "x:9")]) == [NodeName("a", "x:9"), NodeName("b", "x:2")]


@pytest.mark.slow
def test_ctrl_c_ends_it_cleanly(node: NodeThread) -> None:
    code = "from kvstore.cli import main; main()"
    arguments = ["top", "--node", node.info.control_address, "--interval-s", "0.05", "--json"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
    child = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=Path(__file__).resolve().parents[3],
    )
    with contextlib.closing(_Ending(child)):
        assert child.stdout is not None and child.stderr is not None
        rows = [json.loads(child.stdout.readline())["nodes"][0] for _ in range(2)]
        assert [row["commits_per_s"] for row in rows] == [None, 0.0]
        child.send_signal(signal.SIGINT)
        assert child.wait(20) == 0
        assert child.stderr.read() == ""


class _Ending:
    """Whatever a test does, its child ends."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        self._child = child

    def close(self) -> None:
        if self._child.poll() is None:
            self._child.kill()
            self._child.wait(20)
        for pipe in (self._child.stdout, self._child.stderr):
            if pipe is not None:
                pipe.close()


def test_looks_are_timed_by_a_clock_that_goes_on(node: NodeThread) -> None:
    watch = Watch(node.info.control_address, False, "", None, 2.0)
    begin_s = time.monotonic()
    watch.look()
    (kept,) = watch._looks.values()
    assert begin_s <= kept.at_s <= time.monotonic()
