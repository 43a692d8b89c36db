"""`kvstore status` and `kvstore stats`: look at running servers. Each call has a deadline."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from kvstore.cli.asking import (
    METADATA_HINT,
    DeadlineOption,
    MetadataOption,
    NodeOption,
    ask,
    metadata_address,
    node_address,
)
from kvstore.cli.flags import ConfigOption, JsonOption
from kvstore.cli.output import print_json, print_table

if TYPE_CHECKING:
    from kvstore.cli.reach import DataPaths
    from kvstore.rpc.v1.metadata_pb2 import NodeStatus


def status(
    metadata: MetadataOption = "",
    deadline_s: DeadlineOption = 5.0,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the nodes of the pool, and how they can be read from here."""
    from kvstore.cli.reach import look_at
    from kvstore.rpc import wire
    from kvstore.rpc.v1 import metadata_pb2
    from kvstore.rpc.v1.metadata_pb2_grpc import MetadataServiceStub

    address = metadata_address(metadata, config)
    request = metadata_pb2.ListNodesRequest()
    answer = ask(address, MetadataServiceStub, "ListNodes", request, deadline_s, METADATA_HINT)
    paths = look_at([wire.node_info_from_message(entry.node) for entry in answer.nodes], min(deadline_s, 1.0))
    nodes = [_node_facts(entry, path) for entry, path in zip(answer.nodes, paths, strict=True)]
    if as_json:
        print_json({"metadata_address": address, "nodes": nodes})
        return
    columns = ["node_id", "state", "control_address", "data_address", "shard_count", "silent_ms"]
    rows = [[facts[column] for column in columns] for facts in nodes]
    print_table(f"{len(nodes)} nodes, says {address}", [c.replace("_", " ") for c in columns], rows)
    for facts in nodes:
        if facts["trouble"]:
            print(f"{facts['node_id']}: {facts['trouble']}")


def _node_facts(entry: NodeStatus, paths: DataPaths) -> dict[str, Any]:
    """`suspect`: it does not beat. `degraded`: it beats, and a way to read it does not work."""
    return {
        "node_id": entry.node.node_id,
        "state": "suspect" if entry.suspect else "degraded" if paths.trouble else "live",
        "data_paths": paths.offered,
        "trouble": paths.trouble,
        "epoch": entry.node.epoch,
        "host_id": entry.node.host_id,
        "control_address": entry.node.control_address,
        "data_address": entry.node.data_address,
        "socket_path": entry.node.socket_path,
        "applied_sequence": entry.applied_sequence,
        "shard_count": entry.shard_count,
        "silent_ms": entry.silent_ms,
    }


def stats(
    node: NodeOption = "",
    deadline_s: DeadlineOption = 5.0,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the counters of one node."""
    from kvstore.rpc.v1 import node_pb2
    from kvstore.rpc.v1.node_pb2_grpc import NodeServiceStub

    address = node_address(node, config)
    answer = ask(address, NodeServiceStub, "Stats", node_pb2.StatsRequest(), deadline_s)
    if as_json:
        print(answer.json)
        return
    print_table(f"{answer.node.node_id} at {address}", ["name", "value"], json.loads(answer.json).items())
