"""Conversions are inverse to each other, refuse what cannot be right, and errors keep their class."""

from __future__ import annotations

import grpc
import numpy as np
import pytest

from kvstore import errors
from kvstore.errors import InvalidRequest, KvStoreError, LayoutMismatch, LimitExceeded
from kvstore.model.layout import Dtype, Geometry, PageLayout, Rectangle
from kvstore.model.namespace import Namespace
from kvstore.model.prefix import KeyChain, Keys
from kvstore.model.ticket import Ticket, TicketRank
from kvstore.model.values import NodeInfo
from kvstore.rpc import wire
from kvstore.rpc.v1 import node_pb2, scheduler_pb2

LAYOUT = PageLayout(layers=4, kv_heads=4, head_dim=8, dtype=Dtype.BF16, page_tokens=16, pages_per_chunk=1)
CHAIN = KeyChain(Namespace("model", "revision", LAYOUT))


def fields(keys: Keys) -> tuple[object, ...]:
    fingerprints = None if keys.fingerprints is None else keys.fingerprints.tolist()
    return keys.namespace_id, keys.parent, keys.blob, fingerprints, keys.chunk_tokens, keys.last_tokens


@pytest.mark.parametrize("tokens", [0, 1, 15, 16, 17, 160, 1000])
def test_chain_survives_the_wire(tokens: int) -> None:
    keys = CHAIN.keys(range(tokens))
    message = node_pb2.Chain.FromString(wire.chain_to_message(keys).SerializeToString())
    assert fields(wire.keys_from_message(message, LAYOUT.chunk_tokens)) == fields(keys)


def test_chain_in_the_middle_of_a_prompt_keeps_its_parent() -> None:
    keys = CHAIN.keys(range(100)).slice(2, 5)
    assert fields(wire.keys_from_message(wire.chain_to_message(keys), LAYOUT.chunk_tokens)) == fields(keys)


def test_chain_without_fingerprints() -> None:
    message = wire.chain_to_message(CHAIN.keys(range(40)), with_fingerprints=False)
    keys = wire.keys_from_message(message, LAYOUT.chunk_tokens)
    assert keys.fingerprints is None and len(keys) == 3 and keys.last_tokens == 8


def test_absent_last_tokens_mean_a_full_last_chunk() -> None:
    message = wire.chain_to_message(CHAIN.keys(range(32)))
    message.last_tokens = 0
    assert wire.keys_from_message(message, 16).last_tokens == 16


def test_fingerprints_keep_all_64_bits() -> None:
    keys = Keys(b"n" * 16, b"n" * 16, b"k" * 16, np.array([2**64 - 1, 1 << 63], dtype=np.uint64), 16, 16)
    back = wire.keys_from_message(wire.chain_to_message(keys), 16)
    assert back.fingerprints is not None and back.fingerprints.tolist() == [2**64 - 1, 1 << 63]


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        ({"namespace_id": b"short"}, InvalidRequest, "chain.namespace_id"),
        ({"parent_key": b""}, InvalidRequest, "chain.parent_key"),
        ({"keys": b"x" * 33}, InvalidRequest, "chain.keys"),
        ({"keys": bytes(16 * (wire.KEYS_A_CALL_LIMIT + 1))}, LimitExceeded, str(wire.KEYS_A_CALL_LIMIT)),
        ({"fingerprints": [1]}, InvalidRequest, "chain.fingerprints"),
        ({"last_tokens": 17}, InvalidRequest, "last_tokens"),
    ],
)
def test_wrong_chains_are_refused_by_name(change: dict[str, object], error: type[KvStoreError], named: str) -> None:
    message = node_pb2.Chain(namespace_id=b"n" * 16, parent_key=b"n" * 16, keys=b"k" * 32)
    for name, value in change.items():
        if isinstance(value, list):
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)
    with pytest.raises(error, match=named):
        wire.keys_from_message(message, 16)


def test_geometry_survives_and_gaps_are_refused() -> None:
    geometry = Geometry.parallel(LAYOUT, tp=2, pp=2)
    messages = wire.geometry_to_messages(geometry)
    assert wire.geometry_from_messages(messages) == geometry
    with pytest.raises(LayoutMismatch):
        wire.geometry_from_messages(messages[:-1])
    with pytest.raises(LimitExceeded, match="256"):
        wire.geometry_from_messages([node_pb2.Rectangle()] * 257)


def test_an_empty_rectangle_is_refused() -> None:
    with pytest.raises(LayoutMismatch):
        wire.rectangle_from_message(node_pb2.Rectangle())


def test_node_info() -> None:
    node = NodeInfo("n1", 2**63, "host", "127.0.0.1:1", "127.0.0.1:2", "/run/n1.sock")
    assert wire.node_info_from_message(wire.node_info_to_message(node)) == node
    for wrong in (node_pb2.NodeInfo(node_id="n1"), node_pb2.NodeInfo(epoch=1)):
        with pytest.raises(InvalidRequest):
            wire.node_info_from_message(wrong)
    with pytest.raises(LimitExceeded, match="host_id"):
        wire.node_info_from_message(node_pb2.NodeInfo(node_id="n1", epoch=1, host_id="é" * 129))


def test_ticket() -> None:
    ranks = (TicketRank("n1", 1, Rectangle(0, 2, 0, 4)), TicketRank("n2", 5, Rectangle(2, 4, 0, 4)))
    ticket = Ticket(b"t" * 16, b"n" * 16, b"a" * 16, b"z" * 16, 9, 3, ranks)
    assert wire.ticket_from_message(wire.ticket_to_message(ticket)) == ticket
    message = wire.ticket_to_message(ticket)
    message.id = b""
    with pytest.raises(InvalidRequest, match=r"ticket\.id"):
        wire.ticket_from_message(message)
    with pytest.raises(InvalidRequest):
        wire.ticket_from_message(scheduler_pb2.Ticket(id=b"t" * 16))


@pytest.mark.parametrize("name", [name for name in dir(errors) if name != "KvStoreError" and name[0].isupper()])
def test_every_class_of_the_tree_keeps_its_name(name: str) -> None:
    code, details, trailing = wire.status_of(getattr(errors, name)("why"))
    back = wire.error_from_status(code, details, dict(trailing)[wire.ERROR_METADATA_KEY])
    assert type(back) is getattr(errors, name) and str(back) == "why"


def test_a_private_subclass_travels_as_its_base() -> None:
    class Special(LimitExceeded):
        pass

    code, _, trailing = wire.status_of(Special("why"))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert trailing == ((wire.ERROR_METADATA_KEY, "LimitExceeded"),)


@pytest.mark.parametrize(
    ("code", "name", "expected"),
    [
        (grpc.StatusCode.UNAVAILABLE, "", errors.Unreachable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "", errors.DeadlineExceeded),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "", errors.CapacityExhausted),
        (grpc.StatusCode.ABORTED, "NoSuchClass", errors.StaleReference),
        (grpc.StatusCode.INTERNAL, "", KvStoreError),
        (grpc.StatusCode.INTERNAL, "SystemExit", KvStoreError),
    ],
)
def test_without_a_known_name_the_status_code_decides(
    code: grpc.StatusCode, name: str, expected: type[KvStoreError]
) -> None:
    assert type(wire.error_from_status(code, "why", name)) is expected
