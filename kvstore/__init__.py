"""A tiered KV-cache pool for LLM serving: prefill writes pages, decode pulls them, every prefix is computed once.

    with kvstore.open_local(dram="64MiB") as client:
        cache = client.bind(namespace)
        keys = cache.keys(tokens)
        cache.write(keys, pages)
        cache.read(keys, into)

Importing the package loads nothing else: a public name brings its module with it when it is first used, so that
programs which only need one part (the supervisor, the CLI's help) start at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.assemble import open_local
    from kvstore.client import Client, connect
    from kvstore.errors import (
        CapacityExhausted,
        ConfigurationError,
        DeadlineExceeded,
        ForkedProcess,
        InvalidRequest,
        KvStoreError,
        LayoutMismatch,
        LimitExceeded,
        NotFound,
        SessionLost,
        StaleReference,
        Unauthorized,
        Unreachable,
    )
    from kvstore.model.layout import Attention, Dtype, Geometry, PageLayout, Rectangle, SideComponent
    from kvstore.model.namespace import Namespace
    from kvstore.model.parallel import Rank, share_of
    from kvstore.model.prefix import Extra, ExtraKind, Keys
    from kvstore.model.ticket import Ticket
    from kvstore.model.values import MissReason, Outcome

__all__ = [
    "Attention",
    "CapacityExhausted",
    "Client",
    "ConfigurationError",
    "DeadlineExceeded",
    "Dtype",
    "Extra",
    "ExtraKind",
    "ForkedProcess",
    "Geometry",
    "InvalidRequest",
    "Keys",
    "KvStoreError",
    "LayoutMismatch",
    "LimitExceeded",
    "MissReason",
    "Namespace",
    "NotFound",
    "Outcome",
    "PageLayout",
    "Rank",
    "Rectangle",
    "SessionLost",
    "SideComponent",
    "StaleReference",
    "Ticket",
    "Unauthorized",
    "Unreachable",
    "__version__",
    "connect",
    "open_local",
    "share_of",
]

_NAMES = {
    "kvstore.assemble": "open_local",
    "kvstore.client": "Client connect",
    "kvstore.errors": "CapacityExhausted ConfigurationError DeadlineExceeded ForkedProcess InvalidRequest KvStoreError "
    "LayoutMismatch LimitExceeded NotFound SessionLost StaleReference Unauthorized Unreachable",
    "kvstore.model.layout": "Attention Dtype Geometry PageLayout Rectangle SideComponent",
    "kvstore.model.namespace": "Namespace",
    "kvstore.model.parallel": "Rank share_of",
    "kvstore.model.prefix": "Extra ExtraKind Keys",
    "kvstore.model.ticket": "Ticket",
    "kvstore.model.values": "MissReason Outcome",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
__version__ = "0.1.0"


if not TYPE_CHECKING:  # else a misspelt name would pass the type checker as an object

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
