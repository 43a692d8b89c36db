from __future__ import annotations

import pytest

from kvstore.errors import CapacityExhausted, NotFound
from kvstore.scheduler import ClusterView, Worker, WorkerRole, state
from kvstore.scheduler.state import QUEUED_REQUEST_LIFETIME_S, ClusterState


def worker(name: str, role: WorkerRole = WorkerRole.PREFILL, node: str = "n") -> Worker:
    return Worker(name, role, node)


def view(cluster: ClusterState, now_s: float, role: WorkerRole = WorkerRole.PREFILL) -> ClusterView:
    cluster.check()
    return cluster.view(role, lambda one: (len(one.node_id), 7), now_s)


def queued(cluster: ClusterState, now_s: float) -> dict[str, int]:
    return {one.worker.worker_id: one.queued_tokens for one in view(cluster, now_s).candidates}


def test_a_worker_lives_as_long_as_its_lease() -> None:
    cluster = ClusterState()
    cluster.report(worker("a"), 2.0, 10.0)
    assert len(view(cluster, 11.9).candidates) == 1
    cluster.report(worker("a"), 2.0, 11.9)
    assert len(view(cluster, 13.8).candidates) == 1
    assert view(cluster, 13.9).candidates == ()
    with pytest.raises(NotFound, match="unknown worker 'a'"):
        cluster.assign("a", "r", 1, 13.9)


def test_views_are_by_role_with_the_runs_of_the_request() -> None:
    cluster = ClusterState()
    cluster.report(worker("b", node="long"), 9.0, 0.0)
    cluster.report(worker("a"), 9.0, 0.0)
    cluster.report(worker("d", WorkerRole.DECODE), 9.0, 0.0)
    found = view(cluster, 1.0).candidates
    assert [(one.worker.worker_id, one.local_run, one.pool_run) for one in found] == [("a", 1, 7), ("b", 4, 7)]
    assert [one.worker.worker_id for one in view(cluster, 1.0, WorkerRole.DECODE).candidates] == ["d"]


def test_tokens_count_from_the_decision_to_the_report() -> None:
    cluster = ClusterState()
    cluster.report(worker("a"), 99.0, 0.0)
    cluster.assign("a", "r1", 100, 1.0)
    cluster.assign("a", "r2", 20, 1.0)
    assert queued(cluster, 2.0) == {"a": 120}
    cluster.report(worker("a", node="moved"), 99.0, 2.0)
    assert queued(cluster, 2.0) == {"a": 120}, "a report does not reset the load"
    cluster.finish("a", ["r1", "r1", "unknown"])
    assert queued(cluster, 2.0) == {"a": 20}
    cluster.finish("nobody", ["r2"])
    assert queued(cluster, 2.0) == {"a": 20}


def test_a_request_that_is_picked_again_counts_once_a_role() -> None:
    cluster = ClusterState()
    for one in (worker("a"), worker("b"), worker("d", WorkerRole.DECODE)):
        cluster.report(one, 99.0, 0.0)
    cluster.assign("a", "r", 100, 1.0)
    cluster.assign("d", "r", 100, 1.0)
    cluster.assign("b", "r", 100, 1.0)
    assert queued(cluster, 2.0) == {"a": 0, "b": 100}
    assert view(cluster, 2.0, WorkerRole.DECODE).candidates[0].queued_tokens == 100


def test_a_request_that_nobody_ends_stops_counting() -> None:
    cluster = ClusterState()
    cluster.report(worker("a"), 10 * QUEUED_REQUEST_LIFETIME_S, 0.0)
    cluster.assign("a", "r1", 100, 0.0)
    cluster.assign("a", "r2", 5, 1.0)
    assert queued(cluster, QUEUED_REQUEST_LIFETIME_S - 0.1) == {"a": 105}
    assert queued(cluster, QUEUED_REQUEST_LIFETIME_S) == {"a": 5}


def test_a_worker_that_leaves_takes_its_load_along() -> None:
    cluster = ClusterState()
    cluster.report(worker("a"), 9.0, 0.0)
    cluster.assign("a", "r", 100, 0.0)
    cluster.leave("a")
    cluster.leave("a")
    cluster.report(worker("a"), 9.0, 1.0)
    assert queued(cluster, 1.0) == {"a": 0}


def test_maps_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "WORKERS_LIMIT", 2)
    monkeypatch.setattr(state, "QUEUED_REQUESTS_LIMIT", 3)
    cluster = ClusterState()
    cluster.report(worker("a"), 9.0, 0.0)
    cluster.report(worker("b"), 5.0, 0.0)
    with pytest.raises(CapacityExhausted, match="knows 2 workers"):
        cluster.report(worker("c"), 9.0, 1.0)
    for number in range(5):
        cluster.assign("a", f"r{number}", 10**number, 1.0)
        cluster.check()
    assert queued(cluster, 1.0) == {"a": 11100, "b": 0}, "the oldest requests were forgotten"
    cluster.report(worker("c"), 9.0, 6.0)
    assert queued(cluster, 6.0) == {"a": 11100, "c": 0}, "an ended lease makes room"
