"""What a supervisor hands to each of its workers, and what the worker tells it. The standard library only.

The supervisor (`supervisor.py`) outlives its workers and keeps what must: the memory, the bound addresses, and a
pidfd of every process that may write into the arena. A worker is a fork of it, so memory and descriptors are
inherited; the other way goes a socket (SOCK_SEQPACKET), one JSON object a packet:

    {"ready": {...}}                           the worker serves; its value is given to later workers as `bound`
    {"keep": session, "owner": [pid, start]}   with a pidfd (SCM_RIGHTS): this process may write from now on
    {"drop": session}                          it cannot any more, or it has ended
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import socket
from dataclasses import dataclass
from typing import Any, Final

VERSION: Final = 1
"""Of this module's contents. A worker whose code has another one asks for a full restart."""
FULL_RESTART_CODE: Final = 75
"""Exit status of a worker that cannot use its supervisor's memory: a new supervisor must make new memory."""
PACKET_BYTES: Final = 32 << 10
SEND_TIMEOUT_S: Final = 1.0

logger = logging.getLogger(__name__)
Owner = tuple[int, int]
"""(pid, start time) of a writing process as it states them: a label, not a proof. (0, 0): the worker itself."""


@dataclass(frozen=True, slots=True)
class KeptWriter:
    """A process that got writable memory from an earlier worker. `pidfd` becomes readable when it has ended."""

    session: int
    owner: Owner
    pidfd: int


@dataclass(frozen=True, slots=True)
class Seat:
    """A worker's place. `catalog` is the only writable mapping of `catalog_fd` (it is sealed).

    `start` counts workers from 1. `announced`: people have been told already that this node is ready. `bound`: what
    the first worker that was ready said, so that later ones bind the same ports; empty before.
    """

    arena_fd: int
    arena_bytes: int
    catalog_fd: int
    catalog: mmap.mmap
    start: int
    announced: bool
    bound: dict[str, Any]
    writers: tuple[KeptWriter, ...]
    channel: socket.socket

    def ready(self, bound: dict[str, Any]) -> None:
        """This worker serves at these addresses."""
        self._send({"ready": bound})

    def keep(self, session: int, owner: Owner, pidfd: int) -> None:
        """This process may write from now on. Raises OSError if the supervisor did not take it."""
        self._send({"keep": session, "owner": owner}, pidfd)

    def drop(self, session: int) -> None:
        """The process of this session has ended or holds nothing."""
        try:
            self._send({"drop": session})
        except OSError as exc:  # it keeps one descriptor too many; its next worker asks again
            logger.warning("the supervisor does not answer: %s", exc)

    def _send(self, message: dict[str, Any], *descriptors: int) -> None:
        self.channel.settimeout(SEND_TIMEOUT_S)
        socket.send_fds(self.channel, [json.dumps(message).encode()], descriptors)


def receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The supervisor's side: the next message and its descriptors, None if there is none. Never waits.

    The channel must be non-blocking: `recv_fds` of Python 3.11 does not look at its flags.
    """
    assert not channel.getblocking()
    try:
        packet, descriptors, _, _ = socket.recv_fds(channel, PACKET_BYTES, 1)
    except (BlockingIOError, ConnectionError):
        return None
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    return (json.loads(packet), list(descriptors)) if packet else None
