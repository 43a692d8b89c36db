"""`kvstore demo`: the main job on this machine, from prefill to decode to the next turn, compared with cold runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstore.cli.flags import JsonOption
from kvstore.cli.output import print_json, print_table
from kvstore.errors import KvStoreError

if TYPE_CHECKING:
    from rich.progress import Progress

    from kvstore.analytics.trace import Request
    from kvstore.cli.demo_cluster import Served
    from kvstore.cli.demo_job import Report

VOCABULARY = 512
"""Token ids that the reference engine knows."""


def demo(
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Request trace in the Mooncake format. Default: a built-in conversation."),
    ] = None,
    requests: Annotated[int, typer.Option(min=1, metavar="COUNT", help="With --trace: its first COUNT requests.")] = 10,
    scale: Annotated[
        int, typer.Option(min=1, metavar="FACTOR", help="With --trace: divide all lengths by this (a power of two).")
    ] = 8,
    dram: Annotated[
        str, typer.Option(metavar="SIZE", help="Memory of each node; small, so that chunks have to go.")
    ] = "4MiB",
    ssd: Annotated[
        str,
        typer.Option(metavar="SIZE", help="SSD file of each node, in a scratch folder; small, for the same reason."),
    ] = "5MiB",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the built-in conversation.")] = 1,
    as_json: JsonOption = False,
) -> None:
    """Run the main job: two nodes, three engines, a scheduler; every output is compared with a cold run."""
    from kvstore.analytics.trace import read_trace

    chosen = [one.shrunk(scale) for one in read_trace(trace, limit=requests)] if trace is not None else None
    report = _run(chosen, dram, ssd, seed)
    figures = report.figures()
    if as_json:
        print_json({**figures, "picks": [_pick_facts(one) for one in report.served]})
    else:
        source = f"first {len(report.served)} requests of {trace.name}" if trace else "built-in conversation"
        print_table(f"kvstore demo: {source}", ["what", "value"], _rows(figures))
        print(f"outputs identical to a cold run: {figures['identical']}/{figures['requests']}")
    if figures["missing_outcomes"]:
        raise KvStoreError(f"did not occur: {', '.join(figures['missing_outcomes'])}")


def _run(chosen: list[Request] | None, dram: str, ssd: str, seed: int) -> Report:
    from kvstore.cli.demo_cluster import DemoCluster
    from kvstore.cli.demo_job import Report, compare_with_cold, generated_requests, run_generated, run_trace

    count = generated_requests() if chosen is None else len(chosen)
    with _progress() as progress:
        starting = progress.add_task("starting", total=None)
        with DemoCluster(dram, ssd) as cluster:
            progress.remove_task(starting)
            serving = progress.add_task("requests", total=count)
            comparing = progress.add_task("cold runs", total=count)

            def on_served(one: Served) -> None:
                progress.console.print(_pick_line(one), markup=False, highlight=False, soft_wrap=True)
                progress.advance(serving)

            report = Report(on_served, lambda: progress.advance(comparing))
            if chosen is None:
                run_generated(cluster, report, vocabulary=VOCABULARY, seed=seed)
            else:
                run_trace(cluster, report, chosen, vocabulary=VOCABULARY)
            compare_with_cold(cluster, report)
    return report


@contextmanager
def _progress() -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        yield progress


def _pick_line(one: Served) -> str:
    facts = _pick_facts(one)
    return (
        f"{facts['request_id']}: {facts['prefill_worker_id']} -> {facts['decode_worker_id']}, "
        f"{facts['local_run']} of {facts['chunks']} chunks on its node, {facts['pool_run']} in the pool "
        f"({facts['reason']}); hit {facts['hit_tokens']} of {facts['prompt_tokens']} tokens"
    )


def _pick_facts(one: Served) -> dict[str, Any]:
    pick = one.pick
    return {
        "request_id": one.request_id,
        "prefill_worker_id": pick.prefill_worker_id,
        "decode_worker_id": pick.decode_worker_id,
        "chunks": pick.ticket.chunk_count,
        "local_run": pick.local_run,
        "pool_run": pick.pool_run,
        "reason": next(rated.reason for rated in pick.candidates if rated.worker_id == pick.prefill_worker_id),
        "hit_tokens": one.hit_tokens,
        "prompt_tokens": len(one.prompt),
    }


def _rows(figures: dict[str, Any]) -> list[tuple[str, object]]:
    """The table: numbers with their units; what the chosen input cannot show is left out."""
    rows: list[tuple[str, object]] = [
        ("requests", figures["requests"]),
        ("prompt tokens", figures["prompt_tokens"]),
        ("computed by prefill workers", figures["computed_prompt_tokens"]),
        ("hit tokens, own node", figures["hit_tokens_local"]),
        ("hit tokens, other node", figures["hit_tokens_remote"]),
        ("of them from an SSD", figures["hit_tokens_ssd"]),
        ("bytes read through shared memory", figures["bytes_by_shm"]),
        ("bytes read over tcp", figures["bytes_by_tcp"]),
        ("time to first token, cold (median, ms)", figures["ttft_cold_ms"]),
        ("time to first token, with hits (median, ms)", figures["ttft_warm_ms"]),
        ("chunks that left DRAM for the SSD alone", figures["demotions"]),
        ("evictions", figures["evictions"]),
    ]
    if figures["later_turns"]:
        turns = f"{figures['hits_beyond_prompt']} of {figures['later_turns']}"
        rows.append(("later turns that hit prompt and answer", turns))
        found = f"{figures['recovered_chunks']} chunks found, {figures['ssd_hits_after_restart']} tokens hit"
        rows.append(("prefill node killed and started again", found))
        rows.append(("hits after the prefill node's death", "yes" if figures["hits_after_node_death"] else "no"))
    return rows
