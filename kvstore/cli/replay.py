"""`kvstore replay TRACE`: start a pool, drive it with a request trace, print what it delivered."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstore.cli.flags import JsonOption
from kvstore.cli.output import print_json, print_table
from kvstore.errors import KvStoreError

if TYPE_CHECKING:
    from kvstore.analytics.replay import Replayer
    from kvstore.analytics.trace import Request

SPARE_BYTES = 128 << 20
"""DRAM of a node beyond its chunks: reservations, and the last extent that is not full."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """What to start. `room_chunks` 0 = room for everything on every node."""

    requests: list[Request]
    node_count: int
    room_chunks: int

    def node_options(self, slot_bytes: int) -> list[str]:
        """Options of each node: memory and catalog for all that it may have to hold."""
        distinct = len({block_id for request in self.requests for block_id in request.hash_ids})
        chunks = self.room_chunks or distinct
        options = ["--dram", str(chunks * slot_bytes + SPARE_BYTES), "--slots", str(chunks + SPARE_BYTES // slot_bytes)]
        return [*options, "--room-chunks", str(self.room_chunks)] if self.room_chunks else options


def replay(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="Request trace in the Mooncake format (JSON lines).")],
    nodes: Annotated[int, typer.Option(min=1, max=64, help="Nodes to start; request i starts at node i mod N.")] = 1,
    room_chunks: Annotated[
        int, typer.Option(min=0, metavar="COUNT", help="Chunks that fit on each node. 0: room for everything.")
    ] = 0,
    requests: Annotated[
        int, typer.Option(min=0, metavar="COUNT", help="Replay only the first COUNT requests. 0: all.")
    ] = 0,
    as_json: JsonOption = False,
) -> None:
    """Drive a live pool with a request trace and count hits, byte by byte."""
    from kvstore.analytics.trace import read_trace

    plan = _Plan(list(read_trace(trace, limit=requests or None)), nodes, room_chunks)
    result = _run(plan)
    if as_json:
        print_json(result)
    else:
        print_table(f"replay of {trace.name}", ["what", "value"], [[k.replace("_", " "), v] for k, v in result.items()])
    if result["wrong_bytes"]:
        raise KvStoreError(f"{result['wrong_bytes']} bytes were delivered wrong; please report this as a bug")


def _run(plan: _Plan) -> dict[str, Any]:
    import kvstore
    from kvstore.analytics.processes import Children
    from kvstore.analytics.replay import Replayer, replay_namespace
    from kvstore.node.slots import slot_bytes

    namespace = replay_namespace()
    options = plan.node_options(slot_bytes(namespace.layout, namespace.layout.whole))
    with contextlib.ExitStack() as stack:
        children = stack.enter_context(Children())
        metadata_address = children.start_metadata().announcement["control_address"]
        started = [children.start_node(f"node-{i}", metadata_address, *options) for i in range(plan.node_count)]
        addresses = [node.announcement["control_address"] for node in started]
        clients = [
            stack.enter_context(kvstore.connect(node=address, metadata=metadata_address, name="replay"))
            for address in addresses
        ]
        replayer = Replayer(clients, namespace)
        seconds = _drive(replayer, plan.requests)
        return _result(replayer, seconds, sum(children.node_statistics(node)["evictions"] for node in started))


def _drive(replayer: Replayer, requests: list[Request]) -> float:
    """Serve all requests with a progress bar; returns the seconds that took."""
    from rich.console import Console
    from rich.progress import track

    begin_s = time.monotonic()
    console = Console(stderr=True)
    for number, request in enumerate(track(requests, "requests", console=console, disable=not console.is_terminal)):
        replayer.serve(number, request)
    return time.monotonic() - begin_s


def _result(replayer: Replayer, seconds: float, evictions: int) -> dict[str, Any]:
    counts = replayer.counts
    return {
        "requests": counts.requests,
        "chunks": counts.blocks,
        "tokens": counts.tokens,
        "hit_chunk_ratio": round(counts.block_ratio, 4),
        "hit_token_ratio": round(counts.token_ratio, 4),
        "wrong_bytes": replayer.wrong_bytes,
        "local_hits": replayer.local_hits,
        "remote_hits": replayer.remote_hits,
        "evictions": evictions,
        "misses": {reason.value: count for reason, count in sorted(replayer.misses.items()) if count},
        "refused": {outcome.name.lower(): count for outcome, count in sorted(replayer.refused.items())},
        "index_waits": replayer.index_waits,
        "seconds": round(seconds, 2),
    }
