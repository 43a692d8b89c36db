import hashlib
import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from engine_adapter.copy import PagedKv
from engine_adapter.model import Context, Engine, ModelConfig
from kvstore.errors import InvalidRequest

CONFIG = ModelConfig(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, mlp_hidden=96, vocabulary=97, page_tokens=4)
CHUNK = CONFIG.chunk_tokens


def prompt(length, seed=5):
    return random.Random(seed).choices(range(CONFIG.vocabulary), k=length)


def chunk_bytes(engine, context, chunks=None):
    """The context's chunks as the pool would store them."""
    kv = PagedKv(engine.pages, CONFIG.pages_per_chunk, context.blocks)
    layout = CONFIG.namespace.layout
    out = np.full((len(context.blocks), *layout.shape(layout.whole)), 0xA5, dtype=np.uint8)
    for index in range(len(out)):
        kv.gather(index, out[index], 0, 0)
    return out[:chunks]


def load(engine, stored, length):
    """A context whose first chunks come from another engine's bytes."""
    context = Context()
    engine.grow(context, length)
    kv = PagedKv(engine.pages, CONFIG.pages_per_chunk, context.blocks)
    for index, chunk in enumerate(stored):
        kv.scatter(index, chunk, 0, 0)
    context.length = length
    return context


def greedy(engine, context, logits, count):
    """`count` tokens; the last one's KV is not computed."""
    answer = [int(logits.argmax())]
    while len(answer) < count:
        logits = engine.extend(context, answer[-1:])
        answer.append(int(logits.argmax()))
    return answer, logits


@pytest.mark.parametrize("length", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 5])
def test_a_prefix_that_was_loaded_gives_the_bits_of_one_that_was_computed(length):
    tokens = prompt(length)
    first = Engine(CONFIG, blocks=64)
    context = Context()
    logits = first.extend(context, tokens)
    stored = chunk_bytes(first, context)
    for loaded in range((length - 1) // CHUNK + 1):
        other = Engine(CONFIG, blocks=40)
        for pages in other.pages:
            pages.fill_(float("nan"))
        copy = load(other, stored[:loaded], loaded * CHUNK)
        assert torch.equal(other.extend(copy, tokens[loaded * CHUNK :]), logits)
        assert np.array_equal(chunk_bytes(other, copy), stored)


def test_everything_loaded_and_only_the_last_token_computed_again():
    tokens = prompt(2 * CHUNK + 3)
    first, other = Engine(CONFIG, blocks=64), Engine(CONFIG, blocks=64)
    context = Context()
    logits = first.extend(context, tokens)
    stored = chunk_bytes(first, context)
    copy = load(other, stored, len(tokens) - 1)
    assert torch.equal(other.extend(copy, tokens[-1:]), logits)
    assert np.array_equal(chunk_bytes(other, copy), stored)


def test_decoded_chunks_equal_a_prefill_of_prompt_and_answer():
    tokens = prompt(CHUNK + 3)
    engine = Engine(CONFIG, blocks=64)
    context = Context()
    answer, logits = greedy(engine, context, engine.extend(context, tokens), 2 * CHUNK)
    whole, again = Engine(CONFIG, blocks=64), Context()
    assert torch.equal(whole.extend(again, tokens + answer[:-1]), logits)
    assert again.length == context.length
    assert np.array_equal(chunk_bytes(whole, again), chunk_bytes(engine, context))


def test_any_cut_into_steps_gives_the_same_bits():
    tokens, rng = prompt(3 * CHUNK + 7), random.Random(11)
    engine = Engine(CONFIG, blocks=64)
    whole = Context()
    logits = engine.extend(whole, tokens)
    for _ in range(5):
        context, at = Context(), 0
        while at < len(tokens):
            piece = tokens[at : at + rng.randint(1, CHUNK + 5)]
            last = engine.extend(context, piece)
            at += len(piece)
        assert torch.equal(last, logits)
        assert np.array_equal(chunk_bytes(engine, context), chunk_bytes(engine, whole))
        engine.free(context)


def test_one_changed_byte_of_a_loaded_chunk_shows_in_the_logits():
    tokens = prompt(3 * CHUNK)
    engine = Engine(CONFIG, blocks=64)
    context = Context()
    logits = engine.extend(context, tokens)
    stored = chunk_bytes(engine, context)
    stored[0, 0, 0, 1, 2] ^= 0x40
    wrong = load(engine, stored[:2], 2 * CHUNK)
    assert not torch.equal(engine.extend(wrong, tokens[2 * CHUNK :]), logits)


DIGEST = """
import hashlib, random
from engine_adapter.model import Context, Engine, ModelConfig
engine, context = Engine(ModelConfig(), blocks=64), Context()
logits = engine.extend(context, random.Random(5).choices(range(512), k=200))
digest = hashlib.sha256(logits.numpy().tobytes())
for pages in engine.pages:
    digest.update(pages.numpy().tobytes())
print(engine.config.namespace.id.hex(), digest.hexdigest())
"""


@pytest.mark.slow
def test_other_processes_compute_the_same_bytes():
    answers = {
        subprocess.run(
            [sys.executable, "-c", DIGEST],
            env=os.environ | {"PYTHONHASHSEED": seed, "OMP_NUM_THREADS": threads},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed, threads in (("1", "1"), ("77", "2"))
    }
    assert len(answers) == 1


def test_layers_are_reported_in_order_and_their_bytes_are_final():
    tokens = prompt(2 * CHUNK + 2)
    engine, context = Engine(CONFIG, blocks=64), Context()
    seen, digests = [], {}

    def on_layer(chunk, layer):
        seen.append((chunk, layer))
        digests[chunk, layer] = hashlib.sha256(chunk_bytes(engine, context)[chunk, layer].tobytes()).digest()

    engine.extend(context, tokens, on_layer)
    assert seen == [(chunk, layer) for chunk in range(3) for layer in range(CONFIG.layers)]
    final = chunk_bytes(engine, context)
    assert all(hashlib.sha256(final[at].tobytes()).digest() == digest for at, digest in digests.items())


def test_unused_tokens_of_the_last_chunk_are_zero_in_blocks_that_were_used_before():
    engine, context = Engine(CONFIG, blocks=8), Context()
    engine.extend(context, prompt(2 * CHUNK))
    engine.free(context)
    engine.extend(context, prompt(CHUNK + 5))
    layout = CONFIG.namespace.layout
    last = chunk_bytes(engine, context)[1].view(np.float32)
    last = last.reshape(layout.layers, layout.pages_per_chunk, layout.kv_heads, layout.page_tokens, -1)
    by_token = last.transpose(1, 3, 0, 2, 4).reshape(CHUNK, -1)
    assert (by_token[5:] == 0).all()
    assert (by_token[:5] != 0).any(axis=1).all()


def test_blocks_come_back_and_too_few_is_an_error_that_changes_nothing():
    engine, context = Engine(CONFIG, blocks=9), Context()
    with pytest.raises(InvalidRequest, match="blocks are free"):
        engine.extend(context, prompt(2 * CHUNK + 1))
    assert (engine.free_blocks, context.blocks) == (9, [])
    engine.extend(context, prompt(2 * CHUNK))
    assert engine.free_blocks == 1
    engine.free(context)
    assert engine.free_blocks == 9
    for bad in ([], [CONFIG.vocabulary], [-1]):
        with pytest.raises(InvalidRequest):
            engine.extend(context, bad)


def test_other_weights_are_another_namespace():
    assert ModelConfig(seed=1).namespace.id != ModelConfig(seed=2).namespace.id
    assert ModelConfig().namespace.layout.head_page_bytes == 4096
    assert ModelConfig().namespace.layout.chunk_tokens == 64
