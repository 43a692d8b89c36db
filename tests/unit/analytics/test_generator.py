from __future__ import annotations

import pytest

from kvstore.analytics.generator import WorkloadShape, sessions
from kvstore.errors import InvalidRequest

SHAPE = WorkloadShape(sessions=3, turns=2, system_tokens=40, user_tokens=7, vocabulary=100, seed=5)


def test_prompts_share_the_system_part_and_differ_after_it() -> None:
    prompts = [session.next_prompt() for session in sessions(SHAPE)]
    assert {len(prompt) for prompt in prompts} == {47}
    assert len({tuple(prompt[:40]) for prompt in prompts}) == 1
    assert len({tuple(prompt) for prompt in prompts}) == 3
    assert all(0 <= token < 100 for prompt in prompts for token in prompt)


def test_the_next_turn_extends_prompt_and_answer() -> None:
    session = sessions(SHAPE)[0]
    first = session.next_prompt()
    second = session.next_prompt([1, 2, 3])
    assert second[: len(first) + 3] == [*first, 1, 2, 3]
    assert len(second) == len(first) + 3 + 7
    assert session.ended
    with pytest.raises(InvalidRequest, match="has ended"):
        session.next_prompt()


def test_the_seed_decides() -> None:
    again = [session.next_prompt() for session in sessions(SHAPE)]
    assert again == [session.next_prompt() for session in sessions(SHAPE)]
    other = WorkloadShape(sessions=3, turns=2, system_tokens=40, user_tokens=7, vocabulary=100, seed=6)
    assert again != [session.next_prompt() for session in sessions(other)]


@pytest.mark.parametrize("change", [{"sessions": 0}, {"turns": 0}, {"user_tokens": 0}, {"vocabulary": 0}, {"seed": -1}])
def test_impossible_shapes_are_refused(change: dict[str, int]) -> None:
    fields = {"sessions": 1, "turns": 1, "system_tokens": 1, "user_tokens": 1, "vocabulary": 2} | change
    with pytest.raises(InvalidRequest):
        WorkloadShape(**fields)
