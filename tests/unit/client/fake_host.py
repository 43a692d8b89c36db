"""A host node for tests of the writing side: one embedded node whose verbs a test can hold or break."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvstore.assemble import EmbeddedHost
from kvstore.node import NodeApi
from kvstore.node.core import CoreSettings


class BreakableApi:
    """Passes each verb on, after what `before[verb]` does (it may raise). `calls` lists the verbs in order."""

    def __init__(self, api: NodeApi) -> None:
        self._api = api
        self.before: dict[str, Callable[[], None]] = {}
        self.calls: list[str] = []

    def __getattr__(self, verb: str) -> Any:
        target = getattr(self._api, verb)

        def call(*arguments: Any, **named: Any) -> Any:
            self.calls.append(verb)
            self.before.get(verb, lambda: None)()
            return target(*arguments, **named)

        return call


class BreakableHost(EmbeddedHost):
    """An embedded node; `broken` is its api, `core` may be looked at."""

    def __init__(self, dram_bytes: int = 1 << 20) -> None:
        super().__init__(dram_bytes, dram_bytes // 4096, CoreSettings("lru", 0, 1.0))
        self.broken = BreakableApi(self)
        self.api = self.broken
