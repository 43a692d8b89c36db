"""One process saves, another loads: the same tokens as a cold engine, and exactly the hits that were stored."""

from __future__ import annotations

import engines
import pytest
from conftest import Cold
from engines import Workplace, connector, prompt, whole_chunks

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]
PROMPTS = [prompt(0), prompt(1, 330)]


def test_the_second_process_answers_as_a_cold_engine(workplace: Workplace, cold: Cold) -> None:
    node = workplace.node()
    engine = workplace.engine(block_size=64, kv_transfer_config=connector(node))
    first = engine.generate(PROMPTS)
    engine.quit()
    second = workplace.engine(block_size=64, kv_transfer_config=connector(node)).generate(PROMPTS)
    assert first.ids == cold(PROMPTS, block_size=64)
    assert second.ids == first.ids
    assert first.cached_tokens == [0, 0]
    assert second.cached_tokens == [whole_chunks(300), whole_chunks(330)]
    assert second.external_hits == whole_chunks(300) + whole_chunks(330)
    assert second.local_hits == 0
