"""Tenants, revisions and quotas on both tiers (A05, A06, A07, F10), and what is worth a place on the SSD (D08)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.client import Cache
from kvstore.model.namespace import Namespace
from kvstore.model.values import MissReason, Outcome
from tests.chaos.tier_node import SLOT_BYTES, TierNode
from tests.unit.cli.console_run import Console
from tests.unit.client.pages import LAYOUT, namespace, pages_of

A, B = (Namespace("pages", "r1", LAYOUT, tenant=tenant) for tenant in "AB")


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TierNode]:
    node = TierNode(tmp_path, monkeypatch)
    yield node
    node.close()


@pytest.fixture
def console(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Console:
    (tmp_path / "cli").mkdir()
    return Console(capsys, monkeypatch, tmp_path / "cli")


def listed(console: Console, node: TierNode) -> dict[str, dict[str, int]]:
    facts = console.json("namespaces", "--node", node.node.info.control_address, "--json")
    return {fact["id"]: fact for fact in facts["namespaces"]}


# --- A05, A06, A07 -------------------------------------------------------------------------------------------


def test_a05_a_tenant_sees_nothing_of_another_on_the_ssd(
    node: TierNode, console: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same tokens, other secrets; also for two users of one tenant with other salts, and after a restart."""
    caches = {
        "a": node.client.bind(A, secret=b"one"),
        "b": node.client.bind(B, secret=b"two"),
        "a with b's secret": node.client.bind(A, secret=b"two"),
    }
    keys = node.on_ssd(1, 8, caches["a"])
    for name in ("b", "a with b's secret"):
        cache = caches[name]
        result = node.read(node.keys(1, 8, cache), cache=cache)
        assert (result.chunks, result.reason) == (0, MissReason.ABSENT), name
        assert cache.match(node.keys(1, 8, cache)).pool_chunks == 0
    assert node.read(keys, cache=caches["a"]).ssd_tokens == 128
    figures = listed(console, node)
    assert (figures[A.id.hex()]["ssd_bytes"], figures[B.id.hex()]["ssd_bytes"]) == (8 * SLOT_BYTES, 0)
    assert figures[A.id.hex()]["ssd_hit_tokens"] == 128
    address = node.node.info.control_address
    console.ok("remove", "--tenant", "A", "--node", address, "--yes")
    assert listed(console, node)[A.id.hex()]["ssd_bytes"] == 0
    node.check()
    node.close()
    again = TierNode(tmp_path, monkeypatch)
    cache = again.client.bind(A, secret=b"one")
    assert again.read(keys, cache=cache).chunks == 0
    again.close()


def test_a06_other_weights_under_the_same_name_read_nothing(
    node: TierNode, console: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_ssd, in_dram = node.on_ssd(1, 8), node.write(2, 8)
    node.settle()
    node.close()
    again = TierNode(tmp_path, monkeypatch, space=namespace("r2"))
    for number in (1, 2):
        assert again.read(again.keys(number, 8)).chunks == 0
        again.saved(number, 8)
    figures = listed(console, again)
    assert [figures[namespace(each).id.hex()]["chunks"] for each in ("r1", "r2")] == [16, 16]
    console.ok("remove", "--namespace", namespace("r1").id.hex(), "--node", again.node.info.control_address, "--yes")
    again.settle()
    again.check()
    figures = listed(console, again)
    assert [figures[namespace(each).id.hex()]["chunks"] for each in ("r1", "r2")] == [0, 16]
    old = again.client.bind(namespace())
    assert [again.read(keys, cache=old).chunks for keys in (on_ssd, in_dram)] == [0, 0]
    again.close()
    third = TierNode(tmp_path, monkeypatch, space=namespace("r2"))
    assert third.read(third.keys(1, 8)).chunks == 8, "the new revision is still there after a restart"
    assert third.client.bind(namespace()).match(on_ssd).pool_chunks == 0
    third.close()


def test_a07_a_write_that_was_under_way_at_a_weight_update_lands_under_the_old_weights(node: TierNode) -> None:
    old, new = node.cache, node.client.bind(namespace("r2"))
    on_ssd = node.on_ssd(1, 4)
    keys = node.keys(2, 4)
    late = old.begin_write(keys)
    with node.disk.held("pwritev"):
        assert node.read(node.keys(1, 4, new), cache=new).chunks == 0  # the update
        pages = pages_of(keys)
        late.put_layers(0, LAYOUT.layers, Pages(pages))
        assert late.commit().visible == 4
    node.settle()
    for number in (1, 2):
        assert node.read(node.keys(number, 4, new), cache=new).chunks == 0
    assert [node.read(each).chunks for each in (on_ssd, keys)] == [4, 4]
    node.check()


class Pages:
    """A source of pages that lie in one array."""

    def __init__(self, pages: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> None:
        self._pages = pages

    def gather(self, index: int, slot: np.ndarray[tuple[int, ...], np.dtype[np.uint8]], layer: int, head: int) -> None:
        slot[:] = self._pages[index, layer : layer + len(slot)]


# --- F10 -----------------------------------------------------------------------------------------------------


def flood(node: TierNode, cache: Cache, numbers: range) -> None:
    for number in numbers:
        keys = node.keys(number, 8, cache)
        outcomes = set(cache.write(keys, pages_of(keys)).outcomes)
        assert outcomes <= {Outcome.COMMITTED, Outcome.PRESENT}, outcomes


@pytest.mark.parametrize("tier", ["dram", "ssd"])
def test_f10_a_tenant_keeps_its_pages_under_the_flood_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, console: Console, tier: str
) -> None:
    """A has 24 chunks in use, B stores 480 unique ones."""
    keeps = 24 * SLOT_BYTES
    node = TierNode(
        tmp_path, monkeypatch, dram_bytes=1 << 20, ssd_bytes=1 << 20, quotas=f"A:dram={keeps}..,ssd={keeps}.."
    )
    ours, theirs = node.client.bind(A), node.client.bind(B)
    prompts = [node.saved(number, 8, ours) for number in range(3)]
    if tier == "ssd":
        for keys in prompts:
            node.demote(keys)
    hits = asked = 0
    for turn in range(6):
        flood(node, theirs, range(100 + 10 * turn, 110 + 10 * turn))
        node.settle()
        node.check()
        for keys in prompts:
            assert node.places(keys)[1] == 8, "the SSD keeps them too"
            result = node.read(keys, cache=ours)
            hits, asked = hits + result.chunks, asked + 8
    assert hits >= 0.9 * asked
    figures = listed(console, node)
    assert (figures[A.id.hex()]["evicted_chunks"], figures[B.id.hex()]["evicted_chunks"] > 300) == (0, True)
    assert figures[A.id.hex()]["dram_min_bytes"] == keeps
    node.close()


def test_f10_the_test_above_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = TierNode(tmp_path, monkeypatch, dram_bytes=1 << 20, ssd_bytes=1 << 20)
    ours, theirs = node.client.bind(A), node.client.bind(B)
    prompts = [node.saved(number, 8, ours) for number in range(3)]
    flood(node, theirs, range(100, 140))
    node.settle()
    flood(node, theirs, range(140, 160))
    assert sum(node.read(keys, cache=ours).chunks for keys in prompts) < 24
    node.close()


def test_f10_the_most_that_a_tenant_may_have_is_exact_on_both_tiers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dram, ssd = 16 * SLOT_BYTES + 100, 10 * SLOT_BYTES + 100
    node = TierNode(tmp_path, monkeypatch, quotas=f"B:dram=..{dram},ssd=..{ssd}")
    ours, theirs = node.client.bind(A), node.client.bind(B)
    for number in range(20):
        node.write(number, 8, theirs)
        node.write(number, 4, ours)
        node.settle()
        node.check()
        for tier, most in ((node.core.pool.dram, 16), (node.core.pool.ssd, 10)):
            assert node.call(lambda tier=tier: tier.group_bytes[1]) <= most * SLOT_BYTES
    assert node.call(lambda: node.core.pool.dram.group_bytes[1]) >= 12 * SLOT_BYTES
    assert node.call(lambda: node.core.pool.ssd.group_bytes[1]) > 6 * SLOT_BYTES
    kept = sum(node.read(node.keys(number, 4, ours), cache=ours).chunks for number in range(20))
    assert kept == 80, "its own evictions were of its own chunks"
    keys = node.keys(900, 24, theirs)
    host = node.client.host(1.0)
    assert host is not None
    outcomes = theirs.write(keys, pages_of(keys)).outcomes
    assert set(outcomes[:16]) == {Outcome.COMMITTED}
    assert set(outcomes[16:]) == {Outcome.REFUSED_QUOTA}
    assert node.stats()["reserve_refused_quota"] == 8
    node.check()
    node.close()


# --- D08 -----------------------------------------------------------------------------------------------------


def run_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, admission: str) -> tuple[int, int]:
    """(bytes written to the SSD, hit tokens) of 800 requests: four of five unique, the rest of ten repeated ones.

    The DRAM holds a tenth of what is stored.
    """
    folder = tmp_path / admission
    folder.mkdir()
    node = TierNode(folder, monkeypatch, dram_bytes=1 << 20, ssd_bytes=32 << 20, ssd_admission=admission)
    rng, hits = random.Random(8), 0
    for number in range(800):
        keys = node.keys(rng.randrange(10) if rng.random() < 0.2 else 100 + number, 2)
        result = node.read(keys)
        hits += result.tokens
        if result.chunks < 2:
            node.cache.write(keys, pages_of(keys))
        if number % 8 == 0:
            node.client.flush_touches()
            node.settle()
            node.check()
    node.settle()
    written = node.stats()["ssd_write_bytes"]
    node.close()
    return written, hits


@pytest.mark.slow
def test_d08_second_touch_wears_the_ssd_less_and_hits_as_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    always, hits = run_trace(tmp_path, monkeypatch, "always")
    less, hits_of_less = run_trace(tmp_path, monkeypatch, "second_touch")
    assert always > 1200 * SLOT_BYTES and hits > 3000
    assert less <= 0.3 * always
    assert hits_of_less >= 0.95 * hits
