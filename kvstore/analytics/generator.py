"""A built-in workload for people without a trace: conversations that share a system prompt.

The next turn's prompt is the last prompt, the engine's answer and a new user text, so that a pool that stores
prompts and answers hits nearly all of it. Everything but the answers follows from the seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class WorkloadShape:
    """Sizes of a generated workload. Lengths are in tokens; token ids lie in [0, vocabulary)."""

    sessions: int
    turns: int
    system_tokens: int
    user_tokens: int
    vocabulary: int
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("sessions", "turns", "user_tokens", "vocabulary"):
            if getattr(self, name) < 1:
                raise InvalidRequest(f"{name} must be at least 1")
        if self.system_tokens < 0 or self.seed < 0:
            raise InvalidRequest("system_tokens and seed must be >= 0")


class Session:
    """One conversation. `history` holds all tokens so far: prompts and answers in order."""

    def __init__(self, shape: WorkloadShape, number: int) -> None:
        self.number = number
        self.turn = 0
        self._shape = shape
        self._random = np.random.default_rng([shape.seed, 1, number])
        system = _draw(np.random.default_rng([shape.seed, 0]), shape.system_tokens, shape.vocabulary)
        self.history: list[int] = system.tolist()

    @property
    def ended(self) -> bool:
        """True after the last turn."""
        return self.turn >= self._shape.turns

    def next_prompt(self, answer: Sequence[int] = ()) -> list[int]:
        """The prompt of the next turn; `answer` is what the engine said to the last one.

        Raises InvalidRequest after the last turn.
        """
        if self.ended:
            raise InvalidRequest(f"session {self.number} has ended after {self.turn} turns")
        self.turn += 1
        self.history.extend(int(token) for token in answer)
        self.history.extend(_draw(self._random, self._shape.user_tokens, self._shape.vocabulary).tolist())
        return list(self.history)


def sessions(shape: WorkloadShape) -> list[Session]:
    """All conversations of a workload, at their first turn."""
    return [Session(shape, number) for number in range(shape.sessions)]


def _draw(random: np.random.Generator, count: int, vocabulary: int) -> npt.NDArray[np.int64]:
    return random.integers(0, vocabulary, size=count, dtype=np.int64)
