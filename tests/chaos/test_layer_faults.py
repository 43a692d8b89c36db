"""Peers that fail while their layers are told: what was told stays right, the rest comes from another or not at all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.client import Client, LayersReady, connect, reading
from kvstore.client.pipeline import Delivery
from kvstore.metadata import NodeMatch
from kvstore.metadata.embedded import EmbeddedIndex
from kvstore.model.layout import Rectangle
from kvstore.model.prefix import KeyChain, Keys
from kvstore.model.values import MissReason, NodeInfo, Tier
from tests.chaos.node_thread import NodeThread
from tests.chaos.pool_processes import Processes
from tests.chaos.test_tier_uses import Setting, make
from tests.unit.client.pages import MIB, POISON, Bytes, namespace, pages_of, poisoned, prompt

CHUNKS, LAYERS = 4, MIB.layers
SPACE = namespace("faults", MIB)
LAYER_BYTES = MIB.chunk_bytes // LAYERS
KEYS = KeyChain(SPACE).keys(prompt(1, 64 * CHUNKS))
PAGES = pages_of(KEYS, MIB)
WAIT_S = 20.0
__all__ = ["make"]  # a fixture
Told = list[LayersReady]


class InOrder(EmbeddedIndex):
    """An index that believes that all nodes have everything, earlier ones more of it."""

    def __init__(self, *infos: NodeInfo) -> None:
        super().__init__()
        self._infos = infos

    def match(self, keys: Keys, rectangle: Rectangle | None = None) -> list[NodeMatch]:
        first = len(keys) + len(self._infos)
        return [NodeMatch(info, first - place, Tier.DRAM, False) for place, info in enumerate(self._infos)]


def fill(address: str) -> NodeInfo:
    """Store KEYS on a node of this host."""
    with connect(address) as writer:
        assert writer.bind(SPACE).write(KEYS, PAGES).visible == CHUNKS
        assert writer.node is not None
        return writer.node


class Follower:
    """A reader of other nodes that checks what it is told when it is told."""

    def __init__(self, *infos: NodeInfo, staging_bytes: int = 8 << 20) -> None:
        self.client = Client(None, None, InOrder(*infos), staging_bytes=staging_bytes)
        self.cache = self.client.bind(SPACE)
        self.target: Bytes = poisoned(self.cache, CHUNKS)
        self.told: Told = []

    def at_payload(self, number: int, act: Callable[[], object]) -> None:
        """`act` when exchange `number` (a group each) has been asked for and none of its bytes was taken."""
        count = iter(range(1 << 20))

        def hold() -> None:
            if next(count) == number:
                act()

        self.client._transports._tcp.hold_for_tests(hold)  # type: ignore[attr-defined]

    def read(self, deadline_s: float = 10.0) -> Any:
        self.told = []
        with self.cache.read_layers(KEYS, self.target, mode="layerwise", deadline_s=deadline_s) as read:
            for ready in read:
                self.told.append(ready)
                layers = slice(ready.layer_start, ready.layer_stop)
                assert np.array_equal(self.target[: ready.chunks, layers], PAGES[: ready.chunks, layers]), ready
            result = read.result()
        assert np.array_equal(self.target[: result.chunks], PAGES[: result.chunks])
        return result

    def close(self) -> None:
        self.client.close()
        self.client.staging.check()
        assert self.client.staging.usage().free_bytes == self.client.staging.total_bytes


def each_layer(start: int = 0, stop: int = LAYERS) -> Told:
    return [LayersReady(layer, layer + 1, CHUNKS) for layer in range(start, stop)]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[NodeThread]]:
    """Two nodes that hold KEYS."""
    nodes = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        nodes.append(NodeThread(tmp_path / name, 12 << 20, node_id=name))
        fill(nodes[-1].info.socket_path)
    yield nodes
    for node in nodes:
        assert node.call(node.core.stats)["leases"] == 0
        node.call(node.core.check)
        node.stop()


def flip(node: NodeThread, chunk: int, layer: int) -> None:
    copies = node.call(lambda: node.core.pool.forest.chunks[KEYS[chunk]].copies)
    start = next(iter(copies.values())).slot * 4096 + layer * LAYER_BYTES
    np.frombuffer(node.daemon._memory.arena.memory, dtype=np.uint8)[start + 777] ^= 0x10


@pytest.mark.parametrize("replica", [False, True])
def test_a_byte_that_changed_stops_the_telling_at_its_layer(nodes: list[NodeThread], replica: bool) -> None:
    """Layer 5 of chunk 3: layers before it are told of all chunks, and only a replica brings the rest of chunk 3."""
    flip(nodes[0], 3, 5)
    follower = Follower(*(node.info for node in (nodes if replica else nodes[:1])))
    result = follower.read()
    if replica:
        assert (result.chunks, result.reason, follower.told) == (CHUNKS, None, each_layer())
        assert follower.client.stats()["reads_continued_elsewhere"] == 1
    else:
        assert (result.chunks, result.reason) == (3, MissReason.CHECKSUM)
        assert follower.told == [*each_layer(stop=5), LayersReady(5, LAYERS, 3)]
    follower.close()


def test_without_checksums_the_byte_would_be_told(nodes: list[NodeThread], monkeypatch: pytest.MonkeyPatch) -> None:
    flip(nodes[0], 3, 5)
    monkeypatch.setattr(reading, "Delivery", partial(Delivery, verify=False))
    follower = Follower(nodes[0].info)
    with pytest.raises(AssertionError, match="layer_start=5"):
        follower.read()
    follower.close()


@pytest.mark.parametrize("replica", [False, True])
def test_a_chunk_whose_slot_was_reused_stops_the_telling_at_the_fence(nodes: list[NodeThread], replica: bool) -> None:
    def remove() -> None:
        with connect(nodes[0].info.socket_path) as other:
            assert other.bind(SPACE).remove(KEYS.slice(3, 4)) == 1

    follower = Follower(*(node.info for node in (nodes if replica else nodes[:1])))
    follower.at_payload(5, remove)
    result = follower.read()
    if replica:
        assert (result.chunks, follower.told) == (CHUNKS, each_layer())
    else:
        assert (result.chunks, result.reason) == (3, MissReason.ABSENT)
        assert follower.told == [*each_layer(stop=5), LayersReady(5, LAYERS, 3)]
    follower.close()


@pytest.mark.parametrize("missing", [0, 2])
def test_what_comes_from_the_ssd_is_told_of_once_it_is_there(make: Callable[..., Setting], missing: int) -> None:
    """Half of a prompt in DRAM, half on the SSD, and perhaps more asked for than there is."""
    setting = make(room_chunks=6, ssd_chunks=40)
    setting.store(1, 6)
    setting.store(2, 3)  # the tail of the first leaves the DRAM
    keys = setting.keys(1, 6 + missing)
    pages = setting._content(keys.slice(0, 6))
    target, told = setting.cache.empty(len(keys)), []
    target[:] = POISON
    with setting.cache.read_layers(keys, target, mode="layerwise", layers_at_once=1) as read:
        for ready in read:
            layers = slice(ready.layer_start, ready.layer_stop)
            assert np.array_equal(target[: ready.chunks, layers], pages[: ready.chunks, layers]), ready
            told.append(ready)
        result = read.result()
    assert (result.chunks, result.ssd_tokens) == (6, 3 * setting.cache.layout.chunk_tokens)
    assert told[-1].layer_stop == setting.cache.layout.layers and {ready.chunks for ready in told} == {6}
    setting.client.flush_touches()
    setting.rest()
    assert setting.uses(1, 6) == [2] * 6, "one read is one use"


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    processes = Processes(tmp_path)
    yield processes
    processes.end()


@pytest.mark.slow
@pytest.mark.parametrize("replica", [False, True])
def test_b01_a_peer_that_dies_in_the_middle_ends_the_telling_or_is_replaced(
    processes: Processes, nodes: list[NodeThread], replica: bool
) -> None:
    """What was told of stays in the destination; without a replica nothing counts, because no chunk has all layers."""
    dying = processes.node("dying", dram=12 << 20)
    info = fill(dying.said["socket_path"])
    follower = Follower(info, *([nodes[1].info] if replica else []))
    follower.at_payload(3, dying.kill)
    result = follower.read()
    if replica:
        assert (result.chunks, result.reason, follower.told) == (CHUNKS, None, each_layer())
    else:
        # Whether the last group that came was told before the failure was seen is a matter of threads.
        assert len(follower.told) in (2, 3) and follower.told == each_layer(stop=len(follower.told))
        assert (result.chunks, result.reason) == (0, MissReason.UNREACHABLE)
    follower.close()


@pytest.mark.slow
def test_chunks_that_lack_a_layer_do_not_count_where_a_group_takes_several_exchanges(processes: Processes) -> None:
    """Staging takes one chunk's layer at a time; the peer dies when layer 1 of chunks 0 and 1 has come."""
    dying = processes.node("dying", dram=12 << 20)
    follower = Follower(fill(dying.said["socket_path"]), staging_bytes=600 << 10)
    follower.at_payload(CHUNKS + 2, dying.kill)
    result = follower.read()
    assert (result.chunks, result.reason) == (0, MissReason.UNREACHABLE)
    assert follower.told == each_layer(stop=1)
    follower.close()


@pytest.mark.slow
def test_b03_closing_a_read_of_a_stopped_peer_ends_its_transfer(processes: Processes) -> None:
    """The thread is free long before the deadline, and giving up says nothing against the peer."""
    standing = processes.node("standing", dram=12 << 20)
    follower = Follower(fill(standing.said["socket_path"]))
    stopped = threading.Event()
    follower.at_payload(3, lambda: (standing.stop(), stopped.set()))
    read = follower.cache.read_layers(KEYS, follower.target, mode="layerwise", deadline_s=300.0)
    assert next(read) == LayersReady(0, 1, CHUNKS)
    assert stopped.wait(WAIT_S)
    read.close()
    follower.target[:] = POISON
    assert read._future.result(WAIT_S).chunks == 0
    assert (follower.target == POISON).all()
    assert "data_path_failures" not in follower.client.stats()
    standing.go_on()
    assert follower.read().chunks == CHUNKS and follower.told == each_layer()
    follower.close()


@pytest.mark.slow
def test_a_peer_that_stands_still_ends_the_telling_at_the_deadline(processes: Processes) -> None:
    standing = processes.node("standing", dram=12 << 20)
    follower = Follower(fill(standing.said["socket_path"]))
    follower.at_payload(2, standing.stop)
    result = follower.read(0.3)
    assert (result.chunks, result.reason) == (0, MissReason.DEADLINE)
    assert follower.told == each_layer(stop=len(follower.told)) and len(follower.told) <= 2
    standing.go_on()
    assert follower.read().chunks == CHUNKS and follower.told == each_layer()
    follower.close()
