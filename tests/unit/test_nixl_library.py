"""NIXL that is missing, too old or broken, and one that is there."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import ConfigurationError
from kvstore.nixl_library import load_nixl

ROOT = Path(__file__).resolve().parents[2]


def test_a_missing_nixl_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ConfigurationError, match=r"NIXL is not installed: pip install 'kvstore\[nixl\]'"):
        load_nixl()


@pytest.mark.parametrize("version", ["1.5.0", "0.9.1", "1.5.2"])
def test_versions_that_lose_errors_are_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.raises(ConfigurationError, match=f"NIXL {version} is too old or known to be broken"):
        load_nixl()


@pytest.mark.parametrize("error", [ImportError("libucp.so.0: cannot open"), AttributeError("no nixlAgent")])
def test_a_broken_nixl_is_named_with_its_reason(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def broken(name: str) -> Any:
        raise error

    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.6.0")
    monkeypatch.setattr(importlib, "import_module", broken)
    with pytest.raises(ConfigurationError, match=f"cannot be loaded: {error}"):
        load_nixl()


@pytest.mark.nixl
def test_loading_it_keeps_reports_of_broken_log_calls() -> None:
    library = load_nixl()
    assert logging.raiseExceptions and library.errors and hasattr(library.api, "nixl_agent")
    assert all(error is RuntimeError or error.__name__.startswith("nixl") for error in library.errors)
    assert RuntimeError in library.errors, "what its errors become where another library has loaded them too"


@pytest.mark.slow
@pytest.mark.nixl
def test_it_prints_nothing_where_a_node_announces_itself() -> None:
    code = (
        "import logging\nfrom kvstore.node.arena.ssd_nixl import make_agent\n"
        "from kvstore.nixl_library import load_nixl\n"
        "agent, queue = make_agent(load_nixl())\nlogging.getLogger('nixl').warning('heard')"
    )
    ended = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (ended.returncode, ended.stdout) == (0, "") and "heard" in ended.stderr
