"""A child that is forked again and again, in a process of its own: deaths, children that stand still, ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.chaos.nixl_nodes import state_of
from tests.chaos.pool_processes import ROOT, until

SERVER = """
import os, select, sys, time
from kvstore.transport import forking
from kvstore.transport.forking import SAID_WHY, Beat, ForkingServer

forking._LOOK_MS = 20
behaviours = sys.argv[1:]
number = 0

def say(text):
    os.write(1, f"{text}\\n".encode())

def serve(beat):
    behaviour = behaviours[min(number, len(behaviours) - 1)]
    if behaviour == "refuse":
        say("refused")
        return SAID_WHY
    if behaviour == "crash":
        os.abort()
    if behaviour == "hang":
        time.sleep(600)
    beat.strike()
    say(f"serves {os.getpid()}")
    if behaviour == "still":
        time.sleep(600)
    while not select.select([0], [], [], 0.005)[0] or os.read(0, 10):
        beat.strike()
    if behaviour == "deaf":
        time.sleep(600)
    return 0

class Counting(ForkingServer):
    def _run_child(self, beat):
        global number
        how = super()._run_child(beat)
        number += 1
        return how

forking.END_S = 0.1
sys.exit(Counting(serve, 0, say).run())
"""


class Forker:
    def __init__(self, *behaviours: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER, *behaviours],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().decode().strip()

    def serving(self) -> int:
        word, _, pid = self.hear().partition(" ")
        assert word == "serves"
        return int(pid)

    def end(self) -> int:
        """Its exit status after its wishes ended."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(20)


@pytest.fixture
def forker() -> Iterator[Callable[..., Forker]]:
    made: list[Forker] = []

    def forker(*behaviours: str) -> Forker:
        made.append(Forker(*behaviours))
        return made[-1]

    yield forker
    for each in made:
        each.process.kill()
        each.process.wait(20)
        for stream in (each.process.stdin, each.process.stdout, each.process.stderr):
            if stream is not None and not stream.closed:
                stream.close()


def test_a_child_that_dies_is_followed_by_another_and_none_is_left(forker: Callable[..., Forker]) -> None:
    parent = forker("serve")
    for _ in range(3):
        child = parent.serving()
        os.kill(child, signal.SIGKILL)
        assert parent.hear() == "it was ended by SIGKILL"
        assert state_of(child) == "", "no zombie"
    child = parent.serving()
    assert parent.end() == 0 and state_of(child) == ""


def test_a_first_child_that_does_not_serve_is_the_last(forker: Callable[..., Forker]) -> None:
    for behaviour, said in (("refuse", "refused"), ("crash", "it was ended by SIGABRT")):
        parent = forker(behaviour)
        assert parent.hear() == said and parent.process.wait(20) == 1


def test_a_later_child_that_does_not_serve_is_not(forker: Callable[..., Forker]) -> None:
    parent = forker("serve", "refuse", "crash", "serve")
    os.kill(parent.serving(), signal.SIGKILL)
    said = [parent.hear() for _ in range(3)]
    assert said == ["it was ended by SIGKILL", "refused", "it was ended by SIGABRT"]
    parent.serving()
    assert parent.end() == 0


@pytest.mark.parametrize("behaviour", ["still", "hang"])
def test_b15_a_child_that_stands_still_is_replaced(forker: Callable[..., Forker], behaviour: str) -> None:
    """After it served, and before; also one that was stopped."""
    parent = forker("serve", behaviour, "serve")
    os.kill(parent.serving(), signal.SIGKILL)
    assert parent.hear() == "it was ended by SIGKILL"
    if behaviour == "still":
        os.kill(parent.serving(), signal.SIGSTOP)
    assert parent.hear() == "it does not move any more and is ended"
    assert parent.hear() == "it was ended by SIGKILL"
    parent.serving()
    assert parent.end() == 0


def test_a_child_that_does_not_hear_the_end_is_killed(forker: Callable[..., Forker]) -> None:
    parent = forker("deaf")
    child = parent.serving()
    assert parent.end() == 0 and state_of(child) == ""


def test_a_child_dies_with_its_parent(forker: Callable[..., Forker]) -> None:
    parent = forker("serve")
    child = parent.serving()
    assert Path(f"/proc/{child}").exists()
    parent.process.kill()
    until(lambda: state_of(child) in ("", "Z"))
