"""The worker half of an adapter: carries out one rank's part of the plans, in threads where the engine need not wait.

    let_go      before blocks get new content: stores that read them end, or are given up at the next piece
    loads       asynchronous ones in threads; the others before the step, or layer by layer beside it
    stores      after the step, in threads, oldest first; or in the step, layer by layer as it computes them. One that
                has only the end of a prompt rests, without a thread, while another one is storing the beginning

Every plan is reported once, however it ended. A store that fails is a chunk less in the pool; a load that fails names
the blocks that hold nothing, and the engine computes them. Nothing here raises because of the pool.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import torch

from engine_adapter.engine_chunks import EngineChunks, MakeEndpoint, QueuedChunks
from engine_adapter.plans import GroupChunks, KvGroup, LoadPlan, StepPlan, StepReport, StorePlan
from engine_adapter.session import PoolSession, guarded
from kvstore.client import LayersReady, ReadResult, TransferMode
from kvstore.model.layout import Rectangle
from kvstore.model.values import MissReason

STORES_LIMIT = 256
"""Store plans that wait; a later one is dropped: an engine must not keep blocks for a pool that is too slow."""
LOADS_AT_ONCE = 4
STORES_AT_ONCE = 2
_TOO_LATE = ReadResult(0, 0, 0, 0, MissReason.DEADLINE)
"""Of a load that had not begun at its deadline."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RankGroup:
    """One KV group on one rank. `held`: what its tensors hold; `writes`: whether it stores that, or a twin does."""

    group: KvGroup
    session: PoolSession
    held: Rectangle
    writes: bool
    make: MakeEndpoint
    device: torch.device
    layer_names: tuple[str, ...]
    """Of the rank's layers, first to last."""

    def chunks(self, chunks: GroupChunks) -> EngineChunks:
        """These chunks in the engine's blocks."""
        kind = EngineChunks if self.device.type == "cpu" else QueuedChunks
        return kind(self.group, chunks, self.make)


@dataclass(frozen=True, slots=True)
class How:
    """Deadlines in seconds, and what goes layer by layer."""

    load_deadline_s: float = 5.0
    store_deadline_s: float = 10.0
    let_go_s: float = 0.02
    """So long a store may still take when the engine needs its blocks."""
    layerwise: bool = False
    async_stores: bool = True
    layerwise_stores: bool = False


@dataclass(frozen=True, slots=True)
class Ended:
    """What an engine is told after a step. `failed` requests were received in part; `bad_blocks` hold nothing."""

    received: frozenset[str]
    failed: frozenset[str]
    bad_blocks: frozenset[int]
    sent: frozenset[str]


@dataclass(slots=True, eq=False)
class _Store:
    plan: StorePlan
    chunks: tuple[EngineChunks, ...]
    end_s: float
    computed: list[int] | None = None
    """Layers of each group that its step has computed so far; None = all."""
    visible: list[int] = field(default_factory=list)
    """Leading chunks that are visible, of each group that is done."""
    resting: bool = False
    given_up: bool = False
    ended: Future[None] = field(default_factory=Future)

    def will_have(self, number: int, place: int, key: bytes) -> bool:
        """This chunk of a group is among those that it has yet to store."""
        keys = self.plan.groups[number].keys
        mine = len(self.visible) <= number and place < len(keys) and keys[place] == key
        return mine and self.chunks[number].first_whole <= place


@dataclass(slots=True)
class _LayerLoad:
    """A load that the step waits for layer by layer. `ready`: the rank's layers before it are there, or never come."""

    plan: LoadPlan
    end_s: float
    future: Future[None]
    ready: int = 0


class Transfers:
    """One rank's transfers. The verbs belong to the engine's thread, in the order of a step."""

    def __init__(self, groups: Sequence[RankGroup], how: How, savers: Executor | None = None) -> None:
        self._groups = tuple(groups)
        self._errors = groups[0].session.errors
        self._how = how
        self._lock = threading.Condition()
        self._loaders = ThreadPoolExecutor(LOADS_AT_ONCE, thread_name_prefix="kvstore-load")
        self._savers = savers or ThreadPoolExecutor(STORES_AT_ONCE, thread_name_prefix="kvstore-store")
        self._stores: dict[int, _Store] = {}
        self._by_request: Counter[str] = Counter()
        """Stores of each request that have not ended."""
        self._ending: set[str] = set()
        self._layer_loads: list[_LayerLoad] = []
        self._loading = 0
        """Loads under way."""
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._bad: set[int] = set()
        self._sent: set[str] = set()
        self._report = StepReport()
        self._counts: Counter[str] = Counter()
        self._layers = {
            name: (number, place) for number, each in enumerate(groups) for place, name in enumerate(each.layer_names)
        }
        """Group and place in it."""
        self._computing: tuple[StepPlan, list[int]] | None = None
        """The step whose stores have begun with its first layer, and its computed layers by group."""

    # --- the order of a step -----------------------------------------------------------------------------

    def before_step(self, plan: StepPlan) -> None:
        """Nothing reads blocks any more that get new content in this step. Waits a moment for what is nearly done."""
        with self._lock:
            stores = [self._stores[number] for number in plan.let_go if number in self._stores]
            stores = [store for store in stores if not store.given_up]
        if not stores:
            return
        wait([store.ended for store in stores if not store.resting], timeout=self._how.let_go_s)
        for store in stores:
            if not store.ended.done():
                self._count("stores_given_up")
                self._give_up(store)

    def start_loads(self, plan: StepPlan) -> None:
        """Begin the step's loads. What the step itself needs is there when this returns, or comes layer by layer.

        All of them end within one deadline: those that wait for others behind a pool that holds still, too.
        """
        with self._lock:
            self._loading += len(plan.loads)
        end_s = time.monotonic() + self._how.load_deadline_s
        for load in plan.loads:
            if load.is_async:
                self._loaders.submit(self._load, load, end_s)
            elif self._how.layerwise and len(self._groups) == 1:
                with self._lock:
                    self._layer_loads.append(entry := _LayerLoad(load, end_s, Future()))
                self._loaders.submit(self._load_layers, entry)
            else:
                self._load(load, end_s)

    def wait_layer(self, name: str) -> None:
        """The layer of all loads that go layer by layer is there; or it never comes, which the load says at its end."""
        if not self._layer_loads:
            return
        _, place = self._layers.get(name, (0, len(self._layers)))
        with self._lock:
            self._lock.wait_for(
                lambda: all(load.ready > place for load in self._layer_loads),
                timeout=self._how.load_deadline_s + 2.0,
            )

    def save_layer(self, plan: StepPlan, name: str) -> None:
        """The step has computed this layer: stores that go layer by layer may take it. Does not wait."""
        if not self._how.layerwise_stores or not plan.stores or name not in self._layers:
            return
        if self._computing is None or self._computing[0] is not plan:
            self._computing = plan, [0] * len(self._groups)
            self._count("stores_by_layer", len(plan.stores))
            for store in plan.stores:
                self._begin(store, self._computing[1])
        number, place = self._layers[name]
        with self._lock:
            self._computing[1][number] = place + 1
            self._lock.notify_all()

    def after_step(self, plan: StepPlan) -> None:
        """Loads of the step have ended; its stores begin, and have ended too where they may not outlive the step."""
        loads, self._layer_loads = self._layer_loads, []
        for load in loads:
            load.future.result()
        computing, self._computing = self._computing, None
        if computing is not None and computing[0] is plan:
            self._all_computed(computing[1])
        else:
            for store in plan.stores:
                self._begin(store)
        with self._lock:
            self._ending.update(plan.ending)
            self._tell_sent()

    def ended(self) -> Ended:
        """What ended since the last call."""
        with self._lock:
            ended = Ended(
                frozenset(self._received), frozenset(self._failed), frozenset(self._bad), frozenset(self._sent)
            )
            for names in (self._received, self._failed, self._sent):
                names.clear()
            self._bad.clear()
            return ended

    def report(self) -> StepReport:
        """Plans that ended since the last call."""
        with self._lock:
            report, self._report = self._report, StepReport()
            return report

    def wait_idle(self, deadline_s: float) -> bool:
        """Wait until no load and no store is under way; False if that takes longer."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._loading and not self._stores, timeout=deadline_s)

    def take_counts(self) -> dict[str, int]:
        """What was counted since the last call, errors of the pool included."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        for each in self._groups:
            counts.update(each.session.take_errors())
        return dict(counts)

    def close(self) -> None:
        """End the threads; copies under way are given up at the next piece."""
        for store in list(self._stores.values()):
            self._give_up(store)
            if store.computed is not None:
                self._all_computed(store.computed)
        self._loaders.shutdown(wait=True, cancel_futures=True)
        self._savers.shutdown(wait=True, cancel_futures=True)
        for store in list(self._stores.values()):  # they came to no thread any more
            self._end(store, 0)

    # --- loads -------------------------------------------------------------------------------------------

    def _load(self, plan: LoadPlan, end_s: float) -> None:
        """Read all groups; the engine hears of it once, and of the blocks that stayed empty."""
        self._loaded(plan, guarded(self._errors, "load", lambda: self._read(plan, end_s), None))

    def _read(self, plan: LoadPlan, end_s: float) -> set[int]:
        """Blocks of all groups that stayed empty."""
        bad: set[int] = set()
        for number, each in enumerate(self._groups):
            wanted = plan.groups[number]
            ticket = plan.tickets[number] if plan.tickets else None
            if len(wanted.keys):
                into, left_s, result = each.chunks(wanted), end_s - time.monotonic(), _TOO_LATE
                if left_s > 0:
                    result = each.session.read(wanted.keys, into, deadline_s=left_s, ticket=ticket, rectangle=each.held)
                bad |= self._missing(each, wanted, result)
        return bad

    def _load_layers(self, load: _LayerLoad) -> None:
        """The same for a step that computes meanwhile, layer behind layer."""
        try:
            self._loaded(load.plan, guarded(self._errors, "load", lambda: self._read_layers(load), None))
        finally:
            with self._lock:
                load.ready = len(self._layers) + 1
                self._lock.notify_all()
            load.future.set_result(None)

    def _read_layers(self, load: _LayerLoad) -> set[int]:
        each, wanted, left_s = self._groups[0], load.plan.groups[0], load.end_s - time.monotonic()
        if left_s <= 0:
            return self._missing(each, wanted, _TOO_LATE)

        def on_layers(ready: LayersReady) -> None:
            with self._lock:
                # The last one only with the load's end: whether the load was whole is asked right behind that layer.
                load.ready = min(ready.layer_stop - each.held.layer_start, len(self._layers) - 1)
                self._lock.notify_all()

        result = each.session.load_layers(
            wanted.keys,
            each.chunks(wanted),
            on_layers,
            deadline_s=left_s,
            mode=TransferMode.LAYERWISE,
            rectangle=each.held,
        )
        return self._missing(each, wanted, result)

    def _missing(self, each: RankGroup, wanted: GroupChunks, result: ReadResult) -> set[int]:
        self._count("load_bytes", result.chunks * each.group.namespace.layout.payload_bytes(each.held))
        self._count("load_tokens", result.tokens)
        self._count("load_tokens_ssd", result.ssd_tokens)
        self._count("load_tokens_remote", result.tokens - wanted.keys.tokens_of_first(result.local_chunks))
        if result.reason is None:
            return set()
        self._count(f"load_misses_{result.reason.value}")
        behind = wanted.blocks[result.chunks * each.group.blocks_per_chunk :]
        return {block for block in behind if block is not None}

    def _loaded(self, plan: LoadPlan, bad: set[int] | None) -> None:
        """The load has ended; `bad` None: in a way that nobody expected, so nothing of it counts."""
        if bad is None:
            bad = {block for each in plan.groups for block in each.blocks if block is not None}
        with self._lock:
            if plan.is_async:
                self._received.add(plan.request_id)
            if bad:
                self._failed.add(plan.request_id)
                self._bad |= bad
                self._report.failed.add(plan.number)
            self._report.loaded[plan.number] += 1
            self._loading -= 1
            self._lock.notify_all()

    # --- stores ------------------------------------------------------------------------------------------

    def _all_computed(self, computed: list[int]) -> None:
        with self._lock:
            computed[:] = [len(each.layer_names) for each in self._groups]
            self._lock.notify_all()

    def _begin(self, plan: StorePlan, computed: list[int] | None = None) -> None:
        if not any(each.writes for each in self._groups):
            self._stored(plan, len(plan.groups[0].keys), known=False)
            return
        if len(self._stores) >= STORES_LIMIT:
            self._count("stores_dropped")
            self._stored(plan, 0, known=False)
            return
        pairs = list(zip(self._groups, plan.groups, strict=True))
        chunks = guarded(self._errors, "store", lambda: tuple(each.chunks(of) for each, of in pairs), None)
        if chunks is None:
            self._stored(plan, 0, known=False)
            return
        store = _Store(plan, chunks, time.monotonic() + self._how.store_deadline_s, computed)
        with self._lock:
            self._stores[plan.number] = store
            self._by_request[plan.request_id] += 1
        self._savers.submit(self._store, store)
        if not self._how.async_stores and computed is None:
            store.ended.result()

    def _store(self, store: _Store) -> None:
        """Store group after group, to the end or until the next one has to rest."""
        visible, rests = 0, False
        try:
            for number in range(len(store.visible), len(self._groups)):
                rests = self._rests(number, store)
                if rests:
                    return
                each, everything = self._groups[number], len(store.plan.groups[number].keys)
                store.visible.append(self._store_group(number, each, store) if each.writes else everything)
            visible = min(store.visible)
        finally:
            if not rests:
                self._end(store, visible)

    def _rests(self, number: int, store: _Store) -> bool:
        """Whether this group's chunks hang on one that is not in the pool, but that an earlier store has yet to store.

        The store goes on when that one has ended, however. Only earlier ones are waited for: there is no circle, and
        their deadlines are earlier, too.
        """
        each, keys, first = self._groups[number], store.plan.groups[number].keys, store.chunks[number].first_whole
        if not each.writes or not first or (present := each.session.present_here(keys) or 0) >= first:
            return False
        with self._lock:
            # The last one before it first: else all stores of a long prompt wake with each one of its beginning.
            parent = self._earlier(number, store, first - 1) or self._earlier(number, store, present)
            if parent is None or store.given_up:
                return False
            store.resting = True
        parent.ended.add_done_callback(lambda _: self._go_on(store))
        return True

    def _earlier(self, number: int, store: _Store, place: int) -> _Store | None:
        """Under the lock: one that began before this one and has yet to store the same chunk of the group."""
        key = store.plan.groups[number].keys[place]
        begun = itertools.takewhile(lambda other: other is not store, self._stores.values())
        return next((other for other in begun if other.will_have(number, place, key)), None)

    def _go_on(self, store: _Store) -> None:
        with self._lock:
            rested, store.resting = store.resting, False
        if rested:
            self._savers.submit(self._store, store)

    def _give_up(self, store: _Store) -> None:
        """No block is read for this store any more. One that rests ends at once."""
        with self._lock:
            rested, store.resting, store.given_up = store.resting, False, True
        for chunks in store.chunks:
            guarded(self._errors, "let_go", chunks.close, None)
        if rested:
            self._end(store, 0)

    def _end(self, store: _Store, visible: int) -> None:
        self._stored(store.plan, visible)
        store.ended.set_result(None)

    def _store_group(self, number: int, each: RankGroup, store: _Store) -> int:
        """Store one group's chunks; leading chunks that are visible then."""
        keys, source, left_s = store.plan.groups[number].keys, store.chunks[number], store.end_s - time.monotonic()
        if left_s <= 0:
            self._count("stores_too_late")
            return 0
        if source.first_whole and (each.session.present_here(keys) or 0) < source.first_whole:
            # Blocks of a prompt that the engine no longer has, and the pool neither: nothing can hang on them.
            # This is a second look: the store that had them may have ended while `_rests` asked who has.
            self._count("stores_without_parent")
            return 0
        ticket = store.plan.tickets[number] if store.plan.tickets else None
        with each.session.writer(keys, source, ticket=ticket, deadline_s=left_s) as writer:
            if store.computed is None:
                writer.put_chunks(source.first_whole, len(keys))
            else:
                for place in range(each.held.layers):
                    if not self._is_computed(store, number, place):
                        self._count("stores_too_late")
                        return 0
                    writer.put_layer(each.held.layer_start + place, source.first_whole, len(keys))
            writer.finish()
        self._count("store_chunks", writer.stored_chunks)
        self._count("store_bytes", writer.stored_chunks * each.group.namespace.layout.payload_bytes(each.held))
        return writer.visible_chunks

    def _is_computed(self, store: _Store, number: int, place: int) -> bool:
        """Wait until the step has computed this layer of the group; False where that takes too long."""
        computed, left_s = store.computed, store.end_s - time.monotonic()
        with self._lock:
            return self._lock.wait_for(lambda: computed is None or computed[number] > place, timeout=max(0.0, left_s))

    def _stored(self, plan: StorePlan, visible: int, *, known: bool = True) -> None:
        with self._lock:
            self._report.stored[plan.number] += 1
            self._report.stored_chunks[plan.number] = visible
            if known:
                del self._stores[plan.number]
                self._by_request[plan.request_id] -= 1
                if not self._by_request[plan.request_id]:
                    del self._by_request[plan.request_id]
            self._tell_sent()
            self._lock.notify_all()

    def _tell_sent(self) -> None:
        """Under the lock: requests that have ended and whose stores have all ended."""
        ended = [name for name in self._ending if name not in self._by_request]
        self._ending.difference_update(ended)
        self._sent.update(ended)

    def _count(self, name: str, count: int = 1) -> None:
        if count:
            with self._lock:
                self._counts[name] += count
