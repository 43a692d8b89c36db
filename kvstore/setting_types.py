"""The kinds of value that settings have: sizes, counts, addresses, names. Pure; refused values come with good examples.

Each `Annotated` type checks what it is given, whether text from a file, the environment or a flag, or a value from
code. Its `title` stands for a value in the help of the command line.
"""

from __future__ import annotations

import ipaddress
import re
from decimal import Decimal
from typing import Annotated

from pydantic import BeforeValidator, Field

_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>B|KiB|MiB|GiB|TiB)?", re.IGNORECASE | re.ASCII)
_UNIT_BYTES = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_HOST_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,252}")
_NODE_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


def parse_size(value: object) -> int:
    """Bytes of a size: `8GiB`, `1.5 MiB`, `4096`. Raises ValueError with examples for anything else."""
    text = str(value).strip()
    match = None if isinstance(value, bool) else _SIZE.fullmatch(text)
    size = Decimal(match["number"]) * _UNIT_BYTES[(match["unit"] or "").lower()] if match else 0
    if size < 1 or size != int(size):
        raise ValueError(f"{text!r} is not a size above 0; write for example 8GiB, 512MiB or 1073741824 (bytes)")
    return int(size)


def size_text(size_bytes: int) -> str:
    """The shortest text that `parse_size` reads as this many bytes."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size_bytes % _UNIT_BYTES[unit.lower()] == 0:
            return f"{size_bytes // _UNIT_BYTES[unit.lower()]}{unit}"
    return str(size_bytes)


def split_address(text: str) -> tuple[str, int]:
    """(host, port) of `host:port`; IPv6 hosts stand in brackets. Raises ValueError with an example."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""
    if not (colon and _is_host(host) and port.isascii() and port.isdigit()):
        raise ValueError(f"{text!r} is not host:port; write for example 127.0.0.1:7420 or [::1]:7420")
    if int(port) > 65535:
        raise ValueError(f"{text!r} has a port above 65535; write for example 127.0.0.1:7420")
    return host, int(port)


def _listen_address(value: object) -> str:
    split_address(str(value))
    return str(value)


def _listen_address_or_off(value: object) -> str:
    return "" if value == "" else _listen_address(value)


def _peer_address(value: object) -> str:
    if split_address(str(value))[1] == 0:
        raise ValueError(f"{str(value)!r} names port 0, where nothing can be reached; give the port that was printed")
    return str(value)


def _peer_address_or_none(value: object) -> str:
    return "" if value == "" else _peer_address(value)


def _host(value: object) -> str:
    if value != "" and not _is_host(str(value)):
        raise ValueError(
            f"{str(value)!r} is not a host name or IP; write for example node1.example.org, without a port"
        )
    return str(value)


def _is_host(text: str) -> bool:
    return _HOST_NAME.fullmatch(text) is not None or _ip(text) is not None


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def is_node_id(text: str) -> bool:
    """True if the text can name a node and its socket file."""
    return _NODE_ID.fullmatch(text) is not None


def _node_id(value: object) -> str:
    if value != "" and not is_node_id(str(value)):
        raise ValueError(
            f"{str(value)!r} is not a node id; use 1 to 64 of A-Z a-z 0-9 . _ - (it names the socket file)"
        )
    return str(value)


def split_ssd(text: str) -> tuple[str, int]:
    """(path, bytes) of `PATH:SIZE`; raises ValueError with an example."""
    path, colon, size = text.rpartition(":")
    if not (colon and path):
        raise ValueError(f"{text!r} is not PATH:SIZE; write for example /mnt/nvme0:200GiB")
    return path, parse_size(size)


def _ssd(value: object) -> str:
    if value != "":
        split_ssd(str(value))
    return str(value)


QuotaBytes = tuple[str, dict[str, tuple[int, int]]]
"""Name of a tenant or model; tier -> (bytes it keeps at least, bytes it takes at most), 0 = no bound."""


def parse_quotas(text: str) -> list[QuotaBytes]:
    """Quotas like `acme:dram=1GiB..4GiB,ssd=..100GiB; gamma:dram=2GiB..`. Raises ValueError with an example."""
    found: list[QuotaBytes] = []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        name, colon, rest = part.rpartition(":")
        bounds = [bound.strip().partition("=") for bound in rest.split(",")]
        if not (colon and name) or any(tier not in ("dram", "ssd") or ".." not in span for tier, _, span in bounds):
            raise ValueError(
                f"{part!r} is not a quota; write for example 'acme:dram=1GiB..4GiB,ssd=..100GiB', several with ;"
            )
        spans = {}
        for tier, _, span in bounds:
            least, most = (parse_size(end) if end.strip() else 0 for end in span.split("..", 1))
            if most and least > most:
                raise ValueError(f"{part!r}: the minimum of {tier} is above its maximum")
            spans[tier] = least, most
        found.append((name.strip(), spans))
    return found


def _quotas(value: object) -> str:
    parse_quotas(str(value))
    return str(value)


def is_loopback(host: str) -> bool:
    """True for `localhost` and loopback IPs; other names count as reachable from outside."""
    ip = _ip(host)
    return host == "localhost" if ip is None else ip.is_loopback


def is_wildcard(host: str) -> bool:
    """True for 0.0.0.0 and ::, which listen everywhere and name no host."""
    ip = _ip(host)
    return ip is not None and ip.is_unspecified


Size = Annotated[int, BeforeValidator(parse_size), Field(title="SIZE")]
Count = Annotated[int, Field(ge=0, title="COUNT")]
ListenAddress = Annotated[str, BeforeValidator(_listen_address), Field(title="HOST:PORT")]
OptionalListenAddress = Annotated[str, BeforeValidator(_listen_address_or_off), Field(title="HOST:PORT")]
PeerAddress = Annotated[str, BeforeValidator(_peer_address), Field(title="HOST:PORT")]
OptionalPeerAddress = Annotated[str, BeforeValidator(_peer_address_or_none), Field(title="HOST:PORT")]
Host = Annotated[str, BeforeValidator(_host), Field(title="HOST")]
NodeId = Annotated[str, BeforeValidator(_node_id), Field(title="NAME")]
SsdPlace = Annotated[str, BeforeValidator(_ssd), Field(title="PATH:SIZE")]
QuotaTexts = Annotated[str, BeforeValidator(_quotas), Field(title="QUOTAS")]
Folder = Annotated[str, Field(title="FOLDER")]
Name = Annotated[str, Field(title="NAME")]
File = Annotated[str, Field(title="FILE")]
