"""A node's parent process: it holds the memory and starts a worker that serves, again and again.

    kvstore node -> exec python -m kvstore.node.supervisor JOB -> fork -> worker

It imports the standard library and a few modules of ours that do the same. So it stays small, has little that can
fail, and a fork of it loads everything else afresh: after a crash or an upgrade the next worker runs new code on the
old memory. If new code cannot use it (another layout, another Python), the supervisor replaces itself as well and the
contents are lost.

JOB is a JSON object: `entry` ("module:function" that is the worker, called with a Seat and `payload`), `payload`,
`dram_bytes`, `slots`, and after a replacement `announced` and `bound` (see Seat). Why fork and not exec: the catalog is
sealed against new writable mappings, so that the only one must be inherited.

SIGTERM and SIGINT stop the worker, then this process. The worker dies with it, whatever ends it. SIGTERM to the worker
alone restarts it: that is the way to upgrade.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import importlib
import json
import logging
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from kvstore.errors import ConfigurationError
from kvstore.node import handover
from kvstore.node.arena.dram import create_arena
from kvstore.node.handover import FULL_RESTART_CODE, KeptWriter
from kvstore.node.memory import CatalogShape, create_catalog

logger = logging.getLogger("kvstore.node.supervisor")
DEATHS_LIMIT = 8
DEATHS_WINDOW_S = 60.0
"""Give up at so many deaths within this time."""
BACK_OFF_S = 0.1
BACK_OFF_LIMIT_S = 5.0
"""Wait before a restart: nothing after the first death of a window, then this, doubled with each further one."""
STOP_S = 15.0
"""Time for a worker to stop; then it is killed."""
_PR_SET_PDEATHSIG = 1
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(slots=True)
class _Worker:
    pid: int
    pidfd: int
    channel: socket.socket


class Supervisor:
    """One node's memory and its workers. Single-threaded. Raises ConfigurationError if the memory is not there."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._job = job
        self._arena_fd = create_arena(job["dram_bytes"])
        self._catalog_fd, self._catalog = create_catalog(CatalogShape.make(job["dram_bytes"], job["slots"]))
        self._bound: dict[str, Any] = job.get("bound", {})
        self._announced = bool(job.get("announced", False))
        self._starts = 0
        self._was_ready = False
        self._stopping = False
        self._writers: dict[int, KeptWriter] = {}
        self._deaths: collections.deque[float] = collections.deque()
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def run(self) -> int:
        """Keep a worker running until told to stop; returns the exit status."""
        for number in _STOP_SIGNALS:
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(self._wake_write)
        while True:
            code = self._watch(self._start())
            if self._stopping:
                return max(code, 0)
            if code == FULL_RESTART_CODE:
                self._replace()
            if code >= 0 and not self._was_ready:
                return code  # it could not start at all and has said why
            pause_s = self._note_death(code)
            if pause_s is None:
                return 1
            if not self._sleep(pause_s):
                return 0

    # --- a worker's life ---------------------------------------------------------------------------------

    def _start(self) -> _Worker:
        """Fork. The child never returns from here: it ends by SystemExit."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self._starts += 1
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            ours.close()
            self._become_worker(theirs, parent)
        theirs.close()
        return _Worker(pid, os.pidfd_open(pid), ours)

    def _become_worker(self, channel: socket.socket, parent: int) -> NoReturn:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before we asked to be told
            sys.exit(1)
        signal.set_wakeup_fd(-1)
        for number in _STOP_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        os.close(self._wake_read)
        os.close(self._wake_write)
        seat = {
            "arena_fd": self._arena_fd,
            "arena_bytes": self._job["dram_bytes"],
            "catalog_fd": self._catalog_fd,
            "catalog": self._catalog,
            "start": self._starts,
            "announced": self._announced,
            "bound": self._bound,
            "channel": channel,
        }
        sys.exit(_work(self._job["entry"], self._job["payload"], seat, list(self._writers.values())))

    def _watch(self, worker: _Worker) -> int:
        """Serve the worker until it has ended; returns its exit status, or minus the signal that killed it."""
        poller = select.poll()
        for descriptor in (worker.pidfd, worker.channel.fileno(), self._wake_read):
            poller.register(descriptor, select.POLLIN)
        kill_at_s = float("inf")
        while True:
            timeout_ms = None if kill_at_s == float("inf") else max(0, int((kill_at_s - time.monotonic()) * 1000))
            ready = {descriptor for descriptor, _ in poller.poll(timeout_ms)}
            if self._wake_read in ready and self._told_to_stop():
                signal.pidfd_send_signal(worker.pidfd, signal.SIGTERM)
                kill_at_s = min(kill_at_s, time.monotonic() + STOP_S)
            if worker.channel.fileno() in ready and not self._take_message(worker.channel):
                poller.unregister(worker.channel.fileno())
            if worker.pidfd in ready:
                break
            if time.monotonic() >= kill_at_s:
                logger.warning("the worker did not stop within %g s: killing it", STOP_S)
                signal.pidfd_send_signal(worker.pidfd, signal.SIGKILL)
                kill_at_s = float("inf")
        while self._take_message(worker.channel):  # what it said before it died
            pass
        worker.channel.close()
        os.close(worker.pidfd)
        _, status = os.waitpid(worker.pid, 0)
        return os.waitstatus_to_exitcode(status)

    def _take_message(self, channel: socket.socket) -> bool:
        """Handle one message of the worker; False if there is none."""
        received = handover.receive(channel)
        if received is None:
            return False
        message, descriptors = received
        if "ready" in message:
            self._bound, self._announced, self._was_ready = message["ready"], True, True
        elif "keep" in message and descriptors:
            pid, started = message["owner"]
            self._writers[message["keep"]] = KeptWriter(message["keep"], (pid, started), descriptors[0])
        elif "drop" in message and message["drop"] in self._writers:
            os.close(self._writers.pop(message["drop"]).pidfd)
        return True

    # --- between two workers -----------------------------------------------------------------------------

    def _note_death(self, code: int) -> float | None:
        """Seconds to wait before the next start; None to give up."""
        now = time.monotonic()
        self._deaths.append(now)
        while self._deaths[0] <= now - DEATHS_WINDOW_S:
            self._deaths.popleft()
        count = len(self._deaths)
        what = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with status {code}"
        if count >= DEATHS_LIMIT:
            logger.error(
                "the worker %s, its %s death within %g s: giving up; the contents of the DRAM tier are lost",
                what,
                f"{count}th",
                DEATHS_WINDOW_S,
            )
            return None
        pause_s = 0.0 if count == 1 else min(BACK_OFF_LIMIT_S, BACK_OFF_S * 2 ** (count - 2))
        logger.warning("the worker %s; starting another one in %g s on the same memory", what, pause_s)
        return pause_s

    def _sleep(self, pause_s: float) -> bool:
        """Wait; False as soon as told to stop."""
        end_s = time.monotonic() + pause_s
        while (left_s := end_s - time.monotonic()) > 0:
            if select.select([self._wake_read], [], [], left_s)[0] and self._told_to_stop():
                return False
        return True

    def _told_to_stop(self) -> bool:
        """Read the signals that came; True if one of them means stop."""
        with contextlib.suppress(BlockingIOError):
            self._stopping |= any(number in _STOP_SIGNALS for number in os.read(self._wake_read, 64))
        return self._stopping

    def _replace(self) -> NoReturn:
        """Become a new supervisor with new memory; people are not told again, and ports stay."""
        logger.warning("full restart: the contents of the DRAM tier are lost")
        job = {**self._job, "announced": self._announced, "bound": self._bound}
        signal.set_wakeup_fd(-1)
        os.execv(sys.executable, command(job))


def command(job: dict[str, Any]) -> list[str]:
    """The command line that runs a supervisor. -P: the current folder must not be searched for modules."""
    return [sys.executable, "-P", "-m", "kvstore.node.supervisor", json.dumps(job)]


def _work(entry: str, payload: dict[str, Any], seat: dict[str, Any], writers: Sequence[KeptWriter]) -> int:
    """Load the worker's code from disk, also what this process has loaded already, and run it."""
    if seat["start"] > 1 and (reason := _other_python()):
        return _ask_for_full_restart(reason)
    for name in [name for name in sys.modules if name.partition(".")[0] == "kvstore"]:
        del sys.modules[name]
    importlib.invalidate_caches()
    fresh = importlib.import_module("kvstore.node.handover")
    if fresh.VERSION != handover.VERSION:
        return _ask_for_full_restart(f"hand-over version {fresh.VERSION} instead of {handover.VERSION}")
    kept = tuple(fresh.KeptWriter(each.session, each.owner, each.pidfd) for each in writers)
    module, _, function = entry.partition(":")
    return int(getattr(importlib.import_module(module), function)(fresh.Seat(**seat, writers=kept), payload))


def _ask_for_full_restart(reason: str) -> int:
    logger.warning("the installed kvstore cannot go on with this node's memory: %s", reason)
    return FULL_RESTART_CODE


def _other_python() -> str:
    """What is wrong with going on in this interpreter: its files may have been replaced. Empty: nothing."""
    ask = [sys.executable, "-c", "import sys; print(*sys.version_info[:2])"]
    answer = subprocess.run(ask, capture_output=True, text=True, check=False, timeout=30.0).stdout.split()
    ours = [str(part) for part in sys.version_info[:2]]
    return "" if answer == ours else f"Python {'.'.join(answer) or 'that does not start'} instead of {'.'.join(ours)}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def main(arguments: list[str]) -> int:
    """Run the job that the only argument describes."""
    logging.basicConfig(
        level=os.environ.get("LOGLEVEL", "WARNING"), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # one descriptor a writing client
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, hard), hard))
    try:
        supervisor = Supervisor(json.loads(arguments[0]))
    except ConfigurationError as exc:
        print(f"error: {exc}", file=sys.stderr)  # noqa: T201 (as the command that started us would)
        return 2
    return supervisor.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
