"""Chunks from node to node: right bytes, once, as a prefix, within the deadline, and nothing left behind."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore import replication
from kvstore.client import Cache, connect
from kvstore.client.peers import Peer
from kvstore.errors import CapacityExhausted, InvalidRequest, LayoutMismatch
from kvstore.model.layout import Geometry
from kvstore.model.prefix import Keys
from kvstore.model.values import NodeInfo
from kvstore.node.operators.moving import Drained, Replicated
from kvstore.rpc.v1 import admin_pb2
from tests.unit.client.pages import LAYOUT, namespace, pages_of, poisoned, prompt
from tests.unit.pulling_node import PullingNode, stop_halfway

SPACE = namespace()
TP2 = Geometry.parallel(LAYOUT, tp=2)
WHOLE = Geometry.whole(LAYOUT)

Start = Callable[..., PullingNode]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts nodes; each must be settled at the end."""
    nodes: list[PullingNode] = []

    def one(name: str, dram_bytes: int = 4 << 20) -> PullingNode:
        nodes.append(PullingNode(tmp_path, name, dram_bytes))
        return nodes[-1]

    yield one
    try:
        for node in nodes:
            assert node.settled()
    finally:
        for node in nodes:
            node.end()


def stored(node: PullingNode, number: int, tokens: int) -> Keys:
    """A prompt on this node, as its writer stored it."""
    with connect(node.info.socket_path) as client:
        cache = client.bind(SPACE)
        keys = cache.keys(prompt(number, tokens))
        assert cache.write(keys, pages_of(keys)).stored == len(keys)
    return keys


def local_chunks(node: PullingNode, keys: Keys) -> int:
    """Leading chunks that a client on the node's host reads; their bytes are right."""
    with connect(node.info.socket_path) as client:
        return _right_chunks(client.bind(SPACE), keys, "shm")


def remote_chunks(node: PullingNode, keys: Keys) -> int:
    """The same for a client on another host."""
    with connect(node.info.control_address, transport="tcp") as client:
        return _right_chunks(client.bind(SPACE), keys, "tcp")


def _right_chunks(cache: Cache, keys: Keys, path: str) -> int:
    target = poisoned(cache, len(keys))
    result = cache.read(keys, target)
    assert set(result.bytes_by_path) <= {path}
    assert np.array_equal(target[: result.chunks], pages_of(keys)[: result.chunks])
    return result.chunks


# --- replicate -----------------------------------------------------------------------------------------------


def test_a_chain_is_pulled_and_read_on_both_ways(start: Start) -> None:
    source, target = start("source"), start("target")
    keys = stored(source, 1, 16 * 9 + 5)  # the last chunk is partial
    done = target.replicate(keys, source.info, SPACE).result()
    assert done == Replicated(10, 10, 10 * LAYOUT.chunk_bytes, "")
    assert local_chunks(target, keys) == remote_chunks(target, keys) == 10
    # A continuation of the prompt hangs on the pulled chunks: fingerprints and parents came along.
    with connect(target.info.socket_path) as client:
        cache = client.bind(SPACE)
        longer = cache.keys(prompt(1, 16 * 12))
        assert cache.write(longer, pages_of(longer)).visible == 12
    assert local_chunks(target, longer) == 12


def test_what_is_there_is_not_moved_again(start: Start) -> None:
    source, target = start("source"), start("target")
    keys = stored(source, 1, 16 * 8)
    assert target.replicate(keys.slice(0, 5), source.info, SPACE).result().pulled_chunks == 5
    sent = source.node.tcp.payload_bytes_sent
    assert target.replicate(keys.slice(0, 5), source.info, SPACE).result() == Replicated(5, 0, 0, "")
    assert source.node.tcp.payload_bytes_sent == sent
    assert target.replicate(keys, source.info, SPACE).result() == Replicated(8, 3, 3 * LAYOUT.chunk_bytes, "")
    assert local_chunks(target, keys) == 8


def test_many_windows_make_one_chain(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = start("source"), start("target")
    keys = stored(source, 1, 16 * 50)
    monkeypatch.setattr(replication, "WINDOW_BYTES", 3 * 12 << 10)
    assert target.replicate(keys, source.info, SPACE).result().held_chunks == 50
    assert local_chunks(target, keys) == 50


def test_shards_of_two_ranks_stay_two_shards(start: Start) -> None:
    source, target = start("source"), start("target")
    with connect(source.info.socket_path) as client:
        ranks = [client.bind(SPACE, geometry=TP2, rank=rank) for rank in (0, 1)]
        keys = ranks[0].keys(prompt(1, 16 * 6))
        pages = pages_of(keys)
        for rank, cache in enumerate(ranks):
            assert cache.write(keys, np.ascontiguousarray(pages[:, :, :, rank : rank + 1])).stored == 6
    done = target.replicate(keys, source.info, SPACE, [(TP2, (0, 1))]).result()
    assert done == Replicated(6, 6, 6 * LAYOUT.chunk_bytes, "")
    shards = target.node.call(lambda: {tuple(sorted(c.copies)) for c in target.core.pool.forest.chunks.values()})
    assert shards == {(TP2.shard(0), TP2.shard(1))}
    assert local_chunks(target, keys) == 6


def test_only_rectangles_that_are_written_here_are_pulled(start: Start) -> None:
    source, target = start("source"), start("target")
    with connect(source.info.socket_path) as client:
        cache = client.bind(SPACE, geometry=TP2, rank=1, written_here=(1,))
        keys = cache.keys(prompt(1, 16 * 4))
        half = np.ascontiguousarray(pages_of(keys)[:, :, :, 1:2])
        assert cache.write(keys, half).stored == 4
    done = target.replicate(keys, source.info, SPACE, [(TP2, (1,))]).result()
    assert done == Replicated(4, 4, 2 * LAYOUT.chunk_bytes, "")
    published = target.node.call(lambda: [chunk.published for chunk in target.core.pool.forest.chunks.values()])
    assert published == [True] * 4
    # The whole chunks are nowhere: a reason, and no slot is asked for.
    assert target.replicate(keys, source.info, SPACE).result() == Replicated(0, 0, 0, "not_covered")


def test_an_absent_tail_is_a_reason(start: Start) -> None:
    source, target = start("source"), start("target")
    keys = stored(source, 1, 16 * 4)
    with connect(source.info.socket_path) as client:
        longer = client.bind(SPACE).keys(prompt(1, 16 * 7))
    done = target.replicate(longer, source.info, SPACE).result()
    assert done == Replicated(4, 4, 4 * LAYOUT.chunk_bytes, "absent")
    assert local_chunks(target, keys) == 4


def test_d11_two_callers_make_one_copy(start: Start) -> None:
    """Both succeed; each chunk crosses the network once."""
    source, target = start("source"), start("target")
    keys = stored(source, 1, 16 * 60)
    both = [target.replicate(keys, source.info, SPACE) for _ in range(2)]
    done = [each.result() for each in both]
    assert [(each.held_chunks, each.reason) for each in done] == [(60, "")] * 2
    assert sum(each.pulled_chunks for each in done) == 60
    assert sum(each.pulled_bytes for each in done) == 60 * LAYOUT.chunk_bytes
    assert target.stats()["commits"] == 60
    assert local_chunks(target, keys) == 60


def test_a24_a_writer_on_the_target_is_waited_for(start: Start) -> None:
    source, target = start("source"), start("target")
    keys = stored(source, 1, 16 * 6)
    with connect(target.info.socket_path) as client:
        pending = client.bind(SPACE).begin_write(keys.slice(0, 3))
        replicating = target.replicate(keys, source.info, SPACE)
        while target.stats().get("reserve_in_progress", 0) < 3:
            assert not replicating.done()
        pending.abort()
        assert replicating.result() == Replicated(6, 6, 6 * LAYOUT.chunk_bytes, "")
    assert local_chunks(target, keys) == 6


def test_a_writer_that_stalls_is_not_waited_for_beyond_the_deadline(start: Start) -> None:
    source, target = start("source"), start("target")
    keys = stored(source, 1, 16 * 6)
    with connect(target.info.socket_path) as client:
        with client.bind(SPACE).begin_write(keys.slice(0, 3)):
            done = target.replicate(keys, source.info, SPACE, deadline_s=0.6).result()
            assert (done.held_chunks, done.reason) == (0, "deadline")
    assert target.replicate(keys, source.info, SPACE).result().held_chunks == 6


def test_a_full_target_keeps_a_prefix(start: Start) -> None:
    source, target = start("source"), start("target", 1 << 20)
    keys = stored(source, 1, 16 * 120)  # 120 slots of 12 KiB do not fit into 1 MiB
    done = target.replicate(keys, source.info, SPACE).result()
    assert done.reason == "refused_full"
    assert 0 < done.held_chunks == done.pulled_chunks < 120
    assert local_chunks(target, keys) == done.held_chunks


def test_c09_a_source_that_has_nothing_evicts_nothing(start: Start) -> None:
    source, target = start("source"), start("target", 1 << 20)
    kept = [stored(target, number, 16 * 40) for number in (0, 1)]
    with connect(source.info.socket_path) as client:
        missing = client.bind(SPACE).keys(prompt(2, 16 * 40))
    assert target.replicate(missing, source.info, SPACE).result() == Replicated(0, 0, 0, "absent")
    assert target.stats()["evictions"] == 0
    assert [local_chunks(target, keys) for keys in kept] == [40, 40]


def test_chunks_removed_from_the_source_during_the_copy(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = start("source"), start("target")
    keys = stored(source, 1, 16 * 8)

    def remove() -> None:
        with connect(source.info.socket_path) as client:
            client.bind(SPACE).remove(keys.slice(3, 4))

    stop_halfway(monkeypatch, remove)
    done = target.replicate(keys, source.info, SPACE).result()
    assert done == Replicated(3, 3, 3 * LAYOUT.chunk_bytes, "absent")
    assert local_chunks(target, keys) == 3


def test_chunks_removed_from_the_target_during_the_copy_are_pulled_again(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = start("source"), start("target")
    keys = stored(source, 1, 16 * 8)

    def remove() -> None:
        with connect(target.info.socket_path) as client:
            client.bind(SPACE).remove(keys.slice(2, 4))

    stop_halfway(monkeypatch, remove)
    assert target.replicate(keys, source.info, SPACE).result().held_chunks == 8
    assert local_chunks(target, keys) == 8


def test_a_restarted_source_is_a_reason_and_a_second_call_completes(start: Start, tmp_path: Path) -> None:
    source, target = start("source"), start("target")
    keys = stored(source, 1, 16 * 4)
    older = dataclasses.replace(source.info, epoch=source.info.epoch + 7)
    assert target.replicate(keys, older, SPACE).result() == Replicated(0, 0, 0, "unreachable")
    assert target.replicate(keys, source.info, SPACE).result().held_chunks == 4


def test_a_dead_source_is_a_reason(start: Start) -> None:
    target = start("target")
    with connect(target.info.socket_path) as client:
        keys = client.bind(SPACE).keys(prompt(1, 16 * 4))
    gone = NodeInfo("gone", 1, "gone", "127.0.0.1:1", "127.0.0.1:1")
    began = time.monotonic()
    assert target.replicate(keys, gone, SPACE).result() == Replicated(0, 0, 0, "unreachable")
    assert time.monotonic() - began < 5.0


def test_wrong_bytes_of_the_source_are_not_stored(start: Start) -> None:
    source, target = start("source"), start("target")
    keys = stored(source, 1, 16 * 4)

    def spoil() -> None:
        chunk = source.core.pool.forest.chunks[keys[2]]
        source.node.daemon._memory.arena.memory[next(iter(chunk.copies.values())).slot * 4096] ^= 1

    source.node.call(spoil)
    assert target.replicate(keys, source.info, SPACE).result() == Replicated(2, 2, 2 * LAYOUT.chunk_bytes, "checksum")


def test_requests_that_cannot_be_right_are_refused(start: Start) -> None:
    source, target = start("source"), start("target")
    keys = stored(source, 1, 16 * 4)
    for wrong in (keys.slice(1, 4), dataclasses.replace(keys, fingerprints=None)):
        with pytest.raises(InvalidRequest):
            target.replicate(wrong, source.info, SPACE).result()
    with pytest.raises(InvalidRequest, match="in the namespace named"):
        target.replicate(keys, source.info, namespace("other")).result()
    with pytest.raises(InvalidRequest, match="itself"):
        target.replicate(keys, target.info, SPACE).result()
    with pytest.raises(LayoutMismatch):
        narrow = dataclasses.replace(LAYOUT, kv_heads=1)
        target.replicate(keys, source.info, SPACE, [(Geometry.whole(narrow), ())]).result()
    assert target.replicate(keys.slice(0, 0), source.info, SPACE).result() == Replicated(0, 0, 0, "")


def test_requests_are_bounded(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = start("source"), start("target")
    keys = stored(source, 1, 16 * 4)
    held, begun = threading.Event(), threading.Semaphore(0)
    plain = Peer.register

    def register(peer: Peer, *arguments: object) -> None:
        begun.release()
        assert held.wait(20.0)
        plain(peer, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Peer, "register", register)
    monkeypatch.setattr(replication, "ASKED_LIMIT", 3)
    asked = [target.replicate(keys, source.info, SPACE) for _ in range(3)]
    assert begun.acquire(timeout=20.0) and begun.acquire(timeout=20.0)
    with pytest.raises(CapacityExhausted):
        target.replicate(keys, source.info, SPACE).result()
    held.set()
    assert [each.result().held_chunks for each in asked] == [4, 4, 4]


# --- drain ---------------------------------------------------------------------------------------------------


def test_a_drained_node_is_on_its_target_for_both_kinds_of_readers(start: Start) -> None:
    source, target = start("source"), start("target")
    chains = [stored(source, number, 16 * 5 + number) for number in range(6)]
    progress = source.drain(target)
    assert progress[-1] == Drained(36 - 1, 35, 0, "")
    for keys in chains:
        assert local_chunks(target, keys) == remote_chunks(target, keys) == len(keys)
        last = target.core.pool.forest.chunks[keys[-1]]
        assert (last.token_count, last.fingerprint) == (keys.last_tokens, int(keys.fingerprints[-1]))


def test_two_nodes_drain_into_one(start: Start) -> None:
    first, second, target = start("first"), start("second"), start("target")
    chains = [stored(node, number, 16 * 7) for node, number in ((first, 1), (first, 2), (second, 2), (second, 3))]
    draining = [node.start(last_of(node, target)) for node in (first, second)]
    assert [each.result(20.0) for each in draining] == [Drained(14, 14, 0, "")] * 2
    assert target.stats()["commits"] == 21, "what both have is moved once"
    assert all(local_chunks(target, keys) == 7 for keys in chains)


async def last_of(node: PullingNode, *targets: PullingNode) -> Drained:
    *_, last = [progress async for progress in node.mover.drain([target.admin_info for target in targets])]
    return last


def branched(source: PullingNode) -> None:
    """A prompt of four chunks, the first three of which are those of prompt 0."""
    with connect(source.info.socket_path) as client:
        cache = client.bind(SPACE)
        branch = cache.keys([*prompt(0, 16 * 3), *prompt(9, 16)])
        assert cache.write(branch, pages_of(branch)).visible == 4


def test_chunks_that_a_later_chain_moves_have_not_failed(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = start("source"), start("target")
    stored(source, 0, 16 * 4)
    branched(source)
    answers = iter([(0, "refused_full"), (4, "")])

    def answer(*_: object) -> admin_pb2.ReplicateResponse:
        held, reason = next(answers)
        return admin_pb2.ReplicateResponse(held_chunks=held, reason=reason)

    monkeypatch.setattr("kvstore.draining.CHAINS_LIMIT", 1)
    monkeypatch.setattr("kvstore.draining._replicate", answer)
    assert source.drain(target)[-1] == Drained(5, 4, 1, "refused_full on target")


def test_chains_take_turns_over_targets_and_branches_stay_together(start: Start) -> None:
    source, one, two = start("source"), start("one"), start("two")
    for number in range(3):
        stored(source, number, 16 * 4)
    branched(source)
    assert source.drain(one, two)[-1] == Drained(13, 13, 0, "")
    assert one.stats()["chunks"] + two.stats()["chunks"] == 13, "the branch's first chunks are on one target"
    assert one.stats()["chunks"] and two.stats()["chunks"]


def test_the_last_stored_chain_goes_first(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.draining.CHAINS_LIMIT", 1)
    source, target = start("source"), start("target")
    chains = [stored(source, number, 16 * 2) for number in range(4)]
    source.drain(target)
    assert target.moving.asked == [keys[-1] for keys in chains[::-1]]


def test_a_target_that_fails_is_skipped(start: Start) -> None:
    source, target = start("source"), start("target")
    for number in range(4):
        stored(source, number, 16 * 4)
    gone = NodeInfo("gone", 1, "gone", "127.0.0.1:1", "127.0.0.1:1")

    async def drain() -> Drained:
        *_, last = [progress async for progress in source.mover.drain([gone, target.admin_info])]
        return last

    last = source.run(drain())
    assert last == Drained(16, 16, 0, "")


def test_what_cannot_be_moved_is_counted_with_its_reason(start: Start) -> None:
    source, small = start("source"), start("small", 1 << 20)
    stored(source, 1, 16 * 120)
    last = source.drain(small)[-1]
    assert last.chunks == 120 == last.moved_chunks + last.failed_chunks
    assert 0 < last.moved_chunks == small.stats()["chunks"]
    assert last.reason == "refused_full on small"
    with pytest.raises(InvalidRequest):
        source.drain(source)
    with pytest.raises(InvalidRequest):
        source.drain()


def test_orphans_are_counted_as_not_moved(start: Start) -> None:
    source, target = start("source"), start("target")
    keys = stored(source, 1, 16 * 4)
    source.node.call(lambda: source.core.pool.remove(source.core.pool.forest.chunks[keys[1]], "removed"))
    assert source.drain(target)[-1] == Drained(3, 1, 2, "parent_miss")


def test_geometries_that_change_along_a_chain(start: Start) -> None:
    """Half a geometry here and there: each chunk keeps the shards that it has."""
    source, target = start("source"), start("target")
    with connect(source.info.socket_path) as client:
        ranks = [client.bind(SPACE, geometry=TP2, rank=rank) for rank in (0, 1)]
        keys = ranks[0].keys(prompt(1, 16 * 6))
        pages = pages_of(keys)
        for rank, cache in enumerate(ranks):
            cache.write(keys.slice(0, 3), np.ascontiguousarray(pages[:3, :, :, rank : rank + 1]))
        client.bind(SPACE).write(keys, pages)
    assert source.drain(target)[-1] == Drained(6, 6, 0, "")

    def shards(node: PullingNode) -> list[set[int]]:
        return node.node.call(lambda: [set(node.core.pool.forest.chunks[key].copies) for key in keys])

    assert shards(source) == shards(target)
    assert remote_chunks(target, keys) == 6
    assert local_chunks(target, keys) == local_chunks(source, keys)


def test_a_part_of_a_geometry_before_whole_chunks(start: Start) -> None:
    source, target = start("source"), start("target")
    with connect(source.info.socket_path) as client:
        cache = client.bind(SPACE, geometry=TP2, rank=1, written_here=(1,))
        keys = cache.keys(prompt(1, 16 * 6))
        pages = pages_of(keys)
        cache.write(keys.slice(0, 3), np.ascontiguousarray(pages[:3, :, :, 1:2]))
        whole = client.bind(SPACE)
        assert whole.write(keys.slice(3, 6), pages[3:]).stored == 3
    assert source.drain(target)[-1] == Drained(6, 6, 0, "")

    def shards(node: PullingNode) -> list[set[int]]:
        return node.node.call(lambda: [set(node.core.pool.forest.chunks[key].copies) for key in keys])

    assert shards(source) == shards(target)


def test_an_empty_node_is_drained_at_once(start: Start) -> None:
    source, target = start("source"), start("target")
    assert source.drain(target) == [Drained(0, 0, 0, "")]


def test_a_closed_mover_holds_no_session(start: Start) -> None:
    source, target = start("source"), start("target")
    keys = stored(source, 1, 16 * 4)
    target.replicate(keys, source.info, SPACE).result()
    target.run(target.mover.close())
    assert not [s for s in target.node.call(lambda: list(target.core.sessions.values())) if s.name == "replication"]
    with pytest.raises(CapacityExhausted):
        target.replicate(keys, source.info, SPACE).result()
