"""A pool in this process, and engines over it that end with the test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from replayed_engine import (
    ReplayedEngine,
)

import kvstore
from kvstore.client import Client


@pytest.fixture
def pool() -> Iterator[Client]:
    with kvstore.open_local("8MiB") as client:
        yield client


@pytest.fixture
def engines(pool: Client) -> Iterator[list[ReplayedEngine]]:
    made: list[ReplayedEngine] = []
    yield made
    for engine in made:
        engine.close()
