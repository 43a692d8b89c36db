"""What all tests share: the markers' skip reasons, the traces' folder, one hypothesis profile."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent

# Fixed seeds, no example database, no timing inside tests.
settings.register_profile("fixed", derandomize=True, database=None, deadline=None)
settings.load_profile("fixed")


def _traces() -> Path:
    return Path(os.environ.get("KVSTORE_TRACES") or ROOT / "../shared/traces").resolve()


def _gpu_missing() -> str:
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    return "" if torch.cuda.is_available() else "no CUDA device"


def _netns_missing() -> str:
    return "" if os.geteuid() == 0 and shutil.which("ip") else "needs root and the ip command"


def _traces_missing() -> str:
    return "" if _traces().is_dir() else f"no traces in {_traces()} (set KVSTORE_TRACES)"


def _vllm_missing() -> str:
    return "" if os.environ.get("KVSTORE_VLLM_PYTHON") else "`make e2e-vllm` runs it (KVSTORE_VLLM_PYTHON is not set)"


_MISSING: dict[str, Callable[[], str]] = {
    "gpu": cache(_gpu_missing),
    "netns": cache(_netns_missing),
    "nixl": cache(lambda: "" if importlib.util.find_spec("nixl") else "nixl is not installed"),
    "redis": cache(lambda: "" if shutil.which("redis-server") else "no redis-server on the PATH"),
    "traces": cache(_traces_missing),
    "vllm": cache(_vllm_missing),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with the reason, what this machine cannot run."""
    for item in items:
        for name, missing in _MISSING.items():
            if item.get_closest_marker(name) and (reason := missing()):
                item.add_marker(pytest.mark.skip(reason=f"{name}: {reason}"))


@pytest.fixture(scope="session")
def traces_folder() -> Path:
    """Folder of the Mooncake traces: KVSTORE_TRACES, else ../shared/traces beside the repository."""
    if reason := _traces_missing():
        pytest.skip(f"traces: {reason}")
    return _traces()
