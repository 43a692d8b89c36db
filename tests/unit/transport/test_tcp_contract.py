"""The tcp transport keeps the contract of transports."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore.transport.tcp import TcpTransport
from tests.contract.transport_suite import TransportSuite
from tests.unit.transport.tcp_owner import LocalOwner, ProcessOwner


class TestTcpTransport(TransportSuite):
    @pytest.fixture
    def transport(self) -> TcpTransport:
        return TcpTransport()

    @pytest.fixture
    def owner(self) -> Iterator[LocalOwner]:
        owner = LocalOwner()
        yield owner
        owner.stop()
        owner.close()

    @pytest.fixture
    def owner_process(self) -> Iterator[ProcessOwner]:
        owner = ProcessOwner()
        yield owner
        owner.stop()
        owner.close()
