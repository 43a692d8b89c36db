"""An engine's own host chunks as rows of the pool."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvstore
from engine_adapter.looks import WAITING_LIMIT, Looks
from engine_adapter.rows import JOBS_AT_ONCE, RowPool, Rows, row_layout
from engine_adapter.session import PoolSession
from kvstore.client import Client, ReadResult
from kvstore.client.buffers import ChunkArray
from kvstore.errors import LayoutMismatch
from kvstore.model.namespace import Namespace
from kvstore.model.prefix import Keys
from kvstore.model.values import MissReason

ROW_BYTES, ROW_TOKENS = 16 * 96, 16
NAMES = [bytes([number]) * 36 for number in range(6)]


@pytest.mark.parametrize(
    ("row_bytes", "tokens", "layers"),
    [(262_144, 128, 1), (16 * 327_680, 16, 8), (ROW_BYTES, 16, 1), (16 * 65_537 * 2, 16, 65_537)],
)
def test_a_row_is_cut_into_as_few_layers_as_sizes_allow(row_bytes: int, tokens: int, layers: int) -> None:
    if layers > 4096:
        with pytest.raises(LayoutMismatch, match="cannot be cut"):
            row_layout(row_bytes, tokens)
        return
    layout = row_layout(row_bytes, tokens)
    assert layout.chunk_bytes == row_bytes and layout.chunk_tokens == tokens
    assert layout.layers == layers or layout.head_dim < 1 << 16


def test_a_row_that_is_not_whole_tokens_is_refused() -> None:
    with pytest.raises(LayoutMismatch):
        row_layout(100, 16)


@pytest.fixture
def client() -> Iterator[Client]:
    with kvstore.open_local("8MiB") as made:
        yield made


def pool(client: Client, rows: Rows, revision: str = "1") -> RowPool:
    namespace = Namespace("m", revision, row_layout(ROW_BYTES, ROW_TOKENS), "rows/x")
    session = PoolSession(namespace, lambda: client)
    session.open()
    looks = Looks([session], others=False, wait_s=0.1)
    return RowPool(namespace, session, looks, rows, secret=b"", load_deadline_s=5.0, store_deadline_s=5.0)


def filled(seed: int) -> Rows:
    return np.random.default_rng(seed).integers(0, 256, (8, ROW_BYTES), dtype=np.uint8)


def test_rows_come_back_into_other_places_under_their_names(client: Client) -> None:
    source, target = filled(1), filled(2)
    saving, loading = pool(client, source), pool(client, target)
    saving.store(7, NAMES[:3], [4, 0, 2])
    saving.wait_idle()
    (end,) = saving.ended()
    assert (end.job, end.done, end.whole, end.size_bytes) == (7, tuple(NAMES[:3]), True, 3 * ROW_BYTES)
    assert [loading.find(name, "a") for name in NAMES[:4]] == [True, True, True, False]
    loading.load(8, NAMES[:3], [1, 5, 6])
    assert loading.busy
    loading.wait_idle()
    assert loading.ended()[0].whole and not loading.busy
    assert np.array_equal(target[[1, 5, 6]], source[[4, 0, 2]])
    untouched = filled(2)
    assert np.array_equal(target[[0, 2, 3, 4, 7]], untouched[[0, 2, 3, 4, 7]])
    for each in (saving, loading):
        each.close()


def test_b10_a_row_that_does_not_come_is_not_found_again(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = pool(client, filled(1))
    rows.store(1, NAMES[:2], [0, 1])
    rows.wait_idle()
    client.bind(rows._namespace).remove(rows.keys(NAMES[1]))
    rows.load(2, NAMES[:2], [2, 3])
    rows.wait_idle()
    end = rows.ended()[-1]
    assert (end.done, end.whole) == ((NAMES[0],), False)
    monkeypatch.setattr(rows._looks, "ask", lambda *_: 1)  # an index that has not heard of it yet
    assert rows.find(NAMES[1], "a") is False
    rows.store(3, NAMES[1:2], [1])
    rows.wait_idle()
    assert rows.find(NAMES[1], "a") is True
    rows.close()


def test_b10_of_many_rows_that_did_not_come_the_last_ones_are_known(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is told again and again that there is a row that never comes asks for ever."""
    monkeypatch.setattr("engine_adapter.rows.LOST_LIMIT", 2)
    rows = pool(client, filled(1))
    rows.load(1, NAMES[:4], [0, 1, 2, 3])
    rows.wait_idle()
    monkeypatch.setattr(rows._looks, "ask", lambda *_: 1)
    assert [rows.find(name, "a") for name in NAMES[:4]] == [True, True, False, False]
    rows.close()


def test_b01_jobs_behind_a_pool_that_holds_still_end_within_one_deadline(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, now_s, lock = pool(client, filled(1)), [1000.0], threading.Lock()

    def stopped(_: object, keys: Keys, *__: object, deadline_s: float) -> ReadResult:
        with lock:
            now_s[0] += deadline_s
        return ReadResult(0, 0, 0, 0, MissReason.DEADLINE)

    monkeypatch.setattr(PoolSession, "read", stopped)
    monkeypatch.setattr("engine_adapter.rows.time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(rows, "_threads", one_by_one := ThreadPoolExecutor(1))
    with lock:  # all jobs wait when the first one goes
        for job in range(5):
            rows.load(job, NAMES[:2], [0, 1])
    rows.wait_idle()
    assert now_s[0] == 1005.0
    assert [(end.job, end.done, end.whole) for end in rows.ended()] == [(job, (), False) for job in range(5)]
    one_by_one.shutdown()
    rows.close()


def test_a06_rows_of_other_weights_are_others(client: Client) -> None:
    one, other = pool(client, filled(1)), pool(client, filled(2), revision="2")
    one.store(1, NAMES[:1], [0])
    one.wait_idle()
    assert one.find(NAMES[0], "a") is True and other.find(NAMES[0], "a") is False
    one.close()
    other.close()


def test_questions_of_a_request_that_is_settled_keep_nobody_else_from_asking(client: Client) -> None:
    namespace = Namespace("m", "1", row_layout(ROW_BYTES, ROW_TOKENS), "rows/x")
    session = PoolSession(namespace, lambda: client)
    session.open()
    threads, gate = ThreadPoolExecutor(1), threading.Event()
    threads.submit(gate.wait)  # nothing is answered
    looks = Looks([session], others=True, wait_s=3600.0, threads=threads)
    rows = RowPool(namespace, session, looks, filled(1), secret=b"", load_deadline_s=5.0, store_deadline_s=5.0)
    found = [rows.find(number.to_bytes(36, "big"), "a") for number in range(WAITING_LIMIT)]
    without_a_place = rows.find(NAMES[1], "b")
    rows.settled("a")
    with_a_place = rows.find(NAMES[1], "b")
    rows.settled("b")
    gate.set()
    threads.shutdown()
    rows.close()
    assert found == [None] * WAITING_LIMIT
    assert (without_a_place, with_a_place) == (False, None)


class Silent:
    """A session with a node that does not answer: each read takes its whole deadline."""

    whole = None

    def __init__(self) -> None:
        self.deadlines_s: list[float] = []

    def present_here(self, keys: Keys, rectangle: None) -> int:
        return 1

    def read(self, keys: Keys, into: ChunkArray, *, deadline_s: float) -> ReadResult:
        self.deadlines_s.append(deadline_s)
        threading.Event().wait(deadline_s)
        return ReadResult(0, 0, 0, 0, MissReason.UNREACHABLE)


def test_b01_jobs_behind_a_silent_node_end_with_the_first_ones() -> None:
    """A deadline each would hold the engine, which waits for all of them when it drops its caches, once a job."""
    session: Any = Silent()
    namespace = Namespace("m", "1", row_layout(ROW_BYTES, ROW_TOKENS), "rows/x")
    looks = Looks([session], others=False, wait_s=0.1)
    rows = RowPool(namespace, session, looks, filled(1), secret=b"", load_deadline_s=0.2, store_deadline_s=3600.0)
    for job in range(3 * JOBS_AT_ONCE):
        rows.load(job, NAMES[:2], [0, 1])
    rows.load(3 * JOBS_AT_ONCE, NAMES[2:4], [2, 3])
    rows.wait_idle()
    assert sorted(end.job for end in rows.ended() if not end.whole) == list(range(3 * JOBS_AT_ONCE + 1))
    assert max(session.deadlines_s[:JOBS_AT_ONCE]) <= 0.2
    assert max(session.deadlines_s[JOBS_AT_ONCE:], default=0.0) < 0.1
    # None of them is promised again, or the engine would wait for the next round.
    assert [rows.find(name, "a") for name in NAMES[:4]] == [False] * 4
    rows.close()


def test_rows_of_another_size_are_refused(client: Client) -> None:
    with pytest.raises(LayoutMismatch, match="rows are"):
        pool(client, np.zeros((4, ROW_BYTES + 16), np.uint8))


def test_the_engine_can_unmap_its_memory_after_the_end(client: Client) -> None:
    """Its mapping cannot be closed while an array over it lives: gigabytes stayed until the process ended."""
    memory = mmap.mmap(-1, 8 * ROW_BYTES)
    rows = pool(client, np.frombuffer(memory, np.uint8).reshape(8, ROW_BYTES))
    rows.store(1, NAMES[:2], [0, 1])
    rows.load(2, NAMES[:2], [2, 3])
    rows.close()
    memory.close()
    assert memory.closed
