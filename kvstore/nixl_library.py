"""The optional library NIXL: loaded when somebody asks for it, and made to fit into a server.

Loading takes a second and 200 MB, so no module imports it. It also gives its logger a handler that prints to stdout,
where a node announces itself, and switches the reports of broken log calls off for the whole process: both are undone.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
import re
import sys
from dataclasses import dataclass
from typing import Any, Final

from kvstore.errors import ConfigurationError

LEAST_VERSION: Final = (1, 5, 1)
"""Older ones take a file transfer that was cut short for a whole one."""
REFUSED_VERSIONS: Final = {(1, 5, 2)}
_REMEDY: Final = "pip install 'kvstore[nixl]'"


@dataclass(frozen=True, slots=True)
class NixlLibrary:
    """The module `nixl._api`, and the errors that its calls raise (they have no base of their own)."""

    api: Any
    errors: tuple[type[Exception], ...]
    version: str


def load_nixl() -> NixlLibrary:
    """Raises ConfigurationError where it is not installed, too old, refused or broken."""
    try:
        version = importlib.metadata.version("nixl")
    except importlib.metadata.PackageNotFoundError as exc:
        raise ConfigurationError(f"NIXL is not installed: {_REMEDY}") from exc
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    if numbers < LEAST_VERSION or numbers in REFUSED_VERSIONS:
        raise ConfigurationError(f"NIXL {version} is too old or known to be broken: {_REMEDY}")
    # Among the answers on standard output is no place for UCX's warnings either.
    os.environ.setdefault("UCX_LOG_FILE", "stderr")
    # It warns of each piece of every read that is given up, which is counted anyway; what fails is an error of ours.
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    is_first, reports = "nixl" not in sys.modules, logging.raiseExceptions
    try:
        api = importlib.import_module("nixl._api")
        bindings = importlib.import_module("nixl._bindings")
    except (ImportError, OSError, AttributeError, RuntimeError) as exc:
        raise ConfigurationError(f"NIXL {version} cannot be loaded: {exc}; install what it misses, or it anew") from exc
    finally:
        logging.raiseExceptions = reports
    if is_first:
        _take_over(logging.getLogger("nixl"))
    own = [value for name, value in vars(bindings).items() if name.endswith("Error") and isinstance(value, type)]
    # Where a plug-in was loaded that knows the exceptions by itself, the bindings take them for plain runtime errors.
    return NixlLibrary(api, (*own, RuntimeError), version)


def leave_out_torch() -> None:
    """For a process of our own that needs no torch: loading NIXL takes a fifth of a second then, and 60 MB.

    Where no file says which CUDA torch was built for, as on a host without it, NIXL imports torch only to ask. Python
    refuses what is None in `sys.modules`, and NIXL takes its first build then. Other threads would be refused too.
    """
    sys.modules["torch.version"] = None  # type: ignore[assignment]


def _take_over(logger: logging.Logger) -> None:
    """Its messages go the way of ours."""
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    logger.propagate = True
    if "NIXL_LOG_LEVEL" not in os.environ:
        logger.setLevel(logging.WARNING)
