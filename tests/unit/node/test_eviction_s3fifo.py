"""What the paper says of S3-FIFO, on keys that are no chains."""

from __future__ import annotations

from evicting import add, evict, key, touch

from kvstore.node.eviction.s3fifo import S3Fifo


def full(*used_twice: int) -> S3Fifo:
    """Keys 0 to 99, of which some were used twice since they came."""
    policy = S3Fifo()
    add(policy, *range(100))
    touch(policy, *used_twice, *used_twice)
    return policy


def test_one_hit_wonders_go_before_older_keys_that_were_used() -> None:
    policy = full(*range(10))
    assert evict(policy, 3) == [10, 11, 12]
    add(policy, 200, 201, 202)
    assert evict(policy, 77) == list(range(13, 90)), "the small queue shrinks to a tenth of all keys"


def test_one_use_more_is_not_enough_to_stay() -> None:
    policy = full()
    touch(policy, 0)
    assert evict(policy) == [0]


def test_a_ghost_that_comes_back_enters_the_main_queue() -> None:
    policy = full()
    assert evict(policy) == [0]
    add(policy, 0)
    assert evict(policy, 90) == [*range(1, 90), 0], "of the main queue: the small one still has its tenth, 90 to 99"


def test_ghosts_are_no_more_than_the_main_queue_may_hold() -> None:
    policy = full()
    evict(policy, 89)
    add(policy, *range(100, 189))
    evict(policy, 80)  # other ghosts push the first ones out
    add(policy, 0)
    assert evict(policy, len(policy))[-1] == 0, "0 was forgotten and entered the small queue as its youngest"


def test_the_main_queue_gives_a_round_for_each_use() -> None:
    policy = full(*range(90))
    assert evict(policy) == [0], "90 keys moved on, ten are left in the small queue"
    touch(policy, 1, 1, 1, 1, 2)
    assert evict(policy, 91) == [90, *range(3, 90), 2, 1, 91], "1 goes round three times, 2 once"


def test_a_removal_that_nobody_named_leaves_no_ghost() -> None:
    policy = full()
    list(policy.victims())
    add(policy, 500)
    policy.removed([key(500)])
    add(policy, 500)
    assert evict(policy, len(policy))[-1] == 500


def test_no_more_than_three_rounds_are_saved_up() -> None:
    policy = full(*range(90))
    assert evict(policy) == [0]
    for _ in range(3):
        touch(policy, *range(1, 90))
    touch(policy, *[1] * 7)
    assert evict(policy, 2) == [90, 1], "1 is not worth more than 2 to 89, and the oldest of them"


def test_a_prompt_that_grows_leaves_what_it_used_in_its_place() -> None:
    policy = full()
    touch(policy, 0)
    add(policy, 200)
    policy.ordered([key(0), key(200)])
    assert evict(policy) == [0]
