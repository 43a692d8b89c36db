"""Writes the tiny models of the engine tests: `tiny_models.py FOLDER`, run by the side environment's Python.

`llama`: grouped-query attention, and another one in `llama-other` that differs by its weights alone. `hybrid`: Gemma 3,
two layers of sliding window to one of full attention. `mla`: DeepSeek-V2, one latent head. `lora-a`, `lora-b`: adapters
of `llama`. Random weights from fixed seeds, spread widely (0.2), so that a greedy answer depends on the whole context
and a wrong page changes it. No network.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

VOCABULARY = 1024
HIDDEN = 128
HEADS = 4
LORA_RANK = 8
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 16384,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "initializer_range": 0.2,
}
CHAT = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level pairs learned from this very text; every byte has a token."""
    pairs = Tokenizer(models.BPE())
    pairs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pairs.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 8,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pairs.train_from_iterator([Path(__file__).read_text()] * 4, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=pairs, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    fast.chat_template = CHAT
    return fast


def llama(seed: int) -> PreTrainedModel:
    """4 layers, 2 KV heads of 32."""
    torch.manual_seed(seed)
    shape = {"num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": False}
    return LlamaForCausalLM(LlamaConfig(**SHAPE, **shape))


def hybrid() -> PreTrainedModel:
    """6 layers: window, window, full, and again; a window of 64 tokens."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        **SHAPE,
        num_hidden_layers=6,
        num_key_value_heads=2,
        head_dim=32,
        sliding_window=64,
        query_pre_attn_scalar=32,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
    )
    return Gemma3ForCausalLM(config)


def mla() -> PreTrainedModel:
    """3 layers with a latent of 512 and 64 rotary values; no experts are ever asked."""
    torch.manual_seed(0)
    config = DeepseekV2Config(
        **SHAPE,
        num_hidden_layers=3,
        num_key_value_heads=HEADS,
        moe_intermediate_size=64,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        first_k_dense_replace=3,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
    )
    return DeepseekV2ForCausalLM(config)


def write_adapter(folder: Path, seed: int) -> None:
    """A LoRA adapter of `llama` on the query and value projections, strong enough to change the answers."""
    torch.manual_seed(seed)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "llama",
        "r": LORA_RANK,
        "lora_alpha": LORA_RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["q_proj", "v_proj"],
    }
    tensors = {}
    for layer in range(4):
        for name, width in (("q_proj", HEADS * 32), ("v_proj", 2 * 32)):
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(LORA_RANK, HIDDEN) * 0.2
            tensors[f"{stem}.lora_B.weight"] = torch.randn(width, LORA_RANK) * 0.2
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")


def main(folder: Path) -> None:
    """Write them all."""
    words = tokenizer()
    for name, model in (("llama", llama(0)), ("llama-other", llama(1)), ("hybrid", hybrid()), ("mla", mla())):
        model.to(torch.float32).eval().save_pretrained(folder / name, safe_serialization=True)
        words.save_pretrained(folder / name)
        print(f"{name}: {sum(values.numel() for values in model.parameters()):,} parameters")
    for seed, name in enumerate(("lora-a", "lora-b")):
        write_adapter(folder / name, seed)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
