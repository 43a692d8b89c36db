"""A node that restarts under live clients, and two namespaces of different slot class on one small node."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.client import Client, connect
from kvstore.model.layout import Dtype, PageLayout
from kvstore.model.values import Outcome
from tests.chaos.node_thread import NodeThread
from tests.chaos.pool_processes import Process, Processes, stats_of, until
from tests.unit.client.pages import namespace, pages_of, poisoned, prompt

WIDE = PageLayout(layers=4, kv_heads=2, head_dim=40, dtype=Dtype.FP32, page_tokens=8, pages_per_chunk=2)


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["killed", "terminated"])
def test_a_node_restart_is_a_miss_and_then_a_hit_after_the_next_write(processes: Processes, ends: str) -> None:
    node = processes.node()
    reader, writer = processes.client(node), processes.client(node)
    assert writer.do("write", prompt=1, chunks=4)["stored"] == 4
    assert writer.do("reserve", prompt=2, chunks=2)["outcomes"] == ["GRANTED"] * 2
    assert reader.do("read", prompt=1, chunks=4)["chunks"] == 4
    node.kill() if ends == "killed" else node.terminate()

    def misses(client: Process) -> bool:
        answer = client.do("read", prompt=1, chunks=4)
        assert "error" not in answer, answer  # a miss is a value, however long the node is away
        return bool(answer["chunks"] == 0)

    until(lambda: misses(reader))
    for _ in range(3):
        assert misses(reader)
    assert writer.do("copy").get("error") == "SessionLost"
    assert writer.do("write", prompt=1, chunks=4)["error"] in ("Unreachable", "SessionLost")
    until(lambda: reader.do("write", prompt=9, chunks=1).get("error"))
    assert "error" not in reader.do("match", prompt=1, chunks=4)

    again = processes.node()
    assert (again.said["node_id"], again.said["epoch"]) == (node.said["node_id"], node.said["epoch"] + 1)
    until(lambda: writer.do("write", prompt=1, chunks=4).get("stored") == 4)
    until(lambda: reader.do("read", prompt=1, chunks=4)["chunks"] == 4)
    answer = reader.do("read", prompt=1, chunks=4)
    assert (answer["chunks"], answer["wrong"]) == (4, 0)
    assert reader.do("node")["epoch"] == again.said["epoch"]
    assert stats_of(again)["sessions"] == 2


@pytest.mark.slow
def test_a_stopped_node_keeps_no_reader_beyond_its_deadline(processes: Processes) -> None:
    """Same-host reads need no answer of the node; what needs one ends at its deadline."""
    node = processes.node()
    client = processes.client(node)
    client.do("write", prompt=1, chunks=4)
    node.stop()
    answer = client.do("read", prompt=1, chunks=4, deadline_s=0.5)
    assert (answer["chunks"], answer["wrong"]) == (4, 0)
    answer = client.do("read", prompt=2, chunks=4, deadline_s=0.5)
    assert answer["chunks"] == 0 and answer["seconds"] < 1.5
    node.go_on()
    assert client.do("write", prompt=2, chunks=2)["stored"] == 2


@pytest.mark.slow
def test_a_stopped_index_keeps_no_reader_beyond_its_deadline(processes: Processes) -> None:
    """The look-up took the default of the index, three seconds, out of a read that had half a second."""
    index = processes.metadata()
    node = processes.node(metadata_address=index.said["control_address"])
    client = processes.client(node, metadata=index.said["control_address"])
    client.do("write", prompt=1, chunks=2)
    index.stop()
    answer = client.do("read", prompt=1, chunks=4, deadline_s=0.5)
    assert answer["chunks"] == 2 and answer["seconds"] < 1.5
    index.go_on()


@pytest.fixture
def small_node(tmp_path: Path) -> Iterator[NodeThread]:
    node = NodeThread(tmp_path, dram_bytes=256 << 10, node_id="small")
    yield node
    node.stop()


def test_two_namespaces_of_different_class_live_on_one_small_node(small_node: NodeThread) -> None:
    """256 KiB for slots of 12 and of 44 KiB: each gets its room from the other, and neither sees the other's bytes."""
    with connect(small_node.info.socket_path) as client:
        for round_number in range(12):
            for layout, chunks in ((namespace().layout, 8), (WIDE, 2)):
                write_and_read(client, layout, round_number, chunks)
                small_node.call(small_node.core.check)
        stats = small_node.call(small_node.core.stats)
        assert stats["evictions"] > 50 and not stats["reserved_slots"]


def write_and_read(client: Client, layout: PageLayout, number: int, chunks: int) -> None:
    cache = client.bind(namespace(layout=layout))
    keys = cache.keys(prompt(number, 16 * chunks))
    outcomes = cache.write(keys, pages_of(keys, layout)).outcomes
    assert set(outcomes) <= {Outcome.COMMITTED, Outcome.PRESENT}
    target = poisoned(cache, chunks)
    assert cache.read(keys, target).chunks == chunks
    assert np.array_equal(target, pages_of(keys, layout))
