"""One process saves, another loads: the same tokens as a cold engine, and exactly the hits that were stored."""

from __future__ import annotations

from typing import Any

import pytest
from engines import Batch, Cold, Workplace, connector, covered, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]
PROMPTS = [prompt(0), prompt(1, 330)]


def saved_then_loaded(workplace: Workplace, load: str = "sync", **engine: Any) -> tuple[Batch, Batch]:
    """What the process that saves answers, and then the one that loads."""
    node = workplace.node()
    saving = workplace.engine(kv_transfer_config=connector(node), **engine)
    first = saving.generate(PROMPTS)
    saving.quit()
    return first, workplace.engine(kv_transfer_config=connector(node, load), **engine).generate(PROMPTS)


@pytest.mark.parametrize("block_tokens", [32, 64, 128])
def test_the_second_process_answers_as_a_cold_engine(workplace: Workplace, cold: Cold, block_tokens: int) -> None:
    first, second = saved_then_loaded(workplace, block_size=block_tokens)
    hits = [covered(len(tokens), max(64, block_tokens)) for tokens in PROMPTS]
    assert (first.cached_tokens, first.external_hits) == ([0, 0], 0)
    assert second.ids == first.ids == cold(PROMPTS, block_size=block_tokens)
    assert second.cached_tokens == hits
    assert (second.external_hits, second.local_hits) == (sum(hits), 0)


@pytest.mark.parametrize("load", ["async", "layerwise"])
def test_all_ways_of_loading_give_the_same(workplace: Workplace, cold: Cold, load: str) -> None:
    _, second = saved_then_loaded(workplace, load, block_size=32)
    assert second.ids == cold(PROMPTS, block_size=32)
    assert second.cached_tokens == [covered(300), covered(330)]
    assert second.external_hits == covered(300) + covered(330)


def test_bf16_answers_as_an_engine_with_as_much_in_its_own_cache(workplace: Workplace) -> None:
    """In bf16 what is computed from cached pages differs from what is computed at once, pool or no pool."""
    engine: dict[str, Any] = {"dtype": "bfloat16", "block_size": 64}
    node = workplace.node()
    saving = workplace.engine(kv_transfer_config=connector(node), **engine)
    saving.generate(PROMPTS)
    own = saving.generate(PROMPTS)
    computed = saving.page_digests()
    saving.quit()
    loading = workplace.engine(kv_transfer_config=connector(node), **engine)
    loaded = loading.generate(PROMPTS)
    assert own.local_hits == loaded.external_hits == covered(300) + covered(330)
    assert loaded.cached_tokens == own.cached_tokens
    assert loaded.ids == own.ids
    # A block is a chunk here, and every one that was loaded is, byte for byte, one that was computed.
    assert len(loading.page_digests() & computed) >= loaded.external_hits // 64
