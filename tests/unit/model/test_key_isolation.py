"""Who may share pages: adapters, images, salts, tenants, and what happens when digests collide (A02 to A05)."""

from __future__ import annotations

import itertools
from hashlib import sha256

import pytest

from kvstore.errors import InvalidRequest
from kvstore.model.layout import Dtype, PageLayout
from kvstore.model.namespace import Namespace
from kvstore.model.prefix import TOKEN_FINGERPRINT_MASK, Extra, ExtraKind, KeyChain, Keys

PAGE = 16
NAMESPACE = Namespace(
    "m", "r", PageLayout(layers=2, kv_heads=2, head_dim=8, dtype=Dtype.BF16, page_tokens=PAGE, pages_per_chunk=1)
)
CHAIN = KeyChain(NAMESPACE)


def lora(weights: bytes) -> Extra:
    return Extra(ExtraKind.LORA, sha256(weights).digest())


def salt(value: bytes) -> Extra:
    return Extra(ExtraKind.SALT, value)


def shared(one: Keys, other: Keys) -> int:
    """Leading chunks that both name; no later key may be equal."""
    equal = [a == b for a, b in zip(one, other, strict=False)]
    run = equal.index(False) if False in equal else len(equal)
    assert not any(equal[run:]) and len(set(one) & set(other)) == run
    return run


def test_a02_fingerprints_tell_colliding_keys_apart() -> None:
    """A02: with 8-bit keys 300 prompts collide; parent and token fingerprint, as stored, never do."""
    weak = KeyChain(NAMESPACE)
    weak.truncate_digests_for_tests(8)
    prompts = [weak.keys([prompt] * PAGE + [prompt + 1] * PAGE) for prompt in range(300)]
    for place in (0, 1):
        entries = set()
        for keys in prompts:
            assert keys.fingerprints is not None
            parent, own = keys.fingerprints[place], keys.fingerprints[place + 1]
            entries.add((keys[place], int(parent), int(own) & TOKEN_FINGERPRINT_MASK))
        assert len({keys[place] for keys in prompts}) <= 256
        assert len(entries) == 300
        assert len({own for _, _, own in entries}) == 300


def test_a02_normal_keys_have_128_bits() -> None:
    keys = [key for prompt in range(300) for key in CHAIN.keys([prompt] * 32)]
    assert len(set(keys)) == 600 and {len(key) for key in keys} == {16}
    union = 0
    for key in keys:
        union |= int.from_bytes(key, "little")
    assert union == (1 << 128) - 1


def test_a03_five_variants_are_disjoint() -> None:
    """A03: base, two adapters, a salt that equals adapter a's id, and a reloaded with other weights."""
    prompt = list(range(8 * PAGE))
    variants = {
        "base": (),
        "a": (lora(b"weights of a"),),
        "b": (lora(b"weights of b"),),
        "salt like a": (salt(lora(b"weights of a").value),),
        "a reloaded": (lora(b"new weights of a"),),
    }
    keys = {name: CHAIN.keys(prompt, extras) for name, extras in variants.items()}
    for one, other in itertools.combinations(keys, 2):
        assert shared(keys[one], keys[other]) == 0, (one, other)
    for name, extras in variants.items():
        assert shared(keys[name], CHAIN.keys(prompt, extras)) == 8


def test_a03_an_adapter_name_and_an_equal_salt_are_not_the_same() -> None:
    name = b"adapter-a"
    prompt = list(range(8 * PAGE))
    as_lora, as_salt = CHAIN.keys(prompt, [Extra(ExtraKind.LORA, name)]), CHAIN.keys(prompt, [salt(name)])
    assert shared(as_lora, as_salt) == 0


X = bytes(range(30)) + b"\x12\x34"
Y = bytes(range(100, 130)) + b"\x12\x34"
IMAGE_PROMPT = [*range(20), *[9999] * 64, *range(20)]


def image(digest: bytes, start: int = 20) -> Extra:
    return Extra(ExtraKind.MULTIMODAL, digest, start, start + 64)


def test_a04_only_the_text_before_the_image_is_shared() -> None:
    """A04: digests that agree in their last 16 bits, a missing digest, and a shift by one position."""
    with_x = CHAIN.keys(IMAGE_PROMPT, [image(X)])
    assert X[-2:] == Y[-2:] and len(with_x) == 7
    assert shared(with_x, CHAIN.keys(IMAGE_PROMPT, [image(Y)])) == 1
    assert shared(with_x, CHAIN.keys(IMAGE_PROMPT, [image(X, start=21)])) == 1
    assert shared(with_x, CHAIN.keys(IMAGE_PROMPT, [image(X)])) == 7


def test_a04_without_a_digest_nothing_from_the_image_on_has_a_key() -> None:
    unknown = CHAIN.keys(IMAGE_PROMPT, [image(b"")])
    assert len(unknown) == 1 and unknown.last_tokens == PAGE and unknown.token_count == PAGE
    assert shared(unknown, CHAIN.keys(IMAGE_PROMPT)) == 1
    assert len(CHAIN.keys(IMAGE_PROMPT, [image(b"", start=0)])) == 0
    assert len(CHAIN.keys(IMAGE_PROMPT, [image(b"", start=16)])) == 1
    assert len(CHAIN.keys(IMAGE_PROMPT, [image(X, start=0), image(b"", start=40)])) == 2


def test_a04_an_image_is_not_text_and_two_images_do_not_swap() -> None:
    assert shared(CHAIN.keys(IMAGE_PROMPT, [image(X)]), CHAIN.keys(IMAGE_PROMPT)) == 1

    def two(first: bytes, second: bytes) -> Keys:
        return CHAIN.keys(
            [5] * 64,
            [
                Extra(ExtraKind.MULTIMODAL, first, 16, 24),
                Extra(ExtraKind.MULTIMODAL, second, 24, 32),
            ],
        )

    assert shared(two(X, Y), two(Y, X)) == 1


def test_a04_an_image_changes_keys_from_its_first_chunk_on() -> None:
    plain = CHAIN.keys([5] * 64)
    for start, stop, run in ((16, 32, 1), (31, 32, 1), (32, 33, 2), (63, 64, 3), (64, 65, 4)):
        assert shared(plain, CHAIN.keys([5] * 64, [Extra(ExtraKind.MULTIMODAL, X, start, stop)])) == run
    # The part of an image that lies in a chunk is told from a shorter image that ends there.
    assert (
        CHAIN.keys([5] * 32, [Extra(ExtraKind.MULTIMODAL, X, 16, 32)])[1]
        != (CHAIN.keys([5] * 32, [Extra(ExtraKind.MULTIMODAL, X, 16, 48)])[1])
    )


def test_a05_salts_and_secrets_separate_tenants() -> None:
    """A05: same prompt, other salt or other tenant secret: nothing is shared; the own salt hits fully."""
    prompt = list(range(2000))
    a, b, plain = CHAIN.keys(prompt, [salt(b"a")]), CHAIN.keys(prompt, [salt(b"b")]), CHAIN.keys(prompt)
    secret = KeyChain(NAMESPACE, b"tenant a").keys(prompt)
    for one, other in itertools.combinations((a, b, plain, secret), 2):
        assert shared(one, other) == 0
    assert shared(a, CHAIN.keys(prompt, [salt(b"a")])) == len(a) == 125


def test_the_order_of_extras_is_irrelevant() -> None:
    extras = [lora(b"w"), salt(b"s"), image(X), Extra(ExtraKind.MULTIMODAL, Y, 90, 95)]
    expected = CHAIN.keys(IMAGE_PROMPT, extras)
    for order in itertools.permutations(extras):
        keys = CHAIN.keys(IMAGE_PROMPT, order)
        assert keys.blob == expected.blob
        assert keys.fingerprints is not None and expected.fingerprints is not None
        assert keys.fingerprints.tolist() == expected.fingerprints.tolist()


def test_extras_are_not_confusable_with_tokens_or_each_other() -> None:
    """A salt that spells tokens, and a value that spells another extra, still give keys of their own."""
    four = list(range(4))
    spelled = CHAIN.keys(four, [salt((7).to_bytes(4, "little"))])
    assert spelled[0] not in (CHAIN.keys([*four, 7])[0], CHAIN.keys(four)[0])
    # The whole encoding of a second salt, written as more tokens and inside the value of the first.
    encoded = bytes([ExtraKind.SALT]) + bytes(16) + (1).to_bytes(4, "little") + b"y"
    both = CHAIN.keys(four, [salt(b"x"), salt(b"y")])
    assert both[0] != CHAIN.keys(four, [salt(b"x" + encoded)])[0]
    words = encoded + bytes(-len(encoded) % 4)
    as_tokens = [int.from_bytes(words[at : at + 4], "little") for at in range(0, len(words), 4)]
    assert CHAIN.keys(four, [salt(b"y")])[0] != CHAIN.keys([*four, *as_tokens])[0]
    assert CHAIN.keys(four, [salt(b"xy")])[0] != both[0]


@pytest.mark.parametrize(
    ("kind", "value", "start", "stop"),
    [
        (ExtraKind.LORA, b"", 0, 0),
        (ExtraKind.SALT, b"", 0, 0),
        (ExtraKind.MULTIMODAL, X[:15], 0, 1),
        (ExtraKind.MULTIMODAL, X, 0, 0),
        (ExtraKind.MULTIMODAL, X, 5, 5),
        (ExtraKind.MULTIMODAL, X, -1, 5),
        (ExtraKind.MULTIMODAL, X, 0, 1 << 32),
    ],
)
def test_extras_that_would_weaken_a_key_are_refused(kind: ExtraKind, value: bytes, start: int, stop: int) -> None:
    with pytest.raises(InvalidRequest):
        Extra(kind, value, start, stop)
