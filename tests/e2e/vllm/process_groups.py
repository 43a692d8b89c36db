"""The end of an engine: its processes, and the shared memory that they would leave behind.

An engine has workers and a process that removes what they leave in /dev/shm when they have ended. So it is asked to end
and waited for, all of it, before anything is killed. vLLM's ranks on CPUs leave theirs in any case, and so does what
had to be killed: these files are removed here, by the names that the processes had mapped.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from kvstore.analytics.processes import Child

SHARED_MEMORY = "/dev/shm/"
END_DEADLINE_S = 20.0


def members(group: int) -> list[Path]:
    """Folders under /proc of the group's processes; what has ended and was not waited for by its parent is none."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            state, _parent, its_group = (place / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                found.append(place)
    return found


def shared_memory(group: int) -> set[Path]:
    """Files of /dev/shm that the group's processes have mapped."""
    found = set()
    for place in members(group):
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            paths = (line.split(maxsplit=5)[5:] for line in (place / "maps").read_text().splitlines())
            found.update(Path(path[0]) for path in paths if path and path[0].startswith(SHARED_MEMORY))
    return found


@contextlib.contextmanager
def ending(child: Child) -> Iterator[None]:
    """Around what ends it. Returns when all of its processes are gone and so is their shared memory."""
    left = shared_memory(child.pid)
    try:
        yield
        end, pause = time.monotonic() + END_DEADLINE_S, threading.Event()
        while members(child.pid) and time.monotonic() < end:
            pause.wait(0.02)
    finally:
        child.wait_end(0.0)
        for path in left:
            path.unlink(missing_ok=True)
