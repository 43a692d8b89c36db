"""Fixtures of the engine tests: a workplace a test, and what cold engines answered, a session."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import engines
import pytest
from engines import Cold

from kvstore.analytics.processes import Children


@pytest.fixture
def workplace() -> Iterator[engines.Workplace]:
    """Starts engines and nodes; they end with the test."""
    with Children() as children, contextlib.closing(engines.Workplace(children)) as place:
        yield place


@pytest.fixture(scope="session")
def cold() -> Cold:
    """`cold(prompts, max_tokens=12, **engine)`: what an engine without a pool answers, each prompt alone."""
    known: dict[str, list[list[int]]] = {}

    def ids(prompts: Sequence[engines.Prompt], name: str = "llama", max_tokens: int = 12, **arguments: Any) -> Any:
        question = json.dumps([prompts, name, max_tokens, arguments])
        if question not in known:
            with Children() as children, contextlib.closing(engines.Workplace(children)) as place:
                engine = place.engine(name, enable_prefix_caching=False, **arguments)
                batches = [engine.generate([tokens], max_tokens=max_tokens) for tokens in prompts]
            known[question] = [batch.ids[0] for batch in batches]
        return known[question]

    return ids
