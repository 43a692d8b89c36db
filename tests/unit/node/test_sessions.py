"""The session socket: hand-over of descriptors, the ends of sessions, and clients that say anything."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import mmap
import os
import random
import resource
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.errors import ConfigurationError
from kvstore.model.layout import Geometry
from kvstore.model.values import Outcome
from kvstore.node import sessions
from kvstore.node.arena.dram import DramArena
from kvstore.node.sessions import SessionServer
from kvstore.rpc import handshake
from kvstore.rpc.handshake import Kind
from tests.unit.node.small_node import SmallNode, keys_of, namespace

SPACE = namespace()
KEYS = keys_of(SPACE, 1, 3)
HELLO = {"version": handshake.HANDSHAKE_VERSION, "name": "test", "pid": 1, "start_time": 1}


@contextlib.asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[Any]:
    """A node's session server on a socket in `folder`; `core`, `path`, `server` and `node` of it."""
    node = SmallNode()
    arena = DramArena(node.allocator.arena_bytes)
    path = str(folder / "node.sock")
    server = SessionServer(node.core, node.catalog_fd, arena, path)
    server.start()
    try:
        yield SimpleNamespace(core=node.core, node=node, path=path, server=server)
    finally:
        server.stop()
        arena.close()


async def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 5.0
    while not condition():
        assert time.monotonic() < end, "it did not come true within 5 s"
        await asyncio.sleep(0.002)


def greet(path: str, fields: dict[str, Any], pidfd: int | None) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peer.settimeout(5.0)
    peer.connect(path)
    socket.send_fds(peer, [handshake.describe(Kind.HELLO, fields)], [] if pidfd is None else [pidfd])
    return peer


async def answered(peer: socket.socket) -> tuple[Kind, dict[str, Any], list[int]]:
    packet, descriptors, _, _ = await asyncio.to_thread(socket.recv_fds, peer, handshake.PACKET_BYTES, 4)
    return *handshake.described(packet), descriptors


async def welcomed(path: str, pidfd: int | None) -> tuple[socket.socket, dict[str, Any], list[int]]:
    peer = greet(path, HELLO, pidfd)
    kind, fields, descriptors = await answered(peer)
    assert kind is Kind.WELCOME
    return peer, fields, descriptors


@contextlib.contextmanager
def own_pidfd() -> Any:
    pidfd = os.pidfd_open(os.getpid())
    yield pidfd
    os.close(pidfd)


def test_a_client_that_shows_itself_gets_writable_memory_and_a_sealed_catalog(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as node:
            with own_pidfd() as pidfd:
                peer, fields, (catalog_fd, arena_fd) = await welcomed(node.path, pidfd)
            assert fields["writable"] and fields["session"] in node.core.sessions
            assert Path(node.path).stat().st_mode & 0o777 == 0o660
            mmap.mmap(arena_fd, fields["arena_bytes"])
            mmap.mmap(catalog_fd, fields["catalog_bytes"], prot=mmap.PROT_READ)
            with pytest.raises(PermissionError):
                mmap.mmap(catalog_fd, fields["catalog_bytes"])
            peer.close()
            await until(lambda: not node.core.sessions)
            for fd in (catalog_fd, arena_fd):
                os.close(fd)

    asyncio.run(run())


def test_without_a_pidfd_memory_is_read_only_and_nothing_waits_for_the_process(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as node:
            peer, fields, (catalog_fd, arena_fd) = await welcomed(node.path, None)
            assert not fields["writable"]
            with pytest.raises(PermissionError):
                mmap.mmap(arena_fd, fields["arena_bytes"])
            node.core.register_namespace(fields["session"], SPACE, None, ())
            peer.close()
            await until(lambda: not node.core.sessions)
            for fd in (catalog_fd, arena_fd):
                os.close(fd)

    asyncio.run(run())


@pytest.mark.parametrize(
    "packet",
    [
        b"",
        b"H",
        b"Hnot json",
        b"H[]",
        b"H{}",
        handshake.describe(Kind.HELLO, {**HELLO, "version": 99}),
        handshake.describe(Kind.WELCOME, HELLO),
        b"\x00" * 9000,
        bytes(random.Random(1).randbytes(600)),
    ],
)
def test_nonsense_instead_of_a_hello_is_refused(tmp_path: Path, packet: bytes) -> None:
    async def run() -> None:
        async with serving(tmp_path) as node:
            peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            peer.settimeout(5.0)
            peer.connect(node.path)
            peer.send(packet)
            answer = await asyncio.to_thread(peer.recv, 9000)
            assert not answer or answer[0] == Kind.REFUSED
            peer.close()
            await until(lambda: not node.server._connections)
            assert not node.core.sessions

    asyncio.run(run())


@pytest.mark.parametrize(
    "owner", [{"pid": -1}, {"pid": "x"}, {"pid": 1 << 40}, {"start_time": 1.5}, {"start_time": None}]
)
def test_a_hello_with_an_impossible_owner_is_refused(tmp_path: Path, owner: dict[str, Any]) -> None:
    async def run() -> None:
        async with serving(tmp_path) as node:
            with own_pidfd() as pidfd:
                peer = greet(node.path, {**HELLO, **owner}, pidfd)
            kind, _, _ = await answered(peer)
            assert kind is Kind.REFUSED
            peer.close()
            await until(lambda: not node.server._connections)

    asyncio.run(run())


@pytest.mark.parametrize("packet", [b"X", b"T\x05\x00short", b"T\x01", b"P123", b"H{}", b"W{}"])
def test_nonsense_on_a_session_ends_that_session_only(tmp_path: Path, packet: bytes) -> None:
    async def run() -> None:
        async with serving(tmp_path) as node:
            with own_pidfd() as pidfd:
                good, _, descriptors = await welcomed(node.path, pidfd)
                bad, _, more = await welcomed(node.path, pidfd)
            bad.send(packet)
            await until(lambda: len(node.core.sessions) == 1)
            good.send(handshake.ping(Kind.PING, 7))
            assert handshake.pinged(await asyncio.to_thread(good.recv, 100)) == 7
            for peer in (good, bad):
                peer.close()
            for fd in [*descriptors, *more]:
                os.close(fd)

    asyncio.run(run())


def test_who_says_nothing_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "HELLO_TIMEOUT_S", 0.01)

    async def run() -> None:
        async with serving(tmp_path) as node:
            peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            peer.connect(node.path)
            await until(lambda: bool(node.server._connections))
            await until(lambda: not node.server._connections)
            peer.close()

    asyncio.run(run())


def test_touches_and_renewals_reach_the_core(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as node:
            with own_pidfd() as pidfd:
                peer, fields, descriptors = await welcomed(node.path, pidfd)
            session = node.core.sessions[fields["session"]]
            seen: list[list[bytes]] = []
            node.core.pool.touch = seen.append
            for packet in handshake.touches([KEYS.blob, KEYS.blob[:16]]):
                peer.send(packet)
            node.core.register_namespace(session.number, SPACE, None, ())
            peer.send(bytes([Kind.RENEW]))
            peer.send(handshake.ping(Kind.PING, 1))
            assert handshake.pinged(await asyncio.to_thread(peer.recv, 100)) == 1
            assert seen == [list(KEYS), [KEYS[0]]]
            peer.close()
            for fd in descriptors:
                os.close(fd)

    asyncio.run(run())


def test_grants_of_a_lost_session_wait_for_the_end_of_its_process(tmp_path: Path) -> None:
    """The socket closes first, as at a crash of the client library: only the process' end frees its slots."""

    async def run() -> None:
        async with serving(tmp_path) as node:
            with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
                pidfd = os.pidfd_open(child.pid)
                peer, fields, descriptors = await welcomed(node.path, pidfd)
                os.close(pidfd)
                session = node.core.sessions[fields["session"]]
                node.core.register_namespace(session.number, SPACE, Geometry.whole(SPACE.layout), ())
                answer = node.node.reserve(session, KEYS)
                assert answer.outcomes == [Outcome.GRANTED] * 3
                peer.close()
                await until(lambda: not session.open)
                node.core.check()
                assert node.core.stats()["quarantined_bytes"] == 3 * 4096
                child.kill()
                child.wait()
            await until(lambda: not node.core.sessions)
            node.core.check()
            assert node.core.stats()["used_bytes"] == 0
            for fd in descriptors:
                os.close(fd)

    asyncio.run(run())


def test_a_path_is_taken_over_from_the_dead_only(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as node:
            arena = DramArena(4096)
            second = SessionServer(node.core, node.node.catalog_fd, arena, node.path)
            with pytest.raises(ConfigurationError, match="another node"):
                second.start()
            arena.close()
        stale = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stale.bind(str(tmp_path / "node.sock"))
        stale.close()
        async with serving(tmp_path) as node:
            peer, _, descriptors = await welcomed(node.path, None)
            peer.close()
            for fd in descriptors:
                os.close(fd)
        assert not (tmp_path / "node.sock").exists()

    asyncio.run(run())


def test_a_hundred_hand_shakes_leave_no_descriptor(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as node:
            gc.collect()
            before = len(list(Path("/proc/self/fd").iterdir()))
            for round_number in range(100):
                with own_pidfd() as pidfd:
                    peer, _, descriptors = await welcomed(node.path, pidfd if round_number % 2 else None)
                peer.close()
                for fd in descriptors:
                    os.close(fd)
                await until(lambda: not node.server._connections)
            assert len(list(Path("/proc/self/fd").iterdir())) <= before
            assert not node.core.sessions

    asyncio.run(run())


def test_without_a_free_descriptor_the_listener_rests_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sessions, "ACCEPT_PAUSE_S", 0.05)
    tries, accept = [], SessionServer._accept

    def counted(server: SessionServer, listener: socket.socket) -> None:
        tries.append(time.monotonic())
        accept(server, listener)

    monkeypatch.setattr(SessionServer, "_accept", counted)

    async def run() -> None:
        async with serving(tmp_path) as node:
            peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            peer.settimeout(5.0)
            with no_free_descriptor():
                peer.connect(node.path)
                await until(lambda: len(tries) >= 3)
            assert tries[2] - tries[0] >= 0.09, "the loop tried all the time"
            socket.send_fds(peer, [handshake.describe(Kind.HELLO, HELLO)], [])
            kind, _, descriptors = await answered(peer)
            assert kind is Kind.WELCOME
            for fd in descriptors:
                os.close(fd)
            peer.close()

    asyncio.run(run())
    assert sum("no new clients" in record.message for record in caplog.records) == 1


@contextlib.contextmanager
def no_free_descriptor() -> Any:
    """This process cannot open anything more."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(fd.name) for fd in Path("/proc/self/fd").iterdir())
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, before[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                taken.append(os.dup(0))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for fd in taken:
            os.close(fd)
