"""The server side of gRPC (grpc.aio): one way to build, guard, bind and stop a server.

What every server of the pool gets: health and reflection, bounded messages and concurrent calls, refusal of
calls without a deadline, errors of the tree mapped to status codes, everything else logged and answered with
INTERNAL. The guard below is the outermost handler, the one place that catches `Exception`.
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import AbstractContextManager
from typing import Any, Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvstore.errors import ConfigurationError, InvalidRequest, KvStoreError
from kvstore.rpc import wire
from kvstore.rpc.channel import format_address, parse_address
from kvstore.rpc.counting import counted

logger = logging.getLogger(__name__)

CONCURRENT_CALLS_LIMIT: Final = 1_024
"""Calls that a server works on at a time; further ones are refused with RESOURCE_EXHAUSTED."""

_SERVER_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    ("grpc.max_send_message_length", wire.MESSAGE_LIMIT_BYTES),
    ("grpc.max_receive_message_length", wire.MESSAGE_LIMIT_BYTES),
    # A taken port must be an error, not a second server that gets every other connection.
    ("grpc.so_reuseport", 0),
    # Clients ping idle connections every 20 s; without these the server would cut them off for it.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
)

_INFRASTRUCTURE: Final = "/grpc."
"""Health and reflection: other people's clients call them, often without a deadline."""


class Server:
    """A grpc.aio server for named services. Owned by one event loop.

    Use: make it in its loop, `add` the servicers, `start`, `stop`. `without_deadline` holds the full method names
    (`/package.Service/Method`) of streams that live until somebody ends them.
    """

    def __init__(
        self,
        service_names: Collection[str],
        *,
        without_deadline: Collection[str] = (),
        concurrent_calls_limit: int = CONCURRENT_CALLS_LIMIT,
    ) -> None:
        self._service_names = tuple(service_names)
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self.grpc = grpc.aio.server(
            interceptors=(_Guard(frozenset(without_deadline)),),
            options=_SERVER_OPTIONS,
            maximum_concurrent_rpcs=concurrent_calls_limit,
        )

    def add(self, add_to_server: Callable[[Any, Any], None], servicer: object) -> None:
        """Serve `servicer`; `add_to_server` is the generated `add_…Servicer_to_server`."""
        add_to_server(servicer, self.grpc)

    async def start(self, address: str, *, insecure: bool = False) -> str:
        """Bind and serve; returns the bound `host:port` (port 0 = any free one).

        Raises ConfigurationError for an address that other hosts can reach unless `insecure`, and for one that is
        taken or not of this host.
        """
        host, port = _checked_address(address, insecure)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        names = (*self._service_names, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self.grpc)
        try:
            bound_port = self.grpc.add_insecure_port(format_address(host, port))
        except RuntimeError as exc:
            raise ConfigurationError(_cannot_bind(address)) from exc
        if not bound_port:
            raise ConfigurationError(_cannot_bind(address))
        await self.grpc.start()
        for name in ("", *self._service_names):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        return format_address(host, bound_port)

    async def stop(self, grace_s: float = 1.0) -> None:
        """Refuse new calls, let running ones end for at most `grace_s` seconds, then cancel them. Idempotent."""
        await self._health.enter_graceful_shutdown()
        await self.grpc.stop(grace_s)


def _checked_address(address: str, insecure: bool) -> tuple[str, int]:
    try:
        host, port = parse_address(address)
    except InvalidRequest as exc:
        raise ConfigurationError(str(exc)) from exc
    if not insecure and not is_loopback(host):
        raise ConfigurationError(
            f"{address} can be reached from other hosts and calls are not authenticated: "
            "pass --insecure to accept that, or bind 127.0.0.1"
        )
    return host, port


def is_loopback(host: str) -> bool:
    """True for `localhost` and loopback addresses; other names count as reachable from outside."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _cannot_bind(address: str) -> str:
    return (
        f"cannot listen on {address}: the port is taken or the address is not of this host; use port 0 for any free one"
    )


class _Guard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Wraps every method of our own services; see the module's docstring."""

    def __init__(self, without_deadline: frozenset[str]) -> None:
        self._without_deadline = without_deadline

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        """The method's handler, guarded; None for an unknown method (gRPC answers UNIMPLEMENTED)."""
        handler = await continuation(details)
        name = details.method
        if handler is None or name.startswith(_INFRASTRUCTURE):
            return handler
        needs_deadline = name not in self._without_deadline
        codec = handler.request_deserializer, handler.response_serializer
        if handler.request_streaming and handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(_stream(handler.stream_stream, name, needs_deadline), *codec)
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(_stream(handler.unary_stream, name, needs_deadline), *codec)
        if handler.request_streaming:
            return grpc.stream_unary_rpc_method_handler(_unary(handler.stream_unary, name, needs_deadline), *codec)
        return grpc.unary_unary_rpc_method_handler(_unary(handler.unary_unary, name, needs_deadline), *codec)


def _unary(behaviour: Callable[[Any, Any], Awaitable[Any]], name: str, needs_deadline: bool) -> Any:
    async def guarded(request: Any, context: Any) -> Any:
        with _counted(name, context):
            try:
                _check_deadline(context, name, needs_deadline)
                return await behaviour(request, context)
            except grpc.aio.AbortError:
                raise
            except Exception as exc:  # noqa: BLE001 (the outermost handler)
                await _abort(context, name, exc)

    return guarded


def _stream(behaviour: Callable[[Any, Any], AsyncIterator[Any]], name: str, needs_deadline: bool) -> Any:
    async def guarded(request: Any, context: Any) -> AsyncIterator[Any]:
        with _counted(name, context):
            try:
                _check_deadline(context, name, needs_deadline)
                async for response in behaviour(request, context):
                    yield response
            except grpc.aio.AbortError:
                raise
            except Exception as exc:  # noqa: BLE001 (the outermost handler)
                await _abort(context, name, exc)

    return guarded


def _counted(name: str, context: Any) -> AbstractContextManager[None]:
    """Count the call of a full method name; its status is the one that `abort` has set."""
    service, _, method = name.removeprefix("/").partition("/")
    return counted(service.rpartition(".")[2], method, "grpc", context.code)


def _check_deadline(context: Any, name: str, needed: bool) -> None:
    if needed and context.time_remaining() is None:
        raise InvalidRequest(f"{name} was called without a deadline; set one (gRPC timeout) on every call")


async def _abort(context: Any, name: str, exc: Exception) -> None:
    if isinstance(exc, KvStoreError):
        await context.abort(*wire.status_of(exc))
    logger.error("unexpected error in %s", name, exc_info=exc)
    await context.abort(grpc.StatusCode.INTERNAL, f"internal error in {name}; the server's log has the details")
