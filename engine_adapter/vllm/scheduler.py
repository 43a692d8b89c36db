"""The connector's half in vLLM's engine core: its calls in, plans out. It never waits.

vLLM tells of no preemption in time, so what a step gives new content to is read off the blocks that it hands out.
"""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from engine_adapter.identity import LoraDigests
from engine_adapter.looks import Looks
from engine_adapter.plans import KvGroup, StepPlan, StepReport
from engine_adapter.pool_access import PoolAccess
from engine_adapter.requests import Prompt, RequestBook, Rules, Scheduled
from engine_adapter.session import Binding, PoolSession, guarded
from engine_adapter.told import ToldChunks
from engine_adapter.vllm.events import PoolEvents
from engine_adapter.vllm.options import Mode, Options
from engine_adapter.vllm.pool import open_pool
from kvstore.errors import InvalidRequest
from kvstore.model.prefix import Extra, ExtraKind, KeyChain, Keys
from kvstore.model.ticket import Ticket, TicketRank

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

HANDOFF = "kvstore"
"""Our entry in `kv_transfer_params`."""
NULL_BLOCK = 0
"""The block that vLLM gives where there is none."""


class SchedulerHalf:
    """All requests of an engine core. One owner: its scheduler."""

    def __init__(
        self, config: VllmConfig, kv_cache: KVCacheConfig, groups: Sequence[KvGroup], options: Options
    ) -> None:
        transfer = config.kv_transfer_config
        self._groups = tuple(groups)
        self._pool: PoolAccess = open_pool(config, options, "scheduler")
        secret = options.secret
        self._sessions = [
            PoolSession(group.namespace, self._pool.client, Binding(group.geometry, 0, secret)) for group in groups
        ]
        for session in self._sessions:
            session.open()
        self._looks = Looks(self._sessions, others=bool(options.metadata), wait_s=options.lookup_wait_ms / 1000)
        rules = Rules(
            is_async=options.load is Mode.ASYNC,
            save=bool(transfer.is_kv_producer),
            load=bool(transfer.is_kv_consumer),
            save_decode=options.save_decode,
            least_tokens=options.least_tokens,
        )
        self.book = RequestBook(
            groups,
            [KeyChain(group.namespace, secret) for group in groups],
            self._looks,
            rules,
            config.parallel_config.world_size,
            self._make_tickets,
        )
        self._lora = LoraDigests()
        self._generation = b""
        """New after each reset: part of every key, so that nothing from before it is found."""
        self._waiting: dict[str, Request] = {}
        """Requests whose adapter's identity is not known yet."""
        self._incoming: dict[str, tuple[Ticket, ...]] = {}
        self._counts: Counter[str] = Counter()
        self._events: PoolEvents | None = None
        if config.kv_events_config is not None and config.kv_events_config.enable_kv_cache_events:
            told = ToldChunks(self._looks.here, self._looks.later)
            self._events = PoolEvents(kv_cache.hash_block_size or groups[0].block_tokens, told)
        self._told_of: dict[str, Request] = {}
        """Requests of whose chunks events may come."""

    # --- requests ----------------------------------------------------------------------------------------

    def begin(self, request: Request) -> None:
        """A new request."""
        self._waiting[request.request_id] = request
        if self._events is not None:
            self._told_of[request.request_id] = request
        guarded(self._sessions[0].errors, "begin", lambda: self._known(request), False)

    def _known(self, request: Request) -> bool:
        """True once the request is in the book; it is not while its adapter is being identified."""
        if request.request_id not in self._waiting:
            return True
        lora = b""
        no_keys = _why_no_keys(request)
        if request.lora_request is not None and not no_keys:
            digest = self._digest_of(request.lora_request)
            if digest is None:
                return False
            lora, no_keys = digest, "" if digest else "lora"
        del self._waiting[request.request_id]
        params = request.kv_transfer_params or {}
        incoming = self._tickets_of(params)
        if incoming:
            self._incoming[request.request_id] = incoming
        self.book.begin(
            Prompt(
                request.request_id,
                request.num_prompt_tokens,
                lambda: request._all_token_ids,
                None if no_keys else _extras(request, lora, self._generation),
                no_keys,
                incoming,
                bool(params.get("do_remote_decode")),
            )
        )
        return True

    def _digest_of(self, adapter: LoRARequest) -> bytes | None:
        """None while it is not known, empty where there is none."""

        def call() -> bytes | None:
            return self._lora.ask(adapter.lora_int_id, adapter.lora_path, reloaded=adapter.load_inplace)

        none: bytes | None = b""
        return guarded(self._sessions[0].errors, "adapter", call, none)

    def matched_tokens(self, request: Request, local_tokens: int) -> tuple[int | None, bool]:
        """(tokens to load behind the local ones, asynchronously); None = ask again. An error is a miss."""

        def call() -> tuple[int | None, bool]:
            if not self._known(request):
                return None, False
            return self.book.matched_tokens(request.request_id, local_tokens)

        miss: tuple[int | None, bool] = 0, False
        return guarded(self._sessions[0].errors, "match", call, miss)

    def allocated(self, request: Request, blocks: Sequence[Sequence[int]], more_tokens: int) -> None:
        """vLLM has blocks for the request."""
        self.book.allocated(request.request_id, _without_null(blocks), more_tokens)

    def step(self, output: SchedulerOutput) -> StepPlan:
        """The plan of a step."""
        new, cached, state = output.scheduled_new_reqs, output.scheduled_cached_reqs, output.kv_connector_block_state
        before = {each.req_id: each.num_computed_tokens for each in new}
        before.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        scheduled = []
        for request_id, count in output.num_scheduled_tokens.items():
            if state is not None:
                get_blocks = partial(_blocks_of, state, request_id)
                scheduled.append(Scheduled(request_id, before[request_id] + count, get_blocks))
        taken: list[list[int]] = [[] for _ in self._groups]
        for each in new:
            self._take(taken, each.block_ids, each.num_computed_tokens)
        for request_id, added, tokens in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if added is not None:
                self._take(taken, added, tokens if request_id in cached.resumed_req_ids else 0)
        return self.book.step(scheduled, taken)

    def _take(self, taken: list[list[int]], blocks: Sequence[Sequence[int]], computed_tokens: int) -> None:
        for group, of_group, ids in zip(self._groups, taken, blocks, strict=True):
            of_group += [block for block in ids[computed_tokens // group.block_tokens :] if block != NULL_BLOCK]

    def reported(self, report: StepReport) -> None:
        """Ranks have ended plans."""
        read, stored = self.book.reported(report)
        for request_id in read:
            self._release(self._incoming.pop(request_id, ()))
        if self._events is None:
            return
        for each in stored:
            if each.request_id in self._told_of:
                self._events.stored(self._told_of[each.request_id], each.groups, each.visible)
        for request_id in {each.request_id for each in stored}:  # after all of them: one may come twice
            request = self._told_of.get(request_id)
            if request is not None and request.is_finished() and not self.book.is_storing(request_id):
                del self._told_of[request_id]

    def evict(self, bad_blocks: set[int], manager: KVCacheManager) -> None:
        """Take blocks that were to be loaded and hold nothing, and what was computed from them, from the prefix cache.

        vLLM leaves them there, since their request computes them next; and gives them to all that ask, even to that
        request, if it is preempted before.
        """
        for request_id in self.book:
            blocks = manager.get_block_ids(request_id)[0]
            first = next((place for place, block in enumerate(blocks) if block in bad_blocks), len(blocks))
            manager.evict_blocks(set(blocks[first:]))

    def finished(self, request: Request, blocks: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        """The request has ended: (keep its blocks, parameters for whoever goes on with it)."""
        from vllm.v1.request import RequestStatus

        self._waiting.pop(request.request_id, None)
        self._release(self._incoming.pop(request.request_id, ()))
        aborted = request.status in (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR)
        computed_tokens = request.num_computed_tokens - request.num_in_flight_tokens
        keep, tickets = self.book.finished(request.request_id, computed_tokens, _without_null(blocks), aborted=aborted)
        if not keep:
            self._told_of.pop(request.request_id, None)
        if not tickets or aborted:
            return keep, None
        return keep, {HANDOFF: {"tickets": [ticket.to_json() for ticket in tickets]}}

    # --- handoffs ----------------------------------------------------------------------------------------

    def _make_tickets(self, groups: Sequence[Keys]) -> tuple[Ticket, ...]:
        """Tickets for a prompt that another engine goes on with; none while the own node is not known."""
        node = self._sessions[0].node
        if node is None:
            self._counts["tickets_without_node"] += 1
            return ()
        return tuple(
            Ticket(
                secrets.token_bytes(16),
                keys.namespace_id,
                keys[0],
                keys[-1],
                len(keys),
                keys.last_tokens,
                tuple(TicketRank(node.node_id, node.epoch, each) for each in group.geometry.rectangles),
            )
            for group, keys in zip(self._groups, groups, strict=True)
        )

    def _tickets_of(self, params: Mapping[str, Any]) -> tuple[Ticket, ...]:
        entry = params.get(HANDOFF)
        if not entry:
            return ()
        try:
            return tuple(Ticket.from_json(each) for each in entry["tickets"])
        except (InvalidRequest, KeyError, TypeError) as exc:
            logger.warning("kv_transfer_params has no tickets of this pool: %s", exc)
            self._counts["tickets_unreadable"] += 1
            return ()

    def _release(self, tickets: Sequence[Ticket]) -> None:
        """The handoff was read, or will not be: its pins end. In a thread, because it asks the nodes."""
        for session, ticket in zip(self._sessions, tickets, strict=False):
            self._looks.later(partial(session.release, ticket))

    # --- the rest ----------------------------------------------------------------------------------------

    def take_events(self) -> Iterable[Any]:
        """What was stored and what has gone since the last call, where events are wanted."""
        return self._events.take() if self._events is not None else ()

    def reset(self) -> None:
        """What is in the pool is of no use to this engine any more: its weights may have changed under way.

        Others still share what is there. This engine shares with nobody from now on: what it computes now has no name
        that another engine could know.
        """
        self._generation = secrets.token_bytes(16)
        if self._events is not None:
            self._events.clear()
        self._told_of.clear()
        self.book.forget_keys()
        logger.warning("the connector's cache was reset: this engine shares with no other one until it is restarted")

    def take_counts(self) -> dict[str, int]:
        """What was counted since the last call."""
        taken: Counter[str] = Counter()
        for counts in (self._counts, self.book.counts, self._looks.counts):
            taken.update(counts)
            counts.clear()
        for session in self._sessions:
            taken.update(session.take_errors())
        return dict(taken)

    def close(self) -> None:
        """End threads and sessions."""
        self._looks.close()
        self._lora.close()
        self._pool.close()


def _blocks_of(state: KVConnectorBlockState, request_id: str) -> tuple[tuple[int | None, ...], ...]:
    return _without_null(state.get_block_ids(request_id))


def _without_null(blocks: Sequence[Sequence[int]]) -> tuple[tuple[int | None, ...], ...]:
    return tuple(tuple(None if block == NULL_BLOCK else block for block in ids) for ids in blocks)


def _why_no_keys(request: Request) -> str:
    """Why nothing of the request may be shared; "" where it may."""
    if request.prompt_embeds is not None or request.prompt_token_ids is None:
        return "prompt_embeds"
    # The tokens of such a request are changed behind what was computed when more input comes.
    return "streaming_input" if request.resumable else ""


def _extras(request: Request, lora: bytes, generation: bytes) -> tuple[Extra, ...]:
    """What changes the meaning of the tokens: adapter, salt, pictures and the like; and the reset of the engine."""
    extras = []
    if lora:
        extras.append(Extra(ExtraKind.LORA, lora))
    if generation or request.cache_salt:
        extras.append(Extra(ExtraKind.SALT, generation + (request.cache_salt or "").encode()))
    for feature in request.mm_features:
        start = feature.mm_position.offset
        value = feature.identifier.encode() if feature.identifier else b""
        # An identifier is a hash's text or what the caller says of the item; short ones are filled up, never cut.
        padded = value if not value or len(value) >= 16 else value.rjust(16, b"\0")
        extras.append(Extra(ExtraKind.MULTIMODAL, padded, start, start + feature.mm_position.length))
    return tuple(extras)
