"""The wire format of the `tcp` transport.

A connection belongs to one node incarnation and carries one exchange at a time. Integers are little-endian
and unsigned, fields follow each other without padding:

    reader → owner   hello    magic 8 bytes | version u16 | credential_bytes u16 | epoch u64 | credential
    owner → reader   answer   body = epoch u64 | arena_bytes u64
    reader → owner   request  kind u32 = 1 (read)  | count u32 | count * (offset u64 | length u64)
    owner → reader   answer   body = the ranges' bytes in the order asked, back to back
    reader → owner   request  kind u32 = 2 (fence) | count u32 | count * slot u32
    owner → reader   answer   body = count * generation u64, in the order asked

    answer = status u32 | detail_bytes u32 | body_bytes u64 | detail (UTF-8) | body

`status` 0 has no detail; any other has no body, says why in `detail`, and the owner closes behind it. Offsets,
lengths and slots (4096-byte units) lie inside the arena; the limits are the constants below.

Why the fence is a message of its own: the owner's sendfile queues pages, not bytes. Words sent behind the
payload would have been read while the payload's pages could still change under the queued references; so the
reader asks for them when the last byte lies in its staging.
"""

from __future__ import annotations

import enum
import struct
from typing import Final

import numpy as np

MAGIC: Final = b"KVSTREAM"
VERSION: Final = 1
HELLO: Final = struct.Struct("<8sHHQ")
HELLO_BODY: Final = struct.Struct("<QQ")
REQUEST: Final = struct.Struct("<II")
ANSWER: Final = struct.Struct("<IIQ")
RANGE_DTYPE: Final = np.dtype("<u8")
WORD_DTYPE: Final = np.dtype("<u8")

COUNT_LIMIT: Final = 1 << 16
"""Most ranges of a read and slots of a fence; the owner refuses more."""
PAYLOAD_LIMIT_BYTES: Final = 1 << 30
"""Most payload bytes of one read; the owner refuses more."""
CREDENTIAL_LIMIT_BYTES: Final = 4096
DETAIL_LIMIT_BYTES: Final = 1024


class RequestKind(enum.IntEnum):
    """What the reader asks for."""

    READ = 1
    FENCE = 2


class AnswerStatus(enum.IntEnum):
    """How the owner answers; all but OK end the connection."""

    OK = 0
    STALE_EPOCH = 1
    UNAUTHORIZED = 2
    BUSY = 3
    VERSION = 4
    BAD_REQUEST = 5


class Refusal(Exception):
    """The owner said no; raised on the owner's side to send it, on the reader's when it arrives."""

    def __init__(self, status: AnswerStatus, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
