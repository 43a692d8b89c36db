"""`kvstore check`: a live node's laws and a sample of its bytes, or the SSD file of a node that does not run."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from kvstore.cli.asking import DeadlineOption, NodeOption, ask_operator, node_address
from kvstore.cli.flags import ConfigOption, JsonOption
from kvstore.cli.output import print_json, print_table
from kvstore.errors import ConfigurationError


def check(
    ssd: Annotated[
        Path | None, typer.Option(metavar="FILE", help="SSD file of a node that does not run: checks all of it.")
    ] = None,
    repair: Annotated[bool, typer.Option("--repair", help="Remove what is broken.")] = False,
    sample: Annotated[
        int | None, typer.Option(min=0, max=65_536, metavar="COUNT", help="Chunks of the node whose bytes are read.")
    ] = None,
    node: NodeOption = "",
    deadline_s: DeadlineOption = 60.0,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check a node, or its SSD file while it does not run. Exit code 1: something is broken and was not repaired."""
    if ssd is not None and (node or sample is not None):
        raise ConfigurationError("--ssd checks a whole file, without a node: give neither --node nor --sample")
    if ssd is not None:
        figures, findings = _check_file(ssd, repair)
        what = str(ssd)
    else:
        what = node_address(node, config)
        figures, findings = _check_node(what, 100 if sample is None else sample, repair, deadline_s)
    broken = [finding for finding in findings if not finding["repaired"]]
    if as_json:
        print_json({"what": what, **figures, "findings": findings, "broken": len(broken)})
    else:
        _tell(what, figures, findings, broken, repair)
    if broken:
        raise typer.Exit(1)


def _check_node(
    address: str, sample: int, repair: bool, deadline_s: float
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    from kvstore.rpc.v1 import admin_pb2

    request = admin_pb2.CheckRequest(sample_chunks=sample, repair=repair)
    answer = ask_operator(address, "Check", request, deadline_s)
    return {"chunks": answer.chunks, "sampled_chunks": answer.sampled_chunks}, [_finding(f) for f in answer.findings]


def _check_file(path: Path, repair: bool) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    check_ssd_file = importlib.import_module("kvstore.node.tiers.check").check_ssd_file
    with _progress() as progress:
        report = check_ssd_file(path, repair=repair, progress=progress)
    fields = {field.name: getattr(report, field.name) for field in dataclasses.fields(report)}
    figures = {name: value for name, value in fields.items() if name not in ("findings", "path")}
    return figures, [_finding(finding) for finding in report.findings]


def _finding(finding: Any) -> dict[str, Any]:
    return {
        "kind": str(finding.kind),
        "text": finding.text,
        "key": (finding.key or b"").hex(),
        "repaired": finding.repaired,
    }


@contextmanager
def _progress() -> Iterator[Any]:
    """What the check of a file calls with (done, total); a bar on a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("checking", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _tell(
    what: str, figures: dict[str, Any], findings: list[dict[str, Any]], broken: list[dict[str, Any]], repair: bool
) -> None:
    counts = ", ".join(f"{name.replace('_', ' ')} {value:,}" for name, value in figures.items() if type(value) is int)
    if not findings:
        print(f"{what}: nothing is broken ({counts})")
        return
    rows = [[each["kind"], each["text"], "yes" if each["repaired"] else "no"] for each in findings]
    print_table(f"{what}: {len(findings)} findings ({counts})", ["kind", "what", "repaired"], rows)
    if broken and not repair:
        print("`kvstore check --repair` removes what is broken; the pool may forget, but never answers wrongly")
    elif broken:
        print("what could not be repaired: restart the node (SIGTERM to its worker), and report broken laws as a bug")
