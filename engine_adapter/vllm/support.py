"""What of a vLLM configuration is refused by name, and what of it changes the KV beside the weights' files.

Without vLLM, so that it can be tested everywhere.
"""

from __future__ import annotations

import json
from typing import Any

from engine_adapter.vllm.options import Mode
from kvstore.errors import ConfigurationError


def check_supported(config: Any, load: Mode) -> None:
    """ConfigurationError for what would give wrong answers; `config` is vLLM's."""
    if load is not Mode.ASYNC and config.max_concurrent_batches > 1:
        raise ConfigurationError(
            f"load is {load}: with steps that overlap (async scheduling, pipeline parallelism) vLLM answers with what "
            "the next step computed from a load that failed; set load to async, or start vLLM with "
            "--no-async-scheduling and one pipeline stage"
        )
    drafts = config.speculative_config
    if drafts is not None and drafts.uses_draft_kv_cache():
        raise ConfigurationError(
            f"speculative decoding by {drafts.method} keeps KV of a second model in the cache, which has no name here: "
            "not supported by this connector; ngram and suffix are"
        )
    model = config.model_config
    if model.runner_type == "pooling" and not model.is_prefix_caching_supported:
        raise ConfigurationError(
            "this model pools over all tokens of a prompt, and would miss loaded ones: not supported by this connector"
        )


def changes_of(model: Any) -> list[str]:
    """What a user changed of a model (vLLM's ModelConfig), as texts that are the same in all processes.

    ConfigurationError for a change that has no such text.
    """
    if callable(model.hf_overrides) or model.hf_config_path:
        raise ConfigurationError("hf_overrides that is a function, or hf_config_path, has no name; give `revision`")
    changes = {
        "hf_overrides": model.hf_overrides,
        "quantization_config": model.quantization_config,
        "model_class_overrides": model.model_class_overrides,
    }
    texts = [f"{name}={json.dumps(value, sort_keys=True, default=repr)}" for name, value in changes.items() if value]
    rope = getattr(model.hf_text_config, "rope_parameters", None) or {}
    original = rope.get("original_max_position_embeddings")
    if original and "longrope" in (rope.get("rope_type"), rope.get("type")):
        # vLLM takes the long factors for all positions where prompts may be longer than the original ones.
        texts.append(f"longrope={'long' if model.max_model_len > original else 'short'}")
    return texts
