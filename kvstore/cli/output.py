"""What the commands print. JSON goes to standard output, one document a line; words for people go to standard error,
tables that were asked for to standard output."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

Announce = Callable[[Mapping[str, object]], None]

_NEXT_STEPS = {
    "up": "look at it with `kvstore status` and `kvstore stats`, or try `kvstore demo`; Ctrl-C stops it",
    "node": 'engines on this host: `kvstore.connect(node="{control_address}")`; '
    "look at it with `kvstore stats --node {control_address}`; Ctrl-C stops it",
    "metadata": "start nodes with `kvstore node --metadata-address {address}`; "
    "list them with `kvstore status --metadata {address}`; Ctrl-C stops it",
    "router": "workers report to and ask SchedulerService at {address}; Ctrl-C stops it",
}


def print_json(value: object) -> None:
    """One line of JSON on standard output, flushed: whoever started us may be waiting for it."""
    print(json.dumps(value, separators=(",", ":")), flush=True)


def announcer(*, as_json: bool) -> Announce:
    """What a server command calls once everything is bound."""
    return print_json if as_json else _announce_in_words


def _announce_in_words(facts: Mapping[str, object]) -> None:
    role = str(facts.get("role", ""))
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name, value in facts.items():
        if isinstance(value, Mapping):
            value = ", ".join(f"{one.replace('_', ' ')} {_number(of)}" for one, of in value.items())
        if name != "role" and value not in ("", None):
            table.add_row(name.replace("_", " "), escape(str(value)))
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(f"[bold green]kvstore {escape(role)} is ready[/]")
    console.print(table)
    addresses = {"address": facts.get("control_address", "")} | dict(facts)
    if role in _NEXT_STEPS:
        console.print(escape(f"next: {_NEXT_STEPS[role].format_map(_Blank(addresses))}"))


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


class _Blank(dict[str, object]):
    """Facts for a sentence: one that was not announced shows as `…` instead of failing the server."""

    def __missing__(self, key: str) -> str:
        return "…"


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table on standard output; numbers stand right."""
    table = Table(title=title, title_justify="left")
    cells = [list(row) for row in rows]
    for index, column in enumerate(columns):
        is_number = bool(cells) and all(isinstance(row[index], int | float) for row in cells)
        table.add_column(column, justify="right" if is_number else "left", overflow="fold")
    for row in cells:
        table.add_row(*(escape(f"{cell:,}" if type(cell) in (int, float) else str(cell)) for cell in row))
    Console(highlight=False).print(table)
