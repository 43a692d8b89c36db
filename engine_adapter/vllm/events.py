"""The pool's chunks in vLLM's own event stream, so that a router that follows it knows what is a load away.

An event names the engine's own block hashes with the medium `CPU`. A whole chunk is told when all ranks have stored it,
and again, as removed, when the own host's node does not have it any more: within about ten seconds, at the next step.
Requests with a salt, an adapter or pictures are left out: an event that lost one of these would name other requests'
pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from engine_adapter.told import ToldChunks
from kvstore.model.prefix import Keys

if TYPE_CHECKING:
    from vllm.v1.request import Request

WAITING_LIMIT = 4096
"""Events that wait to be taken; more are not made, and their chunks not told of."""


class PoolEvents:
    """Events of one engine. `hash_tokens`: tokens of one of the engine's block hashes; whole ones make a chunk."""

    def __init__(self, hash_tokens: int, told: ToldChunks) -> None:
        self._hash_tokens = hash_tokens
        self._told = told
        self._events: list[Any] = []

    def stored(self, request: Request, groups: Sequence[Keys]) -> None:
        """All ranks have these chunks, from the start of the request on, in the pool."""
        if request.cache_salt or request.lora_request is not None or request.mm_features:
            return
        keys = groups[0]
        whole = keys.token_count // keys.chunk_tokens
        start = self._told.new(keys.slice(0, whole))
        per_chunk = keys.chunk_tokens // self._hash_tokens
        first, last = start * per_chunk, whole * per_chunk
        if start == whole or last > len(request.block_hashes) or len(self._events) >= WAITING_LIMIT:
            return
        hashes = [maybe_convert_block_hash(each) for each in request.block_hashes[first:last]]
        self._told.add([each.slice(start, whole) for each in groups], hashes)
        self._events.append(
            BlockStored(
                block_hashes=hashes,
                parent_block_hash=maybe_convert_block_hash(request.block_hashes[first - 1]) if first else None,
                token_ids=list(request._all_token_ids[first * self._hash_tokens : last * self._hash_tokens]),
                block_size=self._hash_tokens,
                lora_id=None,
                medium=MEDIUM_CPU,
                lora_name=None,
            )
        )

    def clear(self) -> None:
        """Nothing of the pool is of use to this engine any more."""
        self._told.clear()

    def take(self) -> list[Any]:
        """Events since the last call."""
        events, self._events = self._events, []
        gone = self._told.take_gone()
        if gone:
            events.append(BlockRemoved(block_hashes=gone, medium=MEDIUM_CPU))
        return events
