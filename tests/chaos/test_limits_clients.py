"""A client killed, stopped or forked at every step of a write and a read: the node keeps serving, space comes back.

Covers B04 too: (a) a writer killed before its data, (b) in the middle of them, (c) stopped for longer than its
reservation lasts, while another one stores the key, and then going on.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.chaos.pool_processes import Process, Processes, stats_of, until

CHUNKS = 3
LIFE_MS = 500
QUICK = {"kvstore.node.core.RESERVATION_LIFETIME_MS": LIFE_MS, "kvstore.node.RESERVATION_LIFETIME_MS": LIFE_MS}
RENEWING = {"kvstore.transport.shm.RENEW_EVERY_S": 0.1}
SLOT_BYTES = 12 << 10
VICTIM, SURVIVOR = 1, 2
"""Versions of the pages: they say who wrote what is read."""
STEPS = ("hello", "reserved", "in the copy", "copied", "a part committed", "committed", "in a read")
WRITTEN = ("committed", "in a read")

pytestmark = pytest.mark.slow


class Scene:
    """A node, a client that survives, and a victim at some step of prompt number `prompt`."""

    def __init__(self, processes: Processes, **guards_off: str) -> None:
        self._processes = processes
        self.node = processes.node(f"node{len(guards_off)}", patches=QUICK | guards_off)
        self.survivor = processes.client(self.node, patches=RENEWING)
        self.steady = processes.client(self.node, patches=RENEWING)
        """A victim that lives on after each test."""
        self.prompt = 0

    def victim_at(self, step: str, victim: Process | None = None) -> Process:
        self.prompt += 1
        victim = victim or self._processes.client(self.node, patches=RENEWING)
        place = STEPS.index(step)
        if place >= 1:
            assert victim.do("reserve", prompt=self.prompt, chunks=CHUNKS, version=VICTIM) == {
                "outcomes": ["GRANTED"] * CHUNKS
            }
        if step == "in the copy":
            assert victim.do("copy", hold=True) == {"held": 1}
        elif place > 2:
            victim.do("copy")
        if step == "a part committed":
            assert victim.do("commit", upto=1)["stored"] == 1
        elif place > 4:
            assert victim.do("commit")["stored"] == CHUNKS
        if step == "in a read":
            assert victim.do("read", prompt=self.prompt, chunks=CHUNKS, version=VICTIM, hold=True) == {"held": 1}
        return victim

    def becomes_whole(self) -> int:
        """The survivor stores the prompt as soon as it may; returns how many chunks were its own."""
        own = 0

        def written() -> bool:
            nonlocal own
            answer = self.survivor.do("write", prompt=self.prompt, chunks=CHUNKS, version=SURVIVOR)
            own += answer["stored"]
            return not set(answer["outcomes"]) - {"COMMITTED", "PRESENT"}

        until(written, 5.0)
        return own

    def is_right(self, own: int) -> None:
        """The first chunks are the victim's, the others the survivor's, byte for byte."""
        theirs = CHUNKS - own
        answer = self.survivor.do("read", prompt=self.prompt, chunks=CHUNKS, version=SURVIVOR)
        assert (answer["chunks"], answer["wrong"]) == (CHUNKS, theirs)
        answer = self.survivor.do("read", prompt=self.prompt, chunks=theirs, version=VICTIM)
        assert (answer["chunks"], answer["wrong"]) == (theirs, 0)

    def space_is_back(self) -> None:
        def settled() -> bool:
            stats = stats_of(self.node)
            idle = not (stats["reserved_slots"] or stats["quarantined_bytes"] or stats["leases"])
            return idle and stats["sessions"] == 2 and stats["used_bytes"] == stats["chunks"] * SLOT_BYTES

        until(settled, 5.0)


@pytest.fixture(scope="module")
def scene(shared_processes: Processes) -> Iterator[Scene]:
    yield Scene(shared_processes)


def expected_own(step: str) -> int:
    return 0 if step in WRITTEN else CHUNKS - 1 if step == "a part committed" else CHUNKS


@pytest.mark.parametrize("step", STEPS)
def test_b04_a_killed_client_leaves_its_key_to_others(scene: Scene, step: str) -> None:
    scene.victim_at(step).kill()
    own = scene.becomes_whole()
    assert own == expected_own(step)
    scene.is_right(own)
    scene.space_is_back()


@pytest.mark.parametrize("step", STEPS)
def test_b04_a_stopped_client_is_overtaken_and_harms_nobody_when_it_goes_on(scene: Scene, step: str) -> None:
    victim = scene.victim_at(step, scene.steady)
    victim.stop()
    own = scene.becomes_whole()
    assert own == expected_own(step)
    scene.is_right(own)
    victim.go_on()
    goes_on(victim, step)
    scene.is_right(own)
    scene.space_is_back()


def test_b04_the_test_above_can_fail(processes: Processes) -> None:
    """With the quarantine switched off, late bytes reach the slots that the survivor got."""
    scene = Scene(processes, **{"kvstore.node.reservations.Reservations.quarantine": "as abort"})
    victim = scene.victim_at("in the copy", scene.steady)
    victim.stop()
    own = scene.becomes_whole()
    scene.is_right(own)
    victim.go_on()
    goes_on(victim, "in the copy")
    with pytest.raises(AssertionError):
        scene.is_right(own)


def goes_on(victim: Process, step: str) -> None:
    """What it would have done next. It wrote late, and what it commits then is refused."""
    if step == "in the copy":
        assert victim.do("go on") == {}
    if step == "reserved":
        victim.do("copy")
    if step in ("reserved", "in the copy", "copied", "a part committed"):
        answer: dict[str, Any] = victim.do("commit")
        assert answer["stored"] == (1 if step == "a part committed" else 0), answer
    if step == "in a read":
        answer = victim.do("go on")
        assert answer["wrong"] == 0


@pytest.mark.parametrize("step", STEPS)
def test_b14_a_forked_child_gets_an_error_and_its_parent_goes_on(scene: Scene, step: str) -> None:
    victim = scene.victim_at(step, scene.steady)
    answer = victim.do("fork")
    assert answer["error"] == ",".join(["ForkedProcess"] * 4)
    if step in ("in the copy", "in a read"):
        assert not victim.do("go on").get("wrong")
    if step == "reserved":
        victim.do("copy")
    if step not in ("hello", *WRITTEN):
        assert victim.do("commit")["stored"] == CHUNKS
    own = scene.becomes_whole()
    assert own == (CHUNKS if step == "hello" else 0)
    scene.is_right(own)
    scene.space_is_back()


@pytest.mark.parametrize("step", ["reserved", "in the copy"])
def test_a_child_that_outlives_its_parent_keeps_no_space(scene: Scene, step: str) -> None:
    """The child holds the session's socket open; only the parent's pidfd tells that the writer is gone."""
    victim = scene.victim_at(step)
    child = victim.do("fork", stay=True)["child"]
    victim.kill()
    try:
        own = scene.becomes_whole()
        assert own == CHUNKS
        scene.is_right(own)
        scene.space_is_back()
    finally:
        os.kill(child, signal.SIGKILL)
