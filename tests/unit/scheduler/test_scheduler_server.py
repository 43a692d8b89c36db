"""SchedulerService over real gRPC, following a real metadata service."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

import pytest

from kvstore.errors import ConfigurationError, InvalidRequest, KvStoreError, NotFound
from kvstore.metadata import Batch, EventKind, IndexEvent
from kvstore.metadata.embedded import EmbeddedIndex
from kvstore.metadata.remote import RemoteIndex
from kvstore.metadata.server import serve_metadata
from kvstore.model.layout import Dtype, Geometry, PageLayout, Rectangle
from kvstore.model.namespace import Namespace
from kvstore.model.prefix import KeyChain, Keys
from kvstore.model.values import NodeInfo, Tier
from kvstore.scheduler import Worker, WorkerRole, make_policy
from kvstore.scheduler.client import Pick, SchedulerClient
from kvstore.scheduler.server import Router, SchedulerService, serve_router

LAYOUT = PageLayout(layers=2, kv_heads=2, head_dim=4, dtype=Dtype.FP32, page_tokens=16, pages_per_chunk=1)
NAMESPACE = Namespace("m", "r", LAYOUT)
WHOLE = Geometry.whole(LAYOUT)
T = TypeVar("T")


def keys(count: int) -> Keys:
    return KeyChain(NAMESPACE).keys(list(range(16 * count)))


def holding(name: str, chain: Keys, count: int, address: str, epoch: int = 7, geometry: Geometry = WHOLE) -> Batch:
    """The batch of a node that stores all shards of the first `count` chunks."""
    events = [
        IndexEvent(
            EventKind.PUBLISH,
            NAMESPACE.id,
            chain[place],
            chain[place - 1] if place else NAMESPACE.id,
            geometry.shard(number),
            Tier.DRAM,
        )
        for place in range(count)
        for number in range(len(geometry.rectangles))
    ]
    node = NodeInfo(name, epoch, name, address, address)
    return Batch(node, 1, events, [(NAMESPACE.id, geometry)], snapshot_begin=True, lease_ms=30_000)


class Loop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        future: Future[T] = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        return future.result(10)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


class Cluster:
    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.metadata = loop.run(serve_metadata("127.0.0.1:0"))
        self.index = RemoteIndex(self.metadata.address)
        self.router: Router = loop.run(
            serve_router("127.0.0.1:0", self.metadata.address, policy="longest_prefix", insecure=False)
        )
        self.client = SchedulerClient(self.router.address)

    def close(self) -> None:
        self.client.close()
        self.loop.run(self.router.stop())
        self.index.close()
        self.loop.run(self.metadata.stop(0.1))


@pytest.fixture
def cluster(loop: Loop) -> Iterator[Cluster]:
    made = Cluster(loop)
    yield made
    made.close()


def wait_until(ask: Callable[[], Pick], wanted: Callable[[Pick], bool]) -> Pick:
    """The index follows asynchronously: ask again until it has."""
    ends_at_s = time.monotonic() + 10
    while not wanted(pick := ask()) and time.monotonic() < ends_at_s:
        time.sleep(0.005)
    return pick


def test_picks_by_the_followed_index_and_issues_a_ticket(cluster: Cluster) -> None:
    chain = keys(5)
    cluster.client.report(Worker("p1", WorkerRole.PREFILL, "a"))
    cluster.client.report(Worker("p2", WorkerRole.PREFILL, "b"))
    cluster.client.report(Worker("d1", WorkerRole.DECODE, "a"))
    cluster.index.publish(holding("a", chain, 1, cluster.metadata.address))
    cluster.index.publish(holding("b", chain, 3, cluster.metadata.address))

    pick = wait_until(lambda: cluster.client.pick("r", chain, 80), lambda pick: pick.local_run == 3)

    assert (pick.prefill_worker_id, pick.decode_worker_id, pick.pool_run) == ("p2", "d1", 3)
    assert pick.policy == "longest_prefix"
    assert [(one.worker_id, one.local_run, one.pool_run) for one in pick.candidates] == [("p1", 1, 3), ("p2", 3, 3)]
    assert [one.reason for one in pick.candidates] == [
        "not the longest prefix on its own node",
        "chosen: longest prefix on its own node",
    ]
    ticket = pick.ticket
    assert (ticket.first_key, ticket.last_key, ticket.chunk_count, ticket.last_tokens) == (chain[0], chain[4], 5, 16)
    assert [(rank.node_id, rank.epoch, rank.rectangle) for rank in ticket.ranks] == [("b", 7, LAYOUT.whole)]
    assert ticket.id != cluster.client.pick("r", chain, 80).ticket.id


def test_a_worker_of_several_ranks_has_the_run_that_all_of_them_have(cluster: Cluster) -> None:
    chain = keys(4)
    heads = Geometry.parallel(LAYOUT, tp=2)
    whole_batch = holding("a", chain, 4, cluster.metadata.address, geometry=heads)
    only_left = [event for event in whole_batch.events if event.shard == heads.shard(0)]
    right = [event for event in whole_batch.events if event.shard == heads.shard(1)]
    mixed = Batch(
        whole_batch.node,
        1,
        [*only_left, *right[:2]],
        whole_batch.geometries,
        snapshot_begin=True,
        lease_ms=30_000,
    )
    cluster.index.publish(mixed)
    cluster.client.report(Worker("left", WorkerRole.PREFILL, "a", (heads.rectangles[0],)))
    cluster.client.report(Worker("both", WorkerRole.PREFILL, "a", heads.rectangles))

    pick = wait_until(lambda: cluster.client.pick("r", chain, 64), lambda pick: pick.local_run == 4)

    assert {one.worker_id: one.local_run for one in pick.candidates} == {"left": 4, "both": 2}
    assert [rank.rectangle for rank in pick.ticket.ranks] == [Rectangle(0, 2, 0, 1)]


def test_load_counts_from_the_pick_to_the_report(cluster: Cluster) -> None:
    workers = [Worker(name, WorkerRole.PREFILL, name) for name in ("a", "b")]
    for worker in workers:
        cluster.client.report(worker)
    picks = [cluster.client.pick(f"r{number}", keys(2), 32) for number in range(4)]
    assert [pick.prefill_worker_id for pick in picks] == ["a", "b", "a", "b"]
    assert {one.worker_id: one.queued_tokens for one in picks[3].candidates} == {"a": 64, "b": 32}
    assert picks[0].decode_worker_id == ""
    assert picks[0].ticket.ranks == (), "no node is known"
    cluster.client.report(workers[0], finished=["r0", "r2"])
    assert cluster.client.pick("r5", keys(2), 32).prefill_worker_id == "a"


def test_a_worker_that_leaves_is_not_picked(cluster: Cluster) -> None:
    worker = Worker("a", WorkerRole.PREFILL, "a")
    cluster.client.report(worker)
    cluster.client.report(worker, leaving=True)
    with pytest.raises(NotFound, match="no live worker"):
        cluster.client.pick("r", keys(1), 16)


def test_a_dead_node_does_not_attract_requests(cluster: Cluster) -> None:
    chain = keys(2)
    for name in ("a", "b"):
        cluster.client.report(Worker(name, WorkerRole.PREFILL, name))
    cluster.index.publish(holding("b", chain, 2, cluster.metadata.address))
    wait_until(lambda: cluster.client.pick("r", chain, 32), lambda pick: pick.local_run == 2)
    cluster.index.drop_node("b")
    gone = wait_until(lambda: cluster.client.pick("r", chain, 32), lambda pick: pick.pool_run == 0)
    assert gone.local_run == 0
    assert gone.ticket.ranks == ()


@pytest.mark.parametrize(
    ("request_id", "chunks", "tokens", "policy", "complaint"),
    [
        ("", 1, 16, "", "request_id"),
        ("r", 0, 16, "", r"chain\.keys"),
        ("r", 1, 0, "", "prompt_tokens"),
        ("r", 1, 16, "oracle", "unknown policy 'oracle'"),
        ("r" * 300, 1, 16, "", "request_id"),
    ],
)
def test_bad_requests_are_refused_by_name(
    cluster: Cluster, request_id: str, chunks: int, tokens: int, policy: str, complaint: str
) -> None:
    with pytest.raises(InvalidRequest, match=complaint):
        cluster.client.pick(request_id, keys(chunks), tokens, policy=policy)


def test_an_unknown_policy_fails_at_the_start(loop: Loop) -> None:
    with pytest.raises(ConfigurationError, match="unknown policy"):
        loop.run(serve_router("127.0.0.1:0", "127.0.0.1:1", policy="oracle", insecure=False))


def test_a_router_without_metadata_service_picks_by_load(loop: Loop) -> None:
    router = loop.run(serve_router("127.0.0.1:0", "127.0.0.1:1", policy="longest_prefix", insecure=False))
    with SchedulerClient(router.address) as client:
        client.report(Worker("a", WorkerRole.PREFILL, "a"))
        assert client.pick("r", keys(1), 16).prefill_worker_id == "a"
    loop.run(router.stop())
    loop.run(router.stop())


def test_a_gap_in_the_copy_asks_for_a_new_snapshot() -> None:
    service = SchedulerService(EmbeddedIndex(), make_policy(""))
    chain = keys(1)
    service.follow(holding("a", chain, 1, "127.0.0.1:1"))
    service.forget_node("a")
    late = Batch(NodeInfo("a", 7, "a", "127.0.0.1:1", "127.0.0.1:1"), 2)
    with pytest.raises(KvStoreError, match="gap"):
        service.follow(late)
