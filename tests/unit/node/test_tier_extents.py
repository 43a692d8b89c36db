"""An extent that changes its class, in an arena that one long prompt fills: each chunk is looked at once."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.model.layout import Geometry
from kvstore.model.values import Outcome
from kvstore.node.chunks import Chunk, Forest
from tests.unit.node.small_node import WIDE, SmallNode, keys_of, namespace


def test_clearing_an_extent_does_not_walk_a_chain_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    node = SmallNode(slots=512, entries=1024)
    keys = keys_of(namespace(), 1, 512)
    node.store(node.open(namespace()), keys)
    walked: list[int] = []
    subtree = Forest.subtree

    def counted(self: Forest, *arguments: Any) -> list[Chunk]:
        found = subtree(self, *arguments)
        walked.append(len(found))
        return found

    monkeypatch.setattr(Forest, "subtree", counted)
    other = namespace(WIDE, "r2")
    answer = node.reserve(node.open(other), keys_of(other, 2, 1), shard=Geometry.whole(WIDE).shard(0))
    assert answer.outcomes == [Outcome.GRANTED]
    assert 0 < sum(walked) <= len(keys)
    assert node.resident(keys) == 512 - 256  # an extent of this arena, 1 MiB
