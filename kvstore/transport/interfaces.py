"""This host's network interfaces by address."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path
from typing import Final

_SIOCGIFADDR: Final = 0x8915


def interface_of(address: str) -> str:
    """Name of the interface that has this IP address (of IPv4, as its first one); empty where none has.

    "" too for names and for the address that means all of them.
    """
    try:
        wanted = ipaddress.ip_address(address)
    except ValueError:
        return ""
    if wanted.is_unspecified:
        return ""
    if isinstance(wanted, ipaddress.IPv6Address):
        return _with_v6(wanted)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if answer[20:24] == wanted.packed:
                    return name
    return ""


def _with_v6(wanted: ipaddress.IPv6Address) -> str:
    """From the kernel's list: 32 hex digits, four numbers, name."""
    listed = Path("/proc/net/if_inet6")
    lines = listed.read_text().splitlines() if listed.exists() else []
    return next((line.split()[5] for line in lines if bytes.fromhex(line.split()[0]) == wanted.packed), "")
