"""The scheduler half of an adapter: what becomes of each request, as a state machine without I/O of its own.

    new ──matched── running ──────────────► ended ──(stores under way: its blocks stay)──► gone
     ▲                │ ▲
     │ asking again   │ └─ loading (asynchronous): the engine waits, then runs
     └────────────────┘
    a load that failed: chunks from the first bad one on are computed, and nothing is loaded again for this request

What is stored: each chunk when its last token was computed, in the step that computed it, and the shorter last chunk of
a prompt that is handed on. After a load that the step itself waits for nothing that was computed from its blocks is
stored before the ranks have said that it succeeded: a rank that missed pages makes wrong ones on all ranks.

A save may outlive the step. Its blocks are watched: where the engine gives one of them new content (it was preempted,
its window went on, it ended), the plan of that step tells the ranks to let go of it first.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from engine_adapter.plans import GroupChunks, KvGroup, LoadPlan, StepPlan, StepReport, StorePlan
from kvstore.model.prefix import Extra, KeyChain, Keys
from kvstore.model.ticket import Ticket

Blocks = Sequence[Sequence[int | None]]
"""For each KV group the blocks of a request, from its first token on; None where there is none."""


class Phase(enum.Enum):
    """Where a request stands."""

    NEW = "new"
    """Not scheduled yet, or preempted."""
    LOADING = "loading"
    """Its blocks are being filled; it does not run."""
    RUNNING = "running"


class Lookup(Protocol):
    """What `looks.Looks` does."""

    def ask(self, request_id: str, groups: Sequence[Keys]) -> int | None:
        """Leading chunks that the pool has, None = ask again."""

    def forget(self, request_id: str) -> None:
        """Not needed any more."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request as the engine knows it. `tokens` gives all tokens so far.

    `extras` None: nothing of it may be stored or loaded, `no_keys` says why. `incoming`: tickets of a handoff to load,
    one a group; `outgoing`: to hand on.
    """

    request_id: str
    prompt_tokens: int
    tokens: Callable[[], Sequence[int]]
    extras: tuple[Extra, ...] | None = ()
    no_keys: str = ""
    incoming: tuple[Ticket, ...] = ()
    outgoing: bool = False


@dataclass(frozen=True, slots=True)
class Rules:
    """What is loaded and stored. `is_async`: loads run beside the engine's steps; else the step waits for them."""

    is_async: bool = True
    save: bool = True
    load: bool = True
    save_decode: bool = True
    least_tokens: int = 1
    """A hit of fewer is not loaded."""


@dataclass(slots=True)
class _Request:
    prompt: Prompt
    phase: Phase = Phase.NEW
    keys: tuple[Keys, ...] = ()
    """Of all tokens when they were computed; a shorter last one is of no use once more tokens have come."""
    prompt_keys: tuple[Keys, ...] = ()
    """Of the prompt, kept where it is handed on."""
    local_tokens: int = 0
    hit_tokens: int = 0
    offered_chunks: int = 0
    """Chunks before it are in the pool, or a store plan has them."""
    tail_offered: bool = False
    may_load: bool = True
    may_use_tickets: bool = True
    tickets: tuple[Ticket, ...] = ()
    load: int | None = None
    stores: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Stored:
    """A store that has ended. `groups`: its chunks, from the start of the prompt on; so many of them are `visible`."""

    request_id: str
    groups: tuple[Keys, ...]
    visible: int


class RequestBook:
    """All requests of one engine. One owner: the engine's scheduler thread."""

    def __init__(
        self,
        groups: Sequence[KvGroup],
        chains: Sequence[KeyChain],
        lookup: Lookup,
        rules: Rules,
        ranks: int,
        make_tickets: Callable[[Sequence[Keys]], tuple[Ticket, ...]],
    ) -> None:
        """`ranks`: workers that report each plan. `make_tickets`: of the keys of a prompt, one a group."""
        self.counts: Counter[str] = Counter()
        self._groups = tuple(groups)
        self._chains = tuple(chains)
        self._lookup = lookup
        self._rules = rules
        self._ranks = ranks
        self._make_tickets = make_tickets
        self._chunk_tokens = groups[0].chunk_tokens
        self._requests: dict[str, _Request] = {}
        self._ending: dict[str, set[int]] = {}
        """Ended requests and their store plans that are not reported yet."""
        self._told_ending: list[str] = []
        self._loads: list[LoadPlan] = []
        self._late_stores: list[StorePlan] = []
        self._saving: dict[int, tuple[frozenset[int], ...]] = {}
        """Blocks of store plans that are not reported by all ranks, a set a group."""
        self._keys: dict[int, tuple[Keys, ...]] = {}
        """Of the same plans."""
        self._owners: dict[int, str] = {}
        """Request of each load and store plan that is not reported by all ranks."""
        self._reports: Counter[int] = Counter()
        self._visible: dict[int, int] = {}
        """Chunks of store plans that all ranks have, as far as they have reported."""
        self._unconfirmed: dict[int, tuple[frozenset[int], ...]] = {}
        """Blocks of loads that a step itself waits for, until it is known how they ended."""
        self._number = 0

    # --- before a request runs ---------------------------------------------------------------------------

    def begin(self, prompt: Prompt) -> None:
        """The engine has a new request."""
        self._requests[prompt.request_id] = _Request(prompt)
        if prompt.extras is None:
            self.counts[f"no_keys_{prompt.no_keys or 'unknown'}"] += 1

    def matched_tokens(self, request_id: str, local_tokens: int) -> tuple[int | None, bool]:
        """(tokens behind the engine's own `local_tokens` that can be loaded, whether asynchronously).

        None = ask again. Without side effects for the pool; may be called any number of times.
        """
        request = self._requests.get(request_id)
        if request is None or not self._has_keys(request):
            return 0, False
        if request.phase is Phase.RUNNING:
            self._preempted(request)
        request.phase, request.local_tokens = Phase.NEW, local_tokens
        chunks = self._matched_chunks(request)
        if chunks is None:
            return None, False
        request.offered_chunks = chunks
        total = len(request.prompt.tokens())
        is_async = self._is_async(request)
        hit = min(request.keys[0].tokens_of_first(chunks), total)
        if not is_async:
            hit = min(hit, total - 1)  # logits exist only for computed tokens
        request.hit_tokens = hit
        more = hit - local_tokens
        if more < self._rules.least_tokens:
            self.counts["hits_too_short" if more > 0 else "hits_none"] += 1
            return 0, False
        return more, is_async

    def _is_async(self, request: _Request) -> bool:
        """Several groups: an engine cannot be told of bad blocks of one of them within a step."""
        return self._rules.is_async or self._uses_tickets(request) or len(self._groups) > 1

    def _uses_tickets(self, request: _Request) -> bool:
        return bool(request.prompt.incoming) and request.may_use_tickets

    def _matched_chunks(self, request: _Request) -> int | None:
        if not request.may_load or not self._rules.load:
            return 0
        if self._uses_tickets(request):
            if self._fits(request):
                return len(request.keys[0])
            request.may_use_tickets = False
        return self._lookup.ask(request.prompt.request_id, request.keys)

    def _fits(self, request: _Request) -> bool:
        """True if the tickets of the handoff are about this prompt and this model."""
        tickets = request.prompt.incoming
        fits = len(tickets) == len(request.keys) and all(
            (ticket.namespace_id, ticket.last_key) == (keys.namespace_id, keys[-1])
            for ticket, keys in zip(tickets, request.keys, strict=False)
        )
        if not fits:
            self.counts["tickets_of_other_prompts"] += 1
        return fits

    def _has_keys(self, request: _Request) -> bool:
        """Keys of all tokens so far; False where the request may have none."""
        prompt = request.prompt
        if prompt.extras is None:
            return False
        tokens = prompt.tokens()
        if not request.keys:
            request.keys = tuple(chain.keys(tokens, prompt.extras) for chain in self._chains)
            if self._rules.save and prompt.outgoing and len(request.keys[0]) and len(tokens) == prompt.prompt_tokens:
                request.prompt_keys, request.tickets = request.keys, self._make_tickets(request.keys)
        elif len(tokens) // self._chunk_tokens > request.keys[0].token_count // self._chunk_tokens:
            pairs = zip(self._chains, request.keys, strict=True)
            request.keys = tuple(chain.extended(keys, tokens, prompt.extras) for chain, keys in pairs)
        return len(request.keys[0]) > 0

    def allocated(self, request_id: str, blocks: Blocks, more_tokens: int) -> None:
        """The engine has blocks for the request; `more_tokens` of them are to be loaded, 0 = none."""
        request = self._requests.get(request_id)
        if request is None:
            return
        self._lookup.forget(request_id)
        if more_tokens <= 0:
            return  # it runs when a step has it: until then another connector may be filling these blocks
        stop = request.local_tokens + more_tokens
        groups = tuple(
            self._to_load(group, keys, of_group, request.local_tokens, stop)
            for group, keys, of_group in zip(self._groups, request.keys, blocks, strict=True)
        )
        is_async = self._is_async(request)
        tickets = request.prompt.incoming if self._uses_tickets(request) else ()
        request.may_use_tickets = False  # once: they are released when this load has ended
        plan = LoadPlan(self._next_number(), request_id, groups, is_async, tickets)
        self._loads.append(plan)
        request.load = plan.number
        self._owners[plan.number] = request_id
        if is_async:
            request.phase = Phase.LOADING
        else:
            request.phase = Phase.RUNNING
            self._unconfirmed[plan.number] = tuple(_ids(each.blocks) for each in groups)
        self.counts["loads"] += 1
        self.counts["planned_tokens"] += more_tokens

    def _to_load(self, group: KvGroup, keys: Keys, blocks: Sequence[int | None], start: int, stop: int) -> GroupChunks:
        """The chunks of which some block in tokens [start, stop) is there and empty."""
        size, per_chunk = group.block_tokens, group.blocks_per_chunk
        first_block, stop_block = start // size, -(-stop // size)
        wanted = [None] * first_block + list(blocks[first_block:stop_block])
        first = next((place for place, block in enumerate(wanted) if block is not None), stop_block) // per_chunk
        stop_chunk = -(-stop // group.chunk_tokens)
        return GroupChunks(keys.slice(first, stop_chunk), tuple(wanted[first * per_chunk :]))

    # --- steps -------------------------------------------------------------------------------------------

    def step(self, scheduled: Iterable[Scheduled], taken: Blocks = ()) -> StepPlan:
        """The plan of one step. `taken`: for each group blocks that get new content in it, by whatever request."""
        stores = self._late_stores
        self._late_stores = []
        for each in scheduled:
            request = self._requests.get(each.request_id)
            if request is None:
                continue
            request.phase = Phase.RUNNING
            plan = self._to_store(request, each.computed_tokens, each.blocks)
            if plan is not None:
                stores.append(plan)
        loads, self._loads = self._loads, []
        filled = [_ids(blocks) for blocks in taken]
        for load in loads:
            filled = [_ids(each.blocks) | more for each, more in _pairs(load.groups, filled)]
        let_go = [number for number, saving in self._saving.items() if _overlap(saving, filled)]
        for plan in stores:
            self._saving[plan.number] = tuple(_ids(each.blocks) for each in plan.groups)
            self._keys[plan.number] = tuple(each.keys for each in plan.groups)
        ending, self._told_ending = self._told_ending, []
        return StepPlan(tuple(loads), tuple(stores), tuple(let_go), tuple(ending))

    def _to_store(
        self, request: _Request, computed_tokens: int, get_blocks: Callable[[], Blocks], *, confirmed: bool = False
    ) -> StorePlan | None:
        """What of the request becomes complete in this step and is not in the pool, as far as is known.

        `confirmed`: the engine itself says that nothing was missing of what it was computed from.
        """
        if not self._rules.save or not self._has_keys(request):
            return None
        prompt, keys = request.prompt, request.keys
        known = min(computed_tokens, len(prompt.tokens()))
        limit = known if self._rules.save_decode else min(known, prompt.prompt_tokens)
        stop = min(limit, keys[0].token_count) // self._chunk_tokens
        tail = bool(request.tickets) and not request.tail_offered and known >= prompt.prompt_tokens
        if stop <= request.offered_chunks and not tail:
            return None
        blocks = get_blocks()
        if not confirmed and any(_overlap(loading, blocks) for loading in self._unconfirmed.values()):
            return None  # offered again in the next step, when it is known that nothing was missing
        first, request.offered_chunks = request.offered_chunks, stop
        if tail:
            request.tail_offered, keys = True, request.prompt_keys
            stop = len(keys[0])
        return self._store_plan(request, keys, min(first, stop - 1), stop, blocks)

    def _store_plan(self, request: _Request, keys: Sequence[Keys], first: int, stop: int, blocks: Blocks) -> StorePlan:
        stop_tokens = keys[0].tokens_of_first(stop)
        groups = tuple(
            GroupChunks(of_group.slice(0, stop), tuple(ids[: -(-stop_tokens // group.block_tokens)]))
            for group, of_group, ids in zip(self._groups, keys, blocks, strict=True)
        )
        plan = StorePlan(self._next_number(), request.prompt.request_id, groups, first, request.tickets)
        request.stores.add(plan.number)
        self._owners[plan.number] = request.prompt.request_id
        self.counts["stores"] += 1
        return plan

    def reported(self, report: StepReport) -> tuple[list[str], list[Stored]]:
        """What all ranks have ended: (requests whose handoff was read, stores)."""
        read: list[str] = []
        stored: list[Stored] = []
        for number, ranks in (report.stored + report.loaded).items():
            self._reports[number] += ranks
        for number, chunks in report.stored_chunks.items():
            self._visible[number] = min(chunks, self._visible.get(number, chunks))
        for number in report.failed:
            self._load_failed(number)
        for number in [number for number, ranks in self._reports.items() if ranks >= self._ranks]:
            del self._reports[number]
            request_id = self._owners.pop(number, "")
            self._saving.pop(number, None)
            self._unconfirmed.pop(number, None)
            keys = self._keys.pop(number, ())
            if number in self._visible:
                stored.append(Stored(request_id, keys, self._visible.pop(number)))
            request = self._requests.get(request_id)
            if request is not None:
                request.stores.discard(number)
                if request.load == number:
                    request.load = None
                    if request.prompt.incoming:
                        read.append(request_id)
            if request_id in self._ending:
                self._ending[request_id].discard(number)
                if not self._ending[request_id]:
                    del self._ending[request_id]
        return read, stored

    def _load_failed(self, number: int) -> None:
        request = self._requests.get(self._owners.get(number, ""))
        if request is not None and request.load == number and request.may_load:
            # Once only: a pool that fails again and again must not keep a request from being computed.
            request.may_load = False
            request.offered_chunks = min(request.offered_chunks, request.local_tokens // self._chunk_tokens)
            self.counts["loads_failed"] += 1

    def _preempted(self, request: _Request) -> None:
        """It lost its blocks and waits again. What is being stored of it goes on until its blocks are taken."""
        request.offered_chunks, request.tail_offered = 0, False
        self.counts["preempted"] += 1

    def finished(
        self, request_id: str, computed_tokens: int, blocks: Blocks, *, aborted: bool = False
    ) -> tuple[bool, tuple[Ticket, ...]]:
        """The request has ended: (its blocks are to be kept until its stores were told, tickets of its handoff)."""
        self._lookup.forget(request_id)
        request = self._requests.pop(request_id, None)
        if request is None:
            return False, ()
        if request.phase is Phase.LOADING:
            self.counts["ended_while_loading"] += 1
            return False, ()  # the engine keeps the blocks until the load is reported
        if request.phase is Phase.RUNNING:
            plan = self._to_store(request, computed_tokens, lambda: blocks, confirmed=not aborted)
            if plan is not None:
                self._late_stores.append(plan)
        if request.stores:
            self._ending[request_id] = request.stores
            self._told_ending.append(request_id)
        return bool(request.stores), request.tickets

    # --- the rest ----------------------------------------------------------------------------------------

    def forget_keys(self) -> None:
        """The model computes something else from now on: no request so far has keys that name it, or is loaded."""
        for request in self._requests.values():
            if request.prompt.extras is not None:
                self.counts["no_keys_reset"] += 1
            request.prompt = replace(request.prompt, extras=None, no_keys="reset", incoming=())
            request.keys = request.prompt_keys = request.tickets = ()

    def _next_number(self) -> int:
        self._number += 1
        return self._number

    def is_storing(self, request_id: str) -> bool:
        """True while stores of an ended request are not reported by all ranks."""
        return request_id in self._ending

    def check(self) -> None:
        """What is kept belongs to requests that live, or whose plans are not reported."""
        for number in {*self._saving, *self._keys, *self._unconfirmed}:
            assert number in self._owners, "a plan without an owner"
        for request in self._requests.values():
            assert request.stores <= self._owners.keys(), "a store that was reported"
        for stores in self._ending.values():
            assert stores and stores <= self._owners.keys(), "an ended request that waits for nothing"

    def __iter__(self) -> Iterator[str]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A request in a step: after it `computed_tokens` of its tokens have their KV in `blocks()`."""

    request_id: str
    computed_tokens: int
    blocks: Callable[[], Blocks]


def _ids(blocks: Iterable[int | None]) -> frozenset[int]:
    return frozenset(block for block in blocks if block is not None)


def _overlap(held: Sequence[frozenset[int]], blocks: Sequence[Iterable[int | None]]) -> bool:
    return any(not mine.isdisjoint(theirs) for mine, theirs in zip(held, blocks, strict=False))


def _pairs(
    groups: Sequence[GroupChunks], filled: Sequence[frozenset[int]]
) -> Iterable[tuple[GroupChunks, frozenset[int]]]:
    return zip(groups, filled or [frozenset[int]()] * len(groups), strict=True)
