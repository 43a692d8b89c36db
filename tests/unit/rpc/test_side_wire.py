"""Side objects survive the wire; answers that make no sense are refused."""

from __future__ import annotations

import pytest

from kvstore.errors import InvalidRequest, LimitExceeded
from kvstore.model.side_object import SIDE_BYTES_A_TICKET, SIDE_OBJECTS_A_TICKET, SideObject
from kvstore.model.values import MissReason
from kvstore.node import SideAnswer, messages
from kvstore.rpc import wire
from kvstore.rpc.v1 import node_pb2

TICKET = b"t" * 16
OBJECTS = [
    SideObject.made_for(TICKET, "hidden", "bfloat16", (1, 4), bytes(8)),
    SideObject.made_for(TICKET, "count", "int64", (), b"\x01" + bytes(7)),
    SideObject.made_for(TICKET, "nothing", "float32", (0, 3), b""),
]


def test_objects_come_back_equal_and_in_order() -> None:
    sent = [message.SerializeToString() for message in wire.side_objects_to_messages(OBJECTS)]
    back = wire.side_objects_from_messages([node_pb2.SideObject.FromString(each) for each in sent])
    assert back == OBJECTS and all(each.holds_for(TICKET) for each in back)


@pytest.mark.parametrize("answer", [SideAnswer(tuple(OBJECTS), None), SideAnswer((), MissReason.CHUNK_MISSING)])
def test_answers_come_back_equal(answer: SideAnswer) -> None:
    sent = messages.side_to_message(answer).SerializeToString()
    assert messages.side_from_message(node_pb2.GetSideObjectsResponse.FromString(sent)) == answer


def test_answers_that_are_neither_or_both_are_refused() -> None:
    for message in (
        node_pb2.GetSideObjectsResponse(),
        node_pb2.GetSideObjectsResponse(objects=wire.side_objects_to_messages(OBJECTS), miss_reason="absent"),
    ):
        with pytest.raises(InvalidRequest, match="neither"):
            messages.side_from_message(message)
    with pytest.raises(InvalidRequest, match="unknown reason"):
        messages.side_from_message(node_pb2.GetSideObjectsResponse(miss_reason="bad weather"))


def test_objects_out_of_range_are_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="dtype"):
        wire.side_objects_from_messages([node_pb2.SideObject(name="x", data=b"x")])
    with pytest.raises(LimitExceeded, match=r"objects\.shape"):
        wire.side_objects_from_messages([node_pb2.SideObject(name="x", dtype="uint8", shape=[0] * 9)])


def test_the_most_that_a_ticket_can_have_fits_into_a_message() -> None:
    share = SIDE_BYTES_A_TICKET // SIDE_OBJECTS_A_TICKET
    most = tuple(
        SideObject(f"{number:064}", "d" * 32, (share, *[1] * 7), bytes(share), 2**64 - 1)
        for number in range(SIDE_OBJECTS_A_TICKET)
    )
    assert messages.side_to_message(SideAnswer(most, None)).ByteSize() < wire.MESSAGE_LIMIT_BYTES
    put = node_pb2.PutSideObjectsRequest(
        session=2**64 - 1, ticket_id=TICKET, objects=wire.side_objects_to_messages(most)
    )
    assert put.ByteSize() < wire.MESSAGE_LIMIT_BYTES
