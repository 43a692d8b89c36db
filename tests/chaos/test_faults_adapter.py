"""A pool that raises whatever it likes under an engine (B06): requests go on without cache, errors are counted."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvstore
from engine_adapter.session import PoolSession
from kvstore.client import Client
from kvstore.client.buffers import ChunkArray
from kvstore.errors import DeadlineExceeded, KvStoreError, SessionLost
from kvstore.model.prefix import KeyChain
from kvstore.model.values import MissReason
from tests.unit.client.pages import LAYOUT, namespace, pages_of, prompt

REQUESTS = 100
ERRORS = (OSError("disk on fire"), KeyError("gone"), RuntimeError("?"), SessionLost("gone"), DeadlineExceeded("late"))
KEYS = KeyChain(namespace()).keys(prompt(1, 64))


class Raising:
    """Stands for a client and its cache: whatever is called raises, the errors take turns."""

    def __init__(self) -> None:
        self.calls = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def fail(*_: object, **__: object) -> None:
            self.calls += 1
            raise ERRORS[self.calls % len(ERRORS)]

        return fail


class Half(Raising):
    """A client whose cache can be bound; its verbs raise."""

    def bind(self, *_: object, **__: object) -> Raising:
        return Raising()


def request(session: PoolSession, number: int) -> int:
    """What an engine does with the pool for one request; chunks loaded."""
    pages = pages_of(KEYS)
    result = session.read(KEYS, ChunkArray(pages.copy(), LAYOUT.whole), deadline_s=1.0)
    with session.writer(KEYS, ChunkArray(pages, LAYOUT.whole)) as writer:
        for chunk in range(4):
            for layer in range(4):
                writer.put_layer(layer, chunk, chunk + 1)
            writer.commit(chunk + 1)
        writer.finish()
    assert session.stats()["errors"]
    return result.chunks


@pytest.mark.parametrize("backend", [Raising, Half])
def test_b06_a_hundred_requests_go_through_a_pool_that_always_fails(
    backend: type[Raising], caplog: pytest.LogCaptureFixture
) -> None:
    session = PoolSession(namespace(), backend)  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING):
        assert [request(session, number) for number in range(REQUESTS)] == [0] * REQUESTS
    session.close()
    assert session.errors.total() >= 2 * REQUESTS, "each failure is counted"
    assert {name.partition(":")[0] for name in session.errors} >= {"read", "reserve"}
    assert len(caplog.records) < 100, "and logged at a falling rate"


def test_b06_a_client_that_cannot_be_opened_is_not_tried_at_every_call() -> None:
    opened = [0]

    def refuse() -> Client:
        opened[0] += 1
        raise OSError("no such socket")

    session = PoolSession(namespace(), refuse)
    for number in range(REQUESTS):
        assert request(session, number) == 0
    assert opened[0] == 1 and session.node_id == ""


@pytest.mark.parametrize("verb", ["commit", "reserve", "acquire", "release", "abort"])
def test_b06_a_put_that_fails_half_way_leaves_nothing_reserved(verb: str) -> None:
    """One verb of the node fails at every other call, under a real client."""
    client = kvstore.open_local("1MiB")
    host: Any = client._host
    core = host.core
    original, count = getattr(host.api, verb), [0]

    def sometimes(*arguments: Any, **named: Any) -> Any:
        count[0] += 1
        if count[0] % 2:
            raise KvStoreError("not now")
        return original(*arguments, **named)

    setattr(host, verb, sometimes)
    session = PoolSession(namespace(), lambda: client)
    loaded = []
    for number in range(20):
        target = np.zeros((4, *LAYOUT.shape(LAYOUT.whole)), dtype=np.uint8)
        result = session.read(KEYS, ChunkArray(target, LAYOUT.whole), deadline_s=1.0)
        assert np.array_equal(target[: result.chunks], pages_of(KEYS)[: result.chunks])
        loaded.append(result.chunks)
        writer = session.writer(KEYS, ChunkArray(pages_of(KEYS), LAYOUT.whole))
        writer.put_chunks(0, 4)
        writer.commit(1 + number % 4)
        writer.finish()
        core.check()
        # An abort that failed too is the exception: its slots wait for the end of the session.
        assert verb == "abort" or not core.stats()["reserved_slots"]
    assert loaded[-1] == 4, "errors cost hits, not requests"
    session.close()


def test_b06_errors_have_reasons_where_the_engine_can_tell_them_apart() -> None:
    def reason_of(error: Exception) -> MissReason | None:
        class Failing(Half):
            def bind(self, *_: object, **__: object) -> Any:
                cache = Raising()
                cache.read = lambda *a, **k: (_ for _ in ()).throw(error)  # type: ignore[attr-defined]
                return cache

        session = PoolSession(namespace(), Failing)  # type: ignore[arg-type]
        return session.read(KEYS, ChunkArray(pages_of(KEYS), LAYOUT.whole), deadline_s=1.0).reason

    assert reason_of(DeadlineExceeded("x")) is MissReason.DEADLINE
    assert reason_of(SessionLost("x")) is MissReason.SESSION_LOST
    assert reason_of(ZeroDivisionError("x")) is MissReason.UNREACHABLE
