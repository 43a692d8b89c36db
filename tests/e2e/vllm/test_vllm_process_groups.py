"""Engines that end leave nothing: their processes are waited for, and what they had mapped is removed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import process_groups
import pytest

from kvstore.analytics.processes import Child, Children

MAPS = """
import mmap, sys
with open(sys.argv[1], "w+b") as file:
    file.truncate(4096)
    mapping = mmap.mmap(file.fileno(), 4096)
print("{}", flush=True)
sys.stdin.read()
"""
LEAVES_A_WORKER = """
import os, sys, time
read, write = os.pipe()
if not os.fork():
    os.close(write)
    os.read(read, 1)
    time.sleep(0.2)
    open(sys.argv[1], "w").close()
    os._exit(0)
print("{}", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def children() -> Iterator[Children]:
    with Children() as made:
        yield made


def started(children: Children, script: str, file: Path) -> Child:
    child = children.start("child", [sys.executable, "-c", script, str(file)])
    child.receive(30.0)
    return child


def test_shared_memory_of_a_killed_process_is_removed(children: Children) -> None:
    file = Path(process_groups.SHARED_MEMORY) / f"kvstore-test-{os.getpid()}"
    child = started(children, MAPS, file)
    assert file.exists()
    with process_groups.ending(child):
        child.kill()
    assert not file.exists() and not process_groups.members(child.pid)


def test_workers_may_end_after_the_process_that_started_them(children: Children, tmp_path: Path) -> None:
    """One of them is Python's own, which removes shared memory when all others have ended."""
    child = started(children, LEAVES_A_WORKER, tmp_path / "ended-by-itself")
    with process_groups.ending(child):
        child.terminate()
    assert (tmp_path / "ended-by-itself").exists()
