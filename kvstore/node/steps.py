"""Long work of the core in steps, so that the event loop serves others in between. The work itself is synchronous."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Yields where others may have their turn; the value comes with the end."""


def finish(steps: Steps[T]) -> T:
    """All steps in one go."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            value: T = end.value
            return value


async def in_turns(steps: Steps[T]) -> T:
    """All steps; everybody else gets a turn after each."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            value: T = end.value
            return value
        await asyncio.sleep(0)
