"""What is loaded is really used: with its bytes zeroed an engine answers otherwise, or finds out and computes."""

from __future__ import annotations

import pytest
from engines import Cold, Workplace, connector, covered, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]
CHECKSUM_MISSES = "vllm:kvstore_load_misses:checksum"
PROMPTS = [prompt(20), prompt(21, 330)]


def test_zeroed_pages_change_the_answer_where_nothing_checks_them(workplace: Workplace, cold: Cold) -> None:
    node = workplace.node()
    engine = workplace.engine(kv_transfer_config=connector(node, checksums=False))
    assert engine.generate(PROMPTS).ids == cold(PROMPTS)
    node.zero_pages()
    engine.forget()
    loaded = engine.generate(PROMPTS)
    assert loaded.external_hits == covered(300) + covered(330)
    assert all(wrong != right for wrong, right in zip(loaded.ids, cold(PROMPTS), strict=True))


def test_zeroed_pages_of_the_own_host_are_a_miss_where_they_are_verified(workplace: Workplace, cold: Cold) -> None:
    node = workplace.node()
    engine = workplace.engine(kv_transfer_config=connector(node, verify=True))
    assert engine.generate(PROMPTS).ids == cold(PROMPTS)
    engine.forget()
    sound = engine.generate(PROMPTS)
    assert (sound.ids, sound.external_hits) == (cold(PROMPTS), covered(300) + covered(330))
    assert CHECKSUM_MISSES not in sound.counters
    node.zero_pages()
    engine.forget()
    spoiled = engine.generate(PROMPTS)
    assert spoiled.ids == cold(PROMPTS)
    assert spoiled.counters[CHECKSUM_MISSES] > 0


@pytest.mark.parametrize("load", ["sync", "layerwise", "async"])
def test_zeroed_pages_of_another_host_are_a_miss(workplace: Workplace, cold: Cold, load: str) -> None:
    metadata = workplace.metadata()
    there, here = workplace.node(metadata), workplace.node(metadata)
    saving = workplace.engine(kv_transfer_config=connector(there))
    saving.generate(PROMPTS)
    saving.quit()
    loading = workplace.engine(kv_transfer_config=connector(here, load))
    sound = loading.generate(PROMPTS[:1])
    assert sound.external_hits == covered(300)
    assert CHECKSUM_MISSES not in sound.counters
    there.zero_pages()
    spoiled = loading.generate(PROMPTS[1:])
    assert spoiled.ids == cold(PROMPTS)[1:]
    # The engine counts as a hit what it was promised; the connector says that it did not come.
    assert spoiled.counters[CHECKSUM_MISSES] > 0
