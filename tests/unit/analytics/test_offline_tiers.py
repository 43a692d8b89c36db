"""DRAM with an SSD behind it, without bytes: by hand, against the laws, and what the field reports ask of it."""

from __future__ import annotations

import random

import pytest

from kvstore.analytics.offline import simulate
from kvstore.analytics.offline_tiers import ADMISSIONS, Block, Blocks, SimulatedNode, SimulatedTier
from kvstore.analytics.trace import Request
from kvstore.errors import InvalidRequest
from kvstore.node.eviction import policy_names

EVERY_POLICY = pytest.mark.parametrize("policy", policy_names())


def request(*ids: int) -> Request:
    return Request(0, 512 * len(ids), 1, ids)


def key(number: int) -> bytes:
    return number.to_bytes(8, "little")


def prompts_that_branch(count: int, seed: int) -> list[list[bytes]]:
    """Each continues or leaves an earlier prompt; every block has one parent."""
    chance = random.Random(seed)
    prompts: list[list[bytes]] = [[]]
    fresh = 0
    for _ in range(count):
        base = chance.choice(prompts[-20:])
        head = base[: chance.randint(0, len(base))]
        tail = [key(number) for number in range(fresh, fresh + chance.randint(1, 6))]
        fresh += len(tail)
        prompts.append(head + tail)
    return prompts[1:]


# Used below with 4 blocks of DRAM and 8 of SSD.
ROUNDS = [request(1, 2), request(3, 4), request(5), request(1, 2), request(3, 4)]


def test_a_cleaner_that_writes_everything_loses_nothing() -> None:
    counts = simulate(ROUNDS, capacity_blocks=4, ssd_blocks=8)
    assert counts.ssd_blocks_written == 5
    assert (counts.dram_hit_blocks, counts.ssd_hit_blocks) == (2, 2)
    assert counts.evictions == counts.lost_blocks == 0


def test_what_is_used_again_is_not_the_coldest_any_more() -> None:
    rounds = [request(1), request(2), request(3), request(1), request(4), request(5), request(2)]
    counts = simulate(rounds, capacity_blocks=4, ssd_blocks=8)
    assert (counts.dram_hit_blocks, counts.ssd_hit_blocks) == (1, 1), "2 was written before 1, in time to be dropped"


def test_a_use_counts_on_both_tiers() -> None:
    rounds = [request(number) for number in (1, 2, 3, 4, 1, 5, 6, 1)]
    counts = simulate(rounds, capacity_blocks=2, ssd_blocks=4)
    assert counts.ssd_hit_blocks == 2, "5 and 6 pushed 2 and 3 off the SSD, not 1"


def test_second_touch_writes_what_is_used_again_or_came_back() -> None:
    once = simulate(ROUNDS[:3], capacity_blocks=4, ssd_blocks=8, admission="second_touch")
    assert once.ssd_blocks_written == 0
    counts = simulate(ROUNDS, capacity_blocks=4, ssd_blocks=8, admission="second_touch")
    assert counts.lost_blocks == 3, "2, 4 and 5"
    assert counts.ssd_blocks_written == 4, "1 and 3 were used again, 2 and 4 came back after they were lost"


def test_the_ssd_evicts_tails_first_and_forgets_what_only_it_had() -> None:
    rounds = [request(1, 2, 3), request(4, 5), request(1, 2, 3)]
    counts = simulate(rounds, capacity_blocks=3, ssd_blocks=4)
    assert (counts.dram_hit_blocks, counts.ssd_hit_blocks) == (1, 1), "3 had left for 4 and 5"
    assert (counts.evictions, counts.lost_blocks) == (2, 0), "then 5 left for 3"


def test_a_boundless_ssd_with_a_busy_cleaner_hits_what_boundless_memory_does() -> None:
    rounds = [
        Request(0, 512 * len(ids), 1, tuple(int.from_bytes(each, "little") for each in ids))
        for ids in prompts_that_branch(300, 4)
    ]
    longest = max(len(each.hash_ids) for each in rounds)
    small = simulate(rounds, capacity_blocks=longest, ssd_blocks=10_000)
    assert small.hit_blocks == simulate(rounds).hit_blocks
    assert small.ssd_hit_blocks > 0 and small.evictions == 0


@EVERY_POLICY
@pytest.mark.parametrize("admission", ADMISSIONS)
@pytest.mark.parametrize("ssd_blocks", [0, 3, 60])
def test_both_tiers_keep_the_laws(policy: str, admission: str, ssd_blocks: int) -> None:
    node = SimulatedNode(policy, 20, ssd_blocks, admission)
    for prompt in prompts_that_branch(150, 1):
        node.serve(prompt, 512)
        node.check()
    assert node.evictions >= node.lost_blocks
    assert node.lost_blocks or (ssd_blocks == 60 and admission == "always")
    assert bool(node.ssd_blocks_written) == bool(ssd_blocks)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(InvalidRequest, match="unknown admission 'never'; known: always, second_touch"):
        simulate([], ssd_blocks=1, admission="never")
    with pytest.raises(InvalidRequest, match="ssd_blocks"):
        simulate([], ssd_blocks=-1)


@EVERY_POLICY
def test_c10_new_ssd_entries_are_not_evicted_first(policy: str) -> None:
    blocks: Blocks = {key(number): Block(None, 0) for number in range(20)}
    ssd = SimulatedTier(policy, 10, blocks)
    for number in range(9):
        ssd.add([key(number)])
        ssd.touch([key(number)])
    for newest in range(9, 20):
        ssd.add([key(newest)])
        gone = ssd.evict()
        assert key(newest) in ssd and key(newest) not in gone
    ssd.check()
    assert len(ssd) == 10


@EVERY_POLICY
def test_d08_second_touch_writes_little_and_loses_little(policy: str) -> None:
    chance = random.Random(8)
    repeated = [tuple(range(first, first + 10)) for first in range(0, 500, 10)]
    rounds = []
    distinct = 500
    for _ in range(4000):
        if chance.random() < 0.8:
            rounds.append(request(*range(distinct, distinct + 10)))
            distinct += 10
        else:
            rounds.append(request(*chance.choice(repeated)))
    always, second_touch = (
        simulate(rounds, capacity_blocks=distinct // 10, ssd_blocks=distinct, policy=policy, admission=admission)
        for admission in ADMISSIONS
    )
    assert always.ssd_blocks_written > 0.9 * distinct
    assert second_touch.ssd_blocks_written <= 0.3 * always.ssd_blocks_written
    assert second_touch.hit_tokens >= 0.95 * always.hit_tokens


@pytest.mark.parametrize(("policy", "kept_share"), [("s3fifo", 0.9), ("sieve", 0.9), ("arc", 0.9), ("lru", 0.0)])
def test_f10_a_flood_of_unique_prompts_leaves_what_is_used_again(policy: str, kept_share: float) -> None:
    """Without quotas: a policy that resists scans keeps one tenant's 300 blocks through 4,000 of another's a round."""
    node = SimulatedNode(policy, 1000)
    own = [key(number) for number in range(300)]
    for _ in range(3):
        node.serve(own, 512)
    hits = 0
    for flood in range(10):
        for first in range(1000 + flood * 4000, 5000 + flood * 4000, 20):
            node.serve([key(number) for number in range(first, first + 20)], 512)
        hits += node.serve(own, 512).blocks
    assert hits >= kept_share * 10 * len(own)
    assert policy != "lru" or hits == 0
