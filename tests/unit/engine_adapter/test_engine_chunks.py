"""Several threads copy the blocks of one plan at a time, and `close` waits for all of them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from engine_adapter.copy import PagedKv
from engine_adapter.engine_chunks import BlocksTaken, Endpoint, EngineChunks
from engine_adapter.plans import GroupChunks, KvGroup
from kvstore.client.values import gathers_at_once, scatters_at_once
from kvstore.model import checksum
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


class HeldWithSums(Held):
    """The same for copies that take or check checksums."""

    def gather_summed(self, index: int, slot: np.ndarray, layer_start: int, head_start: int) -> checksum.Table:
        self.gather(index, slot, layer_start, head_start)
        return checksum.table_of_layers(slot)

    def scatter_checked(
        self, index: int, piece: np.ndarray, layer_start: int, head_start: int, table: checksum.Table
    ) -> bool:
        self.gather(index, piece, layer_start, head_start)
        return True


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


@pytest.mark.parametrize("blocks", [[1, 2, 3, 4], [1, 2, 3]], ids=["whole", "prompts_end"])
def test_checksums_of_whole_chunks_and_of_parts(blocks: list[int]) -> None:
    """Where a chunk is there whole its endpoint takes them; pages behind the prompt count as zero."""
    memory = torch.randint(1, 256, (2, 8, 1, LAYOUT.head_page_bytes), dtype=torch.uint8)
    keys = KeyChain(GROUP.namespace).keys(range(128))
    chunks = EngineChunks(
        GROUP,
        GroupChunks(keys, (*blocks, *[None] * (4 - len(blocks)))),
        lambda pages, ids: PagedKv(list(memory), pages, ids),
    )
    for index in range(2):
        filled, summed = slot(), slot()
        chunks.gather(index, filled, 0, 0)
        assert np.array_equal(chunks.gather_summed(index, summed, 0, 0), checksum.table_of_layers(filled))
        assert np.array_equal(summed, filled) and filled[:, 0].all()
        before = memory.clone()
        memory.zero_()
        wrong = filled.copy()
        wrong[0, 0, 0, 9] ^= 1
        assert not chunks.scatter_checked(index, wrong, 0, 0, checksum.table_of_layers(filled))
        assert not memory.any()
        assert chunks.scatter_checked(index, filled, 0, 0, checksum.table_of_layers(filled))
        mine = blocks[2 * index : 2 * index + 2]
        assert torch.equal(memory[:, mine], before[:, mine]) and memory.count_nonzero() == before[:, mine].numel()
        memory.copy_(before)
    chunks.close()
    with pytest.raises(BlocksTaken):
        chunks.gather_summed(0, slot(), 0, 0)
    with pytest.raises(BlocksTaken):
        chunks.scatter_checked(0, filled, 0, 0, checksum.table_of_layers(filled))


@pytest.mark.parametrize("verb", ["gather_summed", "scatter_checked"])
def test_close_waits_for_copies_that_take_checksums(verb: str) -> None:
    chunks = chunks_of([endpoint := HeldWithSums(2)], [1, 2])
    arguments = (0, slot(), 0, 0) if verb == "gather_summed" else (0, slot(), 0, 0, checksum.table_of_layers(slot()))
    with ThreadPoolExecutor(2) as threads:
        copy = threads.submit(getattr(chunks, verb), *arguments)
        endpoint.together.wait(DEADLINE_S)
        closed = threads.submit(chunks.close)
        with pytest.raises(TimeoutError):
            closed.result(0.05)
        endpoint.released.set()
        copy.result(DEADLINE_S)
        closed.result(DEADLINE_S)
    assert endpoint.under_way == 0


@pytest.mark.parametrize(("part", "expected"), [(True, True), (False, False)])
def test_all_endpoints_must_allow_several_threads(part: bool, expected: bool) -> None:
    chunks = chunks_of([Held(1), Held(1, several=part)], [1, 2, 3])
    assert (gathers_at_once(chunks), scatters_at_once(chunks)) == (expected, expected)
