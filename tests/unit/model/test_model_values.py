"""Outcomes and tickets."""

from __future__ import annotations

import pytest

from kvstore.errors import InvalidRequest
from kvstore.model.ticket import Ticket
from kvstore.model.values import Outcome


def test_refused_outcomes_are_those_named_so() -> None:
    assert {one for one in Outcome if one.refused} == {one for one in Outcome if one.name.startswith("REFUSED_")}


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("value", [b"", bytes(15), bytes(17)])
def test_ids_and_keys_of_a_ticket_have_16_bytes(place: int, value: bytes) -> None:
    fields = [bytes(16)] * 4
    fields[place] = value
    one, two, three, four = fields
    with pytest.raises(InvalidRequest, match="16 bytes"):
        Ticket(one, two, three, four, 1, 1)


def test_a_ticket_covers_a_chunk() -> None:
    assert Ticket(bytes(16), bytes(16), bytes(16), bytes(16), 1, 1).ranks == ()
    with pytest.raises(InvalidRequest, match="at least one chunk"):
        Ticket(bytes(16), bytes(16), bytes(16), bytes(16), 0, 1)
