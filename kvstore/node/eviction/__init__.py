"""Eviction policies: they only order. The tier decides what may go (leaves that nobody holds).

A policy sees the keys of one slot class of one tier. Live nodes and the simulator use the same objects.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from kvstore.errors import ConfigurationError


class EvictionPolicy(Protocol):
    """Synchronous, no locks, no clock of its own. Batches are ordered from the first chunk of a prompt to its last."""

    name: str

    def added(self, keys: Sequence[bytes], first_tokens: Sequence[int]) -> None:
        """These keys became resident; none was before. It counts as their first use.

        `first_tokens`: for each key, how many tokens of its prompt lie before it (for policies that weigh the cost of
        computing a chunk again).
        """

    def touched(self, keys: Sequence[bytes]) -> None:
        """These keys were used again as one prefix, head first. Unknown keys are ignored."""

    def ordered(self, keys: Sequence[bytes]) -> None:
        """These keys form one prefix, head first, and came piece by piece or beside older ones: order them as one batch
        just added. Not a use. Unknown keys are ignored."""

    def removed(self, keys: Sequence[bytes]) -> None:
        """These keys left, for whatever reason. Unknown keys are ignored."""

    def victims(self) -> Iterator[bytes]:
        """Resident keys, first to go first, each at least once. Ends by itself.

        The caller evicts some of those named, and calls `removed` for them when it has left the iterator; the others
        may not go now and stay. Naming may reorder the policy, as a clock's hand does; only the iterator's consumer may
        not call anything else meanwhile.
        """

    def __len__(self) -> int:
        """Number of resident keys."""


def make_policy(name: str) -> EvictionPolicy:
    """The policy of that name; raises ConfigurationError naming the known ones."""
    known = _policies()
    if name not in known:
        raise ConfigurationError(f"unknown eviction policy {name!r}; known: {', '.join(sorted(known))}")
    return known[name]()


def policy_names() -> tuple[str, ...]:
    """Every name that `make_policy` knows."""
    return tuple(_policies())


def _policies() -> dict[str, type[EvictionPolicy]]:
    from kvstore.node.eviction.arc import Arc
    from kvstore.node.eviction.gdsf import Gdsf
    from kvstore.node.eviction.lru import LeafFirstLru
    from kvstore.node.eviction.s3fifo import S3Fifo
    from kvstore.node.eviction.sieve import Sieve

    policies: tuple[type[EvictionPolicy], ...] = (LeafFirstLru, S3Fifo, Sieve, Arc, Gdsf)
    return {policy.name: policy for policy in policies}
