"""Messages on the Unix socket between a node and a same-host client (SOCK_SEQPACKET: one packet, one message).

The client opens with HELLO and a pidfd of itself; the node answers WELCOME with the descriptors of catalog and
arena, or REFUSED with a reason. Afterwards the client sends TOUCH, RENEW and PING; the node answers PING only.
The first byte names the kind. The node never parses more than one packet of at most PACKET_BYTES.
"""

from __future__ import annotations

import enum
import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from kvstore.errors import InvalidRequest
from kvstore.model.prefix import KEY_BYTES

PACKET_BYTES: Final = 128 << 10
HANDSHAKE_VERSION: Final = 1
_COUNT: Final = struct.Struct("<H")
_SEQUENCE: Final = struct.Struct("<Q")
TOUCH_KEYS_LIMIT: Final = 4096
"""Most keys of one prefix in a TOUCH; of a longer one the first keys are sent."""


class Kind(enum.IntEnum):
    """First byte of a message."""

    HELLO = ord("H")
    WELCOME = ord("W")
    REFUSED = ord("E")
    TOUCH = ord("T")
    RENEW = ord("R")
    PING = ord("P")
    PONG = ord("p")


def describe(kind: Kind, fields: Mapping[str, Any]) -> bytes:
    """HELLO, WELCOME and REFUSED: the kind, then a JSON object."""
    return bytes([kind]) + json.dumps(fields).encode()


def described(packet: bytes) -> tuple[Kind, dict[str, Any]]:
    """The inverse of `describe`; raises InvalidRequest."""
    try:
        kind, fields = Kind(packet[0]), json.loads(packet[1:])
    except (IndexError, ValueError) as exc:
        raise InvalidRequest(f"malformed hand-shake message: {exc}") from exc
    if not isinstance(fields, dict):
        raise InvalidRequest("malformed hand-shake message: not an object")
    return kind, fields


def touches(prefixes: Iterable[bytes]) -> Iterator[bytes]:
    """TOUCH packets for prefixes (keys back to back, head first), several a packet."""
    packet = bytearray([Kind.TOUCH])
    for prefix in prefixes:
        cut = prefix[: TOUCH_KEYS_LIMIT * KEY_BYTES]
        if len(packet) + _COUNT.size + len(cut) > PACKET_BYTES:
            yield bytes(packet)
            packet = bytearray([Kind.TOUCH])
        packet += _COUNT.pack(len(cut) // KEY_BYTES) + cut
    if len(packet) > 1:
        yield bytes(packet)


def touched(packet: bytes) -> Iterator[list[bytes]]:
    """The prefixes of a TOUCH packet; raises InvalidRequest on a wrong length."""
    at = 1
    while at < len(packet):
        if at + _COUNT.size > len(packet):
            raise InvalidRequest("malformed touch")
        (count,) = _COUNT.unpack_from(packet, at)
        at += _COUNT.size
        end = at + count * KEY_BYTES
        if end > len(packet):
            raise InvalidRequest("malformed touch")
        yield [packet[place : place + KEY_BYTES] for place in range(at, end, KEY_BYTES)]
        at = end


def ping(kind: Kind, sequence: int) -> bytes:
    """PING or PONG with a number."""
    return bytes([kind]) + _SEQUENCE.pack(sequence)


def pinged(packet: bytes) -> int:
    """The number of a PING or PONG; raises InvalidRequest."""
    if len(packet) != 1 + _SEQUENCE.size:
        raise InvalidRequest("malformed ping")
    return int(_SEQUENCE.unpack_from(packet, 1)[0])


def process_start_time(pid: int) -> int:
    """Start time of a process in clock ticks since boot: tells a reused pid from the old one."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[19])
