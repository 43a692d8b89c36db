"""Ranks of one engine store their parts, engines with other numbers of ranks load them: the worker half by ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from replayed_engine import BLOCK_TOKENS, HEAD_DIM, HEADS, LAYERS, LAYOUT, tokens

import kvstore
from engine_adapter.copy import PagedKv
from engine_adapter.cuts import Cut
from engine_adapter.engine_chunks import Endpoint
from engine_adapter.plans import GroupChunks, KvGroup, LoadPlan, StepPlan, StepReport, StorePlan
from engine_adapter.session import Binding, PoolSession
from engine_adapter.transfers import How, RankGroup, Transfers
from engine_adapter.views import HeadPages
from kvstore.client import Client
from kvstore.errors import LayoutMismatch
from kvstore.model.layout import Rectangle
from kvstore.model.namespace import Namespace
from kvstore.model.prefix import KeyChain

NAMESPACE = Namespace("replayed", "1", LAYOUT)
KEYS = KeyChain(NAMESPACE).keys(tokens(1, 24))
BLOCKS = 8


@pytest.fixture
def pool() -> Iterator[Client]:
    with kvstore.open_local("8MiB") as client:
        yield client


class Ranks:
    """All ranks of an engine, each with its part of one model-wide tensor of random bytes, or of zeros."""

    def __init__(self, pool: Client, cut: Cut, seed: int | None) -> None:
        shape = (LAYERS, BLOCKS, HEADS, BLOCK_TOKENS, 2 * HEAD_DIM)
        self.model = torch.zeros(shape) if seed is None else torch.rand(shape, generator=torch.manual_seed(seed))
        group = KvGroup(NAMESPACE, cut.geometry, BLOCK_TOKENS)
        self.ranks: list[tuple[Rectangle, list[torch.Tensor], Transfers]] = []
        for stage in range(len(cut.rectangles)):
            for tp_rank in range(len(cut.rectangles[stage]) * cut.copies):
                held, writes = cut.held(tp_rank, stage)
                part = self.model[held.layer_start : held.layer_stop, :, held.head_start : held.head_stop]
                tensors = [layer.clone() for layer in part]
                binding = Binding(cut.geometry, cut.geometry.rectangles.index(held))
                session = PoolSession(NAMESPACE, lambda: pool, binding)
                rank = RankGroup(
                    group,
                    session,
                    held,
                    writes,
                    _maker(tensors, held),
                    torch.device("cpu"),
                    tuple("abc"[: held.layers]),
                )
                self.ranks.append((held, tensors, Transfers([rank], How())))

    def run(self, plan: StepPlan) -> StepReport:
        """One step on all ranks; what they report together."""
        together = StepReport()
        for _, _, transfers in self.ranks:
            transfers.start_loads(plan)
            transfers.after_step(plan)
            assert transfers.wait_idle(10.0)
            together.add(transfers.report())
        return together

    def close(self) -> None:
        for _, _, transfers in self.ranks:
            transfers.close()


def _maker(tensors: list[torch.Tensor], held: Rectangle):  # type: ignore[no-untyped-def]
    def make(pages: int, ids: Sequence[Sequence[int]]) -> Endpoint:
        return PagedKv(HeadPages.opaque(tensors, pages), pages, ids, held.layer_start, held.head_start)

    return make


CUTS = {
    "tp1": Cut.of([3], 2, 1),
    "tp2": Cut.of([3], 2, 2),
    "tp4, heads copied": Cut.of([3], 2, 4),
    "pp2, uneven": Cut.of([2, 1], 2, 1),
    "tp2 pp3": Cut.of([1, 1, 1], 2, 2),
}


@pytest.mark.parametrize("reader", CUTS)
@pytest.mark.parametrize("writer", CUTS)
def test_b09_any_ranks_load_what_any_ranks_stored(pool: Client, writer: str, reader: str) -> None:
    saving, loading = Ranks(pool, CUTS[writer], 1), Ranks(pool, CUTS[reader], None)
    places, others = (0, 1, 2, 3, 4, 5), (7, 6, 5, 4, 3, 2)
    stored = saving.run(StepPlan(stores=(StorePlan(1, "a", (GroupChunks(KEYS, places),), 0),)))
    assert stored.stored[1] == len(saving.ranks), "each rank reports each plan, also who stores nothing"
    assert stored.stored_chunks == {1: 3}
    loaded = loading.run(StepPlan(loads=(LoadPlan(2, "a", (GroupChunks(KEYS, others),), True),)))
    assert loaded.loaded[2] == len(loading.ranks) and not loaded.failed
    for held, tensors, transfers in loading.ranks:
        assert transfers.ended().received == {"a"}
        for place, layer in enumerate(range(held.layer_start, held.layer_stop)):
            wanted = saving.model[layer, :, held.head_start : held.head_stop]
            assert torch.equal(tensors[place][list(others)], wanted[list(places)])
    saving.close()
    loading.close()


def test_a12_of_copies_of_a_head_one_is_stored(pool: Client) -> None:
    cut = Cut.of([3], 1, 4)
    assert [cut.held(rank, 0)[1] for rank in range(4)] == [True, False, False, False]
    assert {cut.held(rank, 0)[0] for rank in range(4)} == {Rectangle(0, 3, 0, 1)}
    two_stages = Cut.of([2, 1], 1, 2)
    assert [two_stages.held(tp, pp)[1] for pp in range(2) for tp in range(2)] == [True, False, True, False]


def test_heads_and_ranks_that_do_not_divide_are_refused() -> None:
    with pytest.raises(LayoutMismatch, match="3 KV heads cannot be cut evenly over tp=2"):
        Cut.of([3], 3, 2)


def test_b09_a_rank_that_misses_something_fails_the_load_for_all(pool: Client) -> None:
    cut = CUTS["tp2"]
    saving = Ranks(pool, cut, 1)
    first_rank_only = StepPlan(stores=(StorePlan(1, "a", (GroupChunks(KEYS, (0, 1, 2, 3, 4, 5)),), 0),))
    saving.ranks[0][2].after_step(first_rank_only)
    assert saving.ranks[0][2].wait_idle(10.0)
    loading = Ranks(pool, cut, None)
    report = loading.run(StepPlan(loads=(LoadPlan(2, "a", (GroupChunks(KEYS, (7, 6, 5, 4, 3, 2)),), True),)))
    assert report.failed == {2} and report.loaded[2] == 2
    whole, missing = (transfers.ended() for _, _, transfers in loading.ranks)
    assert not whole.bad_blocks and missing.bad_blocks == {7, 6, 5, 4, 3, 2}
    saving.close()
    loading.close()
