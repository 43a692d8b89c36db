"""An engine without a model: it calls the adapter's two halves in the order in which vLLM calls a connector.

A token's KV is bytes that depend on all tokens up to it, so that a wrong block is recognised; blocks begin poisoned.
Blocks are given out lowest number first, so that tests can make one be used again at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from engine_adapter.copy import PagedKv
from engine_adapter.engine_chunks import Endpoint
from engine_adapter.plans import KvGroup, StepPlan
from engine_adapter.requests import Prompt, RequestBook, Rules, Scheduled
from engine_adapter.session import Binding, PoolSession
from engine_adapter.transfers import Ended, How, RankGroup, Transfers
from engine_adapter.views import HeadPages
from kvstore.client import Client
from kvstore.model.layout import Dtype, Geometry, PageLayout
from kvstore.model.namespace import Namespace
from kvstore.model.prefix import KeyChain, Keys

BLOCK_TOKENS = 4
CHUNK_TOKENS = 8
HEADS, HEAD_DIM, LAYERS = 2, 8, 3
POISON = 255.0

LAYOUT = PageLayout(
    layers=LAYERS,
    kv_heads=HEADS,
    head_dim=HEAD_DIM,
    dtype=Dtype.FP32,
    page_tokens=BLOCK_TOKENS,
    pages_per_chunk=CHUNK_TOKENS // BLOCK_TOKENS,
    interior="replayed",
)


def group(kind: str = "full", window_tokens: int = 0) -> KvGroup:
    namespace = Namespace("replayed", "1", LAYOUT, kind)
    return KvGroup(namespace, Geometry.whole(LAYOUT), BLOCK_TOKENS, window_tokens)


def expected(tokens: Sequence[int], position: int, layer: int) -> float:
    """The KV of one token in one layer: every element of it."""
    text = repr((list(tokens[: position + 1]), layer)).encode()
    return float(int.from_bytes(blake2b(text, digest_size=2).digest(), "little") % 199)


def layer_name(number: int, layer: int) -> str:
    """As the engine calls a layer of a group."""
    return f"group.{number}.layer.{layer}"


class NoLooks:
    """A pool that is asked through a session, at once; or answers that a test gives."""

    def __init__(self, sessions: Sequence[PoolSession]) -> None:
        self.sessions = sessions
        self.answers: list[int | None] = []
        self.forgotten: list[str] = []

    def ask(self, request_id: str, groups: Sequence[Keys]) -> int | None:
        if self.answers:
            return self.answers.pop(0)
        found = (session.present_here(keys) or 0 for session, keys in zip(self.sessions, groups, strict=True))
        return min(found)

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)


@dataclass
class Running:
    """A request in the engine."""

    request_id: str
    tokens: list[int]
    prompt_tokens: int
    computed: int = 0
    blocks: list[list[int | None]] = field(default_factory=list)
    loading: bool = False


class ReplayedEngine:
    """One engine of one rank. `client`: of the pool, shared with other engines."""

    def __init__(
        self,
        client: Client,
        *,
        groups: Sequence[KvGroup] = (),
        blocks: int = 32,
        rules: Rules = Rules(),  # noqa: B008
        how: How = How(),  # noqa: B008
        savers: Executor | None = None,
    ) -> None:
        self.groups = tuple(groups) or (group(),)
        self.sessions = [PoolSession(each.namespace, lambda: client, Binding(each.geometry)) for each in self.groups]
        for session in self.sessions:
            session.open()
        self.looks = NoLooks(self.sessions)
        chains = [KeyChain(each.namespace) for each in self.groups]
        self.book = RequestBook(self.groups, chains, self.looks, rules, 1, lambda keys: ())
        shape = (blocks, HEADS, BLOCK_TOKENS, 2 * HEAD_DIM)
        self.tensors = [[torch.full(shape, POISON) for _ in range(LAYERS)] for _ in self.groups]
        self.transfers = Transfers([self._rank(number) for number in range(len(self.groups))], how, savers)
        self.free = [list(range(blocks)) for _ in self.groups]
        self.requests: dict[str, Running] = {}
        self.kept: dict[str, Running] = {}
        self.last = Ended(frozenset(), frozenset(), frozenset(), frozenset())
        self.after_layer: Callable[[int], None] = lambda layer: None
        """Called in a step when it has computed that layer."""

    def _rank(self, number: int) -> RankGroup:
        each, tensors = self.groups[number], self.tensors[number]

        def make(pages: int, ids: Sequence[Sequence[int]]) -> Endpoint:
            return PagedKv(HeadPages.opaque(tensors, pages), pages, ids)

        names = tuple(layer_name(number, layer) for layer in range(LAYERS))
        return RankGroup(each, self.sessions[number], LAYOUT.whole, True, make, torch.device("cpu"), names)

    # --- what a scheduler does ---------------------------------------------------------------------------

    def add(self, request_id: str, tokens: Sequence[int], **prompt: object) -> Running:
        running = self.requests[request_id] = Running(request_id, list(tokens), len(tokens))
        self.book.begin(Prompt(request_id, len(tokens), lambda: running.tokens, **prompt))  # type: ignore[arg-type]
        return running

    def admit(self, request_id: str, local_tokens: int = 0) -> bool | None:
        """Ask what the pool has and give blocks; None = ask again, True = it is being loaded."""
        running = self.requests[request_id]
        more, is_async = self.book.matched_tokens(request_id, local_tokens)
        if more is None:
            return None
        running.computed = local_tokens + more
        if not running.blocks:
            running.blocks = [[] for _ in self.groups]
        self._grow(running)
        running.loading = is_async
        self.book.allocated(request_id, running.blocks, more)
        return is_async

    def _grow(self, running: Running) -> list[list[int]]:
        """Blocks for all its tokens; returns the new ones."""
        new: list[list[int]] = []
        for mine, free in zip(running.blocks, self.free, strict=True):
            missing = -(-len(running.tokens) // BLOCK_TOKENS) - len(mine)
            new.append([free.pop(0) for _ in range(missing)])
            mine += new[-1]
        return new

    def step(self, *request_ids: str, compute: int | None = None) -> StepPlan:
        """One step that computes all tokens of these requests that are left (or `compute` of them)."""
        scheduled, taken, spans = [], [list[int]() for _ in self.groups], []
        for request_id in request_ids:
            running = self.requests[request_id]
            if running.loading:
                running.loading = False
                self.book.allocated(request_id, running.blocks, 0)
            new = self._grow(running)
            first = running.computed // BLOCK_TOKENS
            for of_group, mine, fresh in zip(taken, running.blocks, new, strict=True):
                of_group += [block for block in {*mine[first:], *fresh} if block is not None]
            start = running.computed
            running.computed = min(len(running.tokens), start + (compute or len(running.tokens)))
            spans.append((running, start, running.computed))
            scheduled.append(Scheduled(request_id, running.computed, lambda blocks=[*running.blocks]: blocks))
        plan = self.book.step(scheduled, taken)
        self.execute(plan, spans)
        return plan

    def execute(self, plan: StepPlan, spans: Sequence[tuple[Running, int, int]] = ()) -> Ended:
        """What a worker does with a plan, and how the scheduler hears of it."""
        self.transfers.before_step(plan)
        self.transfers.start_loads(plan)
        for layer in range(LAYERS):
            for number in range(len(self.groups)):
                self.transfers.wait_layer(layer_name(number, layer))
            for running, start, stop in spans:
                for position in range(start, stop):
                    self._compute(running, position, layer)
            for number in range(len(self.groups)):
                self.transfers.save_layer(plan, layer_name(number, layer))
            self.after_layer(layer)
        self.transfers.after_step(plan)
        self.last = ended = self.transfers.ended()
        self.book.reported(self.transfers.report())
        self.book.check()
        for request_id in ended.sent:
            self._free(self.kept.pop(request_id))
        return ended

    def _compute(self, running: Running, position: int, layer: int) -> None:
        for number, blocks in enumerate(running.blocks):
            block = blocks[position // BLOCK_TOKENS]
            if block is not None:
                self.tensors[number][layer][block, :, position % BLOCK_TOKENS] = expected(
                    running.tokens, position, layer
                )

    def until_received(self, request_id: str) -> Ended:
        """Empty steps until a load was reported."""
        for _ in range(3):
            ended = self.execute(self.book.step([]))
            if request_id in ended.received:
                return ended
            assert self.transfers.wait_idle(10.0)
        raise AssertionError(f"{request_id} was never reported")

    def settle(self) -> None:
        """Empty steps until all stores were reported and all kept blocks are free."""
        assert self.transfers.wait_idle(10.0)
        for _ in range(3):
            self.execute(self.book.step([]))
        assert not self.kept

    def finish(self, request_id: str, *, aborted: bool = False) -> bool:
        """The request has ended; True if its blocks are kept."""
        running = self.requests.pop(request_id)
        keep, _ = self.book.finished(request_id, running.computed, running.blocks, aborted=aborted)
        if keep or running.loading:
            self.kept[request_id] = running
        else:
            self._free(running)
        return keep

    def preempt(self, request_id: str) -> None:
        """It loses its blocks, which the next allocation gets first, and waits again."""
        running = self.requests[request_id]
        self._free(running)
        running.computed, running.blocks = 0, []

    def _free(self, running: Running) -> None:
        for free, blocks in zip(self.free, running.blocks, strict=True):
            free[:0] = [block for block in blocks if block is not None]

    def run(self, request_id: str, tokens: Sequence[int], **prompt: object) -> int:
        """A whole request: returns the tokens that came from the pool."""
        running = self.add(request_id, tokens, **prompt)
        if self.admit(request_id):
            self.until_received(request_id)
        hits = running.computed
        if hits == len(tokens):
            running.computed -= 1
        self.step(request_id)
        self.assert_right(running)
        self.finish(request_id)
        self.settle()
        return hits

    def assert_right(self, running: Running, first: int = 0) -> None:
        """All computed tokens of the request have their own KV in its blocks."""
        for number, blocks in enumerate(running.blocks):
            for position in range(first, running.computed):
                block = blocks[position // BLOCK_TOKENS]
                if block is None:
                    continue
                for layer in range(LAYERS):
                    found = self.tensors[number][layer][block, :, position % BLOCK_TOKENS]
                    assert bool((found == expected(running.tokens, position, layer)).all()), (position, layer)

    def close(self) -> None:
        self.transfers.close()


def tokens(seed: int, count: int) -> list[int]:
    return [int(number) for number in np.random.default_rng(seed).integers(1, 1000, count)]


class Held(Executor):
    """Stores wait until the test lets them go."""

    def __init__(self) -> None:
        self._calls: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._calls.append((future, lambda: call(*args, **kwargs)))
        return future

    def shutdown(self, *_: Any, **__: Any) -> None:
        """Nothing to end."""

    def go(self) -> None:
        for future, call in self._calls:
            future.set_result(call())
        self._calls.clear()


class ReplayedEngineRuns:
    def __init__(self, pool: Client, engines: list[ReplayedEngine]) -> None:
        self._pool, self._engines = pool, engines

    def hits(self, prompt: list[int]) -> int:
        engine = ReplayedEngine(self._pool)
        self._engines.append(engine)
        return engine.run("probe", prompt)
