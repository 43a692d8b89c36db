"""Keeps a forked child going: for a library that is slow to load and now and then ends the process that uses it.

    parent     has loaded what the child needs and used nothing of it; forks, waits, forks the next one at once
    child      serves and beats; it dies with its parent

So the next child serves after tens of milliseconds instead of the seconds of a fresh start. The parent has one thread
and no state of the library, because a fork copies neither threads nor what the kernel keeps for them.

A child that ends soon after its start makes the next one wait, longer each time. One that does not beat any more
(stopped, or stuck inside the library) is killed: it serves nobody, and nobody else would notice.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

START_LIMIT_S: Final = 60
"""Time for a child's first beat: it may have to register hundreds of GB."""
STILL_LIMIT_S: Final = 5
"""Longest time between two beats afterwards."""
BACK_OFF_S: Final = 0.05
BACK_OFF_LIMIT_S: Final = 1.0
"""Wait before the next child: nothing after one that lived longer than the limit, else this, doubled each time."""
END_S: Final = 3.0
"""Time for a child to end in order when the wishes end."""
SAID_WHY: Final = 3
"""Exit status of a child that has told itself why it ends."""
_LOOK_MS: Final = 1000
_PR_SET_PDEATHSIG: Final = 1


class Beat:
    """A number in memory that parent and child share."""

    def __init__(self) -> None:
        self._words = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("Q")

    def strike(self) -> None:
        """The child lives, and serves from the first of these on."""
        self._words[0] += 1

    @property
    def count(self) -> int:
        """Of strikes so far."""
        return self._words[0]


def die_with_parent(parent: int) -> None:
    """Have the kernel end this process together with the thread of process `parent` that started it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before we asked to be told
        sys.exit(1)


def thread_count() -> int:
    """Threads of this process, also those that a library made."""
    return sum(1 for _ in Path("/proc/self/task").iterdir())


class ForkingServer:
    """Runs `serve(beat)` in one child after the other until the other end of the pipe `wishes` is closed.

    `serve` returns an exit status, and does so when `wishes` ends. `tell(text)` hears how a child ended unless it
    has SAID_WHY.
    """

    def __init__(self, serve: Callable[[Beat], int], wishes: int, tell: Callable[[str], None]) -> None:
        self._serve = serve
        self._wishes = wishes
        self._tell = tell

    def run(self) -> int:
        """0: the wishes ended. 1: the first child did not come to serve; there is no use in another."""
        pause_s, has_served = 0.0, False
        while True:
            began_s, beat = time.monotonic(), Beat()
            how = self._run_child(beat)
            if how is None:
                return 0
            if how:
                self._tell(how)
            has_served |= beat.count > 0
            if not has_served:
                return 1
            is_short = time.monotonic() - began_s < BACK_OFF_LIMIT_S
            pause_s = min(BACK_OFF_LIMIT_S, max(BACK_OFF_S, 2 * pause_s)) if is_short else 0.0
            if self._wait(None, pause_s * 1000):
                return 0

    def _run_child(self, beat: Beat) -> str | None:
        """How it ended, empty if it has said so; None if the wishes did."""
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            die_with_parent(parent)
            sys.exit(self._serve(beat))
        pidfd = os.pidfd_open(pid)
        try:
            is_over = self._watch(pidfd, beat)
            if is_over and not select.select([pidfd], [], [], END_S)[0]:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        finally:
            os.close(pidfd)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if is_over or status == SAID_WHY:
            return None if is_over else ""
        return f"it ended with status {status}" if status >= 0 else f"it was ended by {_signal_name(-status)}"

    def _watch(self, pidfd: int, beat: Beat) -> bool:
        """Return when the child has ended (False) or the wishes have (True); kill a child that stands still."""
        looks, seen = 0, 0
        while True:
            if self._wait(pidfd, _LOOK_MS):
                return True
            if select.select([pidfd], [], [], 0)[0]:
                return False
            looks, seen = (0, beat.count) if beat.count != seen else (looks + 1, seen)
            if looks >= (STILL_LIMIT_S if seen else START_LIMIT_S):  # counted: this process may have been stopped too
                self._tell("it does not move any more and is ended")
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                looks = 0

    def _wait(self, pidfd: int | None, timeout_ms: float) -> bool:
        """Until the child has ended, at most so long; True as soon as the wishes have ended."""
        poller = select.poll()
        poller.register(self._wishes, 0)  # only their end: what they say is for the child
        if pidfd is not None:
            poller.register(pidfd, select.POLLIN)
        return any(descriptor == self._wishes for descriptor, _ in poller.poll(timeout_ms))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
