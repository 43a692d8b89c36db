"""The client library: one object a process, one `Cache` a namespace and rank.

    with kvstore.connect(node="127.0.0.1:7420", metadata="127.0.0.1:7410") as client:
        cache = client.bind(namespace)
        keys = cache.keys(tokens)
        cache.write(keys, pages)
        result = cache.read(keys, destination)     # result.chunks leading chunks, else a reason

Reads from the own host's node go through shared memory without an RPC; reads from other nodes go over the
transport through staging. A miss is a value, never an exception.
"""

from kvstore.client.cache import Cache
from kvstore.client.handoff import HandoffResult, SideResult
from kvstore.client.layers import LayerRead, LayersReady, TransferMode
from kvstore.client.pool_client import Client, connect
from kvstore.client.values import Destination, Durability, Match, ReadResult, Source, WriteResult
from kvstore.client.writing import PendingWrite

__all__ = [
    "Cache",
    "Client",
    "Destination",
    "Durability",
    "HandoffResult",
    "LayerRead",
    "LayersReady",
    "Match",
    "PendingWrite",
    "ReadResult",
    "SideResult",
    "Source",
    "TransferMode",
    "WriteResult",
    "connect",
]
