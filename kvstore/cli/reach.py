"""How nodes can be read, as seen from here: a node beats and answers although its data path is sick (B15).

Each node is asked what it knows of its own paths, and its data address is really connected to.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

from kvstore.cli.asking import ask
from kvstore.errors import KvStoreError, Unauthorized
from kvstore.model.values import NodeInfo

AT_ONCE: Final = 16


@dataclass(frozen=True, slots=True)
class DataPaths:
    """`offered`: by the node, empty where it did not answer. `trouble`: empty where all is well."""

    offered: str
    trouble: str


def look_at(nodes: Sequence[NodeInfo], deadline_s: float) -> list[DataPaths]:
    """Of each node; a node takes at most twice the deadline."""
    if not nodes:
        return []
    with ThreadPoolExecutor(min(AT_ONCE, len(nodes))) as pool:
        return list(pool.map(lambda node: _look(node, deadline_s), nodes))


def _look(node: NodeInfo, deadline_s: float) -> DataPaths:
    figures, troubles = _figures(node, deadline_s)
    if trouble := _cannot_be_read(node, deadline_s):
        troubles.append(f"tcp: {trouble}")
    return DataPaths(str(figures.get("data_paths", "")), "; ".join(troubles))


def _figures(node: NodeInfo, deadline_s: float) -> tuple[dict[str, Any], list[str]]:
    from kvstore.rpc.v1 import node_pb2
    from kvstore.rpc.v1.node_pb2_grpc import NodeServiceStub

    try:
        answer = ask(node.control_address, NodeServiceStub, "Stats", node_pb2.StatsRequest(), deadline_s)
    except KvStoreError:
        return {}, [f"control: {node.control_address} does not answer"]
    figures: dict[str, Any] = json.loads(answer.json)
    return figures, [trouble] if (trouble := figures.get("data_path_trouble")) else []


def _cannot_be_read(node: NodeInfo, deadline_s: float) -> str:
    """Why no connection for data comes about; empty if one does, or would with the secret."""
    from kvstore.transport.tcp import TcpTransport

    try:
        TcpTransport().connect(node, deadline_s).close()
    except Unauthorized:
        return ""
    except KvStoreError as exc:
        return str(exc)
    return ""
