"""Answers of a node <-> messages of node.proto. Pure; used by `remote` (client side) and `server`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, cast

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.errors import InvalidRequest
from kvstore.model.layout import Rectangle
from kvstore.model.prefix import Keys
from kvstore.model.values import MissReason, Outcome
from kvstore.node import AcquireAnswer, CommitAnswer, ReserveAnswer, ShardPlace, SideAnswer
from kvstore.rpc import wire
from kvstore.rpc.v1 import node_pb2

PIECE_BYTES: Final = 1 << 20
"""Most payload bytes in one message of a Put or Get stream."""

STREAM_LIMIT_S: Final = 600.0
"""Longest deadline of a Put or Get stream: a client that stalls keeps one of a few places."""

_OUTCOMES = {outcome.value: outcome for outcome in Outcome}


def outcome_numbers(outcomes: Sequence[Outcome]) -> list[node_pb2.Outcome]:
    """The numbers of the enum, as protobuf takes them."""
    return cast("list[node_pb2.Outcome]", [outcome.value for outcome in outcomes])  # protobuf takes the numbers


def _outcome(value: int) -> Outcome:
    try:
        return _OUTCOMES[value]
    except KeyError:
        raise InvalidRequest(f"the node answered with the unknown outcome {value}; update this client") from None


def _reason(value: str) -> MissReason | None:
    try:
        return MissReason(value) if value else None
    except ValueError as exc:
        raise InvalidRequest(f"the node answered with an unknown reason: {exc}; update this client") from exc


def reserve_to_message(answer: ReserveAnswer, lifetime_ms: int) -> node_pb2.ReserveResponse:
    """Parallel arrays, one place a key."""
    return node_pb2.ReserveResponse(
        attempt=answer.attempt,
        outcomes=outcome_numbers(answer.outcomes),
        slots=answer.slots,
        lifetime_ms=lifetime_ms,
    )


def reserve_from_message(message: node_pb2.ReserveResponse) -> ReserveAnswer:
    """The inverse."""
    return ReserveAnswer(message.attempt, [_outcome(o) for o in message.outcomes], list(message.slots))


def commit_to_message(answer: CommitAnswer) -> node_pb2.CommitResponse:
    """Outcomes of the committed places, then the waiting ones."""
    return node_pb2.CommitResponse(
        outcomes=outcome_numbers(answer.outcomes),
        waiting_indices=[index for index, _, _ in answer.waiting],
        waiting_outcomes=outcome_numbers([outcome for _, outcome, _ in answer.waiting]),
        waiting_slots=[slot for _, _, slot in answer.waiting],
    )


def commit_from_message(message: node_pb2.CommitResponse) -> CommitAnswer:
    """The inverse."""
    waiting = zip(message.waiting_indices, message.waiting_outcomes, message.waiting_slots, strict=True)
    return CommitAnswer(
        [_outcome(outcome) for outcome in message.outcomes],
        [(index, _outcome(outcome), slot) for index, outcome, slot in waiting],
    )


def acquire_to_message(answer: AcquireAnswer) -> node_pb2.AcquireResponse:
    """Places in chunk order. A rectangle that all places share is still sent with each."""
    rectangles: dict[Rectangle, node_pb2.Rectangle] = {}
    for place in answer.places:
        if place.rectangle not in rectangles:
            rectangles[place.rectangle] = wire.rectangle_to_message(place.rectangle)
    return node_pb2.AcquireResponse(
        run=answer.run,
        places=[
            node_pb2.ShardPlace(
                index=place.index,
                shard=place.shard,
                slot=place.slot,
                slot_generation=place.generation,
                table_hash=place.table_hash,
                rectangle=rectangles[place.rectangle],
                tier=1,
            )
            for place in answer.places
        ],
        lease=answer.lease,
        lease_ms=answer.lease_ms,
        miss_reason="" if answer.reason is None else answer.reason.value,
        epoch=answer.epoch,
        more=answer.more,
        ssd_tokens=answer.ssd_tokens,
    )


def acquire_from_message(message: node_pb2.AcquireResponse) -> AcquireAnswer:
    """The inverse; raises InvalidRequest on an unknown reason and on places outside the run."""
    reason = _reason(message.miss_reason)
    places = [
        ShardPlace(
            place.index,
            place.shard,
            place.slot,
            place.slot_generation,
            place.table_hash,
            wire.rectangle_from_message(place.rectangle),
        )
        for place in message.places
    ]
    if any(place.index >= message.run for place in places):
        raise InvalidRequest("the node answered with places of chunks that it does not hold")
    return AcquireAnswer(
        message.run, places, message.lease, message.lease_ms, reason, message.epoch, message.more, message.ssd_tokens
    )


def side_to_message(answer: SideAnswer) -> node_pb2.GetSideObjectsResponse:
    """Objects or a reason."""
    return node_pb2.GetSideObjectsResponse(
        objects=wire.side_objects_to_messages(answer.objects),
        miss_reason="" if answer.reason is None else answer.reason.value,
    )


def side_from_message(message: node_pb2.GetSideObjectsResponse) -> SideAnswer:
    """The inverse; raises InvalidRequest unless the answer is either objects or a reason."""
    answer = SideAnswer(tuple(wire.side_objects_from_messages(message.objects)), _reason(message.miss_reason))
    if bool(answer.objects) == (answer.reason is not None):
        raise InvalidRequest("the node answered neither side objects nor a reason, or both; update one of the two")
    return answer


def put_requests(
    session: int, keys: Keys, shard: int, payloads: Iterable[npt.NDArray[np.uint8]]
) -> Iterator[node_pb2.PutRequest]:
    """The messages of a Put: the header, then pieces and hash of each payload (contiguous uint8), one a key.

    A payload is used up before the next one is asked for, so one buffer can serve for all.
    """
    header = node_pb2.PutHeader(session=session, chain=wire.chain_to_message(keys), shard=shard)
    yield node_pb2.PutRequest(header=header)
    for payload in payloads:
        whole, digest = payload.reshape(-1), xxhash.xxh3_64()
        for at in range(0, len(whole), PIECE_BYTES):
            piece = whole[at : at + PIECE_BYTES].tobytes()
            digest.update(piece)
            yield node_pb2.PutRequest(data=piece)
        yield node_pb2.PutRequest(payload_hash=digest.intdigest())


def put_from_message(message: node_pb2.PutResponse) -> list[Outcome]:
    """Outcomes, one a key."""
    return [_outcome(outcome) for outcome in message.outcomes]
