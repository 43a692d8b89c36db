"""Tickets as they travel beside a request between engines: a JSON object with hexadecimal ids.

{"id", "namespace_id", "first_key", "last_key", "chunk_count", "last_tokens",
 "ranks": [{"node_id", "epoch", "rectangle": [layer_start, layer_stop, head_start, head_stop]}]}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvstore.errors import InvalidRequest
from kvstore.model.layout import Rectangle
from kvstore.model.values import Ticket, TicketRank

_IDS = ("id", "namespace_id", "first_key", "last_key")


def ticket_to_json(ticket: Ticket) -> dict[str, Any]:
    """The object that `json.dumps` takes."""
    fields: dict[str, Any] = {name: getattr(ticket, name).hex() for name in _IDS}
    fields |= {"chunk_count": ticket.chunk_count, "last_tokens": ticket.last_tokens}
    fields["ranks"] = [
        {
            "node_id": rank.node_id,
            "epoch": rank.epoch,
            "rectangle": [
                rank.rectangle.layer_start,
                rank.rectangle.layer_stop,
                rank.rectangle.head_start,
                rank.rectangle.head_stop,
            ],
        }
        for rank in ticket.ranks
    ]
    return fields


def ticket_from_json(fields: Mapping[str, Any]) -> Ticket:
    """The inverse; raises InvalidRequest for anything else."""
    try:
        ids = {name: bytes.fromhex(fields[name]) for name in _IDS}
        ranks = tuple(
            TicketRank(str(rank["node_id"]), int(rank["epoch"]), Rectangle(*(int(edge) for edge in rank["rectangle"])))
            for rank in fields["ranks"]
        )
        return Ticket(
            **ids, chunk_count=int(fields["chunk_count"]), last_tokens=int(fields["last_tokens"]), ranks=ranks
        )
    except (KeyError, TypeError, ValueError) as exc:
        raise InvalidRequest(f"not a ticket: {exc!r}") from exc
