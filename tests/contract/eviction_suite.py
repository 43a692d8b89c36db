"""The behaviour that every eviction policy shares. `EvictionSuite` wants a fixture `name`, a name `make_policy` knows.

Most of it is one state machine against the naive model: a dict of residents with their parents, as a tier keeps them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import islice

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from kvstore.node.eviction import EvictionPolicy, make_policy

BLOCK_TOKENS = 512
PASSES_LIMIT = 2
"""How often one call of `victims` may name a key."""

Make = Callable[[], EvictionPolicy]


def batch(first: int, count: int) -> list[bytes]:
    return [number.to_bytes(16, "little") for number in range(first, first + count)]


def depths(count: int, start: int = 0) -> list[int]:
    return [index * BLOCK_TOKENS for index in range(start, start + count)]


class EvictionMachine(RuleBasedStateMachine):
    """Prompts come, grow, are used and leave, as in a tier; the model knows who is resident and whose child."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.policy = make_policy(name)
        self.prompts: list[list[bytes]] = []
        self.parents: dict[bytes, bytes | None] = {}
        self.left: list[bytes] = []
        self.fresh = 0

    @rule(length=st.integers(1, 8), whole=st.booleans())
    def add(self, length: int, whole: bool) -> None:
        """A new prompt, in one batch or piece by piece."""
        self._store(batch(self.fresh, length), whole)
        self.fresh += length

    @precondition(lambda self: self.prompts)
    @rule(data=st.data(), length=st.integers(1, 8))
    def branch(self, data: st.DataObject, length: int) -> None:
        """A prompt that shares the beginning of another one, which is used by that. What had left comes again."""
        base = data.draw(st.sampled_from(self.prompts))
        shared = base[: data.draw(st.integers(1, len(base)))]
        self.policy.touched([key for key in shared if key in self.parents])
        self._store([*shared, *batch(self.fresh, length)], True)
        self.fresh += length

    def _store(self, prompt: list[bytes], whole: bool) -> None:
        missing = [index for index, key in enumerate(prompt) if key not in self.parents]
        keys = [prompt[index] for index in missing]
        tokens = [index * BLOCK_TOKENS for index in missing]
        for index in missing:
            self.parents[prompt[index]] = prompt[index - 1] if index else None
        if whole:
            self.policy.added(keys, tokens)
        else:
            for key, first in zip(keys, tokens, strict=True):
                self.policy.added([key], [first])
        self.policy.ordered(prompt)
        self.prompts.append(prompt)

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        """A prefix, parts of which may have left."""
        prompt = data.draw(st.sampled_from(self.prompts))
        self.policy.touched(prompt[: data.draw(st.integers(0, len(prompt)))])

    @rule()
    def touch_unknown(self) -> None:
        strangers = batch(1 << 40, 3)
        self.policy.touched(strangers)
        self.policy.ordered(strangers)
        self.policy.removed(strangers)

    @precondition(lambda self: self.parents)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        """Somebody asked for it: not only leaves, and nothing was named before."""
        keys = data.draw(st.lists(st.sampled_from(sorted(self.parents)), unique=True, max_size=5))
        self._leave([*keys, *keys])

    @precondition(lambda self: self.parents)
    @rule(count=st.integers(1, 12), seed=st.integers(0, 1 << 16), held_share=st.sampled_from([0.0, 0.0, 0.5]))
    def evict(self, count: int, seed: int, held_share: float) -> None:
        """As a tier does: leaves that nobody holds, and parents all of whose children go with them."""
        chance = random.Random(seed)
        held = {key for key in sorted(self.parents) if chance.random() < held_share}
        chosen: list[bytes] = []
        for key in self.policy.victims():
            assert key in self.parents, "named a key that is not resident"
            children = {child for child, parent in self.parents.items() if parent == key}
            if key not in held and key not in chosen and children <= set(chosen):
                chosen.append(key)
                if len(chosen) == count:
                    break
        assert chosen or held, "named no leaf although nothing was held"
        self._leave(chosen)

    @rule()
    def name_all(self) -> None:
        """Every resident is named, nobody else, and the naming ends."""
        limit = PASSES_LIMIT * len(self.parents)
        named = list(islice(self.policy.victims(), limit + 1))
        assert len(named) <= limit
        assert set(named) == set(self.parents)

    def _leave(self, keys: list[bytes]) -> None:
        self.policy.removed(keys)
        for key in keys:
            self.parents.pop(key, None)

    @invariant()
    def counts(self) -> None:
        assert len(self.policy) == len(self.parents)


class EvictionSuite:
    """Subclasses give the fixture `name`."""

    @pytest.fixture
    def policy(self, name: str) -> EvictionPolicy:
        return make_policy(name)

    def test_it_knows_its_name(self, policy: EvictionPolicy, name: str) -> None:
        assert policy.name == name

    def test_an_empty_policy_names_nobody(self, policy: EvictionPolicy) -> None:
        assert not list(policy.victims())
        policy.added([], [])
        policy.touched([])
        policy.ordered([])
        policy.removed([])
        assert len(policy) == 0

    def test_it_agrees_with_the_naive_model(self, name: str) -> None:
        run_state_machine_as_test(  # type: ignore[no-untyped-call]
            lambda: EvictionMachine(name), settings=settings(max_examples=60, stateful_step_count=40)
        )

    @pytest.mark.parametrize("pieces", [False, True])
    def test_a_fresh_batch_goes_tail_first(self, policy: EvictionPolicy, pieces: bool) -> None:
        keys = batch(0, 20)
        if pieces:
            for key, tokens in zip(keys, depths(20), strict=True):
                policy.added([key], [tokens])
            policy.ordered(keys)
        else:
            policy.added(keys, depths(20))
        assert list(policy.victims())[:20] == keys[::-1]

    def test_a_fresh_branch_goes_tail_first(self, policy: EvictionPolicy) -> None:
        stem, branch = batch(0, 5), batch(100, 5)
        policy.added(stem, depths(5))
        policy.touched(stem)
        policy.added(branch, depths(5, 5))
        policy.ordered([*stem, *branch])
        named = list(dict.fromkeys(policy.victims()))
        assert [key for key in named if key in branch] == branch[::-1]

    def test_a_key_that_came_back_counts_once(self, policy: EvictionPolicy) -> None:
        keys = batch(0, 10)
        for _ in range(3):
            policy.added(keys, depths(10))
            gone = list(islice(policy.victims(), 10))
            policy.removed(gone)
            assert sorted(gone) == keys and len(policy) == 0

    def test_held_keys_do_not_hide_the_others(self, policy: EvictionPolicy) -> None:
        held, free = batch(0, 50), batch(100, 50)
        policy.added(held, depths(50))
        policy.added(free, depths(50))
        gone = [key for key in policy.victims() if key not in held]
        policy.removed(list(dict.fromkeys(gone)))
        assert set(gone) == set(free)
        assert set(policy.victims()) == set(held)

    @pytest.mark.timeout(60)
    def test_one_eviction_does_not_look_at_everybody(self, policy: EvictionPolicy) -> None:
        """10,000 single evictions among 100,000 keys: a billion steps if each looked at all."""
        length, count = 100, 100_000
        for first in range(0, count, length):
            policy.added(batch(first, length), depths(length))
        for _ in range(10_000):
            policy.removed(list(islice(policy.victims(), 1)))
        assert len(policy) == count - 10_000
