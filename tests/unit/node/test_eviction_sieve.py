"""What the paper says of SIEVE, on keys that are no chains."""

from __future__ import annotations

from evicting import add, evict, key, touch

from kvstore.node.eviction.sieve import Sieve


def test_visited_keys_are_kept_where_they_are() -> None:
    """The paper's figure 1 in small: the hand takes marks off and evicts the first key without one."""
    policy = Sieve()
    add(policy, 1, 2, 3, 4)
    touch(policy, 1, 2)
    assert evict(policy) == [3], "1 and 2 lost their marks and stay the oldest"
    add(policy, 5)
    assert evict(policy) == [4], "the hand goes on from where it was"
    add(policy, 6)
    assert evict(policy, 2) == [5, 6], "new keys are looked at before the kept ones"
    assert evict(policy) == [1], "then the hand turns back to the old end"


def test_what_comes_after_the_hand_has_turned_waits_for_the_old_ones() -> None:
    policy = Sieve()
    add(policy, 1, 2)
    touch(policy, 1)
    assert evict(policy) == [2], "the hand stands at the young end"
    add(policy, 3)
    assert evict(policy) == [1]


def test_a_second_round_of_the_hand_finds_everybody() -> None:
    policy = Sieve()
    add(policy, 1, 2, 3)
    touch(policy, 1, 2, 3)
    assert evict(policy, 3) == [1, 2, 3]


def test_keys_that_may_not_go_are_passed() -> None:
    policy = Sieve()
    add(policy, 1, 2, 3)
    for named in policy.victims():
        if named == key(2):  # 1 may not go
            break
    policy.removed([key(2)])
    assert evict(policy) == [3], "1 is not met again at once"
