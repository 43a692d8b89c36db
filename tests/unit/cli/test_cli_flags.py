"""Flags that are made from settings."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import typer

from kvstore import config
from kvstore.cli.flags import Group, JsonOption, takes_settings
from kvstore.cli.servers import metadata, node, router, up
from kvstore.config import MetadataSettings, NodeSettings
from kvstore.errors import ConfigurationError


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.upper().startswith("KVSTORE_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(config, "DEFAULT_FILES", (Path("kvstore.toml"),))


def _run(*arguments: str) -> tuple[NodeSettings, MetadataSettings, bool]:
    received: list[Any] = []

    @takes_settings(Group(NodeSettings, without=("metadata_address",)), Group(MetadataSettings, prefix="metadata_"))
    def command(first: NodeSettings, second: MetadataSettings, *, as_json: JsonOption = False) -> None:
        """Test."""
        received.extend((first, second, as_json))

    app = typer.Typer(add_completion=False)
    app.command()(command)
    app(list(arguments), standalone_mode=False)
    return received[0], received[1], received[2]


def test_flags_reach_the_settings_of_their_group() -> None:
    first, second, as_json = _run(
        "--dram", "2MiB", "--metrics-address", "", "--insecure", "--metadata-address", "127.0.0.1:9", "--json"
    )
    assert (first.dram, first.metrics_address, first.insecure) == (2 << 20, "", True)
    assert (second.address, second.insecure, as_json) == ("127.0.0.1:9", False, True)
    assert first.metadata_address == ""


def test_flags_that_are_not_given_leave_weaker_sources_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other.toml").write_text('[node]\ninsecure = true\nslots = 5\ndram = "3MiB"\n')
    monkeypatch.setenv("KVSTORE_NODE_DRAM", "4MiB")
    first, _, as_json = _run("--config", str(tmp_path / "other.toml"), "--slots", "6")
    assert (first.insecure, first.slots, first.dram, as_json) == (True, 6, 4 << 20, False)
    assert _run("--config", str(tmp_path / "other.toml"), "--no-insecure")[0].insecure is False


def test_wrong_value_is_a_configuration_error() -> None:
    with pytest.raises(ConfigurationError, match=r"\[node\] dram \(command line\): '8 potatoes'"):
        _run("--dram", "8 potatoes")


@pytest.mark.parametrize(
    ("command", "kind", "skipped"),
    [
        (node, "node", set()),
        (metadata, "metadata", set()),
        (router, "router", set()),
        (up, "node", {"metadata_address"}),
    ],
)
def test_every_setting_has_its_flag(command: Any, kind: str, skipped: set[str]) -> None:
    names = {row.name for row in config.describe() if row.table == kind} - skipped
    assert names <= set(command.__signature__.parameters)
    assert {"config", "as_json"} <= set(command.__signature__.parameters)


def test_up_takes_the_settings_of_all_three_tables_without_clashes() -> None:
    parameters = list(up.__signature__.parameters)  # type: ignore[attr-defined]
    assert len(parameters) == len(set(parameters))
    assert {"dram", "metadata_address", "metadata_metrics_address", "router_address", "router_policy"} <= set(
        parameters
    )


def test_settings_survive_json() -> None:
    # What an operator pastes into a ticket must be plain data.
    assert json.loads(json.dumps(_run()[0].model_dump()))["dram"] == 1 << 30
