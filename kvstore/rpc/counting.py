"""The one place that counts and times calls, however they came: by gRPC or over a session's Unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator

import grpc

from kvstore import metrics
from kvstore.errors import KvStoreError
from kvstore.rpc import wire


def _no_status() -> None:
    return None


@contextlib.contextmanager
def counted(service: str, method: str, via: str, status: Callable[[], object] = _no_status) -> Iterator[None]:
    """Count the call inside under its status code, with the time that it took; a stream's is that of its whole life.

    `via`: "grpc" or "socket". The code is that of the error that leaves the block, unless `status` (asked at the end)
    knows another one.
    """
    began_s, code = time.monotonic(), grpc.StatusCode.OK
    try:
        yield
    except KvStoreError as exc:
        code = wire.status_of(exc)[0]
        raise
    except (asyncio.CancelledError, GeneratorExit):
        code = grpc.StatusCode.CANCELLED
        raise
    except BaseException:
        code = grpc.StatusCode.INTERNAL
        raise
    finally:
        told = status()
        if isinstance(told, grpc.StatusCode) and told is not grpc.StatusCode.OK:
            code = told
        metrics.REQUESTS.labels(service, method, via, code.name).inc()
        metrics.REQUEST_SECONDS.labels(service, method, via).observe(time.monotonic() - began_s)
