"""Arrays that go with a handoff, and its ticket."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvstore.client import HandoffResult, SideResult
from kvstore.model.prefix import Keys
from kvstore.model.ticket import Ticket, TicketRank
from kvstore.model.values import NodeInfo
from tests.unit.client.pages import LAYOUT

HIDDEN = np.arange(24, dtype=np.float32).reshape(2, 12)
LOGITS = np.linspace(-1, 1, 50).astype(np.float16)
BOTH = {"hidden": HIDDEN, "logits": LOGITS}


def ticket_of(keys: Keys, *infos: NodeInfo, name: bytes = b"t") -> Ticket:
    ranks = tuple(TicketRank(info.node_id, info.epoch, LAYOUT.whole) for info in infos)
    return Ticket(name * 16, keys.namespace_id, keys[0], keys[-1], len(keys), keys.last_tokens, ranks)


def same(found: SideResult | HandoffResult, expected: dict[str, np.ndarray[Any, Any]]) -> bool:
    """The result holds exactly these arrays."""
    return found.objects.keys() == expected.keys() and all(
        np.array_equal(found.objects[name].as_numpy(), array) for name, array in expected.items()
    )


def patience(monkeypatch: pytest.MonkeyPatch, wait_ms: int) -> None:
    """Readers wait so long for the next thing of a ticket."""
    for module in ("handoff", "reading"):
        monkeypatch.setattr(f"kvstore.client.{module}.HANDOFF_WAIT_MS", wait_ms)
