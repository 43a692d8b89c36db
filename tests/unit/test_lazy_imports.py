"""What importing the package and asking the CLI for help brings into a process."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import kvstore

REPOSITORY = Path(__file__).resolve().parents[2]


def _modules_after(code: str) -> set[str]:
    script = f"{code}\nimport json, sys\nprint('\\n' + json.dumps(list(sys.modules)))"
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60, cwd=REPOSITORY
    )
    return set(json.loads(ended.stdout.splitlines()[-1]))


def test_importing_the_package_brings_nothing_heavy() -> None:
    loaded = _modules_after("import kvstore")
    assert not loaded & {"numpy", "grpc", "torch", "nixl", "pydantic", "typer", "rich", "xxhash", "prometheus_client"}
    assert {name for name in loaded if name.startswith("kvstore")} == {"kvstore"}


def test_help_brings_neither_grpc_nor_torch() -> None:
    code = "from kvstore.cli import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    pass"
    assert not _modules_after(code) & {"grpc", "torch", "nixl", "numpy", "kvstore.client", "kvstore.assemble"}


def test_a_node_brings_nixl_only_where_it_is_named() -> None:
    loaded = _modules_after("import kvstore.node.daemon, kvstore.node.arena.ssd_nixl, kvstore.nixl_library")
    assert not loaded & {"nixl", "nixl_cu12", "nixl_cu13", "torch"}


def test_every_public_name_can_be_had() -> None:
    assert [name for name in kvstore.__all__ if getattr(kvstore, name, None) is None] == []
    assert set(kvstore.__all__) <= set(dir(kvstore))


def test_names_for_the_type_checker_are_those_at_run_time() -> None:
    tree = ast.parse((REPOSITORY / "kvstore" / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    typed = {alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert typed | {"__version__"} == set(kvstore.__all__)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'conect'"):
        kvstore.conect  # type: ignore[attr-defined]  # noqa: B018
