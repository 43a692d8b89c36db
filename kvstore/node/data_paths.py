"""How other hosts read this node's memory: the tcp transport always, NIXL beside it where it is of use."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvstore.config import NodeSettings
from kvstore.errors import ConfigurationError, NotFound
from kvstore.node.arena.dram import DramArena
from kvstore.rpc.channel import parse_address
from kvstore.rpc.serving import is_loopback
from kvstore.tally import Tally
from kvstore.transport.data_plane import CREDENTIAL_LIMIT_BYTES, DataPlane, DataPlaneServicer, shows_secret
from kvstore.transport.interfaces import interface_of
from kvstore.transport.nixl_agent import is_installed, path_name, rdma_devices
from kvstore.transport.nixl_process import NixlProcess
from kvstore.transport.tcp_server import TcpServer

logger = logging.getLogger(__name__)


class DataPaths:
    """Serves `arena` and the generation words under `epoch`. Raises ConfigurationError.

    Blocks while NIXL starts (seconds). `generations` is called from threads.
    """

    def __init__(
        self,
        settings: NodeSettings,
        arena: DramArena,
        generations: Callable[[Sequence[int]], Sequence[int]],
        epoch: int,
    ) -> None:
        host, port = parse_address(settings.data_address)
        secret = read_secret(settings.peer_secret_file)
        if not settings.insecure and not is_loopback(host):
            raise ConfigurationError(
                f"data_address {settings.data_address} can be reached from other hosts and pages travel in plain: "
                "pass --insecure to accept that, or bind 127.0.0.1"
            )
        self._tcp = TcpServer(
            arena.fd,
            arena.size_bytes,
            generations,
            epoch,
            host,
            port,
            authorize=lambda credential: shows_secret(secret, credential),
        )
        try:
            self._nixl, self._why_not_nixl = _start_nixl(settings, arena, epoch)
        except ConfigurationError:
            self._tcp.stop()
            raise
        self.address = self._tcp.address
        self.servicer = DataPlaneServicer(epoch, self._plane, secret)
        self.names = ("tcp", f"nixl {path_name(settings.nixl_backend)}") if self._nixl is not None else ("tcp",)
        """Ways that are offered, for the announcement, statistics and `kvstore doctor`."""
        logger.info("other hosts read this node over %s", " or ".join(self.names))

    def _plane(self) -> DataPlane:
        if self._nixl is None:
            raise NotFound("this node offers no NIXL; read it over tcp, or start it with transport = nixl")
        return self._nixl.plane()

    def wake(self) -> None:
        """A peer reads, or is about to. Never waits; said again every 100 ms while leases are out."""
        if self._nixl is not None:
            self._nixl.wake()

    @property
    def trouble(self) -> str:
        """What is wrong with a way that this node offers, or should; empty: nothing that it can know of."""
        why = self._nixl.trouble if self._nixl is not None else self._why_not_nixl
        return f"nixl: {why}" if why else ""

    def figures(self) -> dict[str, Any]:
        """For statistics. A way counts while it serves; a degraded one may serve and not be relied on."""
        trouble = self.trouble
        return {
            "data_paths": ", ".join(self.names),
            "data_path_tcp": 1,
            "data_path_nixl": int(self._nixl is not None and self._nixl.is_serving),
            "data_path_degraded_nixl": int(bool(trouble)),
            "data_path_trouble": trouble,
            "tcp_connections": self._tcp.connection_count,
            "tcp_payload_bytes_sent": self._tcp.payload_bytes_sent,
            "nixl_restarts": self._nixl.restarts if self._nixl is not None else 0,
        }

    def drain_send_seconds(self) -> Tally:
        """See TcpServer."""
        return self._tcp.drain_send_seconds()

    def stop(self) -> None:
        """Readers' transfers end with an error. Idempotent."""
        self._tcp.stop()
        if self._nixl is not None:
            self._nixl.stop()


def _start_nixl(settings: NodeSettings, arena: DramArena, epoch: int) -> tuple[NixlProcess | None, str]:
    """What serves NIXL, or why it does not although this host has the devices."""
    forced = settings.transport == "nixl"
    if not forced and (settings.transport == "tcp" or not rdma_devices()):
        return None, ""  # NIXL over TCP is slower than tcp
    devices = [device for device in settings.nixl_devices.split(",") if device]
    try:
        if not is_installed():
            raise ConfigurationError("NIXL is not installed: pip install 'kvstore[nixl]'")
        serving = NixlProcess(
            f"kvstore-{settings.node_id}",
            epoch,
            arena.fd,
            arena.size_bytes,
            backend=settings.nixl_backend,
            devices=devices,
            interface=_interface(settings),
        )
        return serving, ""
    except ConfigurationError as exc:
        if forced:
            raise
        logger.warning("RDMA devices %s are not used: %s", ", ".join(rdma_devices()), exc)
        return None, f"not used: {exc}"


def _interface(settings: NodeSettings) -> str:
    """The interface of the address that other hosts read at, for UCX over TCP: there it would offer all that it finds,
    also on a node bound to loopback, and a peer that has the same private address would connect to itself.
    """
    if settings.nixl_backend != "UCX" or settings.nixl_devices or rdma_devices() or "UCX_NET_DEVICES" in os.environ:
        return ""
    address = settings.advertise or parse_address(settings.data_address)[0]
    if interface := interface_of(address):
        logger.info("NIXL over TCP uses the interface of %s: %s", address, interface)
    return interface


def read_secret(path: str) -> bytes:
    """What the file holds, without white space at its ends; empty for no file. Raises ConfigurationError."""
    if not path:
        return b""
    try:
        secret = Path(path).expanduser().read_bytes().strip()
    except OSError as exc:
        raise ConfigurationError(f"peer_secret_file {path}: {exc.strerror}") from exc
    if not 1 <= len(secret) <= CREDENTIAL_LIMIT_BYTES:
        raise ConfigurationError(f"peer_secret_file {path} must hold 1..{CREDENTIAL_LIMIT_BYTES} bytes")
    return secret
