"""`Presence` against a naive model: random publishes and withdrawals over a small tree, in any order."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import KvStoreError
from kvstore.metadata.presence import Presence
from kvstore.model.layout import Dtype, Geometry, PageLayout, Rectangle
from kvstore.model.values import Tier

LAYOUT = PageLayout(layers=2, kv_heads=2, head_dim=8, dtype=Dtype.BF16, page_tokens=16, pages_per_chunk=1)
GEOMETRIES = [Geometry.whole(LAYOUT), Geometry.parallel(LAYOUT, tp=2), Geometry.parallel(LAYOUT, pp=2)]
UNKNOWN = Geometry.parallel(LAYOUT, tp=2, pp=2)
SHARDS = [g.shard(number) for g in (*GEOMETRIES, UNKNOWN) for number in range(len(g.rectangles))]
RECTANGLES = [None, LAYOUT.whole, Rectangle(0, 1, 0, 2), Rectangle(1, 2, 1, 2), Rectangle(0, 3, 0, 1)]
ROOT = b"r" * 16
SLOWEST_LAST = [Tier.ENGINE_HBM, Tier.GPU, Tier.DRAM, Tier.SSD]


def key(path: tuple[int, ...]) -> bytes:
    """Key of a place in the tree: the digits of its branches; the empty path is the root."""
    return hashlib.blake2b(bytes(path), digest_size=16).digest() if path else ROOT


def blob(path: tuple[int, ...]) -> bytes:
    return b"".join(key(path[: n + 1]) for n in range(len(path)))


class Model:
    """What the presence should be, kept without any cleverness."""

    def __init__(self) -> None:
        self.held: dict[bytes, dict[int, Tier]] = {}

    def tier(self, at: bytes, rectangle: Rectangle | None) -> Tier | None:
        held = self.held.get(at, {})
        if rectangle is None:
            return max(held.values(), key=SLOWEST_LAST.index, default=None)
        choices = []
        for geometry in GEOMETRIES:
            cells = {(layer, head): None for layer in range(2) for head in range(2)}
            wanted = {
                (layer, head)
                for layer in range(rectangle.layer_start, rectangle.layer_stop)
                for head in range(rectangle.head_start, rectangle.head_stop)
            }
            needed = set()
            for number, one in enumerate(geometry.rectangles):
                for layer, head in cells:
                    if one.contains(Rectangle(layer, layer + 1, head, head + 1)) and (layer, head) in wanted:
                        needed.add(geometry.shard(number))
            if wanted <= cells.keys() and needed <= held.keys():
                choices.append(max((held[shard] for shard in needed), key=SLOWEST_LAST.index))
        return min(choices, key=SLOWEST_LAST.index, default=None)

    def run(self, path: tuple[int, ...], rectangle: Rectangle | None) -> tuple[int, Tier] | None:
        tiers = []
        for n in range(len(path)):
            tier = self.tier(key(path[: n + 1]), rectangle)
            if tier is None:
                break
            tiers.append(tier)
        return (len(tiers), max(tiers, key=SLOWEST_LAST.index)) if tiers else None


PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple)
STEPS = st.lists(
    st.tuples(st.sampled_from("pppw"), PATHS, st.sampled_from(SHARDS), st.sampled_from(list(Tier))), max_size=60
)


def apply(presence: Presence, model: Model, kind: str, path: tuple[int, ...], shard: int, tier: Tier) -> None:
    at = key(path)
    if kind == "p":
        presence.publish(at, key(path[:-1]), shard, tier)
        model.held.setdefault(at, {})[shard] = tier
    else:
        presence.withdraw(at, shard, tier)
        if model.held.get(at, {}).get(shard) == tier:
            del model.held[at][shard]
            if not model.held[at]:
                del model.held[at]


@given(STEPS, st.lists(PATHS, min_size=1, max_size=4), st.integers(0, 60))
def test_presence_equals_the_naive_model(
    steps: list[tuple[str, tuple[int, ...], int, Tier]], asked: list[tuple[int, ...]], geometries_at: int
) -> None:
    presence, model = Presence(ROOT), Model()
    for number, step in enumerate(steps):
        if number == geometries_at:
            for geometry in GEOMETRIES:
                presence.add_geometry(geometry)
        apply(presence, model, *step)
        presence.check()
    for geometry in GEOMETRIES:
        presence.add_geometry(geometry)
    for path in asked:
        for rectangle in RECTANGLES:
            assert presence.run(blob(path), rectangle) == model.run(path, rectangle)
    frozen = list(presence.frozen())
    assert {at: dict(shards) for at, _, shards in frozen} == model.held
    order = {at: n for n, (at, _, _) in enumerate(frozen)}
    assert all(order.get(parent, -1) < order[at] for at, parent, _ in frozen)


@given(st.integers(1, 200), st.integers(1, 200), st.sampled_from(RECTANGLES[:2]))
def test_galloping_finds_the_end_of_a_leaf_first_chain(held: int, asked: int, rectangle: Rectangle | None) -> None:
    presence, path = Presence(ROOT), tuple(0 for _ in range(200))
    presence.add_geometry(GEOMETRIES[0])
    for n in range(held):
        presence.publish(key(path[: n + 1]), key(path[:n]), GEOMETRIES[0].shard(0), Tier.DRAM)
    assert presence.run(blob(path[:asked]), rectangle) == (min(held, asked), Tier.DRAM)


def test_a_frozen_copy_does_not_follow_later_changes() -> None:
    presence = Presence(ROOT)
    shard = GEOMETRIES[0].shard(0)
    for n in range(3):
        presence.publish(key((0,) * (n + 1)), key((0,) * n), shard, Tier.DRAM)
    frozen = presence.frozen()
    for n in (0, 2, 1):
        presence.withdraw(key((0,) * (n + 1)), shard, Tier.DRAM)
    presence.publish(key((0, 0, 0)), ROOT, shard, Tier.SSD)
    presence.check()
    expected = [(key((0,) * (n + 1)), ((shard, Tier.DRAM),)) for n in range(3)]
    assert [(at, shards) for at, _, shards in frozen] == expected


def test_a_forged_cycle_of_parents_ends() -> None:
    presence = Presence(ROOT)
    one, two = b"1" * 16, b"2" * 16
    presence.publish(one, two, 1 << 8, Tier.DRAM)
    presence.publish(two, one, 1 << 8, Tier.DRAM)
    presence.check()
    assert {at for at, _, _ in presence.frozen()} == {one, two}
    presence.withdraw(one, 1 << 8, Tier.DRAM)
    presence.withdraw(two, 1 << 8, Tier.DRAM)
    presence.check()
    assert list(presence.frozen()) == []


def test_check_notices_a_wrong_counter() -> None:
    presence = Presence(ROOT)
    presence.publish(key((0,)), ROOT, 1 << 8, Tier.DRAM)
    presence.shard_count += 1
    with pytest.raises(KvStoreError, match="shards"):
        presence.check()
