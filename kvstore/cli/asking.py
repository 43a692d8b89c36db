"""One call to a server with a deadline, for commands: who is asked, and what to do where nobody answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstore.config import MetadataSettings, NodeSettings, load
from kvstore.errors import DeadlineExceeded, NotFound, Unreachable

if TYPE_CHECKING:
    from kvstore.rpc.channel import Channel

DeadlineOption = Annotated[float, typer.Option("--deadline-s", min=0.01, help="Longest wait for the answer, seconds.")]
NodeOption = Annotated[str, typer.Option("--node", metavar="HOST:PORT", help="Node. Default: the configured one.")]
AllOption = Annotated[bool, typer.Option("--all", help="All nodes that the metadata service lists.")]
MetadataOption = Annotated[
    str, typer.Option("--metadata", metavar="HOST:PORT", help="Metadata service. Default: the configured one.")
]
NODE_HINT = (
    "start one with `kvstore node` or `kvstore up`, or name the right one with --node (`kvstore status` lists them)"
)
METADATA_HINT = "start the service with `kvstore metadata` or `kvstore up`, or name the right one with --metadata"


@dataclass(frozen=True, slots=True)
class NodeName:
    """A node that is asked. `node_id` is empty where it was named by its address."""

    node_id: str
    address: str

    @property
    def title(self) -> str:
        """For people."""
        return self.node_id or self.address


@contextmanager
def connected(address: str, deadline_s: float, hint: str = NODE_HINT) -> Iterator[Channel]:
    """A channel for a few calls; errors for which somebody can do something say what (`hint`)."""
    from kvstore.rpc.channel import Channel

    channel = Channel(address)
    try:
        yield channel
    except Unreachable as exc:
        raise Unreachable(f"nothing answers at {address}; {hint}") from exc
    except DeadlineExceeded as exc:
        raise DeadlineExceeded(f"{address} did not answer within {deadline_s:g} s; {hint}") from exc
    finally:
        channel.close()


def ask(
    address: str,
    make_stub: Callable[..., Any],
    method: str,
    request: object,
    deadline_s: float,
    hint: str = NODE_HINT,
) -> Any:
    """The answer of one call."""
    with connected(address, deadline_s, hint) as channel:
        return channel.call(getattr(channel.stub(make_stub), method), request, deadline_s)


def ask_operator(address: str, method: str, request: object, deadline_s: float) -> Any:
    """The answer of one call of a node's AdminService."""
    from kvstore.rpc.v1.admin_pb2_grpc import AdminServiceStub

    return ask(address, AdminServiceStub, method, request, deadline_s)


def node_address(node: str, config: Path | None) -> str:
    """The node that a command means: the named one, else the configured one."""
    return node or load(NodeSettings, config=config).control_address


def metadata_address(metadata: str, config: Path | None) -> str:
    """The metadata service that a command means."""
    configured = load(NodeSettings, config=config).metadata_address or load(MetadataSettings, config=config).address
    return metadata or configured


def listed_nodes(address: str, deadline_s: float) -> list[NodeName]:
    """All nodes of the pool, by name. Raises NotFound where there are none."""
    from kvstore.rpc.v1 import metadata_pb2
    from kvstore.rpc.v1.metadata_pb2_grpc import MetadataServiceStub

    request = metadata_pb2.ListNodesRequest()
    answer = ask(address, MetadataServiceStub, "ListNodes", request, deadline_s, METADATA_HINT)
    nodes = sorted((entry.node.node_id, entry.node.control_address) for entry in answer.nodes)
    if not nodes:
        raise NotFound(f"the metadata service at {address} knows no nodes; {NODE_HINT}")
    return [NodeName(*node) for node in nodes]


def chosen_nodes(node: str, all_nodes: bool, metadata: str, config: Path | None, deadline_s: float) -> list[NodeName]:
    """The nodes that `--node`, `--all` and `--metadata` mean."""
    if all_nodes:
        return listed_nodes(metadata_address(metadata, config), deadline_s)
    return [NodeName("", node_address(node, config))]
