"""Counts that must return to zero (C02), prefixes that must stay usable (C04), pools with nothing to give (B07)."""

from __future__ import annotations

import random

import pytest

from kvstore.model.layout import Geometry
from kvstore.model.prefix import Keys
from kvstore.model.values import Outcome
from kvstore.node.chunks import Chunk
from kvstore.node.core import CoreSettings, Session
from kvstore.node.eviction.lru import LeafFirstLru
from kvstore.node.tier import Tier
from tests.unit.node.small_node import SMALL, SmallNode, keys_of, namespace

SPACE = namespace()
SHARD = Geometry.whole(SMALL).shard(0)


class Crowd:
    """Clients that do anything in any order, without a model: only the counts are looked at."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.node = SmallNode(slots=64, settings=CoreSettings(session_share=0.5))
        self.core = self.node.core
        self.chains = [keys_of(SPACE, number, 6) for number in range(30)]
        self.sessions = [self.node.open(SPACE) for _ in range(4)]
        self.attempts: list[tuple[Session, int, list[int]]] = []
        self.leases: list[tuple[Session, int]] = []

    def step(self) -> None:
        rng, core = self.rng, self.core
        session, keys, dice = rng.choice(self.sessions), rng.choice(self.chains), rng.random()
        if dice < 0.25:
            answer = core.reserve(session.number, keys, SHARD, rng.choice([b"", b"t" * 16]))
            granted = [i for i, outcome in enumerate(answer.outcomes) if outcome is Outcome.GRANTED]
            if answer.attempt:
                self.attempts.append((session, answer.attempt, granted))
        elif dice < 0.55 and self.attempts:
            owner, attempt, granted = self.attempts.pop(rng.randrange(len(self.attempts)))
            if owner not in self.sessions:
                return
            if rng.random() < 0.2:
                core.abort(owner.number, attempt)
            else:
                chosen = granted if rng.random() < 0.7 else granted[: len(granted) // 2]
                done = core.commit(owner.number, attempt, chosen, [1] * len(chosen), rng.random() < 0.9)
                again = [index for index, outcome, _ in done.waiting if outcome is Outcome.GRANTED]
                if again:
                    self.attempts.append((owner, attempt, again))
        elif dice < 0.8:
            lease = core.acquire(session.number, keys, SMALL.whole, rng.choice([0, 300, 3000])).lease
            if lease:
                self.leases.append((session, lease))
        elif dice < 0.92 and self.leases:
            owner, lease = self.leases.pop(rng.randrange(len(self.leases)))
            if owner in self.sessions:
                core.release(owner.number, [lease, lease], [b"t" * 16] if rng.random() < 0.1 else [])
        elif dice < 0.95:
            self.node.clock.now += rng.choice([0.1, 1.0, 31.0])
            core.tick()
        elif dice < 0.97:
            core.remove(session.number, SPACE.id, [keys[rng.randrange(6)]])
        else:
            self.crash(session)

    def crash(self, session: Session) -> None:
        if self.rng.random() < 0.5:
            self.core.session_lost(session.number)
        self.core.process_gone(session.number)
        self.sessions[self.sessions.index(session)] = self.node.open(SPACE)

    def go_home(self) -> None:
        for session in self.sessions:
            self.core.process_gone(session.number)
        self.node.clock.now += 120
        self.core.tick()
        self.core.check()
        stats = self.core.stats()
        zero = ("leases", "tickets", "pinned_bytes", "reserved_slots", "quarantined_bytes", "sessions")
        assert not any(stats[name] for name in zero), stats
        assert stats["used_bytes"] == stats["chunks"] * 4096 == stats["catalog_entries"] * 4096
        assert all(not chunk.holds for chunk in self.core.pool.forest.chunks.values())


@pytest.mark.slow
def test_c02_counts_return_to_zero_after_a_hundred_thousand_steps() -> None:
    crowd = Crowd(seed=3)
    for number in range(100_000):
        crowd.step()
        if number % 1000 == 0:
            crowd.core.check()
    crowd.go_home()
    stats = crowd.core.stats()
    assert min(stats[name] for name in ("commits", "removed_evicted", "removed_removed", "quarantined")) > 1000


def test_c02_the_test_above_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unpin too few is noticed."""
    from kvstore.node.holds import Holds

    monkeypatch.setattr(Holds, "end_lease", lambda holds, number: holds.leases.pop(number, None))
    crowd = Crowd(seed=3)
    with pytest.raises((AssertionError, KeyError)):
        for _ in range(3000):
            crowd.step()
        crowd.go_home()


def put_in_calls(node: SmallNode, session: Session, keys: Keys, pages_a_call: int) -> None:
    """As chunked prefill does: each call names the chain from its start and stores the next part."""
    for stop in range(pages_a_call, len(keys) + 1, pages_a_call):
        node.store(session, keys.slice(0, stop))


def prefix_after_q(round_number: int, looked_up: int) -> tuple[int, int, int]:
    """(pages of P that hit, pages of Q, resident pages of P that no look-up reaches)."""
    node = SmallNode(slots=100)
    session = node.open(SPACE)
    p, q = keys_of(SPACE, 2 * round_number, 60), keys_of(SPACE, 2 * round_number + 1, 50)
    put_in_calls(node, session, p, 15)
    if looked_up:
        found = node.reader.find(p.slice(0, looked_up), SMALL.whole)
        node.core.touch(session.number, list(p)[: found.run])
    put_in_calls(node, session, q, 50)
    resident = sum(key in node.core.pool.forest.chunks for key in p)
    hit = node.resident(p)
    return hit, node.resident(q), resident - hit


@pytest.mark.slow
@pytest.mark.parametrize("looked_up", [0, 20])
def test_c04_eviction_takes_tails_and_leaves_a_usable_prefix(looked_up: int) -> None:
    assert {prefix_after_q(number, looked_up) for number in range(100)} == {(50, 50, 0)}


def test_c04_also_where_each_call_names_only_its_own_part() -> None:
    node = SmallNode(slots=100)
    session = node.open(SPACE)
    p, q = keys_of(SPACE, 1, 60), keys_of(SPACE, 2, 50)
    for start in range(0, 60, 15):
        node.store(session, p.slice(start, start + 15))
    node.store(session, q)
    assert (node.resident(p), node.resident(q)) == (50, 50)


def test_c04_the_test_above_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain LRU in the order of the calls, without the leaf rule, takes the head."""

    def added(policy: LeafFirstLru, keys: list[bytes], _: list[int]) -> None:
        policy._order.update(dict.fromkeys(keys))

    monkeypatch.setattr(LeafFirstLru, "added", added)
    monkeypatch.setattr(LeafFirstLru, "touched", lambda policy, keys: None)
    monkeypatch.setattr(LeafFirstLru, "ordered", lambda policy, keys: None)
    monkeypatch.setattr(Tier, "_may_go", lambda _, chunk, chosen: not chunk.holds and not chunk.pending)
    hit, _, unreachable = prefix_after_q(1, 0)
    assert hit < 45 and unreachable > 0


def test_b07_a_pool_with_everything_held_answers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be evicted: the write is refused after a bounded look around, the read still works."""
    node = SmallNode(slots=8)
    session = node.open(SPACE)
    keys = keys_of(SPACE, 1, 8)
    node.store(session, keys)
    assert node.core.acquire(session.number, keys, SMALL.whole, 60_000).lease
    looked_at = [0]
    may_go = Tier._may_go

    def counting(tier: Tier, chunk: Chunk, chosen: dict[Chunk, None]) -> bool:
        looked_at[0] += 1
        return may_go(tier, chunk, chosen)

    monkeypatch.setattr(Tier, "_may_go", counting)
    for number in range(100):
        outcomes = node.store(session, keys_of(SPACE, 100 + number, 4))
        assert set(outcomes) == {Outcome.REFUSED_FULL}
    assert looked_at[0] <= 100 * 16, "it looked again and again at what nobody gives up"
    assert node.resident(keys) == 8 and node.core.acquire(session.number, keys, SMALL.whole, 0).run == 8
    node.clock.now += 61
    node.core.tick()
    assert set(node.store(session, keys_of(SPACE, 999, 4))) == {Outcome.COMMITTED}
