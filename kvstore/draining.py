"""Emptying a node into others: its chunks as chains, and who is asked to pull which.

A chain goes from the first chunk of a prompt to a chunk that has no child here; what several chains share is stored
once on each target that pulls one of them. The chains that were stored last come first. A chain goes where most of it
lies already, else to the targets in turn; where that target cannot have all of it, to the next one.

The chunks stay on this node: it is a copy, and the node may be stopped when it ends. The forest is read on the event
loop that owns it, in short turns; the chains may change between two of them.
"""

from __future__ import annotations

import array
import asyncio
import itertools
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from kvstore.errors import CapacityExhausted, InvalidRequest, KvStoreError
from kvstore.model.layout import Geometry
from kvstore.model.namespace import Namespace
from kvstore.model.prefix import Keys
from kvstore.model.values import MissReason, NodeInfo, Outcome
from kvstore.node.catalog import age_of
from kvstore.node.chunks import Chunk
from kvstore.node.core import NodeCore
from kvstore.node.operators.moving import Drained
from kvstore.node.steps import Steps, in_turns
from kvstore.rpc import wire
from kvstore.rpc.channel import Channel
from kvstore.rpc.v1 import admin_pb2, admin_pb2_grpc

CHAINS_A_TARGET = 2
CHAINS_LIMIT = 8
"""Chains under way at a time."""
CHAIN_DEADLINE_S = 60.0
"""Longest time of one request to a target; what it brought until then counts, and it is asked again."""
STEP_CHUNKS = 1000
"""Chunks that are looked at in one turn of the event loop: 1 to 2 ms."""
PROGRESS_EVERY_S = 0.1


@dataclass(frozen=True, slots=True)
class Chain:
    """A whole prefix of this node. `cuts`: up to which chunk each geometry reaches, with its numbers written here."""

    namespace: Namespace
    keys: Keys
    cuts: list[tuple[int, Geometry, tuple[int, ...]]]


@dataclass(slots=True)
class Leaves:
    """The chunks of a node, those of them with which a chain ends, and the ages of these (greater = stored later)."""

    chunks: set[bytes] = field(default_factory=set)
    keys: list[bytes] = field(default_factory=list)
    ages: array.array[int] = field(default_factory=lambda: array.array("q"))


def leaf_steps(core: NodeCore) -> Steps[Leaves]:
    """All chains of the node, each by its last chunk; yields between its turns."""
    leaves = Leaves()
    for number, chunk in enumerate(list(core.pool.forest.chunks.values()), 1):
        if shards := _generations(chunk):
            leaves.chunks.add(chunk.key)
            if not any(_generations(child) for child in chunk.children()):
                leaves.keys.append(chunk.key)
                leaves.ages.append(max(map(age_of, shards.values())))
        if not number % STEP_CHUNKS:
            yield
    return leaves


def chain_steps(core: NodeCore, leaf: bytes) -> Steps[Chain | None]:
    """The chain that ends with this chunk, None if it is not whole any more; yields between its turns."""
    line: list[Chunk] = []
    cuts: list[tuple[int, tuple[int, ...]]] = []
    key, chunks = leaf, core.pool.forest.chunks
    while not line or not line[-1].is_root:
        chunk = chunks.get(key)
        if chunk is None or not _generations(chunk):
            return None
        line.append(chunk)
        cuts.append(_cut(chunk))
        key = chunk.parent_key
        if not len(line) % STEP_CHUNKS:
            yield
    space = line[0].space
    # A child has all bits of its parent's fingerprint; of its own, 48 are left after a restart.
    prints = [line[0].fingerprint, *(chunk.parent_fingerprint for chunk in line)]
    assert None not in prints, "no chunk is stored without its fingerprint"
    keys = Keys(
        space.id,
        space.id,
        b"".join(chunk.key for chunk in reversed(line)),
        np.array(prints[::-1], dtype=np.uint64),
        space.layout.chunk_tokens,
        line[0].token_count,
    )
    chain, stop = Chain(space.namespace, keys, []), 0
    for (digest, written_here), same in itertools.groupby(reversed(cuts)):
        stop += sum(1 for _ in same)
        chain.cuts.append((stop, space.geometries[digest], written_here))
    return chain


def _generations(chunk: Chunk) -> dict[int, int]:
    """Shards of a chunk that can be read from this node -> generation of the slot."""
    return {shard: copy.generation for shard, copy in chunk.shards.items()}


def _cut(chunk: Chunk) -> tuple[int, tuple[int, ...]]:
    """(digest of the geometry by which this chunk is whole here, numbers of its rectangles written here)."""
    shards = _generations(chunk)
    several = chunk.space.sets_here
    whole = (here for here in several if all(shard in shards for shard in here))
    partly = (here for here in several if any(shard in shards for shard in here))
    best = next(itertools.chain(whole, partly, [tuple(shards)]))
    digest = best[0] >> 8
    return digest, tuple(shard & 0xFF for shard in best if shard >> 8 == digest)


@dataclass(slots=True, eq=False)
class _Target:
    """A node that pulls. `usable` False: it failed, and is not asked again."""

    info: NodeInfo
    channel: Channel = field(init=False)
    usable: bool = True

    def __post_init__(self) -> None:
        self.channel = Channel(self.info.control_address)


class Drain:
    """One drain. `run` may be iterated once."""

    def __init__(self, core: NodeCore, targets: Sequence[NodeInfo]) -> None:
        if not targets:
            raise InvalidRequest("a drain needs a node to drain to")
        if any(info.node_id == core.info.node_id for info in targets):
            raise InvalidRequest(f"node {core.info.node_id} cannot be drained to itself")
        self._core = core
        self._targets = [_Target(info) for info in targets]
        self._turn = itertools.cycle(self._targets)
        self._place: dict[bytes, _Target] = {}
        """Chunk -> the target that its chain went to last."""
        self._moved: set[bytes] = set()
        self._failed: set[bytes] = set()
        self._chunks = 0
        self._reason = ""

    async def run(self) -> AsyncIterator[Drained]:
        """Progress, at most ten times a second and at the end."""
        workers = min(CHAINS_LIMIT, CHAINS_A_TARGET * len(self._targets))
        threads = ThreadPoolExecutor(workers, thread_name_prefix="kvstore-drain")
        tasks: set[asyncio.Task[None]] = set()
        try:
            leaves = await in_turns(leaf_steps(self._core))
            self._chunks = len(leaves.chunks)
            order = await asyncio.to_thread(lambda: np.argsort(-np.frombuffer(leaves.ages, dtype=np.int64)))
            queue = (leaves.keys[place] for place in order)
            tasks = {asyncio.create_task(self._work(queue, threads)) for _ in range(workers)}
            told = None
            while any(not task.done() for task in tasks):
                await asyncio.wait(tasks, timeout=PROGRESS_EVERY_S)
                if told != (told := self._progress()):
                    yield told
            for task in tasks:
                task.result()
            orphans = leaves.chunks - self._moved - self._failed  # no chain from the start of a prompt reaches them
            self._fail(orphans, MissReason.PARENT_MISS.value)
            if told != self._progress():
                yield self._progress()
        finally:
            for task in tasks:
                task.cancel()
            for target in self._targets:
                target.channel.close()  # which ends its calls
            threads.shutdown(wait=False, cancel_futures=True)

    def _progress(self) -> Drained:
        return Drained(self._chunks, len(self._moved), len(self._failed), self._reason)

    async def _work(self, leaves: Iterator[bytes], threads: ThreadPoolExecutor) -> None:
        for leaf in leaves:
            chain = await in_turns(chain_steps(self._core, leaf))
            if chain is None:
                self._fail({leaf}, MissReason.ABSENT.value)
                continue
            reason = MissReason.UNREACHABLE.value
            for target in self._order(chain.keys):
                if not target.usable:
                    continue
                self._place.update(dict.fromkeys(chain.keys, target))
                held, reason = await self._ask(target, chain, threads)
                self._note_moved(chain.keys.slice(0, held))
                if held == len(chain.keys):
                    break
            else:
                self._fail(chain.keys, reason)

    def _order(self, keys: Keys) -> list[_Target]:
        """All targets: first the one that has half of this chain or more, else the next in turn."""
        first = self._place.get(keys[(len(keys) - 1) // 2])
        if first is None or not first.usable:
            first = next(self._turn)
        at = self._targets.index(first)
        return self._targets[at:] + self._targets[:at]

    def _note_moved(self, keys: Keys) -> None:
        self._moved.update(keys)
        self._failed.difference_update(keys)

    def _fail(self, keys: Iterable[bytes], reason: str) -> None:
        """These could not be moved, unless another chain has moved or moves them."""
        failed = {key for key in keys if key not in self._moved}
        if failed:
            self._failed |= failed
            self._reason = reason

    async def _ask(self, target: _Target, chain: Chain, threads: ThreadPoolExecutor) -> tuple[int, str]:
        """(leading chunks that the target holds now, why not all)."""
        loop = asyncio.get_running_loop()
        held = 0
        for stop, geometry, written_here in chain.cuts:
            request = self._request(chain.namespace, chain.keys.slice(0, stop), geometry, written_here)
            while held < stop:
                try:
                    answer = await loop.run_in_executor(threads, _replicate, target.channel, request)
                except (InvalidRequest, CapacityExhausted) as exc:
                    return held, f"{target.info.node_id}: {exc}"
                except KvStoreError as exc:
                    target.usable = False
                    return held, f"{target.info.node_id}: {exc}"
                before, held = held, max(held, answer.held_chunks)
                if answer.reason == Outcome.REFUSED_DRAINING.name.lower():
                    target.usable = False
                if held < stop and (answer.reason != MissReason.DEADLINE.value or held == before):
                    return held, f"{answer.reason} on {target.info.node_id}"
        return held, ""

    def _request(
        self, namespace: Namespace, keys: Keys, geometry: Geometry, written_here: tuple[int, ...]
    ) -> admin_pb2.ReplicateRequest:
        cut = admin_pb2.Geometry(rectangles=wire.geometry_to_messages(geometry), written_here=written_here)
        return admin_pb2.ReplicateRequest(
            namespace=namespace.canonical,
            geometries=[cut],
            chain=wire.chain_to_message(keys),
            source=wire.node_info_to_message(self._core.info),
        )


def _replicate(channel: Channel, request: admin_pb2.ReplicateRequest) -> admin_pb2.ReplicateResponse:
    stub = channel.stub(admin_pb2_grpc.AdminServiceStub)
    answer: admin_pb2.ReplicateResponse = channel.call(stub.Replicate, request, CHAIN_DEADLINE_S)
    return answer
