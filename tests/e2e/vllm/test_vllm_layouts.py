"""What one engine stored is loaded by one that cuts its heads otherwise, and by models of other kinds."""

from __future__ import annotations

import pytest
from engines import Cold, Workplace, connector, covered, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]
PROMPTS = [prompt(0), prompt(1, 330)]


@pytest.mark.parametrize(("writers", "readers"), [(1, 2), (2, 1)])
def test_ranks_load_what_other_numbers_of_ranks_stored(
    workplace: Workplace, cold: Cold, writers: int, readers: int
) -> None:
    node = workplace.node()
    saving = workplace.engine(tensor_parallel_size=writers, kv_transfer_config=connector(node))
    first = saving.generate(PROMPTS)
    saving.quit()
    second = workplace.engine(tensor_parallel_size=readers, kv_transfer_config=connector(node)).generate(PROMPTS)
    assert second.ids == first.ids == cold(PROMPTS)
    assert second.cached_tokens == [covered(300), covered(330)]
    assert (second.external_hits, second.local_hits) == (covered(300) + covered(330), 0)


def test_a_sliding_window_loads_its_window_only(workplace: Workplace, cold: Cold) -> None:
    node = workplace.node()
    saving = workplace.engine("hybrid", kv_transfer_config=connector(node))
    first = saving.generate(PROMPTS)
    saving.quit()
    second = workplace.engine("hybrid", kv_transfer_config=connector(node)).generate(PROMPTS)
    assert second.ids == first.ids == cold(PROMPTS, "hybrid")
    assert second.cached_tokens == [covered(300), covered(330)]


def test_latent_pages_are_the_same_bytes(workplace: Workplace) -> None:
    """By bytes: with MLA this engine computes other answers from cached pages than at once, whoever caches."""
    node = workplace.node()
    saving = workplace.engine("mla", block_size=16, kv_transfer_config=connector(node))
    saving.generate([PROMPTS[0][:256]], max_tokens=1)
    computed = saving.page_digests()
    saving.quit()
    loading = workplace.engine("mla", block_size=16, kv_transfer_config=connector(node))
    assert loading.generate(PROMPTS[:1], max_tokens=1).external_hits == 256
    assert len(computed) == 256 // 16
    assert computed <= loading.page_digests()
