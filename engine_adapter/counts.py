"""What the adapters count, by the names that engines show: every count has one, or a reason under one."""

from __future__ import annotations

from typing import Final

NAMES: Final = {
    "loads": "Loads that were planned, one a request",
    "planned_tokens": "Tokens that these were to bring",
    "load_tokens": "Tokens loaded from the pool, counted on each rank and KV group",
    "load_tokens_remote": "Those of them that came from other nodes",
    "load_tokens_ssd": "Those of them that a node had on its SSD only",
    "load_bytes": "Bytes loaded from the pool",
    "loads_failed": "Loads of which something was missing and was computed",
    "ended_while_loading": "Requests that ended while they were being loaded",
    "stores": "Stores that were planned",
    "store_chunks": "Chunks stored in the pool",
    "store_bytes": "Bytes stored in the pool",
    "stores_by_layer": "Stores that began with the first layer of their step",
    "stores_dropped": "Stores that were dropped because too many waited",
    "stores_given_up": "Stores that were given up because the engine needed the blocks",
    "stores_without_parent": "Stores of chunks whose prefix neither the engine nor the pool has",
    "stores_too_late": "Stores that had not begun at their deadline",
    "looks_asked_again": "Look-ups that had no answer yet",
    "looks_too_late": "Look-ups of other nodes that did not answer in time",
    "looks_too_many": "Look-ups of other nodes that were not begun because too many were under way",
    "looks_without_node": "Look-ups without a session with the node",
    "hits_none": "Look-ups that found nothing to load",
    "hits_too_short": "Look-ups that found less than `least_tokens`",
    "tickets_of_other_prompts": "Tickets that came with a prompt they are not of",
    "tickets_unreadable": "Tickets that could not be read",
    "tickets_without_node": "Requests that should have got a ticket while the node was away",
    "preempted": "Requests that lost their blocks and were looked up again",
}
"""Counters with a name of their own, and what they count."""
BY_REASON: Final = {
    "load_misses_": ("load_misses", "Chunks that were found and not delivered, by reason"),
    "errors_": ("pool_errors", "Calls of the pool that failed, by operation and kind"),
    "no_keys_": ("requests_without_keys", "Look-ups of requests that may not be stored or loaded"),
}
"""Prefix of counts whose names end with a reason: (name, what they count)."""
