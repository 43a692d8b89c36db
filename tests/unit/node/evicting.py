"""Steps that the tests of eviction policies share."""

from __future__ import annotations

from itertools import islice

from kvstore.node.eviction import EvictionPolicy


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def add(policy: EvictionPolicy, *numbers: int, first_tokens: int = 0) -> None:
    """Keys that have nothing to do with one another, oldest first."""
    for number in numbers:
        policy.added([key(number)], [first_tokens])


def touch(policy: EvictionPolicy, *numbers: int) -> None:
    for number in numbers:
        policy.touched([key(number)])


def evict(policy: EvictionPolicy, count: int = 1) -> list[int]:
    """Evict the first `count` that the policy names."""
    gone = list(islice(policy.victims(), count))
    policy.removed(gone)
    return [int.from_bytes(each, "big") for each in gone]
