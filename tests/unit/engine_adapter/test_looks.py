"""Look-ups from a scheduler: at once on the own node, in a thread elsewhere, never waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from replayed_engine import LAYOUT, group, tokens

from engine_adapter.looks import ANSWER_KEPT_S, Looks
from kvstore.model.prefix import KeyChain, Keys


class Session:
    """Answers that a test sets."""

    whole = LAYOUT.whole

    def __init__(self, here: int | None, anywhere: int = 0) -> None:
        self.here, self.anywhere = here, anywhere
        self.reopened = 0

    def present_here(self, keys: Keys, rectangle: object) -> int | None:
        return None if self.here is None else min(self.here, len(keys))

    def present_anywhere(self, keys: Keys, rectangle: object, *, deadline_s: float) -> int:
        return min(self.anywhere, len(keys))

    def reopen(self) -> bool:
        self.reopened += 1
        return True


class Held(ThreadPoolExecutor):
    """Threads that do nothing until they are told to."""

    def __init__(self) -> None:
        super().__init__(1)
        self.calls: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:  # type: ignore[override]
        future: Future[Any] = Future()
        self.calls.append((future, lambda: call(*args, **kwargs)))
        return future

    def go(self) -> None:
        calls, self.calls = self.calls, []
        for future, call in calls:
            if future.set_running_or_notify_cancel():
                future.set_result(call())


@pytest.fixture
def threads() -> Iterator[Held]:
    held = Held()
    yield held
    held.shutdown()


KEYS = [KeyChain(group().namespace).keys(tokens(1, 32))]
clock = [0.0]


def looks(session: Session, threads: Held, *, others: bool) -> Looks:
    clock[0] = 0.0
    return Looks([session], others=others, wait_s=0.2, clock=lambda: clock[0], threads=threads)  # type: ignore[list-item]


def test_the_own_node_answers_at_once(threads: Held) -> None:
    assert looks(Session(3), threads, others=False).ask("a", KEYS) == 3
    assert looks(Session(4, 4), threads, others=True).ask("a", KEYS) == 4
    assert not threads.calls, "who has everything asks nobody"


def test_other_nodes_are_asked_in_a_thread(threads: Held) -> None:
    asked = looks(Session(1, 4), threads, others=True)
    assert asked.ask("a", KEYS) is None
    assert asked.ask("a", KEYS) is None
    assert len(threads.calls) == 1, "one question a request"
    threads.go()
    assert asked.ask("a", KEYS) == 4
    assert asked.counts["looks_asked_again"] == 2


def test_b10_an_answer_that_does_not_come_is_a_miss_after_a_bound(threads: Held) -> None:
    asked = looks(Session(1, 4), threads, others=True)
    assert asked.ask("a", KEYS) is None
    clock[0] = 0.2
    assert asked.ask("a", KEYS) == 1
    assert asked.counts["looks_too_late"] == 1


@pytest.mark.parametrize("answered", [True, False], ids=["answered", "too late"])
def test_b10_who_had_an_answer_and_found_no_room_has_it_in_the_next_step_too(threads: Held, answered: bool) -> None:
    """Else each second step would pass it over, and give the room that came free to smaller ones behind it."""
    asked = looks(Session(1, 4), threads, others=True)
    assert asked.ask("a", KEYS) is None
    if answered:
        threads.go()
    clock[0] = 0.2
    for _ in range(3):
        assert asked.ask("a", KEYS) == (4 if answered else 1)
    assert len(threads.calls) == (0 if answered else 1), "nobody is asked again"
    assert asked.counts["looks_too_late"] == (0 if answered else 1)
    clock[0] = 0.2 + ANSWER_KEPT_S
    assert asked.ask("a", KEYS) is None, "old answers are not believed"
    asked.forget("a")
    assert asked.ask("a", KEYS) is None


def test_questions_that_nobody_comes_back_for_make_room_for_others(
    threads: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine's own tier is not told of requests that end while their rows are asked for."""
    monkeypatch.setattr("engine_adapter.looks.WAITING_LIMIT", 3)
    asked = looks(Session(1, 4), threads, others=True)
    for number in range(3):
        assert asked.ask(f"gone-{number}", KEYS) is None
    assert asked.ask("a", KEYS) == 1
    assert asked.counts["looks_too_many"] == 1
    clock[0] = 0.2
    assert asked.ask("a", KEYS) is None
    assert len(asked._asked) == 1


def test_a_forgotten_question_is_not_asked(threads: Held) -> None:
    asked = looks(Session(1, 4), threads, others=True)
    asked.ask("a", KEYS)
    asked.forget("a")
    ((future, _),) = threads.calls
    assert future.cancelled()


def test_without_a_session_nothing_is_waited_for_and_one_thread_opens_it_again(threads: Held) -> None:
    session = Session(None)
    asked = looks(session, threads, others=True)
    assert asked.ask("a", KEYS) is None, "others may have it"
    threads.go()
    assert asked.ask("a", KEYS) == 0
    assert session.reopened == 1
    asked.ask("b", KEYS)
    assert sum(1 for _ in threads.calls) == 1, "opened at most once a second"
    clock[0] = 1.5
    asked.ask("c", KEYS)
    threads.go()
    assert session.reopened == 2


def test_an_empty_prompt_needs_no_look(threads: Held) -> None:
    assert looks(Session(3), threads, others=True).ask("a", [KEYS[0].slice(0, 0)]) == 0
