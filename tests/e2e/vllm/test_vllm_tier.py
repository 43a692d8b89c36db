"""The pool behind vLLM's own offloading: what one process offloads, another loads, whatever its number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import engines
import pytest
from engines import Cold, Node, Prompt, Workplace, prompt, tier

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]
PROMPTS = [prompt(0), prompt(1, 330)]
MORE = [prompt(2, 320)]
OFTEN = [prompt(seed) for seed in range(40, 46)]
ALL = [*PROMPTS, *MORE, *OFTEN]
WRITE_BYTES = "vllm:kv_offload_tiering_write_bytes"
FAILED_LOADS = "vllm:kv_offload_tiering_promotion_job_failures"
FAULTS: dict[str, Callable[[Node], None]] = {"killed": Node.kill, "stopped": Node.stop}


def known(cold: Cold, prompts: Sequence[Prompt]) -> list[list[int]]:
    """What an engine without a pool answers; one of them is asked for all prompts of this file."""
    answers = cold(ALL)
    return [answers[ALL.index(tokens)] for tokens in prompts]


def test_ranks_read_what_other_numbers_of_ranks_stored(workplace: Workplace, cold: Cold) -> None:
    """One rank stores, two read that and store more, one reads all; then what was read was used."""
    node = workplace.node()
    one = workplace.engine(kv_transfer_config=tier(node))
    first = one.generate(PROMPTS)
    one.quit()
    assert "Failed to close" not in workplace.log(one)  # vLLM's mapping of its host memory
    two = workplace.engine(kv_transfer_config=tier(node), tensor_parallel_size=2)
    second = two.generate([*PROMPTS, *MORE])
    two.quit()
    again = workplace.engine(kv_transfer_config=tier(node))
    third = again.generate([*PROMPTS, *MORE])
    right = known(cold, [*PROMPTS, *MORE])
    assert (first.ids, second.ids, third.ids) == (right[:2], right, right)
    # Blocks are 32 tokens here and a whole prompt may come from elsewhere: vLLM computes its last token once more.
    assert [batch.cached_tokens for batch in (first, second, third)] == [[0, 0], [288, 320, 0], [288, 320, 320]]
    assert [batch.external_hits for batch in (first, second, third)] == [0, 288 + 320, 288 + 320 + 320]
    again.forget(offloaded=True)
    node.zero_pages()
    zeros = again.generate([*PROMPTS, *MORE])
    assert zeros.cached_tokens == third.cached_tokens
    assert all(answer != its for answer, its in zip(zeros.ids, right, strict=True))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_node_that_is_gone_in_the_middle(workplace: Workplace, cold: Cold, fault: str) -> None:
    """What was loaded is being used when it happens, and what is computed beside it cannot be stored; it comes back."""
    node = workplace.node()
    engine = workplace.engine(kv_transfer_config=tier(node, store_deadline_ms=1000), max_num_seqs=2)
    engine.generate(OFTEN)
    engine.forget(offloaded=True)
    engine.generate_and_hold([*OFTEN, *MORE], steps=6)
    FAULTS[fault](node)
    struck = engine.go_on()
    assert struck.ids == known(cold, [*OFTEN, *MORE])
    assert struck.external_hits == len(OFTEN) * 288
    engine.forget(offloaded=True)
    assert engine.generate([*OFTEN, *MORE]).ids == struck.ids
    if fault == "stopped":
        node.go_on()
    else:
        node.restart()
    engines.until_hits(engine, OFTEN[0], 288, offloaded=True)
    engine.forget(offloaded=True)
    assert engine.generate([*OFTEN, *MORE]).ids == struck.ids


def test_another_host_is_still_asked_after_many_prompts_that_nobody_has(workplace: Workplace) -> None:
    """vLLM asks for all chunks of a prompt at once, and not again for those behind the first that is missing."""
    metadata = workplace.metadata()
    there, here = workplace.node(metadata), workplace.node(metadata)
    saving = workplace.engine(kv_transfer_config=tier(there))
    saving.generate(PROMPTS)
    saving.quit()
    loading = workplace.engine(kv_transfer_config=tier(here))
    for seed in range(100, 140):
        loading.generate([prompt(seed, 1000)], max_tokens=1)
    assert loading.generate(PROMPTS).cached_tokens == [288, 320]


@pytest.mark.parametrize("fault", FAULTS)
def test_another_host_that_is_gone_while_it_is_read(workplace: Workplace, cold: Cold, fault: str) -> None:
    metadata = workplace.metadata()
    there, here = workplace.node(metadata), workplace.node(metadata)
    saving = workplace.engine(kv_transfer_config=tier(there))
    saving.generate(OFTEN)
    saving.quit()
    loading = workplace.engine(kv_transfer_config=tier(here, load_deadline_ms=1000, store_deadline_ms=1000))
    sound = loading.generate(OFTEN[:1])
    assert sound.external_hits == 288
    loading.generate_and_hold([*OFTEN[1:], *MORE], steps=1)
    FAULTS[fault](there)
    struck = loading.go_on()
    assert [*sound.ids, *struck.ids] == known(cold, [*OFTEN, *MORE])
    # Rows that had come before it happened are hits; vLLM is told of all others.
    assert struck.counters.get(FAILED_LOADS, 0) > 0 or struck.external_hits == len(OFTEN[1:]) * 288
    loading.forget(offloaded=True)
    again = loading.generate([*OFTEN, *MORE])
    assert again.ids == [*sound.ids, *struck.ids]


def test_hashes_that_can_be_forged_are_refused(workplace: Workplace, cold: Cold) -> None:
    node = workplace.node()
    engine = workplace.engine(kv_transfer_config=tier(node), prefix_caching_hash_algo="xxhash")
    batches = [engine.generate(PROMPTS)]
    engine.forget(offloaded=True)
    batches.append(engine.generate(PROMPTS))
    assert [batch.ids for batch in batches] == [known(cold, PROMPTS)] * 2
    assert [batch.external_hits for batch in batches] == [0, 0]
    assert not any(batch.counters.get(WRITE_BYTES) for batch in batches)
    assert workplace.log(engine).count("needs --prefix-caching-hash-algo sha256") == 1
