"""`kvstore status` and `kvstore stats`: look at running servers. Each is one call with a deadline."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstore.cli.flags import ConfigOption, JsonOption
from kvstore.cli.output import print_json, print_table
from kvstore.config import MetadataSettings, NodeSettings, load
from kvstore.errors import DeadlineExceeded, Unreachable

if TYPE_CHECKING:
    from kvstore.rpc.v1.metadata_pb2 import NodeStatus

DeadlineOption = Annotated[float, typer.Option("--deadline-s", min=0.01, help="Longest wait for the answer, seconds.")]


def _ask(
    address: str, make_stub: Callable[..., Any], method: str, request: object, deadline_s: float, hint: str
) -> Any:
    """The answer of one call; where nobody answers, the error says what to do (`hint`)."""
    from kvstore.rpc.channel import Channel

    channel = Channel(address)
    try:
        return channel.call(getattr(channel.stub(make_stub), method), request, deadline_s)
    except Unreachable as exc:
        raise Unreachable(f"nothing answers at {address}; {hint}") from exc
    except DeadlineExceeded as exc:
        raise DeadlineExceeded(f"{address} did not answer within {deadline_s:g} s; {hint}") from exc
    finally:
        channel.close()


def status(
    metadata: Annotated[
        str, typer.Option("--metadata", metavar="HOST:PORT", help="Metadata service. Default: the configured one.")
    ] = "",
    deadline_s: DeadlineOption = 5.0,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the nodes of the pool."""
    from kvstore.rpc.v1 import metadata_pb2
    from kvstore.rpc.v1.metadata_pb2_grpc import MetadataServiceStub

    configured = load(NodeSettings, config=config).metadata_address or load(MetadataSettings, config=config).address
    address = metadata or configured
    hint = "start the service with `kvstore metadata` or `kvstore up`, or name the right one with --metadata"
    answer = _ask(address, MetadataServiceStub, "ListNodes", metadata_pb2.ListNodesRequest(), deadline_s, hint)
    nodes = [_node_facts(entry) for entry in answer.nodes]
    if as_json:
        print_json({"metadata_address": address, "nodes": nodes})
        return
    columns = ["node_id", "state", "control_address", "data_address", "shard_count", "silent_ms"]
    rows = [[facts[column] for column in columns] for facts in nodes]
    print_table(f"{len(nodes)} nodes, says {address}", [c.replace("_", " ") for c in columns], rows)


def _node_facts(entry: NodeStatus) -> dict[str, Any]:
    return {
        "node_id": entry.node.node_id,
        "state": "suspect" if entry.suspect else "live",
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
    node: Annotated[str, typer.Option("--node", metavar="HOST:PORT", help="Node. Default: the configured one.")] = "",
    deadline_s: DeadlineOption = 5.0,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the counters of one node."""
    from kvstore.rpc.v1 import node_pb2
    from kvstore.rpc.v1.node_pb2_grpc import NodeServiceStub

    address = node or load(NodeSettings, config=config).control_address
    hint = (
        "start one with `kvstore node` or `kvstore up`, or name the right one with --node (`kvstore status` lists them)"
    )
    answer = _ask(address, NodeServiceStub, "Stats", node_pb2.StatsRequest(), deadline_s, hint)
    if as_json:
        print(answer.json)
        return
    print_table(f"{answer.node.node_id} at {address}", ["name", "value"], json.loads(answer.json).items())
