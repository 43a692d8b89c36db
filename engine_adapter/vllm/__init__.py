"""vLLM's side of the pool: `KVStoreConnector` (`connector`) and `KVStoreTier` (`tier`).

vLLM is imported at the first use of either, so that the options can be read without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {"KVStoreConnector": "connector", "KVStoreTier": "tier"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
