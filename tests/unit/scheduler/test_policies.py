from __future__ import annotations

import numpy as np
import pytest

from kvstore.errors import ConfigurationError, NotFound
from kvstore.model.layout import Dtype, PageLayout
from kvstore.model.namespace import Namespace
from kvstore.model.prefix import KeyChain
from kvstore.scheduler import Candidate, ClusterView, Request, Worker, WorkerRole, make_policy
from kvstore.scheduler.state import ClusterState

LAYOUT = PageLayout(layers=1, kv_heads=1, head_dim=4, dtype=Dtype.FP32, page_tokens=16, pages_per_chunk=1)
CHAIN = KeyChain(Namespace("m", "r", LAYOUT))


def request(number: int = 0, tokens: int = 200) -> Request:
    keys = CHAIN.keys(np.random.default_rng(number).integers(0, 1000, tokens))
    return Request(f"request-{number}", keys, tokens)


def candidate(name: str, local: int = 0, pool: int = 0, queued: int = 0, last: int = 0) -> Candidate:
    return Candidate(Worker(name, WorkerRole.PREFILL, f"node-{name}"), local, pool, queued, last)


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        (
            candidate("b", local=3, pool=3, queued=900),
            candidate("a", local=2, pool=9),
            "longest prefix on its own node",
        ),
        (candidate("b", local=2, pool=5, queued=900), candidate("a", local=2, pool=4), "longest prefix in the pool"),
        (candidate("b", queued=10, last=9), candidate("a", queued=11, last=1), "fewest queued tokens"),
        (candidate("b", last=1), candidate("a", last=2), "least recently picked"),
    ],
)
def test_longest_prefix_orders_by_one_criterion_after_the_other(
    first: Candidate, second: Candidate, reason: str
) -> None:
    for view in (ClusterView((first, second)), ClusterView((second, first))):
        decision = make_policy("longest_prefix").pick(request(), view)
        assert decision.chosen is first
        by_id = {one.worker.worker_id: why for one, why in zip(view.candidates, decision.reasons, strict=True)}
        assert by_id == {"b": f"chosen: {reason}", "a": f"not the {reason}"}


def test_equal_candidates_are_taken_by_id_whatever_their_order() -> None:
    left, right = candidate("a"), candidate("b")
    for view in (ClusterView((left, right)), ClusterView((right, left))):
        assert make_policy("longest_prefix").pick(request(), view).chosen is left


def test_one_worker_is_taken_and_none_is_not_found() -> None:
    decision = make_policy("").pick(request(), ClusterView((candidate("a"),)))
    assert decision.policy == "longest_prefix"
    assert decision.reasons == ("chosen: the only live worker",)
    with pytest.raises(NotFound, match="no live worker"):
        make_policy("longest_prefix").pick(request(), ClusterView(()))


def test_unknown_policies_name_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match="least_queued, longest_prefix"):
        make_policy("random")


def run_through(state: ClusterState, count: int, *, finish: bool) -> dict[str, int]:
    picks = {"a": 0, "b": 0}
    policy = make_policy("longest_prefix")
    for number in range(count):
        asked = request(number)
        view = state.view(WorkerRole.PREFILL, lambda worker: (0, 0), 1.0)
        chosen = policy.pick(asked, view).chosen.worker.worker_id
        state.assign(chosen, asked.request_id, asked.prompt_tokens, 1.0)
        if finish:
            state.finish(chosen, [asked.request_id])
        state.check()
        picks[chosen] += 1
    return picks


def two_workers() -> ClusterState:
    state = ClusterState()
    for name in ("a", "b"):
        state.report(Worker(name, WorkerRole.PREFILL, f"node-{name}"), 60.0, 0.0)
    return state


def test_e02_sequential_requests_are_spread_though_the_load_is_always_zero() -> None:
    assert run_through(two_workers(), 200, finish=True) == {"a": 100, "b": 100}


def test_e02_a_burst_sees_its_own_decisions() -> None:
    assert run_through(two_workers(), 8, finish=False) == {"a": 4, "b": 4}


def test_e03_unknown_prompts_go_to_the_idle_node_however_much_it_caches() -> None:
    state = two_workers()
    for number in range(20):
        state.assign("a", f"old-{number}", 400, 0.0)
    picks = run_through(state, 50, finish=False)
    assert picks["b"] >= 40
