"""What keeps a node's NIXL processes going: starts that fail, deaths, stops at any moment, what is told of it."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.errors import ConfigurationError, Unreachable
from kvstore.transport import nixl_process
from kvstore.transport.nixl_owner import plane_to_json
from kvstore.transport.nixl_process import DEATHS_LIMIT, START_TRIES, NixlProcess
from tests.chaos.nixl_nodes import Held, nixl_processes, nixl_server, only_tcp, state_of
from tests.chaos.pool_processes import until

pytestmark = [pytest.mark.xdist_group("nixl")]
STAND_IN = """#!{python}
import ctypes, json, os, pathlib, sys, time
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
job = json.loads(sys.argv[3])
folder = pathlib.Path({folder!r})
starts = folder / "starts"
number = int(starts.read_text()) if starts.exists() else 0
starts.write_text(str(number + 1))
os.fstat(job["arena_fd"])
behaviour = {behaviours!r}[min(number, len({behaviours!r}) - 1)]
if behaviour == "refuse":
    print(json.dumps({{"refused": "64 bytes could not be registered for the network"}}), flush=True)
    sys.exit(1)
if behaviour == "crash":
    os.kill(os.getpid(), 9)
if behaviour == "hang":
    (folder / "hangs").write_text("")
    time.sleep(600)
plane = dict(epoch=job["epoch"], backend="UCX", agent_metadata="", arena_address=0, arena_bytes=1, rdma_devices=[])
print("noise of a library", flush=True)
print(json.dumps(dict(pid=os.getpid(), plane=plane)), flush=True)
if behaviour == "fork":
    for told in open(folder / "tell"):
        print(told, flush=True)
while os.read(0, 100):
    pass
"""


@pytest.fixture
def arena_fd() -> Iterator[int]:
    arena_fd = os.memfd_create("test-arena")
    os.ftruncate(arena_fd, 1 << 20)
    yield arena_fd
    os.close(arena_fd)


@pytest.fixture
def behaving(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Have the processes that are started serve, refuse, crash or hang, one after the other, instead of using NIXL."""

    def behaving(*behaviours: str) -> None:
        script = tmp_path / "stand_in"
        script.write_text(STAND_IN.format(python=sys.executable, folder=str(tmp_path), behaviours=behaviours))
        script.chmod(0o755)
        monkeypatch.setattr(nixl_process.sys, "executable", str(script))

    return behaving


def starts(folder: Path) -> int:
    return int((folder / "starts").read_text())


def test_b13_a_start_that_fails_is_one_clear_message(
    behaving: Callable[..., None], arena_fd: int, tmp_path: Path
) -> None:
    """And nothing is offered, tried again or left."""
    before = Held.now().descriptors
    behaving("refuse")
    with pytest.raises(ConfigurationError, match="did not start: 64 bytes could not be registered"):
        NixlProcess("node", 1, arena_fd, 4096)
    assert starts(tmp_path) == 1
    until(lambda: Held.now().descriptors <= before)  # fewer: what earlier tests had left has gone
    assert not nixl_processes(os.getpid())


def test_a_start_that_crashes_is_tried_again_and_then_says_so(
    behaving: Callable[..., None], arena_fd: int, tmp_path: Path
) -> None:
    """A node that was to take over its memory went with the first one that something killed."""
    behaving("crash", "crash", "serve", "crash")
    process = NixlProcess("node", 1, arena_fd, 4096)
    assert process.is_serving and process.restarts == 0 and starts(tmp_path) == 3
    process.stop()
    with pytest.raises(ConfigurationError, match=r"did not start: .*ended with status -9"):
        NixlProcess("node", 1, arena_fd, 4096)
    assert starts(tmp_path) == 3 + START_TRIES


def test_processes_that_die_are_replaced_until_one_serves(
    behaving: Callable[..., None], arena_fd: int, tmp_path: Path
) -> None:
    behaving("serve", "crash", "refuse", "serve")
    process = NixlProcess("node", 1, arena_fd, 4096)
    assert process.is_serving and not process.trouble
    first = process.pid
    os.kill(first, signal.SIGKILL)
    until(lambda: process.restarts == 1)
    assert process.plane().epoch == 1 and process.pid != first and starts(tmp_path) == 4
    assert process._why_died == "what starts it ended with status -9"
    process.stop()
    with pytest.raises(Unreachable):
        process.plane()
    assert not nixl_processes(os.getpid())


def test_b15_what_it_is_told_shows(behaving: Callable[..., None], arena_fd: int, tmp_path: Path) -> None:
    """Down with a reason, up again, and in trouble when that happens often."""
    os.mkfifo(tmp_path / "tell")
    behaving("fork")
    process = NixlProcess("node", 1, arena_fd, 4096)
    plane = json.dumps({"pid": 7, "plane": plane_to_json(process.plane())})
    with (tmp_path / "tell").open("w") as tell:
        for death in range(1, DEATHS_LIMIT + 1):
            print(json.dumps({"down": f"reason {death}"}), file=tell, flush=True)
            until(lambda: not process.is_serving)
            assert process.trouble == f"down: reason {death}"
            with pytest.raises(Unreachable):
                process.plane()
            print('{"pid": 7, "pla', file=tell, flush=True)  # of one that was killed while it spoke
            print(plane, file=tell, flush=True)
            until(lambda: process.is_serving)
            assert process.restarts == death and process.pid == 7
            assert bool(process.trouble) is (death == DEATHS_LIMIT)
    assert process.trouble == "died 3 times within 60 s, last because reason 3"
    process.stop()
    assert not nixl_processes(os.getpid())


def test_a_stop_while_another_process_starts_ends_that_one(
    behaving: Callable[..., None], arena_fd: int, tmp_path: Path
) -> None:
    """It was left running, with a mapping of the arena, and the watcher with it."""
    behaving("serve", "hang")
    process = NixlProcess("node", 1, arena_fd, 4096)
    os.kill(process.pid, signal.SIGKILL)
    until((tmp_path / "hangs").exists)
    process.stop()
    process.stop()
    assert not nixl_processes(os.getpid())
    assert not [thread for thread in threading.enumerate() if thread.name == "nixl-watch"]


def test_it_outlives_the_thread_that_made_it(behaving: Callable[..., None], arena_fd: int) -> None:
    """The kernel ended the process together with the thread that had started it."""
    behaving("serve")
    made: list[NixlProcess] = []
    maker = threading.Thread(target=lambda: made.append(NixlProcess("node", 1, arena_fd, 4096)))
    maker.start()
    maker.join(20)
    (process,) = made
    until(lambda: f"/{maker.native_id}" not in str(list(Path("/proc/self/task").iterdir())))  # gone for the kernel too
    process.wake()
    assert process.restarts == 0 and state_of(process.pid) in ("R", "S", "D")
    process.stop()
    assert not nixl_processes(os.getpid())


# --- with the library ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.nixl
@pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="needs the nixl package")
def test_the_library_is_forked_with_one_thread_and_nothing_is_left(arena_fd: int) -> None:
    """Four deaths; the process that forks stays, has no zombie and uses nothing of the library."""
    before = Held.now()
    with only_tcp():
        process = NixlProcess("node", 1, arena_fd, 1 << 20)
    forking, serving = nixl_processes(os.getpid())
    assert serving == process.pid == nixl_server(os.getpid())
    assert len(list(Path(f"/proc/{forking}/task").iterdir())) == 1
    descriptors = descriptors_of(forking)
    for death in range(1, 5):
        os.kill(process.pid, signal.SIGKILL)
        until(lambda death=death: process.restarts == death)  # type: ignore[misc]
    assert nixl_processes(os.getpid()) == [forking, process.pid] and state_of(serving) == ""
    assert "sock" not in descriptors and descriptors_of(forking) == descriptors
    process.stop()
    assert not nixl_processes(os.getpid()) and state_of(process.pid) == ""
    until(lambda: Held.now().descriptors <= before.descriptors)


def descriptors_of(pid: int) -> str:
    """What they are, without numbers; a descriptor of the child that lives is one of them."""
    links = [str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    return " ".join(sorted(link.partition("[")[0] for link in links))


@pytest.mark.slow
@pytest.mark.nixl
@pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="needs the nixl package")
def test_what_serves_goes_with_what_forks_it(arena_fd: int) -> None:
    with only_tcp():
        process = NixlProcess("node", 1, arena_fd, 1 << 20)
    forking, serving = nixl_processes(os.getpid())
    os.kill(forking, signal.SIGKILL)
    until(lambda: process.restarts == 1)
    until(lambda: state_of(serving) in ("", "Z"))
    assert not set(nixl_processes(os.getpid())) & {forking, serving}
    process.stop()
    assert not nixl_processes(os.getpid())
