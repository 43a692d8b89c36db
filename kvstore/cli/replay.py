"""`kvstore replay TRACE`: start a pool, drive it with a request trace, print what it delivered."""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstore.cli.flags import JsonOption
from kvstore.cli.output import print_json, print_table
from kvstore.errors import KvStoreError

if TYPE_CHECKING:
    from kvstore.analytics.offline import HitCounts
    from kvstore.analytics.replay import Replayer
    from kvstore.analytics.trace import Request

SPARE_BYTES = 128 << 20
"""DRAM of a node beyond its chunks: reservations, and the last extent that is not full."""

STATS_DEADLINE_S = 5.0
_COUNTERS = {"evictions": "evictions", "ssd_chunks_written": "saves"}
"""Figures of the computation that live nodes count too -> their counters."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """What to start. `room_chunks` 0 = room for everything on every node, `ssd_chunks` 0 = no SSD."""

    requests: list[Request]
    node_count: int
    room_chunks: int
    eviction: str
    ssd_chunks: int
    ssd_admission: str

    def node_options(self, slot_bytes: int, ssd_path: Path) -> list[str]:
        """Options of a node: memory and catalog for all that it may have to hold."""
        distinct = len({block_id for request in self.requests for block_id in request.hash_ids})
        chunks = self.room_chunks or distinct
        slots = chunks + self.ssd_chunks + SPARE_BYTES // slot_bytes
        options = ["--dram", str(chunks * slot_bytes + SPARE_BYTES), "--slots", str(slots), "--eviction", self.eviction]
        if self.room_chunks:
            options += ["--room-chunks", str(self.room_chunks)]
        if self.ssd_chunks:
            from kvstore.node.slots import ssd_file_bytes

            size = ssd_file_bytes(self.ssd_chunks, slot_bytes)
            options += ["--ssd", f"{ssd_path}:{size}", "--ssd-admission", self.ssd_admission]
        return options

    def offline(self) -> HitCounts:
        """What one node of this plan would hit, computed. Raises what names a policy or admission that is unknown."""
        from kvstore.analytics.offline import simulate

        return simulate(
            self.requests,
            capacity_blocks=self.room_chunks or None,
            ssd_blocks=self.ssd_chunks or None,
            policy=self.eviction,
            admission=self.ssd_admission,
        )

    @property
    def is_comparable(self) -> bool:
        """One node, or no node that ever evicts: then the pool hits what one node of this plan hits."""
        return self.node_count == 1 or not self.room_chunks


def replay(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="Request trace in the Mooncake format (JSON lines).")],
    nodes: Annotated[int, typer.Option(min=1, max=64, help="Nodes to start; request i starts at node i mod N.")] = 1,
    room_chunks: Annotated[
        int, typer.Option(min=0, metavar="COUNT", help="Chunks that fit in DRAM on each node. 0: room for everything.")
    ] = 0,
    requests: Annotated[
        int, typer.Option(min=0, metavar="COUNT", help="Replay only the first COUNT requests. 0: all.")
    ] = 0,
    eviction: Annotated[
        str, typer.Option(metavar="NAME", help="Eviction policy of the nodes: lru, s3fifo, sieve, arc or gdsf.")
    ] = "lru",
    ssd_chunks: Annotated[
        int, typer.Option(min=0, metavar="COUNT", help="Chunks that fit on the SSD of each node. 0: no SSD.")
    ] = 0,
    ssd_admission: Annotated[
        str, typer.Option(metavar="NAME", help="What is written to the SSD: always (everything) or second_touch.")
    ] = "always",
    tolerance: Annotated[
        float,
        typer.Option(min=0.0, metavar="RATIO", help="Fail where live and computed hit ratio differ by more than this."),
    ] = 1.0,
    offline: Annotated[
        bool, typer.Option("--offline", help="Only compute what one node would hit; start nothing.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Drive a live pool with a request trace and count hits, byte by byte."""
    from kvstore.analytics.trace import read_trace

    asked = list(read_trace(trace, limit=requests or None))
    plan = _Plan(asked, nodes, room_chunks, eviction, ssd_chunks, ssd_admission)
    computed = plan.offline()
    result = _offline_result(computed) if offline else _run(plan, computed)
    if as_json:
        print_json(result)
    else:
        title = f"{'offline computation' if offline else 'replay'} of {trace.name}"
        print_table(title, ["what", "value"], [[k.replace("_", " "), v] for k, v in result.items()])
    if result.get("wrong_bytes"):
        raise KvStoreError(f"{result['wrong_bytes']} bytes were delivered wrong; please report this as a bug")
    _check_distance(result, tolerance)


def _check_distance(result: dict[str, Any], tolerance: float) -> None:
    """Raises KvStoreError where the pool hit something else than was computed for it."""
    live, computed = result["hit_chunk_ratio"], result.get("offline_hit_chunk_ratio")
    if computed is not None and abs(live - computed) > tolerance:
        raise KvStoreError(f"hit ratio {live}, but {computed} was computed: they differ by more than {tolerance}")


def _run(plan: _Plan, computed: HitCounts) -> dict[str, Any]:
    import kvstore
    from kvstore.analytics.processes import Children
    from kvstore.analytics.replay import Replayer, replay_namespace
    from kvstore.node.slots import slot_bytes

    namespace = replay_namespace()
    slot = slot_bytes(namespace.layout, namespace.layout.whole)
    with contextlib.ExitStack() as stack:
        children = stack.enter_context(Children())
        metadata_address = children.start_metadata().announcement["control_address"]
        started = []
        for name in (f"node-{index}" for index in range(plan.node_count)):
            options = plan.node_options(slot, children.folder / f"{name}.ssd")
            started.append(children.start_node(name, metadata_address, *options))
        addresses = [node.announcement["control_address"] for node in started]
        clients = [
            stack.enter_context(kvstore.connect(node=address, metadata=metadata_address, name="replay"))
            for address in addresses
        ]
        to_save = _to_save(stack, addresses) if plan.ssd_chunks else None
        replayer = Replayer(clients, namespace, to_save)
        seconds = _drive(replayer, plan.requests)
        result = _result(replayer, seconds, _node_figures(map(children.node_statistics, started)))
        if plan.is_comparable:
            result["offline_hit_chunk_ratio"] = round(computed.block_ratio, 4)
        return result


def _to_save(stack: contextlib.ExitStack, addresses: Sequence[str]) -> Callable[[], int]:
    """Asks the nodes how many chunks they have still to write to their SSDs."""
    from kvstore.rpc.channel import Channel
    from kvstore.rpc.v1 import node_pb2
    from kvstore.rpc.v1.node_pb2_grpc import NodeServiceStub

    calls = []
    for address in addresses:
        channel = Channel(address)
        stack.callback(channel.close)
        calls.append((channel, channel.stub(NodeServiceStub).Stats))

    def ask_all() -> int:
        answers = (channel.call(method, node_pb2.StatsRequest(), STATS_DEADLINE_S) for channel, method in calls)
        return sum(json.loads(answer.json)["cleaner_waiting_chunks"] for answer in answers)

    return ask_all


def _node_figures(statistics: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Sums over the nodes, under the names of the computation."""
    total: Counter[str] = Counter()
    for figures in statistics:
        total.update({name: int(figures.get(counter, 0)) for name, counter in _COUNTERS.items()})
    return {name: total[name] for name in _COUNTERS}


def _drive(replayer: Replayer, requests: list[Request]) -> float:
    """Serve all requests with a progress bar; returns the seconds that took."""
    from rich.console import Console
    from rich.progress import track

    begin_s = time.monotonic()
    console = Console(stderr=True)
    for number, request in enumerate(track(requests, "requests", console=console, disable=not console.is_terminal)):
        replayer.serve(number, request)
    return time.monotonic() - begin_s


def _ratios(counts: HitCounts) -> dict[str, Any]:
    return {
        "requests": counts.requests,
        "chunks": counts.blocks,
        "tokens": counts.tokens,
        "hit_chunk_ratio": round(counts.block_ratio, 4),
        "hit_token_ratio": round(counts.token_ratio, 4),
    }


def _result(replayer: Replayer, seconds: float, node_figures: Mapping[str, int]) -> dict[str, Any]:
    return _ratios(replayer.counts) | {
        "dram_hits": replayer.counts.dram_hit_blocks,
        "ssd_hits": replayer.counts.ssd_hit_blocks,
        "wrong_bytes": replayer.wrong_bytes,
        "local_hits": replayer.local_hits,
        "remote_hits": replayer.remote_hits,
        **node_figures,
        "misses": {reason.value: count for reason, count in sorted(replayer.misses.items()) if count},
        "refused": {outcome.name.lower(): count for outcome, count in sorted(replayer.refused.items())},
        "index_waits": replayer.index_waits,
        "save_waits": replayer.save_waits,
        "saves_given_up": replayer.saves_given_up,
        "seconds": round(seconds, 2),
    }


def _offline_result(counts: HitCounts) -> dict[str, Any]:
    return _ratios(counts) | {
        "dram_hits": counts.dram_hit_blocks,
        "ssd_hits": counts.ssd_hit_blocks,
        "evictions": counts.evictions,
        "lost_chunks": counts.lost_blocks,
        "ssd_chunks_written": counts.ssd_blocks_written,
    }
