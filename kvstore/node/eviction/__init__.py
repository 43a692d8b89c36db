"""Eviction policies: they only order. The pool decides what may go (leaves that nobody holds).

A policy sees the keys of one slot class of one tier. Live nodes and the simulator use the same objects.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from kvstore.errors import ConfigurationError


class EvictionPolicy(Protocol):
    """Synchronous, no locks, no clock of its own. Batches are ordered from the first chunk of a prompt to its last."""

    name: str

    def added(self, keys: Sequence[bytes]) -> None:
        """These keys became resident; none was before."""

    def touched(self, keys: Sequence[bytes]) -> None:
        """These keys were used as one prefix, head first. Unknown keys are ignored."""

    def removed(self, keys: Sequence[bytes]) -> None:
        """These keys left, for whatever reason. Unknown keys are ignored."""

    def victims(self) -> Iterator[bytes]:
        """Resident keys, first to go first. The caller skips those it may not evict.

        The policy must not be changed while the iterator is in use.
        """

    def __len__(self) -> int:
        """Number of resident keys."""


def make_policy(name: str) -> EvictionPolicy:
    """The policy of that name; raises ConfigurationError naming the known ones."""
    from kvstore.node.eviction.lru import LeafFirstLru

    known: dict[str, type[EvictionPolicy]] = {LeafFirstLru.name: LeafFirstLru}
    try:
        return known[name]()
    except KeyError:
        raise ConfigurationError(f"unknown eviction policy {name!r}; known: {', '.join(sorted(known))}") from None
