"""Tickets: what a handoff is called before its chunks exist. Pure values.

A ticket travels beside a request from engine to engine (`kv_transfer_params`) as a JSON object:

    {"id", "namespace_id", "first_key", "last_key",          hexadecimal, 16 bytes each
     "chunk_count", "last_tokens",
     "ranks": [{"node_id", "epoch", "rectangle": [layer_start, layer_stop, head_start, head_stop]}]}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvstore.errors import InvalidRequest
from kvstore.model.layout import Rectangle

_IDS = ("id", "namespace_id", "first_key", "last_key")


@dataclass(frozen=True, slots=True)
class TicketRank:
    """One writing rank of a handoff: its node, that node's epoch, the rectangle it writes."""

    node_id: str
    epoch: int
    rectangle: Rectangle


@dataclass(frozen=True, slots=True)
class Ticket:
    """A handoff that can be named before its chunks are committed, because keys are known beforehand.

    `id` (16 bytes) names the pins that the commits leave on the nodes: released by the reader, or after 60 s.
    """

    id: bytes
    namespace_id: bytes
    first_key: bytes
    last_key: bytes
    chunk_count: int
    last_tokens: int
    ranks: tuple[TicketRank, ...] = ()

    def __post_init__(self) -> None:
        if any(len(value) != 16 for value in (self.id, self.namespace_id, self.first_key, self.last_key)):
            raise InvalidRequest("ids and keys of a ticket have 16 bytes")
        if self.chunk_count < 1:
            raise InvalidRequest("a ticket covers at least one chunk")

    def to_json(self) -> dict[str, Any]:
        """The object that `json.dumps` takes."""
        fields: dict[str, Any] = {name: getattr(self, name).hex() for name in _IDS}
        fields |= {"chunk_count": self.chunk_count, "last_tokens": self.last_tokens}
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
            for rank in self.ranks
        ]
        return fields

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Ticket:
        """The inverse; raises InvalidRequest for anything else."""
        try:
            ids = {name: bytes.fromhex(fields[name]) for name in _IDS}
            ranks = tuple(
                TicketRank(
                    str(rank["node_id"]), int(rank["epoch"]), Rectangle(*(int(edge) for edge in rank["rectangle"]))
                )
                for rank in fields["ranks"]
            )
            return cls(
                **ids, chunk_count=int(fields["chunk_count"]), last_tokens=int(fields["last_tokens"]), ranks=ranks
            )
        except (KeyError, TypeError, ValueError) as exc:
            raise InvalidRequest(f"not a ticket: {exc!r}") from exc
