"""Who shares: the same tokens under the same weights, salt and adapter, whatever the engine hashes them with."""

from __future__ import annotations

import pytest
from engines import Cold, Workplace, connector, covered, model, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]
TOKENS = prompt(30)


def test_another_salt_hits_nothing(workplace: Workplace, cold: Cold) -> None:
    engine = workplace.engine(kv_transfer_config=connector(workplace.node()))
    hits = []
    for salt in ("a", "b", None, "a", None):
        engine.forget()
        batch = engine.generate([TOKENS], salts=[salt])
        hits.append(batch.external_hits)
        assert batch.ids == cold([TOKENS])
    assert hits == [0, 0, 0, covered(300), covered(300)]


def test_another_adapter_hits_nothing(workplace: Workplace) -> None:
    """The same adapter under another name is the same bytes; its name says nothing."""
    engine = workplace.engine(kv_transfer_config=connector(workplace.node()), enable_lora=True, max_lora_rank=8)
    first = ["a", 1, model("lora-a")]
    other = ["b", 2, model("lora-b")]
    batches = []
    for adapter in (first, other, None, first, other):
        engine.forget()
        batches.append(engine.generate([TOKENS], adapters=[adapter]))
    assert [batch.external_hits for batch in batches] == [0, 0, 0, covered(300), covered(300)]
    assert batches[3].ids == batches[0].ids != batches[2].ids
    assert batches[4].ids == batches[1].ids != batches[0].ids


def test_other_weights_under_the_same_name_hit_nothing(workplace: Workplace, cold: Cold) -> None:
    node = workplace.node()
    saving = workplace.engine(kv_transfer_config=connector(node, model="tiny"))
    saving.generate([TOKENS])
    saving.quit()
    other = workplace.engine("llama-other", kv_transfer_config=connector(node, model="tiny")).generate([TOKENS])
    assert other.external_hits == 0
    assert other.ids == cold([TOKENS], "llama-other") != cold([TOKENS])


def test_a06_other_positions_by_an_override_hit_nothing(workplace: Workplace) -> None:
    """The files are the same: what is changed of them at the start of an engine is part of the weights' name."""
    node = workplace.node()
    saving = workplace.engine(kv_transfer_config=connector(node))
    saved = saving.generate([TOKENS])
    saving.quit()
    stretched = {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}
    for hits in (0, covered(300)):
        other = workplace.engine(kv_transfer_config=connector(node), hf_overrides=stretched)
        batch = other.generate([TOKENS])
        assert batch.external_hits == hits
        assert batch.ids != saved.ids
        other.quit()


def test_another_revision_that_was_given_hits_nothing(workplace: Workplace) -> None:
    node = workplace.node()
    saving = workplace.engine(kv_transfer_config=connector(node, model="tiny", revision="one"))
    saving.generate([TOKENS])
    saving.quit()
    other = workplace.engine(kv_transfer_config=connector(node, model="tiny", revision="two")).generate([TOKENS])
    assert other.external_hits == 0


def test_seeds_and_algorithms_of_the_engines_hashes_do_not_matter(workplace: Workplace, cold: Cold) -> None:
    node = workplace.node()
    saving = workplace.engine(kv_transfer_config=connector(node), prefix_caching_hash_algo="xxhash")
    saving.generate([TOKENS])
    saving.quit()
    for seed, algorithm in (("1", "xxhash"), ("2", "sha256")):
        loading = workplace.engine(
            variables={"PYTHONHASHSEED": seed}, kv_transfer_config=connector(node), prefix_caching_hash_algo=algorithm
        )
        loaded = loading.generate([TOKENS])
        assert loaded.external_hits == covered(300)
        assert loaded.ids == cold([TOKENS])
