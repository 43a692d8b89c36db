"""Reading from another host's node: Acquire, payload into staging, fence, checksums, then scatter.

Of each stored shard only what is wanted is fetched (`kvstore/model/fetch.py`): all layers at once, or group by group.

Nothing lands in the caller's memory before its fence and the checksums of its layer have passed; what lies there of a
chunk that is missed is undefined. A larger read streams through staging batch by batch. The checksum table travels with
its payload and is believed only if it matches the hash of the catalog entry, which came by Acquire.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from kvstore.client.peers import Peer
from kvstore.client.pipeline import Delivery, Pipeline
from kvstore.errors import DeadlineExceeded, KvStoreError, NotFound, SessionLost
from kvstore.model.prefix import Keys
from kvstore.model.values import MissReason
from kvstore.node import AcquireAnswer, ShardPlace


@dataclass(frozen=True, slots=True)
class RemoteRead:
    """`chunks` leading chunks were delivered; `payload_bytes` came over the network (tables included), by `path`.

    `ssd_tokens` of them the peer had on its SSD only. `more`: it has the next chunk, on a slower tier.
    """

    chunks: int
    reason: MissReason | None
    payload_bytes: int
    ssd_tokens: int = 0
    more: bool = False
    path: str = ""


def read_remote(
    peer: Peer, delivery: Delivery, keys: Keys, first: int, *, ticket_id: bytes = b"", wait_ms: int = 0
) -> RemoteRead:
    """Deliver the longest prefix of `keys` that this peer holds; chunk i goes to place `first + i`.

    Every failure is a reason, not an exception. What the peer has to bring from a slower tier comes in several parts.
    """
    done = RemoteRead(0, None, 0, more=True)
    while done.more and time.monotonic() < delivery.end_s:
        rest = keys.slice(done.chunks, len(keys))
        part = _read_part(peer, delivery, rest, first + done.chunks, ticket_id, wait_ms)
        done = RemoteRead(
            done.chunks + part.chunks,
            part.reason,
            done.payload_bytes + part.payload_bytes,
            done.ssd_tokens + part.ssd_tokens,
            part.more and part.chunks > 0,
            part.path or done.path,
        )
    return done if done.chunks == len(keys) or done.reason else replace(done, reason=MissReason.DEADLINE)


def _read_part(peer: Peer, delivery: Delivery, keys: Keys, first: int, ticket_id: bytes, wait_ms: int) -> RemoteRead:
    """One Acquire, and what it leased."""
    end_s = delivery.end_s
    try:
        peer.register(delivery.namespace, _left(end_s))
        lease_ms = min(60_000, int(_left(end_s) * 1000) + 1000)
        answer = peer.api.acquire(keys, delivery.rectangle, lease_ms, ticket_id, wait_ms, _left(end_s))
    except DeadlineExceeded:
        return RemoteRead(0, MissReason.DEADLINE, 0)
    except NotFound:
        return RemoteRead(0, MissReason.ABSENT, 0)
    except SessionLost:
        return RemoteRead(0, MissReason.SESSION_LOST, 0)
    except KvStoreError:
        return RemoteRead(0, MissReason.UNREACHABLE, 0)
    if not answer.run:
        return RemoteRead(0, answer.reason, 0)
    by_chunk: list[list[ShardPlace]] = [[] for _ in range(answer.run)]
    for place in answer.places:
        by_chunk[place.index].append(place)
    try:
        result = _read_places(peer, delivery, by_chunk, first, whole=answer.run == len(keys))
    finally:
        _release(peer, answer, end_s)
    ssd_tokens = min(answer.ssd_tokens, keys.tokens_of_first(result.chunks))
    if result.chunks < answer.run:
        return replace(result, ssd_tokens=ssd_tokens)
    return replace(result, reason=answer.reason, ssd_tokens=ssd_tokens, more=answer.more)


def _read_places(
    peer: Peer, delivery: Delivery, by_chunk: list[list[ShardPlace]], first: int, whole: bool
) -> RemoteRead:
    """Deliver resolved chunks. A kept connection that fails at once is made anew: its owner may just have ended it."""
    while True:
        kept, path, moved, healthy, connection = False, "", 0, False, None
        try:
            connection, kept = peer.take(_left(delivery.end_s))
            path = connection.name
            delivery.on_connection(connection)
            pipeline = Pipeline(delivery, first, connection)
            done, reason = pipeline.read(by_chunk, whole)
            moved, healthy = pipeline.moved, pipeline.healthy
        except DeadlineExceeded:
            done, reason = 0, MissReason.DEADLINE
        except KvStoreError:
            done, reason = 0, MissReason.UNREACHABLE
        finally:
            if connection is not None:
                delivery.on_connection(None)
                peer.give_back(connection, healthy=healthy)
        if not (kept and done == 0 and reason is MissReason.UNREACHABLE):
            return RemoteRead(done, reason, moved, path=path)


def _release(peer: Peer, answer: AcquireAnswer, end_s: float) -> None:
    """Give the lease back. Failing that it runs out by itself, within a minute."""
    if answer.lease:
        try:
            peer.api.release([answer.lease], [], min(1.0, max(0.05, _left(end_s))))
        except KvStoreError:
            return


def _left(end_s: float) -> float:
    return max(0.001, end_s - time.monotonic())
