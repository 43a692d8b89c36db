"""Put and Get streams around a node without sockets: bytes, windows, outcomes, bounds."""

from __future__ import annotations

import asyncio
import threading
import tracemalloc
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from small_node import SMALL
from stream_setting import COMMITTED, LARGE, PRESENT, Feed, Setting, payload_of, pieces, run

from kvstore.errors import CapacityExhausted, DeadlineExceeded, InvalidRequest, LimitExceeded, NotFound, SessionLost
from kvstore.model import checksum
from kvstore.model.layout import Dtype, Geometry, PageLayout, Rectangle
from kvstore.model.values import Outcome
from kvstore.node import ShardPlace, streams
from kvstore.node.catalog import UNIT_BYTES
from kvstore.node.stored import StoredChunk
from kvstore.rpc.v1 import node_pb2

# --- bytes ----


def test_what_was_put_is_read_by_streams_and_by_same_host_readers() -> None:
    async def work() -> None:
        setting = Setting(LARGE, 2000)
        keys, payloads = setting.keys(1, 3), [payload_of(LARGE, i) for i in range(3)]
        assert await setting.put(keys, payloads) == [COMMITTED] * 3
        assert await setting.put(keys, payloads) == [PRESENT] * 3
        assert await setting.get(keys) == (payloads, "")
        found = setting.node.reader.find(keys, LARGE.whole)
        for offset, payload in zip(found.offsets[:, 0].tolist(), payloads, strict=True):
            assert setting.node.arena[offset : offset + len(payload)].tobytes() == payload
        assert found.table_hashes.all()
        setting.assert_idle()

    run(work())


@st.composite
def cuts(draw: st.DrawFn) -> tuple[PageLayout, Geometry, Rectangle, int]:
    tp, pp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2]))
    layout = PageLayout(4, 4, draw(st.integers(1, 3)), Dtype.FP16, draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    layer, head = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    wanted = Rectangle(layer, draw(st.integers(layer + 1, 4)), head, draw(st.integers(head + 1, 4)))
    return layout, Geometry.parallel(layout, tp=tp, pp=pp), wanted, draw(st.integers(1, 64))


@given(cuts())
def test_any_rectangle_of_any_cut_comes_in_pieces_of_any_size(
    case: tuple[PageLayout, Geometry, Rectangle, int],
) -> None:
    layout, geometry, wanted, piece_bytes = case
    whole = np.frombuffer(payload_of(layout, 5), dtype=np.uint8).reshape(layout.shape(layout.whole))
    memory = np.full(len(geometry.rectangles) * UNIT_BYTES, 0xEE, dtype=np.uint8)
    places = []
    for number, one in enumerate(geometry.rectangles):
        shard = np.ascontiguousarray(whole[one.layer_start : one.layer_stop, :, one.head_start : one.head_stop])
        table = checksum.table_of(shard.reshape(-1), layout, one)
        stored = np.concatenate([shard.reshape(-1), table.view(np.uint8).ravel()])
        memory[number * UNIT_BYTES :][: len(stored)] = stored
        if one.intersection(wanted) is not None:
            places.append(ShardPlace(0, geometry.shard(number), number, 2, checksum.table_hash(table), one))
    chunk = StoredChunk(memory, layout, wanted, places, piece_bytes)
    expected = whole[wanted.layer_start : wanted.layer_stop, :, wanted.head_start : wanted.head_stop].tobytes()
    found = [piece.tobytes() for piece in chunk.pieces()]
    assert b"".join(found) == expected
    assert all(0 < len(piece) <= piece_bytes for piece in found)
    assert chunk.digest() == xxhash.xxh3_64_intdigest(expected)
    memory[places[-1].slot * UNIT_BYTES] ^= 1
    assert chunk.digest() is None


def test_a_damaged_chunk_is_a_miss_and_without_the_check_it_would_not_be(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        setting = Setting(SMALL, 16)
        keys, payloads = setting.keys(1, 2), [payload_of(SMALL, i) for i in range(2)]
        await setting.put(keys, payloads)
        slot = int(setting.node.reader.find(keys, SMALL.whole).offsets[1, 0])
        setting.node.arena[slot] ^= 1
        assert await setting.get(keys) == (payloads[:1], "checksum")
        monkeypatch.setattr(StoredChunk, "_differs", lambda *_: False)
        found, reason = await setting.get(keys)
        assert reason == "" and found[1] != payloads[1]

    run(work())


# --- order, windows, outcomes ----


def test_a_long_chain_is_reserved_window_by_window(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        monkeypatch.setattr(streams, "WINDOW_CHUNKS", 3)
        setting = Setting(SMALL, 20)
        keys, feed, most = setting.keys(1, 8), Feed(), 0
        task = setting.start(keys, feed)
        for index in range(8):
            await feed.send(*pieces(payload_of(SMALL, index)))
            most = max(most, setting.core.stats()["reserved_slots"])
        feed.end()
        assert await task == [COMMITTED] * 8
        assert most <= 3
        policy = setting.core.pool.dram._policy(4096, 0)
        assert list(policy.victims()) == list(keys)[::-1], "tails go first"
        assert await setting.get(keys) == ([payload_of(SMALL, i) for i in range(8)], "")
        assert list(policy.victims()) == list(keys)[::-1], "also after a Get over several windows"
        setting.assert_idle()

    run(work())


def test_a_chain_longer_than_what_a_session_may_reserve_is_stored() -> None:
    async def work() -> None:
        setting = Setting(SMALL, 12, share=0.5)
        keys = setting.keys(1, 11)
        assert await setting.put(keys, [payload_of(SMALL, i) for i in range(11)]) == [COMMITTED] * 11

    run(work())


def test_what_hangs_on_a_refused_chunk_is_refused_in_later_windows_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        monkeypatch.setattr(streams, "WINDOW_CHUNKS", 2)
        setting = Setting(SMALL, 3)
        keys = setting.keys(1, 8)
        outcomes = await setting.put(keys, [payload_of(SMALL, i) for i in range(8)])
        assert outcomes == [COMMITTED] * 3 + [Outcome.REFUSED_FULL] + [Outcome.REFUSED_PARENT_MISSING] * 4

    run(work())


def test_no_room_for_the_first_chunk_is_an_error() -> None:
    async def work() -> None:
        setting = Setting(SMALL, 2)
        setting.node.reserve(setting.open(shared=True), setting.keys(2, 2))
        with pytest.raises(CapacityExhausted, match="refused_full"):
            await setting.put(setting.keys(1, 1), [])
        assert setting.streams.open_count == 0

    run(work())


@pytest.mark.parametrize("commits", [True, False])
def test_a_chunk_that_somebody_else_writes(commits: bool) -> None:
    async def work() -> None:
        setting = Setting(SMALL, 8)
        other = setting.open(shared=True)
        keys = setting.keys(1, 2)
        answer = setting.node.reserve(other, setting.keys(1, 1))
        feed = Feed()
        task = setting.start(keys, feed)
        await feed.send(*pieces(payload_of(SMALL, 0)))
        if commits:
            assert setting.node.commit(other, answer.attempt, [0]) == [COMMITTED]
        else:
            setting.core.abort(other.number, answer.attempt)
        feed.end(*pieces(payload_of(SMALL, 1)))
        assert await task == [PRESENT if commits else Outcome.IN_PROGRESS, COMMITTED]
        setting.assert_idle()

    run(work())


def test_chunks_before_a_wrong_one_stay() -> None:
    async def work() -> None:
        setting = Setting(SMALL, 8)
        keys, feed = setting.keys(1, 3), Feed()
        good, bad = pieces(payload_of(SMALL, 0)), pieces(payload_of(SMALL, 1))
        feed.end(*good, bad[0], node_pb2.PutRequest(payload_hash=bad[1].payload_hash ^ 1))
        with pytest.raises(InvalidRequest, match="hash"):
            await setting.streams.put(setting.session.number, keys, setting.shard, feed)
        setting.assert_idle()
        assert await setting.get(keys) == ([payload_of(SMALL, 0)], "absent")

    run(work())


# --- bounds ----


def test_streams_are_limited() -> None:
    async def work() -> None:
        setting = Setting(SMALL, 128)
        tasks = []
        for number in range(streams.STREAMS_LIMIT):
            feed = Feed()
            tasks.append(setting.start(setting.keys(number, 1), feed))
            await feed.send()
        with pytest.raises(CapacityExhausted, match="64"):
            await setting.put(setting.keys(99, 1), [])
        with pytest.raises(CapacityExhausted, match="64"):
            await setting.get(setting.keys(99, 1))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        setting.assert_idle()

    run(work())


def test_a_client_that_stalls_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        monkeypatch.setattr(streams, "CHUNK_LIMIT_S", 0.05)
        setting = Setting(SMALL, 8)
        with pytest.raises(DeadlineExceeded, match="a chunk did not arrive"):
            await setting.streams.put(setting.session.number, setting.keys(1, 1), setting.shard, Feed())
        setting.assert_idle()

    run(work())


def test_memory_is_bounded_by_messages_not_by_chunks() -> None:
    """Six Puts and six Gets at a time of chunks of 16 MiB hold a message or two each."""
    layout = PageLayout(16, 16, 128, Dtype.FP32, 64, 1)

    async def work() -> None:
        setting = Setting(layout, 6 * 4200)
        payload = payload_of(layout, 1)
        parts = pieces(payload)
        tasks, feeds = [], []
        tracemalloc.start()
        try:
            for number in range(6):
                feeds.append(Feed())
                tasks.append(setting.start(setting.keys(number, 1), feeds[-1]))
            for part in parts:
                for feed in feeds:
                    await feed.send(part)
            for feed in feeds:
                feed.end()
            assert await asyncio.gather(*tasks) == [[COMMITTED]] * 6
            gets = [setting.streams.get(setting.session.number, setting.keys(n, 1), layout.whole) for n in range(6)]
            for _ in range(3):
                for get in gets:
                    await anext(get)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        for get in gets:
            await get.aclose()
        setting.assert_idle()
        assert peak < 6 * 4 << 20

    run(work())


def test_checksums_of_large_chunks_are_made_off_the_loop_and_of_small_ones_on_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work() -> None:
        real, threads = checksum.table_of, []

        def noted(*arguments: Any) -> Any:
            threads.append(threading.get_ident())
            return real(*arguments)

        monkeypatch.setattr(checksum, "table_of", noted)
        for layout in (LARGE, SMALL):
            setting = Setting(layout, 600)
            await setting.put(setting.keys(1, 1), [payload_of(layout, 1)])
        own = threading.get_ident()
        assert threads[0] != own and threads[1] == own

    run(work())


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        ([node_pb2.PutRequest(data=bytes((1 << 20) + 1))], LimitExceeded, "1048576"),
        ([node_pb2.PutRequest(data=bytes(SMALL.chunk_bytes + 1))], InvalidRequest, "more were sent"),
        ([node_pb2.PutRequest(payload_hash=1)], InvalidRequest, "not 0"),
        ([node_pb2.PutRequest()], InvalidRequest, "expected data"),
        ([], InvalidRequest, "ended before"),
        ([*pieces(payload_of(SMALL, 1)), node_pb2.PutRequest(data=b"")], InvalidRequest, "after the last"),
    ],
)
def test_wrong_messages(parts: list[node_pb2.PutRequest], error: type[Exception], message: str) -> None:
    async def work() -> None:
        setting = Setting(SMALL, 8)
        feed = Feed()
        feed.end(*parts)
        with pytest.raises(error, match=message):
            await setting.streams.put(setting.session.number, setting.keys(1, 1), setting.shard, feed)
        setting.assert_idle()

    run(work())


def test_an_unknown_shard_or_session() -> None:
    async def work() -> None:
        setting = Setting(SMALL, 8)
        with pytest.raises(NotFound, match="geometry"):
            await setting.streams.put(setting.session.number, setting.keys(1, 1), 0x100, Feed())
        with pytest.raises(SessionLost):
            await setting.streams.put(1, setting.keys(1, 1), setting.shard, Feed())
        with pytest.raises(SessionLost):
            await anext(setting.streams.get(1, setting.keys(1, 0), SMALL.whole))
        setting.assert_idle()

    run(work())


def test_no_keys_at_all() -> None:
    async def work() -> None:
        setting = Setting(SMALL, 8)
        assert await setting.put(setting.keys(1, 0), []) == []
        assert await setting.get(setting.keys(1, 0)) == ([], "")

    run(work())
