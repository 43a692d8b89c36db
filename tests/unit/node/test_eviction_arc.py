"""What the paper says of ARC, on keys that are no chains."""

from __future__ import annotations

from evicting import add, evict, key, touch

from kvstore.node.eviction.arc import Arc


def full() -> Arc:
    """0 to 4 used again, 5 to 9 used once."""
    policy = Arc()
    add(policy, *range(10))
    touch(policy, *range(5))
    return policy


def test_without_experience_keys_used_once_go_first() -> None:
    assert evict(full(), 7) == [5, 6, 7, 8, 9, 0, 1]


def test_the_longest_unused_of_the_again_list_goes_first() -> None:
    policy = full()
    touch(policy, 0, 1)
    assert evict(policy, 7) == [5, 6, 7, 8, 9, 2, 3]


def test_a_removal_that_nobody_named_leaves_no_ghost() -> None:
    policy = full()
    assert evict(policy) == [5]
    policy.removed([key(9)])
    add(policy, 9)
    assert policy.target == 0


def test_a_scan_does_not_touch_what_is_used_again() -> None:
    policy = full()
    for number in range(100, 200):
        add(policy, number)
        assert evict(policy)[0] >= 5
    assert sorted(evict(policy, 10))[:5] == [0, 1, 2, 3, 4]


def test_a_ghost_used_once_makes_room_for_such_keys() -> None:
    policy = full()
    evict(policy, 2)
    assert policy.target == 0
    add(policy, 5)
    assert policy.target == 1
    add(policy, 6)
    assert policy.target == 2
    add(policy, 10)  # once: 7 8 9 10, again: 0 1 2 3 4 5 6
    assert evict(policy, 4) == [7, 8, 0, 1], "two keys used once may stay"


def test_a_ghost_used_again_takes_that_room_back() -> None:
    policy = full()
    evict(policy, 2)
    add(policy, 5, 6, 10)
    evict(policy, 4)
    add(policy, 0)
    assert policy.target == 1, "as many ghosts on either side: one step"
    add(policy, 1, 7)
    assert policy.target == 1, "1 took it to zero, 7 back to one"
    assert evict(policy, 2)[0] == 9


def test_a_short_ghost_list_weighs_more() -> None:
    policy = full()
    evict(policy, 7)  # ghosts: five used once, two used again
    add(policy, 5)
    policy.target = 4.0
    add(policy, 0)
    assert policy.target == 2.0, "four ghosts used once to two used again: a step of two"


def test_ghosts_are_bounded_by_the_room() -> None:
    policy = full()
    for number in range(100, 1100):
        add(policy, number)
        evict(policy)
    add(policy, 100)
    assert policy.target == 0, "forgotten"
    add(policy, 1090)
    assert policy.target == 1, "remembered"
