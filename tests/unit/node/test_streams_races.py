"""What may end while a stream runs: sessions, reservations, chunks, the client, while another writer takes over.

It happens between two messages, while the stream is known to wait for the next one, or while a thread is held.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from small_node import SMALL
from stream_setting import COMMITTED, LARGE, Feed, Setting, payload_of, pieces, run

from kvstore.errors import SessionLost
from kvstore.model import checksum
from kvstore.model.values import Outcome
from kvstore.node import streams
from kvstore.node.catalog import UNIT_BYTES
from kvstore.node.stored import StoredChunk
from kvstore.rpc.v1 import node_pb2

# --- law 5: a slot is written only while its grant stands ----


async def _reuse_in_the_middle(
    setting: Setting, first: list[node_pb2.PutRequest]
) -> tuple[int, asyncio.Task[Any], Feed]:
    """A Put whose session ends after `first`; its slot then belongs to another writer, who has written 0xAB."""
    feed = Feed()
    task = setting.start(setting.keys(1, 1), feed)
    await feed.send(*first)
    (grant,) = next(iter(setting.core.reservations.attempts.values())).grants.values()
    setting.core.process_gone(setting.session.number)
    other = setting.open(shared=True)
    answer = setting.node.reserve(other, setting.keys(2, 1))
    assert answer.slots == [grant.slot]
    setting.node.arena[grant.slot * UNIT_BYTES :][: LARGE.chunk_bytes] = 0xAB
    return grant.slot, task, feed


def test_nothing_is_written_after_the_session_ended() -> None:
    async def work() -> None:
        setting = Setting(LARGE, 514)
        parts = pieces(payload_of(LARGE, 1))
        slot, task, feed = await _reuse_in_the_middle(setting, parts[:1])
        feed.end(*parts[1:])
        with pytest.raises(SessionLost):
            await task
        assert (setting.node.arena[slot * UNIT_BYTES :][: LARGE.chunk_bytes] == 0xAB).all()
        setting.core.check()

    run(work())


def test_without_the_look_at_the_grant_the_new_owner_would_be_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        setting = Setting(LARGE, 514)
        parts = pieces(payload_of(LARGE, 1))
        real, known = streams._Put._slot, {}

        def first_answer(self: Any, attempt: int, index: int) -> int | None:
            return known.setdefault((attempt, index), real(self, attempt, index))

        monkeypatch.setattr(streams._Put, "_slot", first_answer)
        slot, task, feed = await _reuse_in_the_middle(setting, parts[:1])
        feed.end(*parts[1:])
        with pytest.raises(SessionLost):
            await task
        assert not (setting.node.arena[slot * UNIT_BYTES :][: LARGE.chunk_bytes] == 0xAB).all()

    run(work())


@pytest.mark.parametrize("ending", ["cancelled", "session gone", "removed", "time is up"])
def test_ends_while_the_checksums_are_made_in_a_thread(ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread only reads: its slot may go to somebody else, and its table is not written there."""

    async def work() -> None:
        setting = Setting(LARGE, 514)
        entered, leave = threading.Event(), threading.Event()
        real = checksum.table_of

        def held(*arguments: Any) -> Any:
            entered.set()
            assert leave.wait(20)
            return real(*arguments)

        monkeypatch.setattr(checksum, "table_of", held)
        feed, keys = Feed(), setting.keys(1, 1)
        task = setting.start(keys, feed)
        feed.end(*pieces(payload_of(LARGE, 1)))
        await asyncio.to_thread(entered.wait, 20)
        (grant,) = next(iter(setting.core.reservations.attempts.values())).grants.values()
        if ending == "cancelled":
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        elif ending == "session gone":
            setting.core.process_gone(setting.session.number)
        elif ending == "removed":
            assert setting.core.remove(setting.session.number, setting.space.id, list(keys)) == 0
        else:
            setting.node.clock.now += 31
            setting.core.tick()
        if ending in ("cancelled", "session gone"):
            other = setting.open(shared=True)
            assert setting.node.reserve(other, setting.keys(2, 1)).slots == [grant.slot]
            setting.node.arena[grant.slot * UNIT_BYTES :][: 514 * UNIT_BYTES] = 0xAB
        else:
            assert grant.slot in setting.node.allocator.used_slots()
        leave.set()
        if ending == "session gone":
            with pytest.raises(SessionLost):
                await task
        elif ending != "cancelled":
            assert await task == [Outcome.REFUSED_STALE]
            setting.assert_idle()
        if ending in ("cancelled", "session gone"):
            assert (setting.node.arena[grant.slot * UNIT_BYTES :][: 514 * UNIT_BYTES] == 0xAB).all()
        assert setting.node.resident(keys) == 0

    run(work())


def test_a_client_that_goes_away_leaves_nothing_behind() -> None:
    async def work() -> None:
        setting = Setting(LARGE, 514 * 3)
        feed = Feed()
        task = setting.start(setting.keys(1, 3), feed)
        await feed.send(*pieces(payload_of(LARGE, 1)), pieces(payload_of(LARGE, 2))[0])
        assert setting.core.stats()["reserved_slots"] == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        setting.assert_idle()
        assert setting.node.resident(setting.keys(1, 3)) == 1

    run(work())


def test_a_reservation_that_runs_out_keeps_its_slot_until_the_stream_ends() -> None:
    async def work() -> None:
        setting = Setting(LARGE, 514)
        feed, parts = Feed(), pieces(payload_of(LARGE, 1))
        task = setting.start(setting.keys(1, 1), feed)
        await feed.send(parts[0])
        setting.node.clock.now += 31
        setting.core.tick()
        assert setting.node.reserve(setting.open(shared=True), setting.keys(2, 1)).outcomes == [Outcome.REFUSED_FULL]
        feed.end(*parts[1:])
        assert await task == [Outcome.REFUSED_STALE]
        setting.assert_idle()

    run(work())


def test_a_long_put_renews_and_without_renewal_it_would_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async def put_slowly(setting: Setting) -> list[Outcome]:
        feed = Feed()
        task = setting.start(setting.keys(1, 6), feed)
        for index in range(6):
            await feed.send(*pieces(payload_of(SMALL, index)))
            setting.node.clock.now += 29
            setting.core.tick()
        feed.end()
        return await task

    async def work() -> None:
        assert await put_slowly(Setting(SMALL, 16)) == [COMMITTED] * 6
        setting = Setting(SMALL, 16)
        monkeypatch.setattr(setting.core, "renew", lambda session: None)
        with pytest.raises(SessionLost):
            await put_slowly(setting)

    run(work())


# --- a Get while its chunks leave ----


async def _reuse_while_sent(setting: Setting) -> tuple[list[bytes], str]:
    """A Get of 2 MiB; after its first piece the chunk is removed and its slot filled with 0xAB by another writer."""
    keys = setting.keys(1, 1)
    await setting.put(keys, [payload_of(LARGE, 1)])
    stream = setting.streams.get(setting.session.number, keys, LARGE.whole)
    head, first = await anext(stream), await anext(stream)
    assert head.head.payload_bytes == LARGE.chunk_bytes
    assert setting.core.remove(setting.session.number, setting.space.id, list(keys)) == 1
    answer = setting.node.reserve(setting.open(shared=True), setting.keys(2, 1))
    setting.node.arena[answer.slots[0] * UNIT_BYTES :][: LARGE.chunk_bytes] = 0xAB
    rest = [message async for message in stream]
    return [first.data, *(m.data for m in rest[:-1])], rest[-1].end_reason


def test_a_get_stops_where_its_chunk_left() -> None:
    async def work() -> None:
        setting = Setting(LARGE, 514)
        data, reason = await _reuse_while_sent(setting)
        assert reason == "fence"
        assert data == [payload_of(LARGE, 1)[: streams.PIECE_BYTES]]
        assert setting.core.stats()["get_misses_fence"] == 1

    run(work())


def test_without_the_look_after_each_message_the_new_owners_bytes_would_be_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work() -> None:
        monkeypatch.setattr(streams._Get, "_stands", lambda *_: True)
        data, reason = await _reuse_while_sent(Setting(LARGE, 514))
        assert reason == "" and data[1] == b"\xab" * streams.PIECE_BYTES

    run(work())


def test_a_chunk_that_left_while_it_was_hashed_is_a_failed_fence_not_a_failed_checksum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work() -> None:
        setting = Setting(LARGE, 514)
        keys = setting.keys(1, 1)
        await setting.put(keys, [payload_of(LARGE, 1)])
        entered, leave = threading.Event(), threading.Event()
        real = StoredChunk.digest

        def held(self: StoredChunk) -> int | None:
            entered.set()
            assert leave.wait(20)
            return real(self)

        monkeypatch.setattr(StoredChunk, "digest", held)
        task = asyncio.create_task(setting.get(keys))
        await asyncio.to_thread(entered.wait, 20)
        setting.core.remove(setting.session.number, setting.space.id, list(keys))
        setting.node.arena[:] = 0xAB
        leave.set()
        assert await task == ([], "fence")
        setting.assert_idle()

    run(work())


def test_a_get_holds_its_chunks_until_it_is_closed() -> None:
    async def work() -> None:
        setting = Setting(SMALL, 2)
        keys = setting.keys(1, 2)
        await setting.put(keys, [payload_of(SMALL, i) for i in range(2)])
        stream = setting.streams.get(setting.session.number, keys, SMALL.whole)
        await anext(stream)
        other = setting.open(shared=True)
        assert setting.node.reserve(other, setting.keys(2, 1)).outcomes == [Outcome.REFUSED_FULL]
        await stream.aclose()
        setting.assert_idle()
        assert setting.node.reserve(other, setting.keys(2, 1)).outcomes == [Outcome.GRANTED]

    run(work())


def test_a_slow_reader_is_not_idle_and_a_lost_session_ends_its_stream() -> None:
    async def work() -> None:
        setting = Setting(SMALL, 8)
        keys = setting.keys(1, 4)
        await setting.put(keys, [payload_of(SMALL, i) for i in range(4)])
        stream = setting.streams.get(setting.session.number, keys, SMALL.whole)
        seen = []
        async for message in stream:
            seen.append(message.WhichOneof("part"))
            setting.node.clock.now += 50
            setting.core.tick()
            if len(seen) == 6:
                break
        assert seen == ["head", "data"] * 3
        setting.core.process_gone(setting.session.number)
        with pytest.raises(SessionLost):
            await anext(stream)
        setting.assert_idle()

    run(work())
