"""How long a prompt of 128k tokens takes to become keys, from a Python list of ints, at 64-token chunks.

    python bench/keys.py [--rounds N]

One JSON line on stdout. `against: raw` is the bare BLAKE2b chain over the same, already packed bytes: what no
key of this kind can undercut in Python; `ratio` = p50 / p50 of raw, alternated in the same run.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from hashlib import blake2b

import numpy as np
import xxhash

from kvstore.model.layout import Dtype, PageLayout
from kvstore.model.namespace import Namespace
from kvstore.model.prefix import KEY_BYTES, KeyChain

TOKENS = 128 << 10
VOCABULARY = 151_936
SECRET = bytes(range(32))
LAYOUT = PageLayout(layers=32, kv_heads=8, head_dim=128, dtype=Dtype.BF16, page_tokens=16, pages_per_chunk=4)


def bare_chain(namespace: Namespace, packed: bytes, stride_bytes: int) -> bytes:
    """The chain alone: no packing of tokens, no fingerprints, no result object."""
    key = namespace.id
    for at in range(0, len(packed), stride_bytes):
        key = blake2b(key + packed[at : at + stride_bytes], digest_size=KEY_BYTES, key=SECRET).digest()
    return key


def seconds(call: Callable[[], object]) -> float:
    """Time of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200, help="measured calls (200)")
    rounds = parser.parse_args().rounds
    namespace = Namespace("bench/model", "revision", LAYOUT)
    chain = KeyChain(namespace, SECRET)
    tokens = random.Random(1).choices(range(VOCABULARY), k=TOKENS)
    table = np.full((TOKENS // LAYOUT.chunk_tokens, 1 + LAYOUT.chunk_tokens), LAYOUT.chunk_tokens, dtype="<u4")
    table[:, 1:] = np.array(tokens, dtype=np.uint32).reshape(-1, LAYOUT.chunk_tokens)
    packed, stride_bytes = table.tobytes(), table.shape[1] * table.itemsize
    keys = chain.keys(tokens)
    if keys[-1] != bare_chain(namespace, packed, stride_bytes):
        print("keys and bare chain disagree", file=sys.stderr)
        return 1
    ours, raw = [], []
    for _ in range(rounds):
        ours.append(seconds(lambda: chain.keys(tokens)))
        raw.append(seconds(lambda: bare_chain(namespace, packed, stride_bytes)))
    p50 = statistics.median(ours)
    result = {
        "bench": "keys",
        "op": "keys",
        "count": TOKENS,
        "chunk_tokens": LAYOUT.chunk_tokens,
        "keys": len(keys),
        "condition": "quiet",
        "p50_ms": round(p50 * 1e3, 3),
        "p50_us": round(p50 * 1e6, 1),
        "p99_us": round(sorted(ours)[int(len(ours) * 0.99)] * 1e6, 1),
        "against": "raw",
        "ratio": round(p50 / statistics.median(raw), 3),
        "versions": f"python {platform.python_version()}, numpy {np.__version__}, xxhash {xxhash.VERSION}",
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
