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
    from kvstore.analytics.offline import HitCounts
    from kvstore.analytics.replay import Replayer
    from kvstore.analytics.trace import Request

SPARE_BYTES = 128 << 20
"""DRAM of a node beyond its chunks: reservations, and the last extent that is not full."""


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


def ssd_file_bytes(chunks: int, slot_bytes: int) -> int:
    """Bytes of an SSD file with room for exactly so many chunks of one slot each.

    To be completed with the file's format: so far the slots alone, without superblock and headers.
    """
    return chunks * slot_bytes


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
        replayer = Replayer(clients, namespace)
        seconds = _drive(replayer, plan.requests)
        result = _result(replayer, seconds, sum(children.node_statistics(node)["evictions"] for node in started))
        if plan.is_comparable:
            result["offline_hit_chunk_ratio"] = round(computed.block_ratio, 4)
        return result


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


def _result(replayer: Replayer, seconds: float, evictions: int) -> dict[str, Any]:
    return _ratios(replayer.counts) | {
        "wrong_bytes": replayer.wrong_bytes,
        "local_hits": replayer.local_hits,
        "remote_hits": replayer.remote_hits,
        "evictions": evictions,
        "misses": {reason.value: count for reason, count in sorted(replayer.misses.items()) if count},
        "refused": {outcome.name.lower(): count for outcome, count in sorted(replayer.refused.items())},
        "index_waits": replayer.index_waits,
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
