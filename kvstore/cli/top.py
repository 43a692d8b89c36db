"""`kvstore top`: what one or all nodes are doing, from their Stats, once a second. Ctrl-C ends it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstore.cli.asking import AllOption, MetadataOption, NodeName, NodeOption, ask, chosen_nodes
from kvstore.cli.flags import ConfigOption, JsonOption
from kvstore.cli.output import print_json
from kvstore.cli.rates import Look, frame
from kvstore.errors import KvStoreError

if TYPE_CHECKING:
    from rich.table import Table

_POLLS_AT_ONCE = 16


class Watch:
    """The nodes that are looked at, with the last look at each. With `--all` the list is asked for anew each time."""

    def __init__(self, node: str, all_nodes: bool, metadata: str, config: Path | None, deadline_s: float) -> None:
        self._chosen = node, all_nodes, metadata, config, deadline_s
        self._all = all_nodes
        self._deadline_s = deadline_s
        self._nodes = chosen_nodes(*self._chosen)
        self._looks: dict[str, Look] = {}

    def look(self) -> list[dict[str, Any]]:
        """One frame: a row a node, by name."""
        if self._all:
            with suppress(KvStoreError):  # the last known list will do
                self._nodes = self._with_departed(chosen_nodes(*self._chosen))
        with ThreadPoolExecutor(_POLLS_AT_ONCE) as threads:
            looks = list(threads.map(self._poll, self._nodes))
        rows = []
        for node, now in zip(self._nodes, looks, strict=True):
            rows.append(frame(node.title, node.address, self._looks.get(node.address), now))
            if now is not None:
                self._looks[node.address] = now
        return rows

    def _with_departed(self, listed: list[NodeName]) -> list[NodeName]:
        """Nodes that left the list stay in view, as away, unless they came back at another address."""
        present = {node.node_id for node in listed}
        return sorted([*listed, *(old for old in self._nodes if old.node_id not in present)], key=lambda n: n.node_id)

    def _poll(self, node: NodeName) -> Look | None:
        from kvstore.rpc.v1 import node_pb2
        from kvstore.rpc.v1.node_pb2_grpc import NodeServiceStub

        try:
            answer = ask(node.address, NodeServiceStub, "Stats", node_pb2.StatsRequest(), self._deadline_s)
        except KvStoreError:
            return None
        return Look(time.monotonic(), answer.node.node_id, answer.node.epoch, json.loads(answer.json))


def top(
    node: NodeOption = "",
    all_nodes: AllOption = False,
    metadata: MetadataOption = "",
    interval_s: Annotated[float, typer.Option(min=0.05, help="Time between two looks, seconds.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show one interval and end.")] = False,
    deadline_s: Annotated[float, typer.Option(min=0.01, help="Longest wait for one node's answer, seconds.")] = 2.0,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Watch what nodes do: slots by state, hits, misses, bytes moved, evictions. Ctrl-C ends it."""
    watch = Watch(node, all_nodes, metadata, config, deadline_s)
    with suppress(KeyboardInterrupt):
        if as_json:
            for rows in _frames(watch, interval_s, once):
                print_json({"nodes": rows})
        else:
            _show(watch, interval_s, once)


def _frames(watch: Watch, interval_s: float, once: bool) -> Iterator[list[dict[str, Any]]]:
    """A frame after each interval; rates need two looks, so the first one is not shown with `once`."""
    never = threading.Event()
    rows = watch.look()
    if not once:
        yield rows
    while True:
        never.wait(interval_s)
        yield watch.look()
        if once:
            return


def _show(watch: Watch, interval_s: float, once: bool) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    if once:
        for rows in _frames(watch, interval_s, once):
            console.print(_table(rows))
        return
    with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
        for rows in _frames(watch, interval_s, once):
            live.update(_table(rows), refresh=True)


def _table(rows: list[dict[str, Any]]) -> Table:
    """Nodes side by side, figures below each other."""
    from rich.table import Table

    table = Table(title="kvstore top: a second's worth of each counter; Ctrl-C ends it", title_justify="left")
    table.add_column("")
    columns = [dict(_lines(row)) for row in rows]
    for row in rows:
        table.add_column(f"{row['node']}\n{row['state']}", justify="right")
    names = dict.fromkeys(name for column in columns for name in column)
    for name in names:
        table.add_row(name, *(column.get(name, "") for column in columns))
    return table


def _lines(row: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in row.items():
        if name in ("node", "address", "state"):
            continue
        if isinstance(value, dict):
            for part, number in value.items():
                yield f"{name.replace('_', ' ').replace(' per s', '/s')}: {part.replace('_', ' ')}", _text(number)
        else:
            yield name.replace("_", " ").replace(" per s", "/s"), _text(value)


def _text(value: Any) -> str:
    if value is None:
        return "…"
    return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
