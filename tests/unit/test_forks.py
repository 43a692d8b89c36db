"""Forked children and the mappings that they must not have: what they map themselves stays theirs."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.chaos.node_thread import NodeThread

MEMORY = {
    "session": "from kvstore.client import connect\nheld = connect(sys.argv[1])\narray = held.host().arena",
    "staging": "from kvstore.transport.staging import Staging\nheld = Staging(SIZE)\narray = held.memory",
    "embedded": "import kvstore\nheld = kvstore.open_local(SIZE)\narray = held.host().arena",
}
CHILD = """
import gc, mmap, os, sys
SIZE = 64 << 20
{memory}
address, size = array.ctypes.data, array.nbytes
array[0] = 7
{before}
child = os.fork()
if not child:
    {inside}
_, status = os.waitpid(child, 0)
assert array[0] == 7
sys.exit(os.waitstatus_to_exitcode(status) & 0xFF)
"""


Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """(kind of memory, what the child does, what its parent does before the fork, and at its start) -> the end."""
    with ExitStack() as stack:
        node: list[NodeThread] = []

        def run(memory: str, inside: str, before: str = "", first: str = "") -> subprocess.CompletedProcess[str]:
            if memory == "session" and not node:
                node.append(NodeThread(tmp_path_factory.mktemp("node"), dram_bytes=64 << 20))
                stack.callback(node[0].stop)
            script = first + CHILD.format(memory=MEMORY[memory], before=before, inside=inside.replace("\n", "\n    "))
            words = [sys.executable, "-c", script, *(each.info.socket_path for each in node)]
            return subprocess.run(words, capture_output=True, text=True, timeout=60)

        yield run


TAKES_THE_HOLE = """
import ctypes, os
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
address, size, place = 0, 0, []
def take():
    place.append(libc.mmap(address, size, 3, 0x22 | 0x10, -1, 0))  # private, anonymous, at this very address
os.register_at_fork(after_in_child=take)  # before the package's own
"""
MAPS_AND_LETS_GO = """
mine = [mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(400)]
for each in mine:
    each[0] = 1
array = held = None
gc.collect()
assert all(each[0] == 1 for each in mine)
sys.exit(0)  # with the interpreter's clean-up
"""


@pytest.mark.parametrize("memory", MEMORY)
def test_b14_what_a_child_maps_outlives_what_its_parent_had(run: Run, memory: str) -> None:
    done = run(memory, MAPS_AND_LETS_GO)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("memory", MEMORY)
def test_b14_where_something_lies_in_the_hole_already_the_child_keeps_the_mapping(run: Run, memory: str) -> None:
    inside = """
assert place == [address]
array = held = None
gc.collect()
ctypes.memset(address, 1, size)
sys.exit(0)
"""
    done = run(memory, inside, first=TAKES_THE_HOLE)
    assert done.returncode == 0, done.stderr


def test_b14_what_is_left_of_a_hole_is_closed(run: Run) -> None:
    """A page of somebody else lies in the middle of it: what the child maps later lies nowhere in it."""
    inside = """
assert place == [address + (size >> 1)]
mine = [mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(400)]
places = [np.frombuffer(each, dtype=np.uint8).ctypes.data for each in mine]
assert not [each for each in places if address <= each < address + size]
array = held = None
gc.collect()
ctypes.memset(place[0], 1, 4096)
sys.exit(0)
"""
    first = TAKES_THE_HOLE.replace("address, size, 3", "address + (size >> 1), 4096, 3") + "import numpy as np\n"
    done = run("staging", inside, first=first)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("memory", MEMORY)
def test_a_child_cannot_touch_what_was_left_out(run: Run, memory: str) -> None:
    done = run(memory, "array[0] = 8\nsys.exit(0)")
    assert done.returncode == -signal.SIGSEGV & 0xFF


def test_the_first_test_can_fail(run: Run) -> None:
    """With the hole left open the child's own memory is unmapped."""
    done = run("staging", MAPS_AND_LETS_GO, before="import kvstore.forks\nkvstore.forks._LEFT_OUT.clear()")
    assert done.returncode == -signal.SIGSEGV & 0xFF
