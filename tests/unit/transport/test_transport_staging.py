"""Staging: blocks, states, waiting, the law that bytes of all states add up."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.errors import InvalidRequest, LimitExceeded
from kvstore.transport.staging import ALIGNMENT_BYTES, Staging, StagingBlock, StagingUsage

PAGE = ALIGNMENT_BYTES


def take(staging: Staging, length_bytes: int) -> StagingBlock:
    block = staging.acquire(length_bytes, 0.0)
    assert block is not None
    return block


def test_blocks_are_aligned_and_exact() -> None:
    staging = Staging(10 * PAGE - 5)
    assert staging.total_bytes == 10 * PAGE
    blocks = [take(staging, length) for length in (1, PAGE, PAGE + 1)]
    for block, length in zip(blocks, (1, PAGE, PAGE + 1), strict=True):
        assert len(block.view) == length
        assert block.view.ctypes.data % PAGE == 0
        assert block.view.flags.carray
    assert staging.usage() == StagingUsage(6 * PAGE, 4 * PAGE, 0)
    staging.check()


def test_a_block_is_the_memory_at_its_offset() -> None:
    staging = Staging(4 * PAGE)
    take(staging, 1)
    block = take(staging, 10)
    block.view[:] = 7
    assert (staging.memory[block.offset_bytes : block.offset_bytes + 10] == 7).all()


def test_full_is_none_and_a_quarantined_block_stays_away_until_settled() -> None:
    staging = Staging(2 * PAGE)
    first, second = take(staging, PAGE), take(staging, PAGE)
    assert staging.acquire(1, 0.0) is None
    ended = [False]
    staging.quarantine(first, lambda: ended[0])
    assert staging.acquire(1, 0.0) is None
    staging.release(second)
    assert take(staging, 1).offset_bytes == second.offset_bytes
    assert staging.usage() == StagingUsage(0, PAGE, PAGE)
    ended[0] = True
    assert take(staging, 1).offset_bytes == first.offset_bytes
    staging.check()


def test_a_block_moves_only_from_the_state_it_is_in() -> None:
    staging = Staging(4 * PAGE)
    block = take(staging, PAGE)
    staging.release(block)
    again = take(staging, PAGE)
    assert again.offset_bytes == block.offset_bytes
    for verb in (staging.release, lambda block: staging.quarantine(block, lambda: True)):
        with pytest.raises(InvalidRequest):
            verb(block)  # must not free the next holder's memory
    staging.quarantine(again, lambda: False)
    with pytest.raises(InvalidRequest):
        staging.release(again)
    staging.check()


@pytest.mark.parametrize("length_bytes", [0, -1, 4 * PAGE + 1])
def test_what_can_never_fit_is_refused_with_the_limit(length_bytes: int) -> None:
    with pytest.raises(LimitExceeded, match=str(4 * PAGE)):
        Staging(4 * PAGE).acquire(length_bytes, 0.0)


def test_no_size() -> None:
    with pytest.raises(InvalidRequest):
        Staging(0)


def test_neighbours_are_joined_in_any_order() -> None:
    for order in ((0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)):
        staging = Staging(3 * PAGE)
        blocks = [take(staging, PAGE) for _ in range(3)]
        for index in order:
            staging.release(blocks[index])
            staging.check()
        take(staging, 3 * PAGE)


def test_waiting_ends_at_the_deadline() -> None:
    staging = Staging(PAGE)
    take(staging, 1)
    started = time.monotonic()
    assert staging.acquire(1, 0.05) is None
    assert 0.05 <= time.monotonic() - started < 2.0


def test_a_waiter_gets_what_is_released() -> None:
    staging = Staging(PAGE)
    block = take(staging, 1)
    got: list[StagingBlock | None] = []
    waiter = threading.Thread(target=lambda: got.append(staging.acquire(PAGE, 10.0)))
    waiter.start()
    staging.release(block)
    waiter.join(10)
    assert got and got[0] is not None
    staging.check()


def test_small_requests_do_not_pass_a_large_one_that_waits() -> None:
    staging = Staging(4 * PAGE)
    held = [take(staging, PAGE) for _ in range(4)]
    large: list[StagingBlock | None] = []
    waiter = threading.Thread(target=lambda: large.append(staging.acquire(4 * PAGE, 10.0)))
    waiter.start()
    while not staging.waiting_count:
        assert waiter.is_alive()
    for block in held[:3]:
        staging.release(block)
    assert staging.acquire(PAGE, 0.0) is None  # there is room, but somebody was first
    staging.release(held[3])
    waiter.join(10)
    assert large and large[0] is not None
    staging.release(large[0])
    take(staging, PAGE)


def test_many_threads_never_share_a_byte() -> None:
    staging = Staging(16 * PAGE)
    failures: list[str] = []

    def work(mark: int) -> None:
        rng = np.random.default_rng(mark)
        for _ in range(100):
            block = staging.acquire(int(rng.integers(1, 6 * PAGE)), 10.0)
            if block is None:
                failures.append("starved")
                return
            block.view[:] = mark
            if not (block.view == mark).all():
                failures.append("shared")
            staging.release(block)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not failures
    staging.check()
    assert staging.usage() == StagingUsage(16 * PAGE, 0, 0)


def test_of_no_use_in_a_forked_child() -> None:
    script = """
        import os
        from kvstore.errors import ForkedProcess
        from kvstore.transport.staging import Staging

        staging = Staging(1 << 20)
        block = staging.acquire(10, 0.0)
        verbs = [lambda: staging.acquire(1, 0.0), lambda: staging.release(block),
                 lambda: staging.quarantine(block, bool), staging.usage, staging.check]
        child = os.fork()
        if not child:
            refused = 0
            for verb in verbs:
                try:
                    verb()
                except ForkedProcess:
                    refused += 1
            os._exit(0 if refused == len(verbs) else 1)
        assert os.waitpid(child, 0)[1] == 0
        staging.release(block)
        staging.check()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=60)


def pages(block: StagingBlock) -> int:
    return -(-len(block.view) // PAGE)


class StagingMachine(RuleBasedStateMachine):
    """Against a naive model: a set of blocks a state, and no two of them share a page."""

    def __init__(self) -> None:
        super().__init__()
        self.staging = Staging(32 * PAGE)
        self.in_use: list[StagingBlock] = []
        self.quarantined: list[StagingBlock] = []
        self.ended: set[StagingBlock] = set()

    @rule(length_bytes=st.integers(1, 12 * PAGE))
    def acquire(self, length_bytes: int) -> None:
        block = self.staging.acquire(length_bytes, 0.0)
        if block is not None:
            self.in_use.append(block)
        else:
            held = sum(map(pages, (*self.in_use, *self.quarantined)))
            gaps = len(self.in_use) + len(self.quarantined) + 1
            assert (32 - held) // gaps < -(-length_bytes // PAGE), "some gap must have been large enough"

    @precondition(lambda self: self.in_use)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.staging.release(self.in_use.pop(data.draw(st.integers(0, len(self.in_use) - 1))))

    @precondition(lambda self: self.in_use)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        block = self.in_use.pop(data.draw(st.integers(0, len(self.in_use) - 1)))
        self.staging.quarantine(block, lambda: block in self.ended)
        self.quarantined.append(block)

    @precondition(lambda self: self.quarantined)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        self.ended.add(self.quarantined.pop(data.draw(st.integers(0, len(self.quarantined) - 1))))
        self.staging.usage()  # whoever asks lets it see

    @invariant()
    def law(self) -> None:
        self.staging.check()
        used, quarantined = (PAGE * sum(map(pages, blocks)) for blocks in (self.in_use, self.quarantined))
        assert self.staging.usage() == StagingUsage(32 * PAGE - used - quarantined, used, quarantined)


TestStagingMachine = StagingMachine.TestCase
TestStagingMachine.settings = settings(max_examples=40, stateful_step_count=30)
