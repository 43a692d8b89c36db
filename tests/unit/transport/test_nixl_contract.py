"""The nixl transport keeps the contract of transports, over TCP and where the reader reaches into the owner."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from kvstore.transport.nixl import NixlTransport
from tests.contract.transport_suite import TransportSuite
from tests.unit.transport.nixl_owners import LocalNixlOwner, NixlProcessOwner

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="needs the nixl package"),
    pytest.mark.nixl,
    pytest.mark.xdist_group("nixl"),
]


Owners = dict[type, LocalNixlOwner]


@pytest.fixture(scope="module")
def owners() -> Iterator[Owners]:
    """The owner that each class used last, if it still serves: starting one takes seconds."""
    kept: Owners = {}
    yield kept
    for owner in kept.values():
        owner.stop()


class TestNixlOverTcp(TransportSuite):
    """Both sides are told to use TCP, as between hosts without RDMA."""

    @pytest.fixture(autouse=True)
    def only_tcp(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("UCX_TLS", "tcp")

    @pytest.fixture
    def transport(self) -> Iterator[NixlTransport]:
        transport = NixlTransport()
        yield transport
        transport.close()

    @pytest.fixture
    def owner(self, only_tcp: None, transport: NixlTransport, owners: Owners) -> LocalNixlOwner:
        owner = owners.get(type(self))
        if owner is None or owner.stopped:
            owner = owners[type(self)] = LocalNixlOwner()
        owner.read_by(transport)
        return owner

    @pytest.fixture
    def owner_process(self, only_tcp: None) -> Iterator[NixlProcessOwner]:
        owner = NixlProcessOwner()
        yield owner
        owner.stop()
        owner.close()


class TestNixlOneSided(TestNixlOverTcp):
    """What UCX chooses between processes of one host: the reader copies out of the owner's memory."""

    needs_owner = False

    @pytest.fixture(autouse=True)
    def only_tcp(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("UCX_TLS", raising=False)
