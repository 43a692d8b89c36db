"""Writers that stop or die in the middle of a copy (B04): their late bytes touch no live space, and nothing is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.model.prefix import Keys
from kvstore.node import RESERVATION_LIFETIME_MS
from kvstore.node.reservations import Reservations
from tests.chaos.node_thread import NodeThread
from tests.chaos.raced_node import LAYOUT, NAMESPACE, pages_of, prompt_keys
from tests.chaos.stopped_writer import CHUNKS, PROMPT

ROOT = Path(__file__).resolve().parents[2]
KEYS = prompt_keys(PROMPT, CHUNKS)
W_VERSION, V_VERSION = 1, 2
REFUSED = ["REFUSED_STALE"] * CHUNKS


def wait_until(condition: Callable[[], bool], what: str) -> None:
    end, never = time.monotonic() + 20, threading.Event()
    while not condition():
        assert time.monotonic() < end, f"not within 20 s: {what}"
        never.wait(0.005)


class StoppedWriter:
    """W: the process of `stopped_writer`, in the middle of its first chunk."""

    def __init__(self, node: NodeThread) -> None:
        command = [sys.executable, "-m", "tests.chaos.stopped_writer", node.info.socket_path, str(W_VERSION)]
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.slots: list[int] = self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def go_on(self) -> list[str]:
        """Continue: write the rest, commit. The outcomes."""
        assert self.process.stdin is not None
        self.process.stdin.write("go on\n")
        self.process.stdin.flush()
        self.process.send_signal(signal.SIGCONT)
        outcomes: list[str] = self._answer()
        return outcomes

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=20)


@dataclass
class Stage:
    """A node whose clock the test moves, W, and V: a client in this process."""

    node: NodeThread
    client: kvstore.Client
    late_s: float = 0.0

    def __post_init__(self) -> None:
        def use_clock() -> None:
            self.node.core._clock = self.node.core.pool._clock = lambda: time.monotonic() + self.late_s

        self.node.call(use_clock)
        self.cache = self.client.bind(NAMESPACE)
        self.arena = np.frombuffer(self.node.daemon._memory.arena.memory, dtype=np.uint8)

    def let_reservations_end(self) -> None:
        self.late_s += RESERVATION_LIFETIME_MS / 1000 + 1
        self.node.call(self.node.core.tick)

    def put(self, keys: Keys) -> None:
        assert self.cache.write(keys, pages_of(keys, V_VERSION)).stored == len(keys)

    def reads(self, keys: Keys) -> bool:
        """True if V's bytes, all of them, are what a reader gets."""
        pages = self.cache.empty(len(keys))
        result = self.cache.read(keys, pages)
        return result.chunks == len(keys) and np.array_equal(pages.reshape(len(keys), -1), pages_of(keys, V_VERSION))

    def live_slots(self) -> set[int]:
        chunks = self.node.call(lambda: list(self.node.core.pool.forest.chunks.values()))
        return {copy.slot for chunk in chunks for copy in chunk.copies.values()}

    def stats(self) -> dict[str, int]:
        return self.node.call(self.node.core.stats)

    def used_slots(self) -> int:
        return len(self.node.call(self.node.core.pool.allocator.used_slots))


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    node = NodeThread(tmp_path, dram_bytes=16 * 4096)
    with kvstore.connect(node.info.socket_path, name="V") as client:
        yield Stage(node, client)
    node.call(node.core.check)
    node.stop()


@pytest.fixture
def writer(stage: Stage) -> Iterator[StoppedWriter]:
    writer = StoppedWriter(stage.node)
    yield writer
    writer.kill()


def write_late(stage: Stage, writer: StoppedWriter) -> tuple[list[str], bool, set[int]]:
    """B04 (c): W is stopped for longer than its reservation lasts, V puts the key, W goes on.

    W's outcomes, whether V's bytes are whole, and the live slots that W wrote into.
    """
    writer.stop()
    stage.let_reservations_end()
    stage.put(KEYS)
    assert stage.reads(KEYS)
    touched = stage.live_slots() & set(writer.slots)
    outcomes = writer.go_on()
    return outcomes, stage.reads(KEYS), touched


@pytest.mark.slow
def test_b04_the_late_write_of_a_stopped_writer_touches_no_live_space(stage: Stage, writer: StoppedWriter) -> None:
    outcomes, intact, touched = write_late(stage, writer)
    assert outcomes == REFUSED
    assert intact and not touched
    written = stage.arena[writer.slots[0] * 4096 :][: LAYOUT.chunk_bytes]
    assert np.array_equal(written, pages_of(KEYS, W_VERSION)[0]), "it did write late: this test has a point"
    # W has acknowledged that it stopped, so its slots are free again although it lives.
    assert stage.used_slots() == CHUNKS
    assert stage.stats()["quarantined"] == CHUNKS


@pytest.mark.slow
def test_without_quarantine_the_late_write_lands_in_the_bytes_of_another(
    stage: Stage, writer: StoppedWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Reservations, "quarantine", Reservations.abort)
    outcomes, intact, touched = write_late(stage, writer)
    assert outcomes == REFUSED
    assert touched and not intact


@pytest.mark.slow
def test_quarantined_slots_stay_out_of_use_however_much_room_is_needed(stage: Stage, writer: StoppedWriter) -> None:
    """V fills the node twice over; what W may still write into is not handed out, and evictions find other room."""
    writer.stop()
    stage.let_reservations_end()
    for prompt in range(2, 10):
        stage.cache.write(prompt_keys(prompt, 5), pages_of(prompt_keys(prompt, 5), V_VERSION))
        assert not stage.live_slots() & set(writer.slots)
        stage.node.call(stage.node.core.check)
    assert stage.stats()["evictions"] > 0
    resident = [keys for keys in (prompt_keys(prompt, 5) for prompt in range(2, 10)) if stage.reads(keys)]
    assert resident
    assert writer.go_on() == REFUSED
    assert all(stage.reads(keys) for keys in resident)


@pytest.mark.slow
@pytest.mark.parametrize("first", ["reservation", "session"])
def test_quarantine_lasts_until_the_process_is_gone_whatever_ends_first(
    stage: Stage, writer: StoppedWriter, first: str
) -> None:
    """The socket's end is not the process's: a stopped writer keeps its mapping. Only the pidfd frees its slots."""
    writer.stop()
    if first == "reservation":
        stage.let_reservations_end()
    else:
        (number,) = (s.number for s in stage.node.core.sessions.values() if s.writer.held_bytes)
        stage.node.call(lambda: stage.node.core.session_lost(number))
        stage.let_reservations_end()
    assert stage.used_slots() == CHUNKS
    stage.put(KEYS)
    assert stage.used_slots() == 2 * CHUNKS
    writer.kill()
    wait_until(lambda: stage.used_slots() == CHUNKS, "the slots of the killed writer are free")
    assert stage.reads(KEYS)


@pytest.mark.slow
def test_b04_a_key_of_a_killed_writer_can_be_written_again_at_once(stage: Stage, writer: StoppedWriter) -> None:
    """(a) and (b): killed after half the data, long before the reservation ends."""
    assert stage.cache.write(KEYS, pages_of(KEYS, V_VERSION)).stored == 0, "it is in progress"
    writer.kill()
    wait_until(lambda: stage.used_slots() == 0, "the killed writer's slots are free")
    stage.put(KEYS)
    assert stage.reads(KEYS)
    assert stage.used_slots() == CHUNKS


@pytest.mark.slow
def test_a_writer_that_goes_on_in_time_commits_and_the_other_finds_it(stage: Stage, writer: StoppedWriter) -> None:
    """The mirror: stopped for less than the reservation lasts, nothing is taken from W."""
    writer.stop()
    stage.late_s += RESERVATION_LIFETIME_MS / 1000 - 10
    stage.node.call(stage.node.core.tick)
    assert writer.go_on() == ["COMMITTED"] * CHUNKS
    pages = stage.cache.empty(CHUNKS)
    assert stage.cache.read(KEYS, pages).chunks == CHUNKS
    assert np.array_equal(pages.reshape(CHUNKS, -1), pages_of(KEYS, W_VERSION))
    assert stage.cache.write(KEYS, pages_of(KEYS, V_VERSION)).stored == 0
