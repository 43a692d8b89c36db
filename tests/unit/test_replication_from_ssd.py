"""What the source has on its SSD only moves to another node as well."""

from __future__ import annotations

from pathlib import Path

from kvstore.client import connect
from tests.unit.client.pages import LAYOUT, namespace, pages_of, prompt
from tests.unit.pulling_node import PullingNode

SPACE = namespace()


def test_chunks_on_the_ssd_are_pulled_and_drained(tmp_path: Path) -> None:
    source = PullingNode(tmp_path, "source", 1 << 20, ssd=f"{tmp_path}/file:16MiB")
    target = PullingNode(tmp_path, "target", 4 << 20)
    try:
        chains = []
        with connect(source.info.socket_path) as client:
            cache = client.bind(SPACE)
            for number in range(4):
                keys = cache.keys(prompt(number, 30 * LAYOUT.chunk_tokens))
                assert cache.write(keys, pages_of(keys)).stored == len(keys)
                assert cache.persist(keys) == (len(keys), "")
                chains.append(keys)
        first = [source.core.pool.forest.chunks[key] for key in chains[0]]
        assert source.node.call(lambda: all(chunk.ssd and not chunk.copies for chunk in first))
        done = target.replicate(chains[0], source.info, SPACE).result(20)
        assert (done.held_chunks, done.pulled_chunks, done.reason) == (30, 30, "")
        last = source.drain(target)[-1]
        assert (last.chunks, last.moved_chunks, last.failed_chunks) == (120, 120, 0)
        assert source.settled() and target.settled()
    finally:
        target.end()
        source.end()
