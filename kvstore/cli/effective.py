"""What settings amount to, for `--check` and before a start: values in force, bounds that follow from them, memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvstore.cli.output import print_json, print_table
from kvstore.config import NodeSettings, Settings
from kvstore.setting_types import split_ssd


def effective(tables: Mapping[str, Settings | None]) -> dict[str, Any]:
    """Values by table, with the node's limits and memory. Raises ConfigurationError for what cannot be started.

    Nothing is made and nothing is reached. A node id that the first start will make is empty.
    """
    from kvstore.node.core import CoreSettings
    from kvstore.node.operators.limits import MemoryPlan, effective_limits

    facts: dict[str, Any] = {}
    for name, settings in tables.items():
        if isinstance(settings, NodeSettings):
            settings = settings.planned()
            ssd_bytes = split_ssd(settings.ssd)[1] if settings.ssd else 0
            plan = MemoryPlan.of(settings.dram, settings.slots, ssd_bytes)
            limits = effective_limits(settings.dram, settings.slots, settings.room_chunks, CoreSettings())
            plan.check()
            facts["limits"] = limits
            facts["memory_bytes"] = plan.total_bytes
        if settings is not None:
            facts[name] = settings.model_dump(mode="json")
    return facts


def print_effective(tables: Mapping[str, Settings | None], *, as_json: bool) -> None:
    """What `--check` prints."""
    facts = effective(tables)
    if as_json:
        print_json(facts)
        return
    for name in tables:
        if name in facts:
            print_table(f"settings of the {name} table", ["setting", "value"], _rows(facts[name]))
    print_table("limits", ["limit", "value"], _rows(facts["limits"]))
    print(f"memory of the whole node, pages and catalog: {facts['memory_bytes']:,} bytes")


def _rows(values: Mapping[str, object]) -> list[tuple[str, str]]:
    return [(name, str(value)) for name, value in values.items()]
