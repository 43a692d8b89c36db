"""NIXL as a way to the SSD file, over a fake of it that fails, holds and refuses; and what the real one needs."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvstore.errors import ConfigurationError, ForkedProcess, StorageFailed
from kvstore.node.arena import Run, ssd_nixl
from kvstore.node.arena.ssd import SsdArena
from kvstore.node.arena.ssd_io import CHOICES, ThreadedIo, check_choice, open_ssd_io
from kvstore.node.arena.ssd_nixl import NixlIo, make_agent
from tests.contract.fake_nixl import FakeNixl
from tests.contract.ssd_io_suite import MEMORY_BYTES, UNIT_BYTES, Disk, opened, some

WAIT_S = 10.0
ROOT = Path(__file__).resolve().parents[3]


@contextmanager
def disk_over(nixl: FakeNixl, path: Path) -> Iterator[Disk]:
    """An arena whose payloads go by this NIXL."""
    yield from opened(path, lambda arena, memory: NixlIo(arena, memory, nixl.loaded, *make_agent(nixl.loaded)))


def write(disk: Disk, page: int = 0) -> list[object]:
    disk.memory[page * UNIT_BYTES :][: 2 * UNIT_BYTES] = some(page, 2 * UNIT_BYTES)
    errors = disk.io.write([Run(disk.offset(page), [disk.piece(page, 2)])])
    if errors == [None]:
        assert np.array_equal(disk.in_file(page, 2), some(page, 2 * UNIT_BYTES))
    return list(errors)


def until(condition: Callable[[], object]) -> None:
    ends_s, pause = time.monotonic() + WAIT_S, threading.Event()
    while not condition():
        assert time.monotonic() < ends_s
        pause.wait(0.001)


# --- which queue ---------------------------------------------------------------------------------------------


def test_where_io_uring_is_refused_libaio_serves_and_where_both_are_the_message_says_what_to_do() -> None:
    assert make_agent(FakeNixl().loaded)[1] == "io_uring"
    assert make_agent(FakeNixl(refused=("use_uring",)).loaded)[1] == "libaio"
    with pytest.raises(ConfigurationError, match=r"seccomp profile.*io_uring_disabled.*ssd_io threads"):
        make_agent(FakeNixl(refused=("use_uring", "use_aio")).loaded)


REFUSED = """
import ctypes, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
numbers = [int(number) for number in sys.argv[1:]]  # system calls that this process may not make any more
steps = [(0x20, 0, 0, 0)] + [(0x15, len(numbers) - i, 0, number) for i, number in enumerate(numbers)]
steps += [(0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x00050001)]
program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
class Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("program", ctypes.c_void_p)]
assert libc.prctl(38, 1, 0, 0, 0) == 0
if libc.prctl(22, 2, ctypes.byref(Filter(len(steps), ctypes.addressof(program))), 0, 0):
    print("no seccomp here")
    sys.exit(7)
from kvstore.node.arena.ssd_nixl import make_agent
from kvstore.nixl_library import load_nixl
print(make_agent(load_nixl())[1])
"""
IO_URING_SETUP, IO_SETUP = "425", "206"


@pytest.mark.slow
@pytest.mark.nixl
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of system calls of x86_64")
def test_a_kernel_that_refuses_queues_is_noticed_by_the_real_one() -> None:
    def said(*refused: str) -> tuple[int, str, str]:
        ended = subprocess.run(
            [sys.executable, "-c", REFUSED, *refused], capture_output=True, text=True, timeout=60, cwd=ROOT
        )
        if ended.returncode == 7:
            pytest.skip(ended.stdout)
        return ended.returncode, ended.stdout.strip(), ended.stderr

    assert said(IO_URING_SETUP)[:2] == (0, "libaio"), "and it prints nothing else"
    status, _, errors = said(IO_URING_SETUP, IO_SETUP)
    assert status == 1 and "neither io_uring nor libaio" in errors


# --- what fails ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", ["post", "look"])
def test_what_nixl_fails_and_system_calls_do_ends_its_use(
    tmp_path: Path, fails: str, caplog: pytest.LogCaptureFixture
) -> None:
    nixl = FakeNixl(fails=fails)
    with disk_over(nixl, tmp_path / "ssd") as disk:
        assert disk.io.name == "nixl"
        assert write(disk) == [None]
        assert (disk.io.name, disk.io.detail) == ("threads", "threads (NIXL failed)")
        assert write(disk, 4) == [None]
        assert len(nixl.handles) == 1, "it is not asked again"
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "NIXL failed a write that system calls did" in warning


def test_what_nobody_can_do_has_the_error_of_the_system_call_and_nixl_goes_on(tmp_path: Path) -> None:
    with disk_over(FakeNixl(), tmp_path / "ssd") as disk:
        os.truncate(disk.arena.path, disk.offset(1))
        (error,) = disk.io.read([Run(disk.offset(2), [disk.piece(0, 1)])])
        assert isinstance(error, StorageFailed) and "ended after 0 of 4096 bytes" in str(error)
        assert disk.io.name == "nixl"
        assert write(disk) == [None]


def test_a_handle_that_could_not_be_posted_stays_until_the_end(tmp_path: Path) -> None:
    """The plug-in may have taken a part of it."""
    nixl = FakeNixl(fails="post")
    with disk_over(nixl, tmp_path / "ssd") as disk:
        assert write(disk) == [None]
        assert not nixl.handles[0].is_released and disk.io._unposted == nixl.handles  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("is_lost", [False, True])
def test_an_error_that_nobody_thought_of_keeps_nobody_waiting(tmp_path: Path, is_lost: bool) -> None:
    """What is under way is seen out, or fails where nobody can ask how it stands; all else goes by system calls."""
    nixl = FakeNixl(breaks=threading.Event(), breaks_looks=is_lost)
    with disk_over(nixl, tmp_path / "ssd") as disk, ThreadPoolExecutor(3) as pool:
        under_way = pool.submit(write, disk)
        assert nixl.reached.wait(WAIT_S)
        waiting = [pool.submit(write, disk, page) for page in (4, 12)]
        until(lambda: len(disk.io._orders) == 2)  # type: ignore[attr-defined]
        assert nixl.breaks is not None
        nixl.breaks.set()
        (error,) = under_way.result(WAIT_S)
        assert error is None or is_lost
        if is_lost:
            assert (
                isinstance(error, StorageFailed) and "a write was lost" in str(error) and "ssd_io threads" in str(error)
            )
        assert [each.result(WAIT_S) for each in waiting] == [[None], [None]]
        assert disk.io.name == "threads" and write(disk, 8) == [None]
        assert len(nixl.handles) == 1, "nothing more was posted"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_was_seen_out_was_not_given_back_before_it_ended(tmp_path: Path) -> None:
    nixl = FakeNixl(breaks=threading.Event(), held=["WRITE"])
    with disk_over(nixl, tmp_path / "ssd") as disk, ThreadPoolExecutor(1) as pool:
        under_way = pool.submit(write, disk)
        assert nixl.reached.wait(WAIT_S) and nixl.breaks is not None
        nixl.reached.clear()
        nixl.breaks.set()
        assert nixl.reached.wait(WAIT_S), "it is looked at"
        assert not under_way.done() and not nixl.handles[0].is_released
        nixl.held = ()
        assert under_way.result(WAIT_S) == [None]
        until(lambda: nixl.handles[0].is_released)


# --- what stands still ---------------------------------------------------------------------------------------


def test_a_read_that_stands_still_keeps_its_memory_and_holds_nobody_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssd_nixl, "_WARN_S", 0.01)
    monkeypatch.setattr(ssd_nixl, "_STILL_S", 0.01)
    monkeypatch.setattr(ssd_nixl, "_STILL_PAUSE_S", 0.001)
    nixl = FakeNixl(held=["READ"])
    with disk_over(nixl, tmp_path / "ssd") as disk, ThreadPoolExecutor(1) as pool:
        reading = pool.submit(disk.io.read, [Run(disk.offset(8), [disk.piece(8, 1)])])
        assert nixl.reached.wait(WAIT_S)
        for page in range(0, 40, 4):
            assert write(disk, page) == [None]
        until(lambda: "a read has not ended in 0.01 s" in caplog.text)
        assert not reading.done() and not nixl.handles[0].is_released
        nixl.held = ()
        assert reading.result(WAIT_S) == [None]
        assert nixl.handles[0].is_released
        assert np.array_equal(disk.memory[8 * UNIT_BYTES :][:UNIT_BYTES], some(8, 2 * UNIT_BYTES)[:UNIT_BYTES])


def test_the_owner_looks_seldom_at_what_takes_long() -> None:
    def pause_s(*ages_s: float) -> float | None:
        now_s, nothing = time.monotonic(), np.zeros((1, 3), dtype=np.uint64)
        transfers = [ssd_nixl._Transfer("READ", nothing, nothing, began_s=now_s - age_s) for age_s in ages_s]
        return ssd_nixl._pause_s(transfers)

    assert pause_s() is None, "with nothing under way it waits for orders"
    assert pause_s(0.0) == ssd_nixl._LEAST_PAUSE_S
    assert pause_s(0.002) == pytest.approx(0.0005, rel=0.2)
    assert pause_s(0.5) == pause_s(0.5, 0.0) == ssd_nixl._MOST_PAUSE_S
    assert pause_s(20.0) == ssd_nixl._STILL_PAUSE_S
    assert pause_s(20.0, 0.0) == ssd_nixl._LEAST_PAUSE_S, "what stands still makes nobody else wait"


def test_an_idle_owner_asks_nothing(tmp_path: Path) -> None:
    nixl = FakeNixl()
    with disk_over(nixl, tmp_path / "ssd") as disk:
        assert write(disk) == [None]
        looks = nixl.looks
        assert looks == 1 and not threading.Event().wait(0.05) and nixl.looks == looks


# --- beginning and end ---------------------------------------------------------------------------------------


def test_everything_is_given_back_at_the_end(tmp_path: Path) -> None:
    nixl = FakeNixl()
    with disk_over(nixl, tmp_path / "ssd") as disk:
        assert nixl.registered == 2
        assert write(disk) == [None]
    assert nixl.registered == 0 and all(handle.is_released for handle in nixl.handles)
    assert not any(thread.name == "kvstore-ssd-nixl" for thread in threading.enumerate())


def test_after_a_fork_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner's thread is in the parent: a child would wait for ever."""
    with disk_over(FakeNixl(), tmp_path / "ssd") as disk:
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: 1)
            with pytest.raises(ForkedProcess, match="was opened by process"):
                write(disk)
        assert write(disk) == [None]


def test_a_choice_that_cannot_be_had_is_refused_and_never_replaced(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="unknown ssd_io 'uring'; known: auto, threads, nixl, gds"):
        check_choice("uring")
    with pytest.raises(ConfigurationError, match="no GPU arena: use auto, threads or nixl"):
        check_choice("gds")
    with SsdArena.open(tmp_path / "ssd", MEMORY_BYTES, "node", 1) as arena:
        memory = np.zeros(MEMORY_BYTES, dtype=np.uint8)
        assert [type(open_ssd_io(choice, arena, memory)) for choice in CHOICES[:2]] == [ThreadedIo, ThreadedIo]
        with pytest.raises(ConfigurationError, match="no GPU arena"):
            open_ssd_io("gds", arena, memory)


@pytest.mark.nixl
def test_nixl_by_name_is_nixl(tmp_path: Path) -> None:
    for disk in opened(tmp_path / "ssd", lambda arena, memory: open_ssd_io("nixl", arena, memory)):
        assert disk.io.name == "nixl" and write(disk) == [None]
