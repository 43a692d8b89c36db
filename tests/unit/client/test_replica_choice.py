"""Which of several nodes that hold a prefix is read first."""

from __future__ import annotations

import pytest

from kvstore.client import nodes as nodes_module
from kvstore.client.nodes import Nodes
from kvstore.metadata import NodeMatch
from kvstore.model.values import NodeInfo, Tier


def match(name: str, run: int, *, suspect: bool = False) -> NodeMatch:
    return NodeMatch(NodeInfo(name, 1, name, f"{name}:1", f"{name}:2"), run, Tier.DRAM, suspect)


def chosen(nodes: Nodes, *matches: NodeMatch) -> set[str]:
    return {nodes.spread(matches).node.node_id for _ in range(100)}


@pytest.fixture
def nodes() -> Nodes:
    return Nodes(None, None, None)


def test_equal_nodes_share_the_reads(nodes: Nodes) -> None:
    assert chosen(nodes, match("a", 7), match("b", 7), match("c", 7)) == {"a", "b", "c"}


def test_the_longest_run_comes_first(nodes: Nodes) -> None:
    assert chosen(nodes, match("a", 7), match("b", 8), match("c", 8)) == {"b", "c"}


def test_a_node_that_has_fallen_silent_is_asked_last(nodes: Nodes) -> None:
    assert chosen(nodes, match("silent", 9, suspect=True), match("a", 3)) == {"a"}


def test_b15_a_node_whose_data_did_not_come_is_asked_last_for_a_while(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    sick, well = match("sick", 9), match("well", 3)
    now_s = [100.0]
    monkeypatch.setattr(nodes_module.time, "monotonic", lambda: now_s[0])
    pauses = []
    for _ in range(7):
        nodes.note_data_path(sick.node, works=False)
        assert chosen(nodes, sick, well) == {"well"} and chosen(nodes, sick) == {"sick"}
        began_s = now_s[0]
        while chosen(nodes, sick, well) == {"well"}:
            now_s[0] += 0.5
        pauses.append(now_s[0] - began_s)
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    nodes.note_data_path(sick.node, works=True)
    assert chosen(nodes, sick, well) == {"sick"}
    assert nodes.counters.snapshot()["data_path_failures"] == 7


def test_b15_a_node_whose_data_did_not_come_lately_is_named(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once in the log, and until a read has worked or nobody has asked it for a while."""
    now_s = [100.0]
    monkeypatch.setattr(nodes_module.time, "monotonic", lambda: now_s[0])
    for _ in range(3):
        nodes.note_data_path(match("sick", 1).node, works=False, why="unreachable")
    nodes.note_data_path(match("old", 1).node, works=False, why="deadline")
    nodes.note_data_path(match("well", 1).node, works=True)
    assert nodes.degraded_nodes() == ("old", "sick") and nodes.stats()["degraded_nodes"] == 2
    assert [record.getMessage() for record in caplog.records] == [
        "node sick: its data do not come (unreachable); others are asked first",
        "node old: its data do not come (deadline); others are asked first",
    ]
    nodes.note_data_path(match("sick", 1).node, works=True)
    assert nodes.degraded_nodes() == ("old",)
    now_s[0] += 100.0
    assert nodes.degraded_nodes() == () and nodes.stats()["degraded_nodes"] == 0
