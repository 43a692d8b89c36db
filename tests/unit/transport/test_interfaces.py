"""Interfaces by address."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.transport.interfaces import interface_of


def test_an_address_has_its_interface() -> None:
    assert interface_of("127.0.0.1") == "lo"


@pytest.mark.skipif(
    not any(line.split()[5] == "lo" for line in Path("/proc/net/if_inet6").read_text().splitlines())
    if Path("/proc/net/if_inet6").exists()
    else True,
    reason="no IPv6 here",
)
def test_an_address_of_ipv6_too() -> None:
    assert interface_of("::1") == "lo"


@pytest.mark.parametrize("address", ["203.0.113.77", "2001:db8::77", "0.0.0.0", "::", "localhost", ""])
def test_what_no_interface_has_is_none(address: str) -> None:
    assert interface_of(address) == ""
