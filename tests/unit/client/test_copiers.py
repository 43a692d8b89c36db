"""Several threads copy one batch: each piece once, and nothing is under way any more when the batch counts or fails."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

import numpy as np
import pytest

from kvstore.client import Cache, Client, connect, copiers
from kvstore.client.buffers import ChunkArray
from kvstore.client.copiers import Copiers
from kvstore.errors import ConfigurationError
from kvstore.model.prefix import Keys
from kvstore.model.values import MissReason, Outcome
from kvstore.node.lookup import CatalogReader, Found
from tests.unit.client.fake_host import BreakableHost
from tests.unit.client.pages import LAYOUT, Bytes, namespace, pages_of, poisoned, prompt

WAIT_S = 20
SHORT_S = 0.05
"""So long a piece stays under way to see whether somebody goes on without it."""


@pytest.fixture(autouse=True)
def every_batch_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copiers, "PIECE_BYTES", 1)
    monkeypatch.setattr(copiers, "SHARE_BYTES", 1)


@pytest.fixture
def two() -> Iterator[Copiers]:
    two = Copiers(2)
    yield two
    two.close()


class Together:
    """Work of which the caller's thread does none before a helper has begun one. `slow` runs in the helper's first."""

    def __init__(self, slow: Callable[[], None] = lambda: None) -> None:
        self._slow = slow
        self._caller = threading.get_ident()
        self.helper_began, self.caller_did = threading.Event(), threading.Event()
        self.under_way = 0
        self.most_at_once = 0
        self._lock = threading.Lock()

    def piece(self, work: Callable[[], None] = lambda: None) -> None:
        with self._lock:
            self.under_way += 1
            self.most_at_once = max(self.most_at_once, self.under_way)
        try:
            if threading.get_ident() == self._caller:
                assert self.helper_began.wait(WAIT_S)
                self.caller_did.set()
            elif not self.helper_began.is_set():
                self.helper_began.set()
                assert self.caller_did.wait(WAIT_S)
                self._slow()
            work()
        finally:
            with self._lock:
                self.under_way -= 1


# --- the batch ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("count", [0, 1, 2, 33])
def test_each_piece_is_done_once_and_all_count(threads: int, count: int) -> None:
    some, done = Copiers(threads), []
    assert some.each(range(100, 100 + count), 1, done.append) == (count, None)
    assert sorted(done) == list(range(100, 100 + count))
    some.close()


def test_the_number_of_threads_follows_the_cpus_and_what_is_asked_for() -> None:
    assert Copiers().threads == min(copiers.THREADS_LIMIT, len(os.sched_getaffinity(0)))
    assert Copiers(7).threads == 7
    with pytest.raises(ConfigurationError, match="copy_threads is -1"):
        connect("127.0.0.1:1", copy_threads=-1)


def test_caller_and_helper_work_at_the_same_time(two: Copiers) -> None:
    together = Together()
    assert two.each(range(8), 1, lambda _: together.piece()) == (8, None)
    assert together.most_at_once == 2


@pytest.mark.parametrize("threads", [1, 3])
def test_a_piece_that_fails_ends_the_run_before_it(threads: int) -> None:
    """Others that failed behind it do not matter, and after it no new one is begun."""
    some, begun = Copiers(threads), []

    def work(place: int) -> str | None:
        begun.append(place)
        return f"no {place}" if place in (5, 6) else None

    assert some.each(range(1000), 1, work) == (5, "no 5")
    assert len(begun) < 1000 and set(range(6)) <= set(begun)
    some.close()


def test_the_first_piece_that_failed_counts_and_not_the_last_to_fail(
    two: Copiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave, left, begun = copiers._Shares._leave, threading.Event(), threading.Event()

    def noting(shares: copiers._Shares[str], number: int, done: bool, answer: str | None) -> None:
        leave(shares, number, done, answer)
        left.set()

    def work(place: int) -> str:
        if place:
            begun.set()
        assert (left if place else begun).wait(WAIT_S)
        return f"no {place}"

    monkeypatch.setattr(copiers._Shares, "_leave", noting)
    assert two.each(range(2), 1, work) == (0, "no 0")


def test_what_a_helper_raises_is_raised_when_the_caller_has_stopped_too(two: Copiers) -> None:
    def fail() -> None:
        raise RuntimeError("no such block")

    together = Together(fail)
    with pytest.raises(RuntimeError, match="no such block"):
        two.each(range(8), 1, lambda _: together.piece())
    assert together.under_way == 0
    assert two.each(range(8), 1, lambda _: None) == (8, None), "and the helper goes on"


def test_what_the_caller_raises_waits_for_the_helper(two: Copiers) -> None:
    failed, ended = threading.Event(), threading.Event()

    def slow() -> None:
        assert failed.wait(WAIT_S)
        ended.wait(SHORT_S)

    together = Together(slow)

    def work(place: int) -> None:
        together.piece()
        if threading.current_thread() is threading.main_thread():
            failed.set()
            raise RuntimeError("full")

    with pytest.raises(RuntimeError, match="full"):
        two.each(range(8), 1, work)
    assert together.under_way == 0


class Interrupted(Exception):
    """What a signal's handler raises."""


def test_an_interrupted_caller_waits_for_the_helper_all_the_same(two: Copiers, monkeypatch: pytest.MonkeyPatch) -> None:
    ending, handled, never, finished = threading.Event(), threading.Event(), threading.Event(), []
    end = copiers._Shares.end
    monkeypatch.setattr(copiers._Shares, "end", lambda shares: (ending.set(), end(shares))[0])

    def handler(number: int, frame: FrameType | None) -> None:
        if not handled.is_set():
            handled.set()
            raise Interrupted

    def slow() -> None:
        assert ending.wait(WAIT_S)
        end_s = time.monotonic() + WAIT_S
        while not handled.wait(0.01):  # one that comes just before the caller sleeps does not wake it
            assert time.monotonic() < end_s
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        never.wait(SHORT_S)
        finished.append(True)

    together, before = Together(slow), signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(Interrupted):
            two.each(range(2), 1, lambda _: together.piece())
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert finished and together.under_way == 0


def test_helpers_that_are_busy_elsewhere_are_not_waited_for(two: Copiers) -> None:
    busy, go = threading.Event(), threading.Event()
    together = Together(lambda: (busy.set(), go.wait(WAIT_S))[0])
    other = threading.Thread(target=lambda: two.each(range(2), 1, lambda _: together.piece()))
    together._caller = -1  # whoever begins first is held
    other.start()
    together.caller_did.set()
    assert busy.wait(WAIT_S)
    done: list[int] = []
    assert two.each(range(50), 1, done.append) == (50, None)
    assert len(done) == 50 and other.is_alive()
    go.set()
    other.join(WAIT_S)
    assert not other.is_alive()


def test_after_the_end_the_caller_works_alone(two: Copiers) -> None:
    threads = set()
    two.each(range(4), 1, lambda _: None)
    two.close()
    assert two.each(range(4), 1, lambda _: threads.add(threading.current_thread())) == (4, None)
    assert threads == {threading.current_thread()}


def test_small_batches_and_small_pieces_stay_on_the_callers_thread(
    two: Copiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copiers, "PIECE_BYTES", 100)
    monkeypatch.setattr(copiers, "SHARE_BYTES", 1000)
    for count, piece_bytes in ((19, 100), (1, 5000), (1000, 99)):
        two.each(range(count), piece_bytes, lambda _: None)
        assert two._helpers is None
    two.each(range(20), 100, lambda _: None)
    assert two._helpers is not None


# --- reads and writes ---------------------------------------------------------------------------------------------


class Endpoint(ChunkArray):
    """Pages of chunks, of which the helper's first piece takes its time."""

    def __init__(self, array: Bytes, slow: Callable[[], None] = lambda: None) -> None:
        super().__init__(array, LAYOUT.whole)
        self.together = Together(slow)

    def scatter(self, index: int, piece: Bytes, layer_start: int, head_start: int) -> None:
        self.together.piece(lambda: super(Endpoint, self).scatter(index, piece, layer_start, head_start))

    def gather(self, index: int, slot: Bytes, layer_start: int, head_start: int) -> None:
        self.together.piece(lambda: super(Endpoint, self).gather(index, slot, layer_start, head_start))


@pytest.fixture
def host() -> BreakableHost:
    return BreakableHost()


@pytest.fixture
def cache(host: BreakableHost) -> Iterator[Cache]:
    with Client(None, None, None, copy_threads=2, host=host) as client:
        yield client.bind(namespace())


def stored(cache: Cache, number: int = 1, chunks: int = 6) -> Keys:
    keys = cache.keys(prompt(number, 16 * chunks))
    assert cache.write(keys, pages_of(keys)).stored == chunks
    return keys


def test_the_fence_comes_after_all_copies(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """The helper still copies when the caller has no more to do: the second look waits for it."""
    keys, looked, confirm = stored(cache), threading.Event(), CatalogReader.confirm
    target = poisoned(cache, len(keys))
    endpoint = Endpoint(target, lambda: looked.wait(SHORT_S) or None)

    def look(reader: CatalogReader, found: Found) -> int:
        looked.set()
        assert endpoint.together.under_way == 0, "looked before the copies had ended"
        return confirm(reader, found)

    monkeypatch.setattr(CatalogReader, "confirm", look)
    assert cache.read(keys, endpoint).chunks == len(keys)
    assert np.array_equal(target, pages_of(keys)) and endpoint.together.most_at_once == 2


def test_what_is_overtaken_while_a_helper_copies_does_not_count(cache: Cache) -> None:
    """The chunks leave and their slots are filled anew before the helper copies its piece."""
    keys = stored(cache)

    def refill() -> None:
        cache.remove(keys.slice(0, 1))
        stored(cache, number=2, chunks=80)

    result = cache.read(keys, Endpoint(poisoned(cache, len(keys)), refill))
    assert (result.chunks, result.reason) == (0, MissReason.ABSENT)


def test_a_destination_that_does_not_say_so_is_called_by_the_caller_only(cache: Cache) -> None:
    keys, threads, others = stored(cache), set(), threading.Event()

    class Plain:
        def scatter(self, index: int, piece: Bytes, layer_start: int, head_start: int) -> None:
            threads.add(threading.current_thread())
            if threading.current_thread() is not threading.main_thread():
                others.set()
            elif not index:
                others.wait(SHORT_S)

        gather = scatter

    assert cache.read(keys, Plain()).chunks == len(keys)
    assert cache.write(cache.keys(prompt(3, 96)), Plain()).stored == 6
    assert threads == {threading.current_thread()}


@pytest.mark.parametrize("checksums", [True, False])
def test_a_commit_waits_for_all_copies_into_its_slots(host: BreakableHost, checksums: bool) -> None:
    with Client(None, None, None, copy_threads=2, host=host) as client:
        cache, told = client.bind(namespace(), checksums=checksums), threading.Event()
        keys = cache.keys(prompt(1, 96))
        source = Endpoint(pages_of(keys), lambda: told.wait(SHORT_S) or None)
        host.broken.before["commit"] = lambda: (told.set(), _no_copies(source))[0]
        assert cache.write(keys, source).stored == len(keys)
        target = poisoned(cache, len(keys))
        assert cache.read(keys, target).chunks == len(keys)
        assert np.array_equal(target, pages_of(keys)) and source.together.most_at_once == 2


def test_an_abort_waits_for_all_copies_into_its_slots(cache: Cache, host: BreakableHost) -> None:
    """The caller's own piece fails: its slots may be somebody else's when the node has heard of the abort."""
    keys, told = cache.keys(prompt(1, 96)), threading.Event()

    class Fails(Endpoint):
        def gather(self, index: int, slot: Bytes, layer_start: int, head_start: int) -> None:
            super().gather(index, slot, layer_start, head_start)
            if threading.current_thread() is threading.main_thread():
                raise RuntimeError("no such block")

    source = Fails(pages_of(keys), lambda: told.wait(SHORT_S) or None)
    host.broken.before["abort"] = lambda: (told.set(), _no_copies(source))[0]
    with pytest.raises(RuntimeError, match="no such block"):
        cache.write(keys, source)
    assert host.broken.calls[-1] == "abort" and not host.core.reservations.attempts


def _no_copies(source: Endpoint) -> None:
    assert source.together.under_way == 0, "the node was told before the copies had ended"


def test_a_chunk_named_twice_is_filled_by_one_thread(cache: Cache) -> None:
    keys, gathered = cache.keys(prompt(1, 96)), []

    class Noting(Endpoint):
        def gather(self, index: int, slot: Bytes, layer_start: int, head_start: int) -> None:
            gathered.append(index)
            super().gather(index, slot, layer_start, head_start)

    with cache.begin_write(keys) as pending:
        pending.put_layers(0, LAYOUT.layers, Noting(pages_of(keys)), chunks=(0, 1, 1, 0, 2, 3, 4, 5, 5))
        assert sorted(gathered) == list(range(6))
        assert pending.commit().outcomes == (Outcome.COMMITTED,) * 6
    target = poisoned(cache, len(keys))
    assert cache.read(keys, target).chunks == len(keys)
    assert np.array_equal(target, pages_of(keys))
