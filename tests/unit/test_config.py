"""Where settings come from, which source wins, and what a wrong one is told."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from kvstore import config
from kvstore.config import MetadataSettings, NodeSettings, RouterSettings, load
from kvstore.errors import ConfigurationError
from kvstore.setting_types import parse_size

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.upper().startswith("KVSTORE_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(config, "DEFAULT_FILES", (Path("kvstore.toml"), tmp_path / "etc.toml"))


def _file(folder: Path, text: str, name: str = "kvstore.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


# --- sources -------------------------------------------------------------------------------------------------


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(NodeSettings).dram == 1 << 30
    _file(tmp_path, '[node]\ndram = "2MiB"\n')
    assert load(NodeSettings).dram == 2 << 20
    monkeypatch.setenv("KVSTORE_NODE_DRAM", "3MiB")
    assert load(NodeSettings).dram == 3 << 20
    assert load(NodeSettings, {"dram": "4MiB"}).dram == 4 << 20


def test_sources_are_merged_setting_by_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _file(tmp_path, '[node]\ndram = 4096\nslots = 7\nnode_id = "from-file"\n')
    monkeypatch.setenv("KVSTORE_NODE_SLOTS", "8")
    settings = load(NodeSettings, {"node_id": "from-flag"})
    assert (settings.dram, settings.slots, settings.node_id) == (4096, 8, "from-flag")


def test_first_file_found_is_the_only_one_read(tmp_path: Path) -> None:
    _file(tmp_path, "[node]\nslots = 2\nroom_chunks = 2\n", "etc.toml")
    assert load(NodeSettings).slots == 2
    _file(tmp_path, "[node]\nslots = 1\n")
    assert (load(NodeSettings).slots, load(NodeSettings).room_chunks) == (1, 0)
    named = _file(tmp_path, "[node]\nslots = 3\n", "named.toml")
    assert load(NodeSettings, config=named).slots == 3


def test_a_table_reads_only_its_own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _file(tmp_path, '[metadata]\naddress = "127.0.0.1:1"\n[router]\naddress = "127.0.0.1:2"\n')
    monkeypatch.setenv("KVSTORE_NODE_CONTROL_ADDRESS", "127.0.0.1:3")
    assert load(MetadataSettings).address == "127.0.0.1:1"
    assert load(RouterSettings).address == "127.0.0.1:2"
    assert load(NodeSettings).control_address == "127.0.0.1:3"


def test_settings_made_in_code_see_neither_file_nor_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _file(tmp_path, "[node]\nslots = 9\n")
    monkeypatch.setenv("KVSTORE_NODE_SLOTS", "8")
    assert NodeSettings(dram=parse_size("64MiB")).slots == 0


# --- names ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[node]\ndrum = 1\n", "unknown setting [node] drum; did you mean dram?"),
        ("[nodes]\n", "unknown table or key 'nodes'; did you mean node?"),
        ('dram = "1GiB"\n', "unknown table or key 'dram'; did you mean [node] dram?"),
        # A misspelt name in a table that this program does not use is refused as well.
        ('[router]\npolcy = "x"\n', "unknown setting [router] polcy; did you mean policy?"),
        ("[metadata]\nzzz = 1\n", "known: address, insecure, metrics_address"),
        ("node = 3\n", "node must be a table"),
        ("[node\n", "cannot read"),
    ],
)
def test_unknown_names_in_a_file_are_refused(tmp_path: Path, text: str, expected: str) -> None:
    path = _file(tmp_path, text, "some.toml")
    with pytest.raises(ConfigurationError) as caught:
        load(NodeSettings, config=path)
    assert expected in str(caught.value)
    assert str(path) in str(caught.value)


def test_missing_named_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"--config .*gone\.toml: there is no such file"):
        load(NodeSettings, config=tmp_path / "gone.toml")


def test_unknown_environment_variable_names_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_NOD_DRAM", "1GiB")
    with pytest.raises(ConfigurationError, match=r"KVSTORE_NOD_DRAM; did you mean KVSTORE_NODE_DRAM\?"):
        load(MetadataSettings)


@pytest.mark.parametrize(
    "name",
    ["KVSTORE_DEBUG", "KVSTORE_TRACES", "KVSTORE_NODE_SERVICE_HOST", "KVSTORE_PORT", "KVSTORE_NODE_PORT_7420_TCP_ADDR"],
)
def test_variables_that_are_not_settings_are_let_pass(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "tcp://10.0.0.1:7420")
    load(NodeSettings)


def test_unknown_names_in_code_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="drum"):
        load(NodeSettings, {"drum": "1GiB"})


# --- values --------------------------------------------------------------------------------------------------


def test_wrong_value_names_setting_and_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _file(tmp_path, '[node]\ndram = "8 potatoes"\n')
    with pytest.raises(ConfigurationError, match=rf"\[node\] dram \({path.name}\): '8 potatoes' .* 8GiB"):
        load(NodeSettings)
    monkeypatch.setenv("KVSTORE_NODE_DRAM", "0")
    with pytest.raises(ConfigurationError, match=r"\[node\] dram \(KVSTORE_NODE_DRAM\): '0'"):
        load(NodeSettings)
    with pytest.raises(ConfigurationError, match=r"\[node\] dram \(command line\): '-5'"):
        load(NodeSettings, {"dram": "-5"})


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"slots": "-1"}, r"slots .*greater than or equal to 0"),
        ({"slots": "many"}, r"slots .*integer"),
        ({"insecure": "perhaps"}, r"insecure .*boolean"),
        ({"node_id": "a/b"}, r"node_id .*not a node id"),
        ({"advertise": "host:7420"}, r"advertise .*not a host"),
        ({"metadata_address": "127.0.0.1:0"}, r"metadata_address .*port 0"),
        ({"control_address": "x"}, r"control_address .*127\.0\.0\.1:7420"),
    ],
)
def test_wrong_values_say_what_fits(flags: dict[str, object], expected: str) -> None:
    with pytest.raises(ConfigurationError, match=expected):
        load(NodeSettings, flags)


@pytest.mark.parametrize("name", ["control_address", "data_address", "metrics_address"])
def test_addresses_that_others_reach_need_insecure(name: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"{name} 10\.0\.0\.5:7420 .*--insecure"):
        load(NodeSettings, {name: "10.0.0.5:7420"})
    assert getattr(load(NodeSettings, {name: "10.0.0.5:7420", "insecure": "true"}), name) == "10.0.0.5:7420"


def test_insecure_is_asked_of_the_other_servers_too() -> None:
    with pytest.raises(ConfigurationError, match="--insecure"):
        load(MetadataSettings, {"address": "10.0.0.5:7410"})
    with pytest.raises(ConfigurationError, match="--insecure"):
        load(RouterSettings, {"address": "example.org:7400"})


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0"])
def test_listening_everywhere_needs_a_name_to_advertise(address: str) -> None:
    with pytest.raises(ConfigurationError, match="advertise must name this host"):
        load(NodeSettings, {"data_address": address, "insecure": True})
    load(NodeSettings, {"data_address": address, "insecure": True, "advertise": "node1.example.org"})


def test_empty_switches_metrics_off_and_lets_a_node_stand_alone() -> None:
    settings = load(NodeSettings, {"metrics_address": "", "metadata_address": ""})
    assert (settings.metrics_address, settings.metadata_address) == ("", "")


# --- computed values -----------------------------------------------------------------------------------------


def test_resolved_keeps_one_node_id_a_data_folder(tmp_path: Path) -> None:
    folders: dict[str, Any] = {"data_dir": str(tmp_path / "data"), "socket_dir": str(tmp_path / "socket")}
    first = NodeSettings(**folders, dram=1 << 20).resolved()
    assert first.node_id.startswith("node-")
    assert first.slots == 16
    assert first.host_id
    assert NodeSettings(**folders).resolved().node_id == first.node_id
    assert NodeSettings(**{**folders, "data_dir": str(tmp_path / "other")}).resolved().node_id != first.node_id
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["node_id"]


def test_resolved_leaves_what_was_given(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "data_dir": str(tmp_path),
        "socket_dir": str(tmp_path),
        "node_id": "n1",
        "host_id": "h1",
        "slots": 5,
    }
    resolved = NodeSettings(**given).resolved()
    assert {name: getattr(resolved, name) for name in given} == given
    assert list(tmp_path.iterdir()) == []


def test_resolved_uses_the_runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert NodeSettings(data_dir=str(tmp_path)).resolved().socket_dir == str(tmp_path)


def test_resolved_refuses_folders_it_cannot_use(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ConfigurationError, match="data_dir: cannot make"):
        NodeSettings(data_dir=str(blocked / "x"), socket_dir=str(tmp_path)).resolved()
    with pytest.raises(ConfigurationError, match="shorter socket_dir"):
        NodeSettings(data_dir=str(tmp_path), socket_dir=str(tmp_path / ("x" * 100))).resolved()
    (tmp_path / "node_id").write_text("not an id\n")
    with pytest.raises(ConfigurationError, match="does not hold a node id"):
        NodeSettings(data_dir=str(tmp_path), socket_dir=str(tmp_path)).resolved()


# --- documentation -------------------------------------------------------------------------------------------


def test_every_setting_is_described_and_a_node_has_at_most_22() -> None:
    rows = list(config.describe())
    assert all(len(row.text) > 20 and row.text.endswith(".") for row in rows)
    assert len({row.environment for row in rows}) == len(rows)
    assert sum(row.table == "node" for row in rows) <= 22


def test_example_file_is_accepted() -> None:
    for kind in config.TABLES:
        load(kind, config=REPOSITORY / "deploy" / "kvstore.toml")
