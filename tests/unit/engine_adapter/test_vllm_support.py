"""What of a vLLM configuration is refused, and what names the model beside its files; without vLLM."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from engine_adapter.vllm.options import Mode
from engine_adapter.vllm.support import changes_of, check_supported
from kvstore.errors import ConfigurationError


def model(**changes: Any) -> SimpleNamespace:
    usual = {
        "hf_overrides": {},
        "hf_config_path": None,
        "quantization_config": None,
        "model_class_overrides": {},
        "hf_text_config": SimpleNamespace(rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
        "max_model_len": 4096,
        "runner_type": "generate",
        "is_prefix_caching_supported": True,
    }
    return SimpleNamespace(**{**usual, **changes})


def config(**changes: Any) -> SimpleNamespace:
    usual = {"max_concurrent_batches": 1, "speculative_config": None, "model_config": model()}
    return SimpleNamespace(**{**usual, **changes})


def test_a06_what_a_user_changes_of_a_model_names_it() -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"hf_overrides": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}},
        {"hf_overrides": {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}},
        {"quantization_config": {"linear": "fp8"}},
        {"model_class_overrides": {"LlamaForCausalLM": "mine:Llama"}},
    ]
    texts = [changes_of(model(**each)) for each in changes]
    assert texts[0] == [], "an engine as it comes has the name that it always had"
    assert len({tuple(each) for each in texts}) == len(changes)
    assert changes_of(model(hf_overrides={"a": 1, "b": 2})) == changes_of(model(hf_overrides={"b": 2, "a": 1}))


def test_a06_long_factors_of_positions_depend_on_the_longest_prompt() -> None:
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 4096}
    texts = [
        changes_of(model(hf_text_config=SimpleNamespace(rope_parameters=rope), max_model_len=longest))
        for longest in (2048, 4096, 4097, 131072)
    ]
    assert texts[0] == texts[1] != texts[2] == texts[3]


@pytest.mark.parametrize(
    "change", [{"hf_overrides": lambda _: _}, {"hf_config_path": "/models/other"}], ids=["function", "path"]
)
def test_a06_a_change_without_a_name_needs_one(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="give `revision`"):
        changes_of(model(**change))


def drafting(method: str, *, has_kv: bool) -> SimpleNamespace:
    uses: Callable[[], bool] = lambda: has_kv  # noqa: E731
    return SimpleNamespace(method=method, uses_draft_kv_cache=uses)


@pytest.mark.parametrize(
    ("load", "changes", "says"),
    [
        (Mode.SYNC, {"max_concurrent_batches": 2}, "load is sync.*set load to async.*--no-async-scheduling"),
        (Mode.LAYERWISE, {"max_concurrent_batches": 2}, "load is layerwise"),
        (Mode.ASYNC, {"speculative_config": drafting("eagle3", has_kv=True)}, "by eagle3 .*ngram"),
        (Mode.ASYNC, {"model_config": model(runner_type="pooling", is_prefix_caching_supported=False)}, "pools over"),
    ],
)
def test_what_would_answer_wrongly_is_refused_by_name(load: Mode, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        check_supported(config(**changes), load)


@pytest.mark.parametrize(
    ("load", "changes"),
    [
        (Mode.ASYNC, {"max_concurrent_batches": 2}),
        (Mode.SYNC, {}),
        (Mode.LAYERWISE, {}),
        (Mode.ASYNC, {"speculative_config": drafting("ngram", has_kv=False)}),
        (Mode.ASYNC, {"model_config": model(runner_type="pooling")}),
    ],
)
def test_what_is_right_is_taken(load: Mode, changes: dict[str, Any]) -> None:
    check_supported(config(**changes), load)
