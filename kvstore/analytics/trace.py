"""Request traces in the Mooncake format: one JSON object a line, read as a stream.

    {"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2, ...]}

`timestamp` is in milliseconds, the lengths are in tokens, and there is one id for each block of 512 prompt
tokens, the last of which may be partial. Equal ids mean an equal prefix. The trace has no tokens: they are
drawn from the ids here, so that equal ids give equal tokens in every process.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvstore.errors import InvalidRequest

BLOCK_TOKENS: Final = 512
"""Tokens of a full block in the published traces."""

LINE_LIMIT_BYTES: Final = 4 << 20
"""Longest line that is read; a request of that size would have half a million blocks."""

_OFFSET_BITS: Final = 20


@dataclass(frozen=True, slots=True)
class Request:
    """One request. `hash_ids[i]` names the prompt's tokens up to the end of block i.

    `block_tokens` is the size of a full block in tokens; the last block may be shorter.
    """

    timestamp_ms: int
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    block_tokens: int = BLOCK_TOKENS

    def __post_init__(self) -> None:
        if self.timestamp_ms < 0 or self.input_length < 1 or self.output_length < 0:
            raise InvalidRequest("timestamp and output_length must be >= 0 and input_length >= 1")
        if self.block_tokens < 1 or len(self.hash_ids) != -(-self.input_length // self.block_tokens):
            raise InvalidRequest(
                f"{self.input_length} tokens are {-(-self.input_length // max(self.block_tokens, 1))} blocks of "
                f"{self.block_tokens}, but there are {len(self.hash_ids)} hash_ids"
            )
        if min(self.hash_ids) < 0 or max(self.hash_ids) >= 1 << (64 - _OFFSET_BITS):
            raise InvalidRequest(f"hash_ids must lie in 0..2**{64 - _OFFSET_BITS}-1")

    def tokens_of_first(self, block_count: int) -> int:
        """Prompt tokens of the first `block_count` blocks together."""
        return min(self.input_length, block_count * self.block_tokens)

    def shrunk(self, factor: int) -> Request:
        """The same request with blocks of `block_tokens / factor` tokens: same ids, lengths rounded up.

        Raises InvalidRequest unless `factor` divides the block size.
        """
        if factor < 1 or self.block_tokens % factor:
            raise InvalidRequest(f"scale {factor} does not divide the block size of {self.block_tokens} tokens")
        return Request(
            self.timestamp_ms,
            -(-self.input_length // factor),
            -(-self.output_length // factor),
            self.hash_ids,
            self.block_tokens // factor,
        )

    def tokens(self, vocabulary: int = 1 << 32) -> npt.NDArray[np.uint32]:
        """The prompt's token ids in [0, vocabulary): equal ids give equal blocks, a shorter last block the
        beginning of its full one."""
        return block_tokens(self.hash_ids, self.block_tokens, vocabulary).reshape(-1)[: self.input_length]


def block_tokens(hash_ids: tuple[int, ...], count: int, vocabulary: int) -> npt.NDArray[np.uint32]:
    """Token ids of blocks, shape (len(hash_ids), count): SplitMix64 of (id, offset), reduced to the vocabulary.

    SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    if not 1 <= vocabulary <= 1 << 32 or not 1 <= count <= 1 << _OFFSET_BITS:
        raise InvalidRequest(f"vocabulary {vocabulary} or block size {count} is out of range")
    state = np.array(hash_ids, dtype=np.uint64)[:, None] << np.uint64(_OFFSET_BITS) | np.arange(count, dtype=np.uint64)
    state = (state + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ state >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ state >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    return (state % np.uint64(vocabulary)).astype(np.uint32)


def read_trace(path: Path | str, *, limit: int | None = None) -> Iterator[Request]:
    """The requests of a trace file in order, at most `limit`; nothing is kept in memory.

    Raises InvalidRequest with file and line number on the first line that is not a request, and for a file
    that cannot be read.
    """
    try:
        with Path(path).open("rb") as lines:
            count = 0
            number = 0
            while (limit is None or count < limit) and (line := lines.readline(LINE_LIMIT_BYTES + 1)):
                number += 1
                if line.strip():
                    count += 1
                    yield _parse(line, f"{path}:{number}")
    except OSError as exc:
        raise InvalidRequest(f"cannot read the trace {path}: {exc.strerror}") from exc


def _parse(line: bytes, place: str) -> Request:
    if len(line) > LINE_LIMIT_BYTES:
        raise InvalidRequest(f"{place}: the line is longer than {LINE_LIMIT_BYTES} bytes")
    try:
        fields: Any = json.loads(line)
    except ValueError as exc:
        raise InvalidRequest(f"{place}: not JSON: {exc}") from exc
    if not isinstance(fields, dict):
        raise InvalidRequest(f"{place}: expected a JSON object")
    ids = fields.get("hash_ids")
    if not isinstance(ids, list) or not ids or not all(_is_integer(value) for value in ids):
        raise InvalidRequest(f"{place}: hash_ids must be a list of integers, not empty")
    names = ("timestamp", "input_length", "output_length")
    if not all(_is_integer(fields.get(name)) for name in names):
        raise InvalidRequest(f"{place}: {', '.join(names)} must be integers")
    try:
        return Request(fields["timestamp"], fields["input_length"], fields["output_length"], tuple(ids))
    except InvalidRequest as exc:
        raise InvalidRequest(f"{place}: {exc}") from exc


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
