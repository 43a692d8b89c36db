"""A real vLLM engine in this process, for benches: a small model with KV pages of a usual size, and its connectors."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
LAYERS, HEADS, HEAD_DIM, BLOCK_TOKENS = 16, 4, 128, 32
LAYER_BLOCK_BYTES = HEADS * BLOCK_TOKENS * 2 * HEAD_DIM * 2
"""Of one block in one layer: K and V in bf16."""
MODEL_TOKENS = 8192
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": HEAD_DIM,
    "hidden_size": 128,
    "intermediate_size": 128,
    "vocab_size": 1024,
    "max_position_embeddings": MODEL_TOKENS,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
VARIABLES = {
    "PYTHONPATH": str(ROOT),
    "PYTHONWARNINGS": "ignore",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "DO_NOT_TRACK": "1",
}


def ensure_vllm() -> None:
    """Start this program again under the Python of the side environment, unless this is it."""
    if importlib.util.find_spec("vllm") is not None:
        return
    script = ROOT / "tests" / "e2e" / "vllm" / "side_environment.py"
    made = subprocess.run([sys.executable, script], stdout=subprocess.PIPE, text=True)
    if made.returncode:
        sys.exit(made.returncode)
    python = made.stdout.strip()
    os.execve(python, [python, *sys.argv], {**os.environ, **VARIABLES})


class Engine:
    """A vLLM whose connector uses a node. It never runs a request.

    `connector`: its scheduler's. `group`: its only KV group. `tensors`: its KV cache, one a layer, (blocks, heads,
    tokens, content).
    """

    def __init__(self, folder: Path, node: str, blocks: int) -> None:
        """`folder`: empty, for the model. `node`: control address."""
        from vllm import LLM

        from engine_adapter.vllm.model import kv_groups
        from engine_adapter.vllm.options import Options

        (folder / "config.json").write_text(json.dumps(MODEL))
        llm = LLM(
            model=str(folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            max_num_seqs=8,
            block_size=BLOCK_TOKENS,
            kv_cache_memory_bytes=blocks * LAYERS * LAYER_BLOCK_BYTES,
            enforce_eager=True,
            kv_transfer_config={
                "kv_connector": "KVStoreConnector",
                "kv_connector_module_path": "engine_adapter.vllm",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"node": node},
            },
        )
        self._core: Any = llm.llm_engine.engine_core
        self._config: Any = llm.llm_engine.vllm_config
        scheduler = self._core.engine_core.scheduler
        self._kv_cache = scheduler.kv_cache_config
        self.connector = scheduler.connector
        (self.group,), _ = kv_groups(self._config, self._kv_cache, Options())
        layers = self._config.compilation_config.static_forward_context
        self._registered = {name: layers[name].kv_cache for name in self._kv_cache.kv_cache_groups[0].layer_names}
        self.tensors: list[torch.Tensor] = list(self._registered.values())

    def worker(self, **options: Any) -> Any:
        """One more connector of a worker over the engine's KV cache, with these options."""
        from vllm.config import set_current_vllm_config
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

        from engine_adapter.vllm import KVStoreConnector

        transfer = self._config.kv_transfer_config
        options = {**transfer.kv_connector_extra_config, **options}
        config = dataclasses.replace(
            self._config, kv_transfer_config=dataclasses.replace(transfer, kv_connector_extra_config=options)
        )
        with set_current_vllm_config(config):
            connector = KVStoreConnector(config, KVConnectorRole.WORKER, self._kv_cache)
            connector.register_kv_caches(self._registered)
        return connector

    def request(self, number: int, tokens: Sequence[int]) -> Any:
        """A new request as the engine core makes it."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        return Request(f"bench-{number}", list(tokens), SamplingParams(max_tokens=1), None)

    def close(self) -> None:
        """End it in order."""
        self._core.shutdown()
