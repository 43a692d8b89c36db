"""The node that chunks are pulled from dies, stops or restarts in the middle: a reason in time, and nothing leaks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.client import connect
from kvstore.model.prefix import Keys
from kvstore.model.values import NodeInfo
from kvstore.node.operators.moving import Replicated
from tests.chaos.pool_processes import Process, Processes
from tests.unit.client.pages import LAYOUT, namespace, pages_of, prompt
from tests.unit.pulling_node import PullingNode, stop_halfway

SPACE = namespace()
CHUNKS = 8


@pytest.fixture
def target(tmp_path: Path) -> Iterator[PullingNode]:
    node = PullingNode(tmp_path, "target")
    yield node
    node.end()


def filled(source: Process) -> tuple[Keys, NodeInfo]:
    """A prompt on this node, and what the node says of itself."""
    with connect(source.said["socket_path"]) as client:
        cache = client.bind(SPACE)
        keys = cache.keys(prompt(1, 16 * CHUNKS))
        assert cache.write(keys, pages_of(keys)).visible == CHUNKS
        assert client.node is not None
        return keys, client.node


def all_there(target: PullingNode, keys: Keys) -> bool:
    with connect(target.info.socket_path) as client:
        cache = client.bind(SPACE)
        pages = cache.empty(CHUNKS)
        return cache.read(keys, pages).chunks == CHUNKS and bool((pages == pages_of(keys)).all())


@pytest.mark.slow
def test_a_source_killed_in_the_middle(
    processes: Processes, target: PullingNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = processes.node("source")
    keys, info = filled(source)
    stop_halfway(monkeypatch, source.kill)
    began = time.monotonic()
    done = target.replicate(keys, info, SPACE, deadline_s=10.0).result()
    assert done == Replicated(2, 2, 2 * LAYOUT.chunk_bytes, "unreachable")
    assert time.monotonic() - began < 10.0
    assert target.settled()
    restarted = processes.node("source")  # with a new epoch, and empty
    assert target.replicate(keys, info, SPACE).result().reason == "unreachable"
    keys, info = filled(restarted)
    assert target.replicate(keys, info, SPACE).result() == Replicated(CHUNKS, 6, 6 * LAYOUT.chunk_bytes, "")
    assert all_there(target, keys)
    assert target.settled()


@pytest.mark.slow
def test_a_source_stopped_in_the_middle(
    processes: Processes, target: PullingNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = processes.node("source")
    keys, info = filled(source)
    stop_halfway(monkeypatch, source.stop)
    began = time.monotonic()
    done = target.replicate(keys, info, SPACE, deadline_s=0.8).result()
    assert time.monotonic() - began < 0.8 + 1.0
    assert done == Replicated(2, 2, 2 * LAYOUT.chunk_bytes, "deadline")
    assert target.settled()
    source.go_on()
    assert target.replicate(keys, info, SPACE).result() == Replicated(CHUNKS, 6, 6 * LAYOUT.chunk_bytes, "")
    assert all_there(target, keys)
    assert target.settled()


@pytest.mark.slow
def test_a_stopped_source_does_not_hold_up_the_node(processes: Processes, target: PullingNode) -> None:
    """While both pulls wait for it, the target's loop answers, and its clients write and read."""
    source = processes.node("source")
    keys, info = filled(source)
    source.stop()
    waiting = [target.replicate(keys, info, SPACE, deadline_s=2.0) for _ in range(3)]
    with connect(target.info.socket_path) as client:
        cache = client.bind(SPACE)
        other = cache.keys(prompt(2, 16 * CHUNKS))
        assert cache.write(other, pages_of(other)).stored == CHUNKS
        assert cache.read(other, cache.empty(CHUNKS)).chunks == CHUNKS
    assert not any(each.done() for each in waiting)
    # The one that waits behind the others may learn from them that the source does not answer.
    assert {each.result().reason for each in waiting} <= {"deadline", "unreachable"}
    assert target.settled()
    source.go_on()
