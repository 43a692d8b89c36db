"""Nothing is counted in vain: what the halves of an adapter count has a name that the engine shows."""

from __future__ import annotations

import re
from pathlib import Path

import engine_adapter
from engine_adapter.counts import BY_REASON, NAMES

FOLDER = Path(engine_adapter.__file__).parent
COUNTED = re.compile(r"""counts?(?:\[|\()f?"([a-z_]+)(?:"|\{)(?: if [^"]*else "([a-z_]+)")?""")
OF_THE_TIER = {"rows.py", "tier.py"}
"""vLLM's tiers have statistics of their own."""


def test_every_count_is_shown() -> None:
    files = [path for path in FOLDER.rglob("*.py") if path.name not in OF_THE_TIER]
    counted = {name for path in files for found in COUNTED.findall(path.read_text()) for name in found if name}
    assert {"loads", "store_chunks", "hits_too_short", "hits_none", "tickets_unreadable"} <= counted
    assert [name for name in counted if name not in NAMES and not name.startswith(tuple(BY_REASON))] == []
    assert not [name for name in NAMES if name.startswith(tuple(BY_REASON))]


def test_every_name_is_counted() -> None:
    text = "".join(path.read_text() for path in FOLDER.rglob("*.py") if path.name != "counts.py")
    assert [name for name in (*NAMES, *BY_REASON) if f'"{name}' not in text] == []
