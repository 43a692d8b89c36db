"""`kvstore drain`: have other nodes take over what one node holds, so that it can be stopped without losing it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from kvstore.cli.flags import ConfigOption, JsonOption
from kvstore.cli.output import print_json
from kvstore.config import MetadataSettings, NodeSettings, load
from kvstore.errors import InvalidRequest, KvStoreError, NotFound, Unreachable

if TYPE_CHECKING:
    from kvstore.model.values import NodeInfo
    from kvstore.node.operators.moving import Drained

_ASK_S = 5.0
"""Longest wait for what a node or the metadata service says of the nodes."""


def drain(
    node: Annotated[str, typer.Argument(metavar="NODE", help="Node to empty: its id, or HOST:PORT.")],
    to: Annotated[
        list[str] | None,
        typer.Option("--to", metavar="NODE", help="Where to; may be given again. Default: all other live nodes."),
    ] = None,
    metadata: Annotated[
        str, typer.Option("--metadata", metavar="HOST:PORT", help="Metadata service. Default: the configured one.")
    ] = "",
    deadline_s: Annotated[float, typer.Option("--deadline-s", min=0.01, help="Longest time of all, seconds.")] = 3600.0,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Copy all chunks of a node to others; the node takes no new ones from now on."""
    configured = load(NodeSettings, config=config).metadata_address or load(MetadataSettings, config=config).address
    pool = _Pool(metadata or configured)
    source = pool.node(node)
    targets = [pool.node(each) for each in to] if to else pool.others(source)
    last = _follow(source, targets, deadline_s)
    if as_json:
        print_json(
            {"node_id": source.node_id, "targets": [each.node_id for each in targets]} | dataclasses.asdict(last)
        )
    else:
        print(f"{last.moved_chunks:,} of {last.chunks:,} chunks of {source.node_id} are on other nodes now")
    if last.failed_chunks:
        raise KvStoreError(f"{last.failed_chunks} of {last.chunks} chunks could not be moved: {last.reason}")


def _follow(source: NodeInfo, targets: list[NodeInfo], deadline_s: float) -> Drained:
    """The last word of the drain; what it says before that is one changing line on standard error."""
    from kvstore.node.operators.moving import Drained
    from kvstore.rpc import wire
    from kvstore.rpc.channel import Channel
    from kvstore.rpc.v1 import admin_pb2
    from kvstore.rpc.v1.admin_pb2_grpc import AdminServiceStub

    channel = Channel(source.control_address)
    request = admin_pb2.DrainRequest(targets=[wire.node_info_to_message(each) for each in targets])
    last = Drained(0, 0, 0, "")
    try:
        with Console(stderr=True).status(f"draining {source.node_id}") as line:
            for said in channel.stream(channel.stub(AdminServiceStub).Drain, request, deadline_s):
                last = Drained(said.chunks, said.moved_chunks, said.failed_chunks, said.reason)
                line.update(f"draining {source.node_id}: {_in_words(last)}")
    finally:
        channel.close()
    return last


def _in_words(progress: Drained) -> str:
    failed = f", {progress.failed_chunks:,} could not be moved" if progress.failed_chunks else ""
    return f"{progress.moved_chunks:,} of {progress.chunks:,} chunks moved{failed}"


class _Pool:
    """The nodes that the metadata service lists, asked for when first needed."""

    def __init__(self, metadata_address: str) -> None:
        self._address = metadata_address
        self._known: list[NodeInfo] | None = None

    def _live(self) -> list[NodeInfo]:
        from kvstore.metadata.remote import RemoteIndex

        if self._known is None:
            index = RemoteIndex(self._address)
            try:
                self._known = [status.node for status in index.nodes(deadline_s=_ASK_S) if not status.suspect]
            except Unreachable as exc:
                hint = "name the right service with --metadata, or the nodes as HOST:PORT with --to"
                raise Unreachable(f"nothing answers at {self._address}; {hint}") from exc
            finally:
                index.close()
        return self._known

    def node(self, name: str) -> NodeInfo:
        """By id, or by what answers at HOST:PORT."""
        from kvstore.node.remote import ask_info
        from kvstore.rpc.channel import parse_address

        try:
            parse_address(name)
        except InvalidRequest:
            for info in self._live():
                if info.node_id == name:
                    return info
            raise NotFound(f"no live node {name}, says {self._address}; `kvstore status` lists them") from None
        return ask_info(name, _ASK_S)

    def others(self, source: NodeInfo) -> list[NodeInfo]:
        """All live nodes but this one; raises NotFound where there is none."""
        others = [info for info in self._live() if info.node_id != source.node_id]
        if not others:
            raise NotFound(f"there is no live node besides {source.node_id}, says {self._address}; start another one")
        return others
