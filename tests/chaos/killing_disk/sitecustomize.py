"""A process with this folder on its path kills itself with SIGKILL at one of its disk calls.

`TEST_KILL_AT` = what it dies at: `payload`, `header`, `zeroing`, `superblock` or `fdatasync`; at the how manieth;
`before` it or in the `middle` of it; a file that is made then, so that the next process lives; and whether its parent
(the supervisor) is killed with it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PAGE = 4096
SUPERBLOCKS_END = 2 * (64 << 10)
MAGIC = b"KVSLOTH1"

plan: dict[str, Any] = json.loads(os.environ.get("TEST_KILL_AT", "{}"))
counts: Counter[str] = Counter()
headers: Counter[int] = Counter()
pwritev, fdatasync = os.pwritev, os.fdatasync


def kind_of(data: bytes, offset: int) -> str:
    """What a write of a small SSD file is (a slot has more than one page)."""
    if offset < SUPERBLOCKS_END:
        return "superblock"
    if len(data) > PAGE:
        return "payload"
    before, headers[offset] = headers[offset], data.count(MAGIC)
    return "header" if headers[offset] > before else "zeroing"


def is_due(kind: str) -> bool:
    counts[kind] += 1
    return kind == plan["kind"] and counts[kind] == plan["number"] and not Path(plan["marker"]).exists()


def die() -> None:
    Path(plan["marker"]).touch()
    if plan["parent"]:
        os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def deadly_pwritev(fd: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
    data = b"".join(map(bytes, buffers))
    if is_due(kind_of(data, offset)):
        if plan["when"] == "middle":  # half of it, in whole pages where there are several
            half = len(data) // 2 // PAGE * PAGE
            if half:
                pwritev(fd, [memoryview(buffers[0])[:half]], offset)
        die()
    return pwritev(fd, buffers, offset)


def deadly_fdatasync(fd: int) -> None:
    if is_due("fdatasync"):
        die()
    fdatasync(fd)


if plan and "kvstore" in " ".join(sys.orig_argv):
    os.pwritev, os.fdatasync = deadly_pwritev, deadly_fdatasync  # type: ignore[assignment]
