"""The synchronous client side of gRPC: one channel, calls with deadlines, foreign errors mapped once.

Every `grpc.RpcError` becomes an error of the tree here. A call does not wait for a dead peer: it fails at once
with Unreachable, and the channel reconnects by itself with a back-off of at most a second. Keep-alive pings run
while the channel is idle too, so that a connection dropped on the way is noticed before it is needed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

import grpc

from kvstore.errors import DeadlineExceeded, ForkedProcess, InvalidRequest, KvStoreError, Unreachable
from kvstore.rpc import wire

KEEPALIVE_TIME_MS: Final = 20_000
KEEPALIVE_TIMEOUT_MS: Final = 2_000

CHANNEL_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    ("grpc.max_send_message_length", wire.MESSAGE_LIMIT_BYTES),
    ("grpc.max_receive_message_length", wire.MESSAGE_LIMIT_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2_000),  # also the time of one attempt: a busy node needs some
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # A proxy from the environment has no business between the parts of a pool.
    ("grpc.enable_http_proxy", 0),
)

S = TypeVar("S")


class Stream(Iterator[Any]):
    """The answers of a streaming call. Iterating raises errors of the tree; `cancel` ends it from any thread."""

    def __init__(self, call: Any, address: str) -> None:
        self._call = call
        self._address = address

    def __next__(self) -> Any:
        try:
            return next(self._call)
        except grpc.RpcError as exc:
            raise _mapped(exc, self._address) from exc

    def cancel(self) -> None:
        """End the call; a thread that iterates gets Unreachable. Idempotent."""
        self._call.cancel()


class Channel:
    """A connection to one gRPC server. Thread-safe; usable only in the process that made it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._process_id = os.getpid()
        self._closed = False
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)

    def stub(self, make: Callable[[grpc.Channel], S]) -> S:
        """`make` is a generated `…Stub` class; its methods go into `call` and `stream`."""
        return make(self._channel)

    def call(self, method: Callable[..., Any], request: Any, deadline_s: float, *, wait_for_ready: bool = False) -> Any:
        """The answer of one call that takes at most `deadline_s` seconds.

        `method` is a method of a stub, or takes an iterator of requests. With `wait_for_ready` a server that is
        not there yet is waited for until the deadline. Raises any error of the tree, ForkedProcess in a child.
        """
        self._check(deadline_s)
        try:
            return method(request, timeout=deadline_s, wait_for_ready=wait_for_ready)
        except grpc.RpcError as exc:
            raise _mapped(exc, self.address) from exc
        except ValueError as exc:  # what a channel raises that another thread closed meanwhile
            raise Unreachable(f"{self.address}: {exc}") from exc

    def stream(self, method: Callable[..., Any], request: Any, deadline_s: float | None) -> Stream:
        """A call with streamed answers; `deadline_s` None only for streams that live until somebody ends them."""
        self._check(deadline_s)
        try:
            return Stream(method(request, timeout=deadline_s), self.address)
        except ValueError as exc:
            raise Unreachable(f"{self.address}: {exc}") from exc

    def close(self) -> None:
        """End the channel and all its calls. Idempotent; in a forked child it does nothing."""
        if not self._closed and os.getpid() == self._process_id:
            self._closed = True
            self._channel.close()

    def _check(self, deadline_s: float | None) -> None:
        if os.getpid() != self._process_id:
            raise ForkedProcess("this connection belongs to the parent process; open one after the fork, or use spawn")
        if self._closed:
            raise Unreachable(f"{self.address}: the channel is closed")
        if deadline_s is not None and deadline_s <= 0:
            raise DeadlineExceeded(f"{self.address}: the deadline had passed before the call")


def parse_address(address: str) -> tuple[str, int]:
    """(host, port) of `host:port` or `[v6]:port`; raises InvalidRequest."""
    host, separator, port = address.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not separator or not host or not port.isdecimal() or int(port) > 65_535:
        raise InvalidRequest(f"{address!r} is not an address; expected HOST:PORT")
    return host, int(port)


def format_address(host: str, port: int) -> str:
    """The inverse of `parse_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _mapped(exc: grpc.RpcError, address: str) -> KvStoreError:
    call: Any = exc  # every RpcError that a channel raises is also a grpc.Call, which the types cannot say
    name = dict(call.trailing_metadata() or ()).get(wire.ERROR_METADATA_KEY, "")
    return wire.error_from_status(call.code(), f"{address}: {call.details()}", name)
