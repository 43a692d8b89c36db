"""Messages on the Unix socket between a node and a same-host client (SOCK_SEQPACKET: one packet, one message).

The client opens with HELLO and a pidfd of itself; the node answers WELCOME with the descriptors of catalog and
arena, or REFUSED with a reason. Afterwards the client sends TOUCH, RENEW, PING and CALL; the node answers PING with
PONG and CALL with ANSWER. The first byte names the kind. Nobody parses more than one packet of PACKET_BYTES.

A CALL carries a verb of NodeService and its request message, an ANSWER the response message or the error: the same
verbs as by gRPC, which cost a fifth of the time here, because no HTTP/2 lies in between. What does not fit into a
packet goes by gRPC.
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
_HEAD: Final = struct.Struct("<BBI")
VERBS: Final = (
    "RegisterNamespace",
    "Reserve",
    "Commit",
    "Abort",
    "Release",
    "Remove",
    "PutSideObjects",
    "DropTicket",
)
"""Methods of NodeService that a CALL may name; its second byte is the place in this list. All answer at once."""
CALL_LIMIT_BYTES: Final = 96 << 10
"""Longest request of a CALL; the answers of these verbs are shorter than their requests, or a few bytes long."""
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
    CALL = ord("C")
    ANSWER = ord("A")


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


def call(verb: str, number: int, request: bytes) -> bytes:
    """A CALL; `number` (u32) comes back with the answer."""
    return _HEAD.pack(Kind.CALL, VERBS.index(verb), number) + request


def called(packet: bytes) -> tuple[str, int, bytes]:
    """(verb, number, request) of a CALL; raises InvalidRequest."""
    if len(packet) < _HEAD.size or packet[1] >= len(VERBS):
        raise InvalidRequest("malformed call")
    _, verb, number = _HEAD.unpack_from(packet)
    return VERBS[verb], number, packet[_HEAD.size :]


def answer(number: int, response: bytes | None, error: str = "", details: str = "") -> bytes:
    """An ANSWER: the response, or with None the class name of an error and its text."""
    if response is not None:
        return _HEAD.pack(Kind.ANSWER, 0, number) + response
    return _HEAD.pack(Kind.ANSWER, 1, number) + f"{error}\n{details}".encode()[: PACKET_BYTES >> 1]


def answered(packet: bytes) -> tuple[int, bytes | None, str, str]:
    """(number, response or None, error class name, details) of an ANSWER; raises InvalidRequest."""
    if len(packet) < _HEAD.size:
        raise InvalidRequest("malformed answer")
    _, failed, number = _HEAD.unpack_from(packet)
    if not failed:
        return number, packet[_HEAD.size :], "", ""
    error, _, details = packet[_HEAD.size :].decode(errors="replace").partition("\n")
    return number, None, error, details


def process_start_time(pid: int) -> int:
    """Start time of a process in clock ticks since boot: tells a reused pid from the old one."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[19])
