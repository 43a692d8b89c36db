"""The pool's chunks in vLLM's own event stream, so that a router that follows it knows what is a load away.

An event names the engine's own block hashes with the medium `CPU`. A whole chunk is told when all ranks have stored it,
or have found that others did so at the same time and the own host's node has it; and again, as removed, when that node
does not have it any more: within about ten seconds. Either is told at a step of the engine.
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

    def stored(self, request: Request, groups: Sequence[Keys], visible: int) -> None:
        """All ranks have ended a store of these chunks, from the start of the request on: so many are in the pool."""
        if request.cache_salt or request.lora_request is not None or request.mm_features:
            return
        whole = groups[0].token_count // groups[0].chunk_tokens
        visible = min(visible, whole)
        self._tell(request, [keys.slice(0, visible) for keys in groups])
        self._told.expect(request.request_id, [keys.slice(0, whole) for keys in groups], visible, request)

    def _tell(self, request: Request, groups: Sequence[Keys]) -> None:
        """These chunks are there, from the start of the request on."""
        keys, stop = groups[0], len(groups[0])
        start = self._told.new(keys)
        per_chunk = keys.chunk_tokens // self._hash_tokens
        first, last = start * per_chunk, stop * per_chunk
        if start == stop or last > len(request.block_hashes) or len(self._events) >= WAITING_LIMIT:
            return
        hashes = [maybe_convert_block_hash(each) for each in request.block_hashes[first:last]]
        self._told.add([each.slice(start, stop) for each in groups], hashes)
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
        for request, groups in self._told.arrived():
            self._tell(request, groups)
        events, self._events = self._events, []
        gone = self._told.take_gone()
        if gone:
            events.append(BlockRemoved(block_hashes=gone, medium=MEDIUM_CPU))
        return events
