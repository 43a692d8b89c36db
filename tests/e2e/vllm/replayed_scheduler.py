"""vLLM's own scheduler and the connector, with a model that is a function: `replayed_scheduler.py SCHEDULER LOAD …`.

Run by the side environment's Python. The KV of a token follows from the KV before it, as it lies in the engine's
blocks, and the next token from that: whoever was given one wrong byte answers wrongly. Stores and loads end when chance
wants it, loads fail, requests are aborted and preempted, and the weights change under way. Unlike vLLM on a CPU this
runs its scheduler with overlapping steps, too. Prints one JSON line with counts, or ends with the first wrong answer.

SCHEDULER: plain or overlapping. LOAD: async, sync or layerwise. Then: `full` or `hybrid` (a sliding window besides),
the first seed, the number of seeds, `reset` or `keep` (the weights), the folder of a model, of which only the
configuration is read.
"""

from __future__ import annotations

import json
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, maybe_convert_block_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from engine_adapter.copy import PagedKv
from engine_adapter.engine_chunks import Endpoint, EngineChunks, MakeEndpoint
from engine_adapter.session import Binding, ChunkWriter, PoolSession
from engine_adapter.transfers import How, RankGroup, Transfers
from engine_adapter.views import HeadPages
from engine_adapter.vllm.connector import ReportMetadata
from kvstore.client import ReadResult
from kvstore.model.prefix import Keys
from kvstore.model.values import MissReason

BLOCK_TOKENS, CHUNK_TOKENS, BLOCKS, BUDGET_TOKENS = 4, 8, 30, 24
HEADS, HEAD_DIM, WINDOW_TOKENS = 2, 32, 12
NAMES = [f"model.layers.{layer}.self_attn.attn" for layer in range(2)]
SHARING = 3
"""Engines of that many seeds one after the other have one pool and prompts that begin alike."""
STEPS_LIMIT = 5000


class Chance(Executor):
    """Calls that go when chance wants it, mostly in order."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._calls: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._calls.append((future, lambda: call(*args, **kwargs)))
        return future

    def some(self, likely: float = 0.4) -> None:
        """Let some of them go."""
        while self._calls and self._rng.random() < likely:
            future, call = self._calls.pop(0 if self._rng.random() < 0.7 else -1)
            if future.set_running_or_notify_cancel():
                future.set_result(call())

    def shutdown(self, *_: Any, **__: Any) -> None:
        """Nothing to end."""


@dataclass
class Model:
    """The function. Its weights are a number."""

    weights: int = 0

    def kv(self, before: int, token: int, layer: int) -> int:
        return (before * 31 + token * 7 + layer * 13 + self.weights * 101 + 5) % 16_777_213

    @staticmethod
    def next_token(kv: int) -> int:
        return 3 + kv % 400

    def answer(self, tokens: Sequence[int], count: int) -> list[int]:
        """What follows these tokens where nothing is cached."""
        kv = 0
        for token in tokens:
            kv = self.kv(kv, token, len(NAMES) - 1)
        answer = []
        for _ in range(count):
            answer.append(self.next_token(kv))
            kv = self.kv(kv, answer[-1], len(NAMES) - 1)
        return answer


@dataclass
class Part:
    """One request in a step."""

    request_id: str
    start: int
    stop: int
    blocks: list[list[int]]
    partial: bool


@dataclass
class Engine:
    """Scheduler, connector and one rank."""

    seed: int
    overlapping: bool
    load: str
    hybrid: bool
    rng: random.Random = field(init=False)
    model: Model = field(default_factory=Model)
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self._config = self._configured()
        spec = {"block_size": BLOCK_TOKENS, "num_kv_heads": HEADS, "head_size": HEAD_DIM, "dtype": torch.float32}
        full, sliding = FullAttentionSpec(**spec), SlidingWindowSpec(**spec, sliding_window=WINDOW_TOKENS)
        kv_groups = [KVCacheGroupSpec(NAMES, full)]
        if self.hybrid:
            kv_groups = [KVCacheGroupSpec(NAMES[:1], full), KVCacheGroupSpec(NAMES[1:], sliding)]
        self.scheduler = (AsyncScheduler if self.overlapping else Scheduler)(
            vllm_config=self._config,
            kv_cache_config=KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=kv_groups),
            structured_output_manager=StructuredOutputManager(self._config),
            block_size=BLOCK_TOKENS,
            hash_block_size=BLOCK_TOKENS,
        )
        self.half = self.scheduler.connector._scheduler
        self.tensors = [torch.full((BLOCKS, HEADS, BLOCK_TOKENS, 2 * HEAD_DIM), -1.0) for _ in NAMES]
        self.savers, self.loaders = Chance(self.rng), Chance(self.rng)
        self.transfers = Transfers(self._ranks(), How(layerwise=self.load == "layerwise", let_go_s=0.0), self.savers)
        if self.load == "async":
            self.transfers._loaders = self.loaders  # type: ignore[assignment]
        self.events = Events(self.half)
        self.known: dict[str, list[int]] = {}
        """Tokens of each request as its worker knows them: those that the scheduler has not heard of, too."""

    def _configured(self) -> Any:
        extra = {"revision": "x", "chunk_tokens": CHUNK_TOKENS, "dram": "32MiB", "load": self.load}
        transfer = {
            "kv_connector": "KVStoreConnector",
            "kv_connector_module_path": "engine_adapter.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "engine_id": f"engine-{self.seed // SHARING}",
            "kv_connector_extra_config": extra,
        }
        arguments = EngineArgs(
            model=sys.argv[-1],
            dtype="float32",
            max_model_len=256,
            block_size=32,
            max_num_seqs=4,
            kv_transfer_config=transfer,
            kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
        )
        config = arguments.create_engine_config()
        config.scheduler_config.async_scheduling = self.overlapping
        config.scheduler_config.max_num_batched_tokens = BUDGET_TOKENS
        config.scheduler_config.max_num_scheduled_tokens = BUDGET_TOKENS
        config.cache_config.num_gpu_blocks, config.cache_config.block_size = BLOCKS, BLOCK_TOKENS
        return config

    def _ranks(self) -> list[RankGroup]:
        ranks = []
        for number, group in enumerate(self.half._groups):
            session = PoolSession(group.namespace, self.half._pool.client, Binding(group.geometry))
            session.open()
            session.read = self._fails(session.read)  # type: ignore[method-assign]
            session.load_layers = self._fails(session.load_layers)  # type: ignore[method-assign]
            session.writer = self._overlaps(session.writer)  # type: ignore[method-assign]
            mine = slice(number, number + 1) if self.hybrid else slice(None)
            make, whole = _maker(self.tensors[mine]), group.namespace.layout.whole
            ranks.append(RankGroup(group, session, whole, True, make, torch.device("cpu"), tuple(NAMES[mine])))
        return ranks

    def _fails(self, read: Callable[..., ReadResult]) -> Callable[..., ReadResult]:
        """A read of which each fourth breaks off at some chunk."""

        def call(keys: Keys, *arguments: Any, **options: Any) -> ReadResult:
            if self.rng.random() > 0.25:
                return read(keys, *arguments, **options)
            self.counts["broken"] += 1
            count = self.rng.randrange(len(keys))
            if count and (result := read(keys.slice(0, count), *arguments, **options)).reason is not None:
                return result
            return ReadResult(count, 0, count * CHUNK_TOKENS, 0, MissReason.CHECKSUM)

        return call

    def _overlaps(self, begin: Callable[..., ChunkWriter]) -> Callable[..., ChunkWriter]:
        """A store that is each fifth time behind another one of the same chunks, which ends when chance wants it."""

        def call(keys: Keys, source: EngineChunks, **options: Any) -> ChunkWriter:
            if self.rng.random() < 0.2:
                self.counts["overlaps"] += 1
                other = begin(keys, source, **options)
                other.put_chunks(source.first_whole, len(keys))
                self.savers.submit(other.finish)
            return begin(keys, source, **options)

        return call

    # --- a step ------------------------------------------------------------------------------------------

    def step(self, requests: dict[str, Request]) -> tuple[Any, ModelRunnerOutput]:
        """Schedule and compute one step."""
        if not self.overlapping and self.scheduler.running and self.rng.random() < 0.05:
            self._preempt()
        output = self.scheduler.schedule()
        new, cached = output.scheduled_new_reqs, output.scheduled_cached_reqs
        starts = {each.req_id: each.num_computed_tokens for each in new}
        starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        parts = []
        for request_id, count in output.num_scheduled_tokens.items():
            blocks = [list(ids) for ids in self.scheduler.kv_cache_manager.get_block_ids(request_id)]
            partial, start = requests[request_id].is_prefill_chunk, starts[request_id]
            parts.append(Part(request_id, start, start + count, blocks, partial))
        self.half.book.check()
        self.go()
        return output, self._execute(output, parts)

    def _preempt(self) -> None:
        """As the scheduler does where it has no block left."""
        request = self.scheduler.running.pop()
        self.scheduler._preempt_request(request, time.monotonic())
        self.scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
        self.counts["preempted_by_chance"] += 1

    def go(self, likely: float = 0.4) -> None:
        """Let some stores and loads end."""
        self.savers.some(likely)
        self.loaders.some(likely)

    def _execute(self, output: Any, parts: Sequence[Part]) -> ModelRunnerOutput:
        plan = output.kv_connector_metadata.plan
        self.transfers.before_step(plan)
        if output.has_sync_kv_loads:
            self.transfers.start_loads(plan)
            for name in NAMES:
                self.transfers.wait_layer(name)
        sampled = {part.request_id: self._compute(part) for part in parts}
        if not output.has_sync_kv_loads:
            self.transfers.start_loads(plan)
        self.transfers.after_step(plan)
        ended, report, ids = self.transfers.ended(), self.transfers.report(), list(sampled)
        self.counts["bad_blocks"] += len(ended.bad_blocks)
        connector = KVConnectorOutput(
            finished_sending=set(ended.sent) or None,
            finished_recving=set(ended.received) or None,
            invalid_block_ids=set() if self.hybrid else set(ended.bad_blocks),
            failed_recving=set(ended.failed & ended.received) if self.hybrid else set(),
            kv_connector_worker_meta=ReportMetadata(report) if report else None,
        )
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={name: place for place, name in enumerate(ids)},
            sampled_token_ids=[sampled[name] for name in ids],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
            kv_connector_output=connector,
        )

    def _compute(self, part: Part) -> list[int]:
        tokens, kv = self.known[part.request_id], 0
        for position in range(part.start, part.stop):
            for layer, tensor in enumerate(self.tensors):
                blocks = part.blocks[layer if self.hybrid else 0]
                before = self._kv_at(tensor, blocks, position - 1) if position else 0
                kv = self.model.kv(before, tokens[position], layer)
                tensor[blocks[position // BLOCK_TOKENS], :, position % BLOCK_TOKENS] = float(kv)
        if part.partial:
            return []
        tokens[part.stop :] = [self.model.next_token(kv)]
        return tokens[part.stop :]

    @staticmethod
    def _kv_at(tensor: torch.Tensor, blocks: Sequence[int], position: int) -> int:
        cell = tensor[blocks[position // BLOCK_TOKENS], :, position % BLOCK_TOKENS]
        return int(cell[0, 0]) if bool((cell == cell[0, 0]).all()) else -7

    def check_at_rest(self) -> None:
        """Nothing is kept of requests that have ended, and all blocks are free."""
        book, transfers = self.half.book, self.transfers
        kept = [book._requests, book._ending, book._saving, book._unconfirmed, book._owners, book._visible]
        kept += [transfers._by_request, transfers._ending, transfers._stores]
        assert not any(kept), kept
        free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        assert free == BLOCKS - 1, f"{free} blocks are free of {BLOCKS - 1}"


def _maker(tensors: list[torch.Tensor]) -> MakeEndpoint:
    def make(pages: int, ids: Sequence[Sequence[int]]) -> Endpoint:
        return PagedKv(HeadPages.opaque(tensors, pages), pages, ids)

    return make


class Events:
    """What the connector tells of the pool, and what it should."""

    def __init__(self, half: Any) -> None:
        self._half, self._pool = half, half._events
        self._told: set[Any] = set()
        self._stores: list[tuple[Request, Sequence[Keys]]] = []
        self.of_no_use: set[str] = set()
        """Requests from before a reset."""
        self._stored, self._pool.stored = self._pool.stored, self._note
        half.take_events, self._take = self.take, half.take_events

    def _note(self, request: Request, groups: Sequence[Keys], visible: int) -> None:
        assert request.request_id not in self.of_no_use, "what was stored before a reset is told behind it"
        self._stores.append((request, groups))
        self._stored(request, groups, visible)

    def take(self) -> Sequence[Any]:
        """Events name something new, behind parents that were told."""
        events = self._take()
        for event in events:
            hashes = set(event.block_hashes)
            if isinstance(event, BlockRemoved):
                assert hashes <= self._told, "what was never told has gone"
                self._told -= hashes
            elif isinstance(event, BlockStored):
                # A block with which two prompts part within a chunk comes with either.
                assert len(hashes) == len(event.block_hashes) and not hashes <= self._told, "told twice"
                assert event.parent_block_hash is None or event.parent_block_hash in self._told, "a parent is missing"
                self._told |= hashes
        return events

    def check_all_told(self) -> int:
        """All chunks of this engine's stores that the pool has were told; returns how many blocks."""
        while self._pool._told._expected and self._expected_here():
            self.take()
        self.take()
        for request, groups in self._stores:
            whole = [keys.slice(0, keys.token_count // keys.chunk_tokens) for keys in groups]
            blocks = (self._half._looks.here(whole) or 0) * CHUNK_TOKENS // BLOCK_TOKENS
            assert set(map(maybe_convert_block_hash, request.block_hashes[:blocks])) <= self._told, request.request_id
        return len(self._told)

    def _expected_here(self) -> bool:
        """Something that is waited for has come."""
        expected = self._pool._told._expected.values()
        return any((self._half._looks.here(each.groups) or 0) > each.present for each in expected)


class Users:
    """Requests that come, go and are looked at."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._rng = engine, engine.rng
        begin = random.Random(engine.seed // SHARING)
        self._common = [begin.randrange(3, 400) for _ in range(64)]
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self.left = self._rng.randrange(10, 25)
        self.requests: dict[str, Request] = {}
        self.wanted: dict[str, list[int]] = {}
        self.got: dict[str, list[int]] = {}

    def act(self) -> None:
        """Before a step."""
        if self.left and self._rng.random() < 0.4:
            self._ask()
        living = [request for request in self.requests.values() if not request.is_finished()]
        if living and self._rng.random() < 0.02:
            gone = self._rng.choice(living).request_id
            self._engine.scheduler.finish_requests(gone, RequestStatus.FINISHED_ABORTED)
            del self.wanted[gone]

    def _ask(self) -> None:
        self.left -= 1
        name, count = f"r{self.left}", self._rng.randrange(1, 20)
        tokens = self._common[: self._rng.randrange(60)]
        tokens += [self._rng.randrange(3, 400) for _ in range(self._rng.randrange(1, 30))]
        parameters = SamplingParams(max_tokens=count, ignore_eos=True)
        request = Request(name, tokens, parameters, None, block_hasher=self._hasher)
        self.requests[name], self._engine.known[name] = request, list(tokens)
        self.wanted[name] = self._engine.model.answer(tokens, count)
        self._engine.scheduler.add_request(request)

    def new_weights(self) -> None:
        """What vLLM does for a pause, and then other weights: requests go on with the tokens that they have."""
        living = list(self._engine.scheduler.requests.values())
        holding = (each.num_computed_tokens for each in living if each.status is not RequestStatus.RUNNING)
        if any(holding) or any(request.is_finished() for request in living):
            return  # vLLM refuses while a request holds blocks that does not run: loaded, or still being stored
        self._engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        self._engine.counts["resets"] += 1
        self._engine.events.of_no_use.update(self.requests)
        self._engine.model.weights += 1
        for request in living:
            have = list(request.output_token_ids)
            tokens = [*(request.prompt_token_ids or ()), *have]
            self._engine.known[request.request_id] = tokens
            rest = self._engine.model.answer(tokens, request.max_tokens - len(have))
            self.wanted[request.request_id] = have + rest

    def take(self, outputs: Any) -> None:
        for of_client in outputs.values():
            for output in of_client.outputs:
                self.got.setdefault(output.request_id, []).extend(output.new_token_ids)

    def check(self) -> None:
        for name, wanted in self.wanted.items():
            assert self.got.get(name) == wanted, (
                f"{name} of seed {self._engine.seed}: {self.got.get(name)}, not {wanted}"
            )


def run(engine: Engine, *, reset: bool) -> Counter[str]:
    """All requests of one engine."""
    users, under_way = Users(engine), list[tuple[Any, ModelRunnerOutput]]()

    def take(left: int) -> None:
        while len(under_way) > left:
            users.take(engine.scheduler.update_from_output(*under_way.pop(0)))

    for _ in range(STEPS_LIMIT):
        if not users.left and not under_way and not engine.scheduler.has_requests():
            break
        users.act()
        if reset and engine.rng.random() < 0.03:
            take(0)
            users.new_weights()
        under_way.append(engine.step(users.requests))
        engine.go()
        take(1 if engine.overlapping and under_way[-1][0].num_scheduled_tokens else 0)
    else:
        raise AssertionError(f"seed {engine.seed} never ends: {engine.scheduler.requests}")
    engine.counts["preempted"] += sum(request.num_preemptions for request in users.requests.values())
    users.check()
    engine.check_at_rest()
    engine.go(1.0)
    if not reset:
        engine.counts["told"] += engine.events.check_all_told()
    engine.transfers.close()
    return engine.counts


def main(scheduler: str, load: str, kind: str, first: str, count: str, weights: str, _: str) -> None:
    logging.disable(logging.WARNING)
    init_none_hash(sha256)
    counts: Counter[str] = Counter()
    halves: list[Any] = []
    for seed in range(int(first), int(first) + int(count)):
        engine = Engine(seed, scheduler == "overlapping", load, kind == "hybrid")
        halves.append(engine.half)  # its pool ends with the last engine that has it
        counts += run(engine, reset=weights == "reset")
    for half in halves:
        half.close()
    print(json.dumps(counts), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
