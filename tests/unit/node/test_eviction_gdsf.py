"""GDSF by recompute cost, on keys that are no chains and on chains."""

from __future__ import annotations

import pytest
from evicting import add, evict, key, touch

from kvstore.node.eviction.gdsf import ATTENTION_EQUAL_TOKENS, Gdsf


def test_what_is_cheap_to_compute_again_goes_first() -> None:
    policy = Gdsf()
    add(policy, 1, first_tokens=4 * ATTENTION_EQUAL_TOKENS)
    add(policy, 2, first_tokens=0)
    add(policy, 3, first_tokens=ATTENTION_EQUAL_TOKENS)
    assert evict(policy, 3) == [2, 3, 1], "although 1 is the oldest"


def test_uses_count_as_much_as_cost() -> None:
    policy = Gdsf()
    add(policy, 1)
    add(policy, 2, first_tokens=ATTENTION_EQUAL_TOKENS)
    touch(policy, 1, 1)
    assert evict(policy) == [2], "three uses of cost one against one of cost two"


def test_what_is_not_used_any_more_is_overtaken() -> None:
    policy = Gdsf()
    add(policy, 1)
    touch(policy, *[1] * 9)
    for number in range(10, 14):
        add(policy, number)
        touch(policy, number)
        assert evict(policy) == [number], "each eviction moves the clock on by two"
    add(policy, 20)
    touch(policy, 20, 20)
    assert evict(policy) == [1], "ten uses when the clock stood at zero are less than three at eight"


def test_a_parent_is_worth_at_least_its_child() -> None:
    policy = Gdsf()
    chain = [key(number) for number in range(4)]
    policy.added(chain, [0, 50_000, 100_000, 150_000])
    add(policy, 9, first_tokens=10_000)
    assert evict(policy, 5) == [9, 3, 2, 1, 0]


def test_what_may_not_go_is_named_again() -> None:
    policy = Gdsf()
    add(policy, 1, 2, 3)
    assert list(policy.victims()) == [key(1), key(2), key(3)]
    policy.removed([key(2)])
    assert evict(policy, 2) == [1, 3]


@pytest.mark.parametrize("uses", [5_000])
def test_the_heap_does_not_grow_with_uses(uses: int) -> None:
    policy = Gdsf()
    add(policy, 1, 2)
    touch(policy, *[1] * uses)
    assert len(policy._heap) < uses / 2
    assert evict(policy, 2) == [2, 1]
