"""A prefill and a decode server behind a proxy answer as one engine does, whatever their numbers of ranks."""

from __future__ import annotations

import engines
import pytest
from engines import Cold, Workplace, connector, prompt
from pd_proxy import PdProxy

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]
PROMPTS = [prompt(10), prompt(11, 256), prompt(12, 257)]


@pytest.mark.parametrize(("prefill_ranks", "decode_ranks"), [(1, 2), (2, 1)])
def test_two_servers_answer_as_one(workplace: Workplace, cold: Cold, prefill_ranks: int, decode_ranks: int) -> None:
    node = workplace.node()
    prefill = workplace.server(connector(node, "async"), tp=prefill_ranks, core=0)
    decode = workplace.server(connector(node, "async"), tp=decode_ranks, core=1)
    prefill.wait_ready()
    decode.wait_ready()
    with PdProxy(prefill.url, decode.url) as proxy:
        answers = [engines.complete(proxy.url, tokens) for tokens in PROMPTS]
    assert [answer["choices"][0]["token_ids"] for answer in answers] == cold(PROMPTS)
    assert all(proxy.handed_on)
    # The last token of each prompt, for the first answer; nothing of the tail behind the whole chunks.
    counted = f"prefill {prefill.pool_counters()}, decode {decode.pool_counters()}"
    assert decode.computed_tokens() <= len(PROMPTS), counted
