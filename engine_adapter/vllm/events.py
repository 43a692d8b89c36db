"""The pool's chunks in vLLM's own event stream, so that a router that follows it knows what is a load away.

An event names the engine's own block hashes with the medium `CPU`. It is told when all ranks have stored a chunk. What
leaves the pool is not told: to such a router it looks like a miss that it did not expect. Requests with a salt, an
adapter or pictures are left out: an event that lost one of these would name other requests' pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import MEDIUM_CPU, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

if TYPE_CHECKING:
    from vllm.v1.request import Request

WAITING_LIMIT = 4096
"""Events that wait to be taken; more are dropped."""


class StoredEvents:
    """Events of one engine. `hash_tokens`: tokens of one of the engine's block hashes."""

    def __init__(self, hash_tokens: int) -> None:
        self._hash_tokens = hash_tokens
        self._told: dict[str, int] = {}
        """Blocks of each request that were told."""
        self._events: list[Any] = []
        self.dropped = 0

    def stored(self, request: Request, tokens: int) -> None:
        """All ranks have the first `tokens` tokens of the request in the pool."""
        if request.cache_salt or request.lora_request is not None or request.mm_features:
            return
        first = self._told.get(request.request_id, 0)
        last = min(tokens // self._hash_tokens, len(request.block_hashes))
        if last <= first:
            return
        self._told[request.request_id] = last
        if len(self._events) >= WAITING_LIMIT:
            self.dropped += 1
            return
        hashes = [maybe_convert_block_hash(each) for each in request.block_hashes[first:last]]
        parent = maybe_convert_block_hash(request.block_hashes[first - 1]) if first else None
        self._events.append(
            BlockStored(
                block_hashes=hashes,
                parent_block_hash=parent,
                token_ids=list(request._all_token_ids[first * self._hash_tokens : last * self._hash_tokens]),
                block_size=self._hash_tokens,
                lora_id=None,
                medium=MEDIUM_CPU,
                lora_name=None,
            )
        )

    def forget(self, request_id: str) -> None:
        """Nothing more will be stored of the request."""
        self._told.pop(request_id, None)

    def take(self) -> list[Any]:
        """Events since the last call."""
        events, self._events = self._events, []
        return events
