"""`kvstore node` and `kvstore up` under a supervisor: how the command becomes one, and what its workers do.

The command checks the settings and then replaces itself (exec), so that the supervisor has none of what the CLI loads.
Settings travel as JSON; the worker builds them again.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

from kvstore.cli import failed
from kvstore.cli.effective import effective
from kvstore.cli.output import announcer
from kvstore.cli.progress import StartProgress
from kvstore.config import MetadataSettings, NodeSettings, RouterSettings, Settings
from kvstore.errors import KvStoreError, LayoutMismatch
from kvstore.node.handover import FULL_RESTART_CODE, Seat
from kvstore.node.supervisor import command

logger = logging.getLogger(__name__)


def start(node: NodeSettings, others: dict[str, Settings | None], *, as_json: bool) -> NoReturn:
    """Become the supervisor of a node. `others`: what its worker runs besides, by table; empty for a node alone.

    Raises ConfigurationError for folders that cannot be used and for more memory than there is.
    """
    effective({"node": node})
    node = node.resolved()
    tables = {"node": node, **others}
    payload = {name: None if table is None else table.model_dump(mode="json") for name, table in tables.items()}
    job = {
        "entry": f"{__name__}:work",
        "payload": {"settings": payload, "as_json": as_json},
        "dram_bytes": node.dram,
        "slots": node.slots,
    }
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, command(job))


def work(seat: Seat, payload: dict[str, Any]) -> int:
    """Be a worker of the supervisor that gave this seat; returns the exit status."""
    from kvstore import assemble  # it brings gRPC, which `start` has no use for

    settings = payload["settings"]
    node, tell = NodeSettings(**settings["node"]), announcer(as_json=payload["as_json"])
    progress = StartProgress(sys.stderr, announced=seat.announced)

    def announce(facts: Mapping[str, object]) -> None:
        tell(facts)
        progress.announced()

    try:
        if "metadata" not in settings:
            assemble.run_node(node, announce, seat, progress)
        else:
            router = RouterSettings(**settings["router"]) if settings["router"] else None
            assemble.run_up(node, MetadataSettings(**settings["metadata"]), router, announce, seat, progress)
    except LayoutMismatch as exc:
        logger.warning("this node's memory cannot be used by this worker: %s", exc)
        return FULL_RESTART_CODE
    except KvStoreError as exc:
        if os.environ.get("KVSTORE_DEBUG") == "1":
            raise
        return failed(exc)
    return 0
