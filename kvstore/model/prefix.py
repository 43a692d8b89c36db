"""Keys: the chain that names whole prefixes.

    key[-1] = namespace id
    key[i]  = BLAKE2b-128, keyed by the tenant's secret, of key[i-1] || message[i]
    message[i] = number of tokens u32 || tokens of chunk i, u32 each || extras of chunk i
    extra      = kind u8 || start i64 || stop i64 || length u32 || value         (all numbers little-endian)

A full chunk has `chunk_tokens` tokens; the last chunk of a prompt may be shorter: it has a key of its own and
never a child. *Extras* are tagged fields that change what the tokens mean: LoRA content id and cache salt (both
in chunk 0, with start = stop = 0; the chain carries them on) and multimodal digests (in every chunk that their
placeholder tokens touch, start and stop counted from the chunk's first token, so they may be negative or lie
beyond it). The extras of a chunk are sorted by their bytes, so the order of the caller never matters.

Beside each key runs a 64-bit fingerprint: the store compares it on look-up, so that even a broken digest gives a
miss and not another prompt's pages.

    fingerprint[-1] = xxh3-64(namespace id), seed 0
    fingerprint[i]  = xxh3-64(message[i]), seed fingerprint[i-1]

Nothing of a process (hash seed, rank, TP size, Python version) enters a key. Golden vectors:
`tests/golden/keys.json`.
"""

from __future__ import annotations

import array
import enum
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.errors import InvalidRequest
from kvstore.model.namespace import Namespace

KEY_BYTES: Final = 16
SECRET_LIMIT_BYTES: Final = 64
TOKEN_FINGERPRINT_MASK: Final = (1 << 48) - 1

Tokens = Sequence[int] | npt.NDArray[np.integer]


class ExtraKind(enum.IntEnum):
    """Tags of extras. A value keeps its meaning for ever; new kinds get new numbers."""

    LORA = 1
    SALT = 2
    MULTIMODAL = 3


@dataclass(frozen=True, slots=True)
class Extra:
    """One field that changes what tokens mean.

    LORA: `value` = content digest of the adapter's weights (not its name). SALT: the cache salt. Both hold for
    the whole prompt. MULTIMODAL: `value` = digest of the item (at least 16 bytes) whose placeholder tokens are
    [start, stop); it enters every chunk that overlaps them, with its place relative to the chunk. A multimodal
    item with an empty value has no known content: the chunk where it starts and all after it get no key.
    """

    kind: ExtraKind
    value: bytes
    start: int = 0
    stop: int = 0

    def __post_init__(self) -> None:
        if self.kind is ExtraKind.MULTIMODAL:
            if not 0 <= self.start < self.stop < 1 << 32:
                raise InvalidRequest("a multimodal extra needs its token range [start, stop), below 2**32")
            if self.value and len(self.value) < 16:
                raise InvalidRequest("a multimodal digest has at least 16 bytes; shorter ones collide")
        elif not self.value:
            raise InvalidRequest(f"an extra of kind {self.kind.name} needs a value")


@dataclass(frozen=True, slots=True, eq=False)
class Keys:
    """The keys of consecutive chunks of one prompt, first to last.

    `blob` holds 16 bytes a key. `parent` is the key before the first (the namespace id at the start of a
    prompt). `fingerprints[0]` belongs to the parent and `fingerprints[i + 1]` to key i (u64); None when the
    keys came without tokens, then fingerprints are not compared. `last_tokens` is the token count of the last
    chunk, `chunk_tokens` that of all others. `first_index` is the place of the first key in its prompt.
    """

    namespace_id: bytes
    parent: bytes
    blob: bytes
    fingerprints: npt.NDArray[np.uint64] | None
    chunk_tokens: int
    last_tokens: int
    first_index: int = 0

    def __post_init__(self) -> None:
        if len(self.blob) % KEY_BYTES or len(self.parent) != KEY_BYTES or len(self.namespace_id) != KEY_BYTES:
            raise InvalidRequest("keys have 16 bytes each")
        if self.fingerprints is not None and len(self.fingerprints) != len(self) + 1:
            raise InvalidRequest("there is one fingerprint a key and one for the parent")
        if len(self) and not 1 <= self.last_tokens <= self.chunk_tokens:
            raise InvalidRequest(f"last_tokens is {self.last_tokens}; a chunk has 1..{self.chunk_tokens} tokens")

    def __len__(self) -> int:
        return len(self.blob) // KEY_BYTES

    def __iter__(self) -> Iterator[bytes]:
        blob = self.blob
        return (blob[at : at + KEY_BYTES] for at in range(0, len(blob), KEY_BYTES))

    def __getitem__(self, index: int) -> bytes:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        at = (index % len(self)) * KEY_BYTES
        return self.blob[at : at + KEY_BYTES]

    @property
    def words(self) -> npt.NDArray[np.uint64]:
        """The keys as u64 pairs, shape (n, 2), little-endian, read-only."""
        return np.frombuffer(self.blob, dtype="<u8").reshape(-1, 2)

    @property
    def token_count(self) -> int:
        """Tokens of all chunks together."""
        return (len(self) - 1) * self.chunk_tokens + self.last_tokens if len(self) else 0

    def tokens_of(self, index: int) -> int:
        """Tokens of chunk `index`; IndexError outside 0..len-1."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.last_tokens if index == len(self) - 1 else self.chunk_tokens

    def tokens_of_first(self, count: int) -> int:
        """Tokens of the first `count` chunks together."""
        return self.token_count if count >= len(self) else count * self.chunk_tokens

    def slice(self, start: int, stop: int) -> Keys:
        """Keys [start, stop) with their true parent."""
        start, stop, _ = slice(start, stop).indices(len(self))
        stop = max(start, stop)
        return Keys(
            self.namespace_id,
            self.parent if start == 0 else self[start - 1],
            self.blob[start * KEY_BYTES : stop * KEY_BYTES],
            None if self.fingerprints is None else self.fingerprints[start : stop + 1],
            self.chunk_tokens,
            self.last_tokens if stop == len(self) else self.chunk_tokens,
            self.first_index + start,
        )


class KeyChain:
    """Turns the tokens of one namespace into keys. Cheap to make, stateless, thread-safe.

    `secret` (0..64 bytes) belongs to the tenant: who does not know it can neither guess nor forge a key.
    """

    def __init__(self, namespace: Namespace, secret: bytes = b"") -> None:
        if len(secret) > SECRET_LIMIT_BYTES:
            raise InvalidRequest(f"a secret has at most {SECRET_LIMIT_BYTES} bytes")
        self._namespace = namespace
        self._hash = partial(blake2b, digest_size=KEY_BYTES, key=secret)
        self._root_fingerprint = xxhash.xxh3_64_intdigest(namespace.id)
        self._digest_bits = KEY_BYTES * 8

    def keys(self, tokens: Tokens, extras: Sequence[Extra] = ()) -> Keys:
        """Keys of a prompt: one a full chunk, and one for the shorter last chunk where there is one.

        `tokens`: token ids, each 0..2**32-1, as list, tuple, array or integer numpy array.
        """
        return self._chained(tokens, extras, None)

    def extended(self, keys: Keys, tokens: Tokens, extras: Sequence[Extra] = ()) -> Keys:
        """Keys of a prompt that went on: `keys(tokens, extras)`, without computing again what `keys` has of it.

        `keys`: made by this chain, with fingerprints, of the beginning of the same prompt with the same extras. Its
        full chunks are believed; a shorter last one is computed anew.
        """
        if keys.namespace_id != self._namespace.id or keys.first_index or keys.fingerprints is None:
            raise InvalidRequest("only keys of this namespace, from the start of a prompt and with fingerprints, go on")
        full = len(keys) - (len(keys) > 0 and keys.last_tokens < keys.chunk_tokens)
        return self._chained(tokens, extras, keys.slice(0, full))

    def _chained(self, tokens: Tokens, extras: Sequence[Extra], begun: Keys | None) -> Keys:
        chunk_tokens, first = self._namespace.layout.chunk_tokens, len(begun) if begun is not None else 0
        messages, token_count = _messages(tokens[first * chunk_tokens :] if first else tokens, chunk_tokens)
        token_count += first * chunk_tokens
        for extra in extras:
            if extra.kind is ExtraKind.MULTIMODAL and not extra.value:
                token_count = min(token_count, extra.start // chunk_tokens * chunk_tokens)
        chunk_count = -(-token_count // chunk_tokens)
        del messages[max(0, chunk_count - first) :]
        for index, fields in _chunk_extras(extras, chunk_count, chunk_tokens).items():
            if index >= first:
                messages[index - first] += fields
        last_tokens = token_count - (chunk_count - 1) * chunk_tokens if chunk_count else 0
        key, fingerprint = self._namespace.id, self._root_fingerprint
        known, known_fingerprints = b"", np.array([fingerprint], dtype=np.uint64)
        if begun is not None and begun.fingerprints is not None and first:
            key, known, known_fingerprints = begun[-1], begun.blob, begun.fingerprints
            fingerprint = int(known_fingerprints[-1])
        hash_, bits, fingerprint_of = self._hash, self._digest_bits, xxhash.xxh3_64_intdigest
        if bits == KEY_BYTES * 8:
            digests = [key := hash_(key + message).digest() for message in messages]
        else:
            digests = [key := _truncated(hash_(key + message).digest(), bits) for message in messages]
        fingerprints = [fingerprint := fingerprint_of(message, fingerprint) for message in messages]
        return Keys(
            self._namespace.id,
            self._namespace.id,
            known + b"".join(digests),
            np.concatenate((known_fingerprints, np.array(fingerprints, dtype=np.uint64))),
            chunk_tokens,
            last_tokens,
        )

    def truncate_digests_for_tests(self, bits: int) -> None:
        """Keep only `bits` bits of every key, so that collisions happen (tests of the fingerprints)."""
        self._digest_bits = bits


def _messages(tokens: Tokens, chunk_tokens: int) -> tuple[list[bytes], int]:
    """Per chunk: token count u32 LE, then the tokens as u32 LE. And the number of tokens."""
    values = _as_u32(tokens)
    full, rest = divmod(len(values), chunk_tokens)
    table = np.empty((full, 1 + chunk_tokens), dtype="<u4")
    table[:, 0] = chunk_tokens
    table[:, 1:] = values[: full * chunk_tokens].reshape(full, chunk_tokens)
    messages: list[bytes] = table.view(f"V{table.shape[1] * 4}").ravel().tolist()  # quicker than slices
    if rest:
        messages.append(struct.pack("<I", rest) + values[full * chunk_tokens :].astype("<u4", copy=False).tobytes())
    return messages, len(values)


def _as_u32(tokens: Tokens) -> npt.NDArray[np.uint32]:
    if isinstance(tokens, np.ndarray):
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise InvalidRequest("tokens must be a one-dimensional array of integers")
        if int(np.bitwise_or.reduce(tokens)) >> 32:  # one pass for both ends
            raise InvalidRequest("token ids must lie in 0..2**32-1")
        return tokens.astype("<u4", copy=False)
    if isinstance(tokens, (bytes, bytearray, memoryview)):
        # array() would take bytes as packed numbers and not as one token each.
        raise InvalidRequest("tokens must be integers, not bytes")
    try:
        values = array.array("I", tokens)
    except (TypeError, OverflowError) as exc:
        raise InvalidRequest(f"token ids must be integers in 0..2**32-1: {exc}") from exc
    return np.frombuffer(values, dtype=np.uint32)


def _chunk_extras(extras: Sequence[Extra], chunk_count: int, chunk_tokens: int) -> dict[int, bytes]:
    """Encoded and sorted extras by chunk, for the chunks that have any."""
    placed: dict[int, list[bytes]] = {}
    for extra in extras:
        if extra.kind is ExtraKind.MULTIMODAL:
            first, last = extra.start // chunk_tokens, (extra.stop - 1) // chunk_tokens
        else:
            first = last = 0
        for index in range(first, min(last + 1, chunk_count)):
            place = (0, 0)
            if extra.kind is ExtraKind.MULTIMODAL:
                place = (extra.start - index * chunk_tokens, extra.stop - index * chunk_tokens)
            field = struct.pack("<BqqI", extra.kind, *place, len(extra.value)) + extra.value
            placed.setdefault(index, []).append(field)
    return {index: b"".join(sorted(fields)) for index, fields in placed.items()}


def _truncated(key: bytes, bits: int) -> bytes:
    value = int.from_bytes(key, "little") & ((1 << bits) - 1)
    return value.to_bytes(KEY_BYTES, "little")
