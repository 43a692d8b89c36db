"""Leaf-first LRU as a policy: it orders, nothing else."""

from __future__ import annotations

import pytest

from kvstore.errors import ConfigurationError
from kvstore.node.eviction import make_policy
from kvstore.node.eviction.lru import LeafFirstLru

A, B, C, D = (letter * 16 for letter in (b"a", b"b", b"c", b"d"))


def test_tails_go_before_heads() -> None:
    policy = LeafFirstLru()
    policy.added([A, B, C], [0, 0, 0])
    assert list(policy.victims()) == [C, B, A]
    policy.added([D], [0])
    policy.touched([A, B])
    assert list(policy.victims()) == [C, D, B, A]


def test_unknown_keys_change_nothing() -> None:
    policy = LeafFirstLru()
    policy.added([A], [0])
    policy.touched([B])
    policy.removed([C])
    assert list(policy.victims()) == [A] and len(policy) == 1
    policy.removed([A])
    assert not len(policy)


def test_policies_are_chosen_by_name() -> None:
    assert make_policy("lru").name == "lru"
    with pytest.raises(ConfigurationError, match="lru"):
        make_policy("fifo")
