"""Several threads copy the blocks of one plan at a time, and `close` waits for all of them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from engine_adapter.engine_chunks import BlocksTaken, Endpoint, EngineChunks
from engine_adapter.plans import GroupChunks, KvGroup
from kvstore.client.values import gathers_at_once, scatters_at_once
from kvstore.model.layout import Dtype, Geometry, PageLayout
from kvstore.model.namespace import Namespace
from kvstore.model.prefix import KeyChain

LAYOUT = PageLayout(2, 1, 32, Dtype.BF16, 32, 2)
GROUP = KvGroup(Namespace("m", "r", LAYOUT), Geometry.whole(LAYOUT), 32)
DEADLINE_S = 20.0


class Held:
    """An endpoint whose copies wait for each other and then for the test. `under_way`: those that have not ended."""

    def __init__(self, together: int, *, several: bool = True) -> None:
        self.gathers_at_once = self.scatters_at_once = several
        self.together = threading.Barrier(together)
        self.released = threading.Event()
        self.under_way = 0
        self._lock = threading.Lock()

    def gather(self, index: int, slot: np.ndarray, layer_start: int, head_start: int) -> None:
        with self._lock:
            self.under_way += 1
        self.together.wait(DEADLINE_S)
        self.released.wait(DEADLINE_S)
        with self._lock:
            self.under_way -= 1

    def scatter(self, index: int, piece: np.ndarray, layer_start: int, head_start: int) -> None:
        self.gather(index, piece, layer_start, head_start)


def chunks_of(endpoints: Sequence[Endpoint], blocks: Sequence[int | None]) -> EngineChunks:
    """Blocks in chunks of two; each endpoint that is needed is the next of these."""
    keys = KeyChain(GROUP.namespace).keys(range(len(blocks) * 32))
    left = iter(endpoints)
    return EngineChunks(GROUP, GroupChunks(keys, tuple(blocks)), lambda pages, ids: next(left))


def slot() -> np.ndarray:
    return np.zeros(LAYOUT.shape(LAYOUT.whole), dtype=np.uint8)


@pytest.mark.parametrize("verb", ["gather", "scatter"])
def test_close_waits_for_every_thread_that_copies(verb: str) -> None:
    endpoint = Held(3)  # two threads and this one: so both are in the middle of a copy
    chunks = chunks_of([endpoint], [1, 2, 3, 4])
    left_behind: list[int] = []

    def close() -> None:
        chunks.close()
        left_behind.append(endpoint.under_way)

    with ThreadPoolExecutor(3) as threads:
        copies = [threads.submit(getattr(chunks, verb), index, slot(), 0, 0) for index in range(2)]
        endpoint.together.wait(DEADLINE_S)
        closed = threads.submit(close)
        with pytest.raises(TimeoutError):
            closed.result(0.05)
        with pytest.raises(BlocksTaken):
            getattr(chunks, verb)(0, slot(), 0, 0)
        endpoint.released.set()
        for copy in copies:
            copy.result(DEADLINE_S)
        closed.result(DEADLINE_S)
    assert left_behind == [0]


def test_a_copy_that_fails_is_not_waited_for() -> None:
    class Failing(Held):
        def gather(self, index: int, slot: np.ndarray, layer_start: int, head_start: int) -> None:
            raise OSError("no")

    chunks = chunks_of([Failing(1)], [1, 2])
    with pytest.raises(OSError, match="no"):
        chunks.gather(0, slot(), 0, 0)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(chunks.close).result(DEADLINE_S)


@pytest.mark.parametrize(("part", "expected"), [(True, True), (False, False)])
def test_all_endpoints_must_allow_several_threads(part: bool, expected: bool) -> None:
    chunks = chunks_of([Held(1), Held(1, several=part)], [1, 2, 3])
    assert (gathers_at_once(chunks), scatters_at_once(chunks)) == (expected, expected)
