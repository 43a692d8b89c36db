"""An engine goes on, with the right answers, whatever happens to the pool or to a request."""

from __future__ import annotations

from collections.abc import Callable

import engines
import pytest
from engines import CHUNK_TOKENS, Cold, Node, Workplace, connector, covered, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]
PROMPTS = [prompt(seed) for seed in range(40, 46)]
MORE = [prompt(seed) for seed in range(46, 49)]
FAULTS: dict[str, Callable[[Node], None]] = {"killed": Node.kill, "stopped": Node.stop}


@pytest.mark.parametrize("load", ["sync", "async", "layerwise"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_pool_that_is_gone_in_the_middle(workplace: Workplace, cold: Cold, fault: str, load: str) -> None:
    """Some of the requests were loaded when it happens, others wait; then it comes back."""
    node = workplace.node()
    engine = workplace.engine(kv_transfer_config=connector(node, load), max_num_seqs=2)
    engine.generate(PROMPTS)
    engine.forget()
    engine.generate_and_hold([*PROMPTS, *MORE], steps=4)
    FAULTS[fault](node)
    struck = engine.go_on()
    assert struck.ids == cold([*PROMPTS, *MORE])
    assert struck.external_hits >= covered(300)
    engine.forget()
    assert engine.generate(PROMPTS).ids == cold(PROMPTS)
    if fault == "stopped":
        node.go_on()
    else:
        node.restart()
    engines.until_hits(engine, PROMPTS[0], covered(300))
    engine.forget()
    after = engine.generate(PROMPTS)
    assert after.ids == cold(PROMPTS)


def test_a_pool_that_restarts_in_the_middle(workplace: Workplace, cold: Cold) -> None:
    node = workplace.node()
    engine = workplace.engine(kv_transfer_config=connector(node), max_num_seqs=2)
    engine.generate(PROMPTS)
    engine.forget()
    engine.generate_and_hold([*PROMPTS, *MORE], steps=4)
    node.kill()
    node.restart()
    struck = engine.go_on()
    assert struck.ids == cold([*PROMPTS, *MORE])
    assert covered(300) <= struck.external_hits < len(PROMPTS) * covered(300)


@pytest.mark.parametrize("load", ["sync", "async"])
def test_preempted_requests_end_right(workplace: Workplace, cold: Cold, load: str) -> None:
    """The KV cache holds little more than one of them at full length."""
    node = workplace.node()
    engine = workplace.engine(kv_transfer_config=connector(node, load), num_gpu_blocks_override=34)
    first = engine.generate(PROMPTS[:3], max_tokens=120)
    engine.forget()
    second = engine.generate(PROMPTS[:3], max_tokens=120)
    assert first.counters[engines.PREEMPTIONS] > 0 and second.counters[engines.PREEMPTIONS] > 0
    assert first.ids == second.ids == cold(PROMPTS[:3], max_tokens=120)
    assert second.external_hits >= 3 * covered(300)


@pytest.mark.parametrize("load", ["sync", "async"])
def test_an_aborted_request_leaves_the_others_alone(workplace: Workplace, cold: Cold, load: str) -> None:
    node = workplace.node()
    engine = workplace.engine(kv_transfer_config=connector(node, load))
    for _ in range(2):
        engine.generate(PROMPTS[:3], abort_after=1)
        engine.forget()
    batch = engine.generate(PROMPTS[:3])
    assert batch.ids == cold(PROMPTS[:3])
    assert batch.cached_tokens[1:] == [covered(300)] * 2


@pytest.mark.parametrize("load", ["sync", "async"])
def test_prompts_around_whole_chunks(workplace: Workplace, cold: Cold, load: str) -> None:
    """One token less than whole chunks, as many, one more: at the first and at the fourth chunk."""
    lengths = [63, 64, 65, 255, 256, 257]
    prompts = [prompt(50 + length, length) for length in lengths]
    engine = workplace.engine(kv_transfer_config=connector(workplace.node(), load, save_decode=False))
    first = engine.generate(prompts)
    engine.forget()
    second = engine.generate(prompts)
    assert first.ids == second.ids == cold(prompts)
    assert second.external_hits == sum(second.cached_tokens)
    whole = [length // CHUNK_TOKENS * CHUNK_TOKENS for length in lengths]
    assert second.cached_tokens == (whole if load == "async" else [covered(length) for length in lengths])
