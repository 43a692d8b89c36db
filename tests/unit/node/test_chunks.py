"""The forest alone: parents, orphans, coverage."""

from __future__ import annotations

import random

import pytest

from kvstore.model.layout import Geometry, Rectangle
from kvstore.node.chunks import Chunk, Copy, Forest, KnownNamespace
from tests.unit.node.small_node import SMALL, keys_of, namespace

WHOLE, HALVES = Geometry.whole(SMALL), Geometry.parallel(SMALL, tp=2)


@pytest.fixture
def space() -> KnownNamespace:
    known = KnownNamespace(namespace(), 1)
    known.add_geometry(WHOLE, [0])
    known.add_geometry(HALVES, [0, 1])
    return known


def chunk_of(space: KnownNamespace, key: bytes, parent: bytes, *shards: int) -> Chunk:
    chunk = Chunk(key, parent, space, 4, None, None, 0.0)
    for shard in shards or (WHOLE.shard(0),):
        chunk.copies[shard] = Copy(0, 2, 0, 4096, 7)
    return chunk


def covered(*chunks: Chunk) -> list[bytes]:
    return [chunk.key for chunk in chunks if chunk.covered_here]


def test_children_arrive_before_their_parent(space: KnownNamespace) -> None:
    forest, keys = Forest(), list(keys_of(space.namespace, 1, 3))
    tail = chunk_of(space, keys[2], keys[1])
    head = chunk_of(space, keys[0], space.namespace.id)
    for chunk in (tail, head):
        forest.add(chunk)
        forest.check()
    assert list(forest.orphan_heads()) == [tail]
    middle = chunk_of(space, keys[1], keys[0])
    forest.add(middle)
    forest.check()
    assert not forest.orphans
    assert forest.subtree(head) == [tail, middle, head], "children before parents"
    forest.remove(middle)
    forest.check()
    assert tail.is_orphan and not list(head.children())


def test_coverage_is_judged_by_one_geometry_at_a_time(space: KnownNamespace) -> None:
    left, right = HALVES.rectangles
    half = chunk_of(space, b"k" * 16, space.namespace.id, HALVES.shard(0))
    assert half.covering(left) == (HALVES.shard(0),)
    assert half.covering(right) is None and half.covering(SMALL.whole) is None
    assert half.key not in covered(half)
    half.copies[HALVES.shard(1)] = Copy(1, 4, 1, 4096, 7)
    assert half.covering(SMALL.whole) == (HALVES.shard(0), HALVES.shard(1))
    assert half.key in covered(half)
    whole = chunk_of(space, b"w" * 16, space.namespace.id)
    assert whole.covering(right) == (WHOLE.shard(0),), "a half can be read out of a whole"


def test_a_rectangle_beyond_the_geometries_is_never_covered(space: KnownNamespace) -> None:
    chunk = chunk_of(space, b"k" * 16, space.namespace.id)
    assert chunk.covering(Rectangle(0, 2, 0, 3)) is None


def test_random_trees_keep_their_links(space: KnownNamespace) -> None:
    rng, forest = random.Random(2), Forest()
    names = [bytes([n]) * 16 for n in range(1, 40)]
    parents = {name: rng.choice([space.namespace.id, *names[:place]]) for place, name in enumerate(names)}
    for _ in range(3000):
        name = rng.choice(names)
        known = forest.get(name)
        if known is None:
            forest.add(chunk_of(space, name, parents[name]))
        else:
            forest.remove(known)
        forest.check()
    orphans = {key for keys in forest.orphans.values() for key in keys}
    roots = {space.namespace.id}
    assert orphans == {k for k in forest.chunks if parents[k] not in forest.chunks and parents[k] not in roots}


def test_the_check_notices_a_lost_sibling(space: KnownNamespace) -> None:
    forest, keys = Forest(), list(keys_of(space.namespace, 1, 2))
    head, tail = chunk_of(space, keys[0], space.namespace.id), chunk_of(space, keys[1], keys[0])
    forest.add(head)
    forest.add(tail)
    head.first_child = None
    with pytest.raises(AssertionError):
        forest.check()
