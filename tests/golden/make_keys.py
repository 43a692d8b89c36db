"""Writes `keys.json`: keys and fingerprints computed from the documented format alone.

Nothing of kvstore is imported: the format is written down a second time here, as plainly as possible, from the
docstrings of `kvstore.model.prefix` (message, extras, chain) and `kvstore.model.namespace` (canonical JSON). A
change of this file's output means that stored pages of older versions are no longer found.

    python tests/golden/make_keys.py            write keys.json
    python tests/golden/make_keys.py --check    exit 1 if keys.json differs
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import xxhash

TARGET = Path(__file__).with_name("keys.json")
Case = dict[str, Any]

LORA, SALT, MULTIMODAL = 1, 2, 3


def namespace(**changes: object) -> Case:
    description: Case = {
        "model": "example/llama-8b",
        "revision": "0123456789abcdef0123456789abcdef01234567",
        "kv_group": "full",
        "tenant": "",
        "layers": 32,
        "kv_heads": 8,
        "head_dim": 128,
        "dtype": "bf16",
        "page_tokens": 16,
        "pages_per_chunk": 1,
        "attention": "gqa",
        "interior": "kv_per_token",
        "side_components": [],
    }
    return description | changes


def canonical(description: Case) -> bytes:
    return json.dumps(description, sort_keys=True, separators=(",", ":")).encode()


def little(value: int, size: int) -> bytes:
    return value.to_bytes(size, "little", signed=value < 0)


def tokens_of(rule: dict[str, int]) -> list[int]:
    return [(index * rule["step"] + rule["first"]) % rule["modulus"] for index in range(rule["count"])]


def message(tokens: list[int], extras: list[Case], start: int) -> bytes:
    """Count, tokens and extras of the chunk whose first token has the index `start`."""
    fields = []
    for extra in extras:
        value = bytes.fromhex(extra["value"])
        if extra["kind"] == MULTIMODAL:
            if extra["stop"] <= start or extra["start"] >= start + len(tokens):
                continue
            place = little(extra["start"] - start, 8) + little(extra["stop"] - start, 8)
        elif start == 0:
            place = bytes(16)
        else:
            continue
        fields.append(bytes([extra["kind"]]) + place + little(len(value), 4) + value)
    packed = b"".join(little(token, 4) for token in tokens)
    return little(len(tokens), 4) + packed + b"".join(sorted(fields))


def chain(case: Case) -> Case:
    """The case with the id of its namespace, its keys and its fingerprints, root first, all as hex digits."""
    layout = case["namespace"]
    chunk = layout["page_tokens"] * layout["pages_per_chunk"]
    tokens = tokens_of(case["tokens"])
    key = hashlib.blake2b(canonical(layout), digest_size=16, person=b"kvstore-ns").digest()
    fingerprint = xxhash.xxh3_64_intdigest(key)
    result = case | {"namespace_id": key.hex(), "keys": [], "fingerprints": [f"{fingerprint:016x}"]}
    for start in range(0, len(tokens), chunk):
        part = message(tokens[start : start + chunk], case["extras"], start)
        key = hashlib.blake2b(key + part, digest_size=16, key=bytes.fromhex(case["secret"])).digest()
        fingerprint = xxhash.xxh3_64_intdigest(part, fingerprint)
        result["keys"].append(key.hex())
        result["fingerprints"].append(f"{fingerprint:016x}")
    return result


def cases() -> list[Case]:
    def case(name: str, count: int, *, secret: str = "", extras: tuple[Case, ...] = (), **changes: object) -> Case:
        rule = {"count": count, "first": 13, "step": 7919, "modulus": 128_256}
        return {
            "name": name,
            "namespace": namespace(**changes),
            "tokens": rule,
            "secret": secret,
            "extras": list(extras),
        }

    lora = {"kind": LORA, "value": hashlib.sha256(b"adapter weights").hexdigest(), "start": 0, "stop": 0}
    salt = {"kind": SALT, "value": b"salt of a user".hex(), "start": 0, "stop": 0}
    image = {"kind": MULTIMODAL, "value": hashlib.sha256(b"picture").hexdigest(), "start": 20, "stop": 84}
    large = case("largest token ids", 40)
    large["tokens"] |= {"first": 2**32 - 1, "step": 2**31 - 1, "modulus": 2**32}
    return [
        case("512 tokens", 512),
        case("no tokens", 0),
        case("one token", 1),
        case("one less than two chunks", 127, pages_per_chunk=4),
        case("two chunks", 128, pages_per_chunk=4),
        case("one more than two chunks", 129, pages_per_chunk=4),
        large,
        case("secret", 40, secret=bytes(range(64)).hex(), tenant="tenant-a"),
        case("lora", 40, extras=(lora,)),
        case("salt", 40, extras=(salt,)),
        case("image", 104, extras=(image,)),
        case("image of exactly one chunk", 64, extras=(image | {"start": 16, "stop": 32},)),
        case("image across three chunks", 64, extras=(image | {"start": 15, "stop": 33},)),
        case("all extras", 104, extras=(image, salt, lora), secret="00ff"),
        case("latent fp8", 100, attention="mla", kv_heads=1, head_dim=576, dtype="fp8_e4m3", page_tokens=64),
        case("side components", 40, side_components=[["k_scale", 64], ["v_scale", 64]], dtype="fp8_e5m2"),
        case("text outside ASCII", 20, model="modèle/日本", kv_group="sliding:4096", interior="k_then_v"),
    ]


def main() -> int:
    text = json.dumps([chain(case) for case in cases()], indent=1, sort_keys=True) + "\n"
    if "--check" in sys.argv[1:]:
        return 0 if TARGET.read_text() == text else 1
    TARGET.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
