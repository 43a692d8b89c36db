"""All ranks of a writing group against one node, each with a session of its own; then a fresh group reads."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from kvstore.client import Cache, Client, PendingWrite, connect
from kvstore.client.buffers import ChunkArray
from kvstore.model.layout import Attention, Dtype, PageLayout, Rectangle
from kvstore.model.parallel import Rank, Share, share_of
from kvstore.model.prefix import Keys
from kvstore.model.values import Outcome
from tests.chaos.node_thread import NodeThread
from tests.unit.client.pages import namespace, pages_of, poisoned, prompt

MLA = PageLayout(4, 1, 16, Dtype.BF16, 8, 2, Attention.MLA)
GQA = PageLayout(4, 2, 8, Dtype.BF16, 8, 2)
CHUNKS = 5


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeThread]:
    node = NodeThread(tmp_path, node_id="own")
    yield node
    node.stop()


@pytest.fixture
def clients(node: NodeThread) -> Iterator[list[Client]]:
    with ExitStack() as stack:
        yield [stack.enter_context(connect(node.info.control_address)) for _ in range(4)]


def group(tp: int, cp: int) -> list[Rank]:
    places = itertools.product(range(cp), range(tp))
    return [Rank(tp_rank=tp_rank, tp=tp, cp_rank=cp_rank, cp=cp) for cp_rank, tp_rank in places]


def bound(client: Client, layout: PageLayout, share: Share, rectangle: Rectangle) -> Cache:
    number = share.geometry.rectangles.index(rectangle)
    return client.bind(namespace(layout=layout), geometry=share.geometry, rank=number)


def source_of(keys: Keys, layout: PageLayout, rectangle: Rectangle) -> ChunkArray:
    layers, heads = (rectangle.layer_start, rectangle.layer_stop), (rectangle.head_start, rectangle.head_stop)
    return ChunkArray(np.ascontiguousarray(pages_of(keys, layout)[:, slice(*layers), :, slice(*heads)]), rectangle)


def begin(client: Client, layout: PageLayout, share: Share) -> PendingWrite | None:
    """Reserve what this rank writes, and copy it; None if it writes nothing."""
    for number in share.written:
        rectangle = share.geometry.rectangles[number]
        cache = bound(client, layout, share, rectangle)
        keys = cache.keys(prompt(1, CHUNKS * layout.chunk_tokens))
        pending = cache.begin_write(keys, chunks=share.written_chunks(keys.first_index, len(keys)))
        pending.put_layers(rectangle.layer_start, rectangle.layer_stop, source_of(keys, layout, rectangle))
        return pending
    return None


def read_by(node: NodeThread, layout: PageLayout, rank: Rank, transport: str = "auto") -> int:
    """Chunks that a fresh rank of any group reads, all of them right."""
    share = share_of(layout, rank)
    with connect(node.info.control_address, transport=transport) as client:
        cache = bound(client, layout, share, share.held)
        keys = cache.keys(prompt(1, CHUNKS * layout.chunk_tokens))
        target = poisoned(cache, CHUNKS)
        done = cache.read(keys, target).chunks
        held = slice(share.held.head_start, share.held.head_stop)
        assert np.array_equal(target[:done], pages_of(keys, layout)[:done, :, :, held])
        return done


def commits(node: NodeThread) -> int:
    def look() -> int:
        node.core.check()
        return node.core.stats().get("commits", 0)

    return node.call(look)


def test_a12_one_copy_of_latent_pages_and_every_rank_finds_it(node: NodeThread, clients: list[Client]) -> None:
    """TP 4: one rank of the four stores; offered by all of them, it is still one copy."""
    ranks = group(tp=4, cp=1)
    for client, rank in zip(clients, ranks, strict=True):
        pending = begin(client, MLA, share_of(MLA, rank))
        if pending is not None:
            assert pending.commit().stored == CHUNKS
    assert commits(node) == CHUNKS
    for client, rank in zip(clients, ranks, strict=True):
        share = share_of(MLA, rank)
        cache = bound(client, MLA, share, share.held)
        keys = cache.keys(prompt(1, CHUNKS * MLA.chunk_tokens))
        assert cache.write(keys, source_of(keys, MLA, share.held)).outcomes == (Outcome.PRESENT,) * CHUNKS
    assert commits(node) == CHUNKS
    assert [read_by(node, MLA, rank) for rank in ranks] == [CHUNKS] * 4


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("layout", "shards"), [(MLA, 1), (GQA, 2)])
def test_a12_context_parallel_ranks_make_a_full_hit_in_any_order(
    node: NodeThread, clients: list[Client], layout: PageLayout, shards: int, seed: int
) -> None:
    """CP 2 x TP 2: each context rank stores its chunks, whoever comes first; all ranks of a fresh group hit fully."""
    ranks, rng = group(tp=2, cp=2), random.Random(seed)
    pairs = list(zip(clients, ranks, strict=True))
    rng.shuffle(pairs)
    pending = [write for client, rank in pairs if (write := begin(client, layout, share_of(layout, rank))) is not None]
    assert len(pending) == 2 * shards
    rng.shuffle(pending)
    for write in pending:
        write.commit()
    assert commits(node) == CHUNKS * shards
    assert [read_by(node, layout, rank) for rank in ranks] == [CHUNKS] * 4
    assert read_by(node, layout, Rank()) == CHUNKS, "a reader with another cut"
    assert read_by(node, layout, Rank(), transport="tcp") == CHUNKS, "from another host"


def test_a12_latent_pages_split_by_layers(node: NodeThread, clients: list[Client]) -> None:
    ranks = group(tp=4, cp=1)
    for client, rank in zip(clients, ranks, strict=True):
        pending = begin(client, MLA, share_of(MLA, rank, split_copies=True))
        assert pending is not None and pending.commit().stored == CHUNKS
    assert commits(node) == 4 * CHUNKS
    assert node.call(lambda: node.core.stats()["chunks"]) == CHUNKS
    assert [read_by(node, MLA, rank) for rank in ranks] == [CHUNKS] * 4


def test_only_one_context_rank_wrote(node: NodeThread, clients: list[Client]) -> None:
    """What is there is no prefix: a miss from the first chunk that is not."""
    first, second = (share_of(MLA, rank) for rank in group(tp=1, cp=2))
    write = begin(clients[0], MLA, second)
    assert write is not None
    left = Outcome.LEFT_TO_OTHERS
    result = write.commit()
    assert result.outcomes == (left, Outcome.COMMITTED, left, Outcome.COMMITTED, left) and result.visible == 0
    assert read_by(node, MLA, Rank()) == 0
    write = begin(clients[1], MLA, first)
    assert write is not None and write.commit().visible == CHUNKS
    assert read_by(node, MLA, Rank()) == CHUNKS


def test_a_writer_without_a_chunk_of_its_own_asks_for_nothing(node: NodeThread, clients: list[Client]) -> None:
    cache = clients[0].bind(namespace(layout=MLA))
    keys = cache.keys(prompt(1, MLA.chunk_tokens))
    with cache.begin_write(keys, chunks=()) as pending:
        assert pending.granted == ()
        assert pending.commit().outcomes == (Outcome.LEFT_TO_OTHERS,)
    assert commits(node) == 0
