"""The supervisor's decisions, without processes; `tests/chaos/test_supervisor.py` has the processes."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.errors import ConfigurationError
from kvstore.node import handover, supervisor
from kvstore.node.supervisor import DEATHS_LIMIT, DEATHS_WINDOW_S, Supervisor


@pytest.fixture
def parent() -> Iterator[Supervisor]:
    made = Supervisor({"dram_bytes": 1 << 20, "slots": 16, "entry": "", "payload": {}})
    yield made
    made._catalog.close()
    for descriptor in (made._arena_fd, made._catalog_fd, made._wake_read, made._wake_write):
        os.close(descriptor)


def test_waits_grow_and_have_an_end(parent: Supervisor, caplog: pytest.LogCaptureFixture) -> None:
    pauses = [parent._note_death(-9) for _ in range(DEATHS_LIMIT)]
    assert pauses == [0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, None]
    assert "killed by SIGKILL" in caplog.text and "giving up" in caplog.text


def test_deaths_long_ago_do_not_count(parent: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("kvstore.node.supervisor.time.monotonic", lambda: now)
    for _ in range(3 * DEATHS_LIMIT):
        assert parent._note_death(1) == 0.0
        now += DEATHS_WINDOW_S


def test_signals_between_two_workers_end_the_wait(parent: Supervisor) -> None:
    os.write(parent._wake_write, bytes([supervisor.signal.SIGCHLD]))
    assert parent._sleep(0.001)
    os.write(parent._wake_write, bytes([supervisor.signal.SIGTERM]))
    assert not parent._sleep(60.0)


def test_memory_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="--dram"):
        Supervisor({"dram_bytes": 1 << 60, "slots": 16})


def test_a_workers_messages(parent: Supervisor) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    seat = handover.Seat(0, 0, 0, parent._catalog, 1, False, {}, (), theirs)
    pidfd = os.pidfd_open(os.getpid())
    seat.ready({"node": {"control_address": "127.0.0.1:5"}})
    seat.keep(11, (1, 2), pidfd)
    seat.keep(12, (3, 4), pidfd)
    seat.drop(11)
    seat.drop(99)
    os.close(pidfd)
    for _ in range(5):
        assert parent._take_message(ours)
    assert not parent._take_message(ours)
    assert parent._announced and parent._bound == {"node": {"control_address": "127.0.0.1:5"}}
    assert [(kept.session, kept.owner) for kept in parent._writers.values()] == [(12, (3, 4))]
    kept = parent._writers.pop(12)
    assert not os.get_inheritable(kept.pidfd)
    assert f"Pid:\t{os.getpid()}\n" in Path(f"/proc/self/fdinfo/{kept.pidfd}").read_text()
    os.close(kept.pidfd)
    theirs.close()
    assert not parent._take_message(ours), "the worker has died"
    ours.close()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("echo 3 99", "Python 3.99 instead of"),
        ("exit 1", "Python that does not start instead of"),
        (f"echo {sys.version_info[0]} {sys.version_info[1]}", ""),
    ],
)
def test_another_python_is_noticed(answer: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{answer}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    told = supervisor._other_python()
    assert told.startswith(reason) and bool(told) == bool(reason)
