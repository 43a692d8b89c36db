"""One process saves, another loads: the same tokens as a cold engine, and exactly the hits that were stored."""

from __future__ import annotations

from typing import Any

import pytest
from engines import Batch, Cold, Workplace, connector, covered, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]
PROMPTS = [prompt(0), prompt(1, 330)]


def saved_then_loaded(
    workplace: Workplace, load: str = "sync", store: str = "async", **engine: Any
) -> tuple[Batch, Batch]:
    """What the process that saves answers, and then the one that loads."""
    node = workplace.node()
    saving = workplace.engine(kv_transfer_config=connector(node, store=store), **engine)
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


@pytest.mark.parametrize(("load", "store"), [("async", "sync"), ("layerwise", "layerwise")])
def test_all_ways_of_saving_and_loading_give_the_same(workplace: Workplace, cold: Cold, load: str, store: str) -> None:
    first, second = saved_then_loaded(workplace, load, store, block_size=32)
    assert first.ids == second.ids == cold(PROMPTS, block_size=32)
    assert (first.counters.get("vllm:kvstore_stores_by_layer", 0) > 0) == (store == "layerwise")
    assert second.cached_tokens == [covered(300), covered(330)]
    assert second.external_hits == covered(300) + covered(330)


def test_bf16_answers_as_an_engine_with_as_much_in_its_own_cache(workplace: Workplace) -> None:
    """In bf16 what is computed from cached pages differs from what is computed at once, pool or no pool."""
    engine: dict[str, Any] = {"dtype": "bfloat16", "block_size": 64}
    node = workplace.node()
    saving = workplace.engine(kv_transfer_config=connector(node), **engine)
    saving.generate([tokens[: covered(len(tokens))] for tokens in PROMPTS], max_tokens=1)
    computed = saving.page_digests()
    own = saving.generate(PROMPTS)
    saving.quit()
    loading = workplace.engine(kv_transfer_config=connector(node), **engine)
    loaded = loading.generate(PROMPTS)
    assert own.local_hits == loaded.external_hits == covered(300) + covered(330)
    assert loaded.cached_tokens == own.cached_tokens
    assert loaded.ids == own.ids
    # A block is a chunk here, and each that was computed was loaded, byte for byte.
    assert len(computed) == loaded.external_hits // 64
    assert computed <= loading.page_digests()


@pytest.mark.parametrize("save_decode", [True, False])
def test_the_next_turn_finds_the_answer_too(workplace: Workplace, cold: Cold, save_decode: bool) -> None:
    engine = workplace.engine(kv_transfer_config=connector(workplace.node(), save_decode=save_decode))
    (answer,) = engine.generate(PROMPTS[:1], max_tokens=100).ids
    next_turn = prompt(2, 420, prefix=[*PROMPTS[0], *answer])
    engine.forget()
    batch = engine.generate([next_turn])
    assert batch.ids == cold([next_turn])
    # The KV of an answer's last token is never computed.
    assert batch.external_hits == covered(399 if save_decode else 300)
