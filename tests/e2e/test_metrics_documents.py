"""docs/metrics.md against the code, both ways: every figure is documented, and everything documented is there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import foreign_store_client as foreign
import grpc
import pytest
from prometheus_client.metrics import MetricWrapperBase
from test_store_service_documents import ROOT, rows

from kvstore import metrics
from kvstore.client import Durability, connect
from kvstore.model.namespace import Namespace
from kvstore.model.values import MissReason, Outcome
from kvstore.rpc.v1 import node_pb2, node_pb2_grpc
from tests.chaos.node_thread import NodeThread
from tests.unit.client.pages import namespace, pages_of, prompt

PAGE = (ROOT / "docs" / "metrics.md").read_text()
LISTED = {part for row in rows(PAGE, "Stats of a node") for part in re.findall(r"`([a-z_<>]+)`", row[0])}
PREFIXES = {part.partition("<")[0] for part in LISTED if "<" in part}


def documented(name: str) -> bool:
    return name in LISTED or any(name.startswith(prefix) for prefix in PREFIXES)


def counters() -> set[str]:
    """Names of all counters in the node's sources, reasons, outcomes and kinds filled in."""
    text = "".join(path.read_text() for path in sorted((ROOT / "kvstore" / "node").rglob("*.py")))
    names = set(re.findall(r'counts\[f?"([^"]+)"\]', text))
    reasons = [reason.value for reason in MissReason]
    filled = {
        "reserve_{outcome.name.lower()}": [f"reserve_{outcome.name.lower()}" for outcome in Outcome],
        "removed_{reason}": ["removed_removed", "removed_evicted", "removed_broken"],
        "ssd_errors_{kind}": [f"ssd_errors_{kind}" for kind in re.findall(r'_fail\([^()]*, "(\w+)"\)', text)],
        **{
            template: [template.partition("{")[0] + reason for reason in reasons]
            for template in names
            if template.endswith("eason.value}")
        },
    }
    return {each for name in names for each in filled.get(name, [name])}


@pytest.fixture(scope="module")
def stats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What a node with an SSD answers after some work."""
    folder = tmp_path_factory.mktemp("node")
    node = NodeThread(folder, dram_bytes=1 << 20, slots=256, ssd=f"{folder / 'file'}:1MiB")
    try:
        with connect(node.info.socket_path) as client:
            cache = client.bind(namespace())
            keys = cache.keys(prompt(1, 64))
            assert cache.write(keys, pages_of(keys), durability=Durability.SSD).durable == 4
            with grpc.insecure_channel(node.info.control_address) as channel:
                answer = node_pb2_grpc.NodeServiceStub(channel).Stats(node_pb2.StatsRequest(), timeout=5)
        yield dict(json.loads(answer.json))
    finally:
        node.stop()


# --- Stats ---------------------------------------------------------------------------------------------------


def test_every_counter_is_documented() -> None:
    assert len(counters()) > 40 and not any("{" in name for name in counters())
    assert sorted(name for name in counters() if not documented(name)) == []


def test_every_figure_of_a_node_with_an_ssd_is_documented(stats: dict[str, Any]) -> None:
    assert len(stats) > 50
    assert sorted(name for name in stats if not documented(name)) == []


def test_every_documented_figure_is_there(stats: dict[str, Any]) -> None:
    known = stats.keys() | counters()
    assert sorted(name for name in LISTED if "<" not in name and name not in known) == []
    assert sorted(prefix for prefix in PREFIXES if not any(name.startswith(prefix) for name in known)) == []


@pytest.mark.parametrize("name", ["chunks_that_nobody_knows", "ssd_states", "read_bytes"])
def test_an_undocumented_name_would_be_noticed(name: str) -> None:
    assert not documented(name)


def test_a_pool_inside_a_process_answers_documented_figures_only() -> None:
    from kvstore.assemble import open_local

    with open_local("32MiB") as client:
        space = Namespace.from_canonical(foreign.canonical(foreign.DESCRIPTION))
        client.bind(space)
        host: Any = client.host()
        assert sorted(name for name in host.core.stats() if not documented(name)) == []


# --- Prometheus ----------------------------------------------------------------------------------------------


def instruments() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Name as it is scraped -> type and labels, of all instruments of our own."""
    found = {}
    for each in vars(metrics).values():
        if isinstance(each, MetricWrapperBase):
            name = each._name + ("_total" if each._type == "counter" else "")
            found[name] = each._type, tuple(each._labelnames)
        elif isinstance(each, metrics.TallyHistogram):
            found[each.name] = "histogram", (each.label,)
    return found


def test_the_page_names_every_instrument_with_its_type_and_labels_and_no_other() -> None:
    listed = {}
    for names, kind, labels, _ in rows(PAGE, "Prometheus"):
        for name in re.findall(r"`(\w+)`", names):
            listed[name] = kind, tuple(re.findall(r"`(\w+)`", labels))
    assert listed == instruments()


def test_every_instrument_is_on_the_registry() -> None:
    families = {family.name for family in metrics.REGISTRY.collect()}
    assert {name.removesuffix("_total") for name in instruments()} <= families
    others = {name for name in families if not name.startswith("kvstore_")}
    assert all(name.startswith(("process_", "python_")) for name in others), "the page names these prefixes"
    assert {name for name in families if name.startswith("kvstore_")} == {
        name.removesuffix("_total") for name in instruments()
    }


# --- deploy/ -------------------------------------------------------------------------------------------------


Value = Any


def read_yaml(text: str) -> Value:
    """The YAML of deploy/: block mappings and lists, two columns a level, whose scalars and short lists are JSON.

    Refuses everything else, so that nothing is in these files which could be read in another way.
    """
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    value, rest = _block(lines, 0)
    assert not rest, rest[0]
    return value


def _block(lines: list[str], indent: int) -> tuple[Value, list[str]]:
    items: list[Value] = []
    fields: dict[str, Value] = {}
    while lines and len(lines[0]) - len(lines[0].lstrip(" ")) == indent:
        line = lines[0][indent:]
        if line.startswith('- "'):
            items.append(json.loads(line[2:]))
            lines = lines[1:]
        elif line.startswith("- "):
            item, lines = _block([" " * (indent + 2) + line[2:], *lines[1:]], indent + 2)
            items.append(item)
        else:
            lines = _field(lines, indent, fields)
    assert bool(items) != bool(fields), lines[:1]
    return items or fields, lines


def _field(lines: list[str], indent: int, fields: dict[str, Value]) -> list[str]:
    line = lines[0][indent:]
    match = re.fullmatch(r"([a-z_]+):(?: (\S.*))?", line)
    assert match is not None and match[1] not in fields, line
    if match[2] is not None:
        fields[match[1]], lines = json.loads(match[2]), lines[1:]
    else:
        fields[match[1]], lines = _block(lines[1:], indent + 2)
    return lines


def test_the_scrape_configuration_names_the_default_ports_and_the_rules() -> None:
    from kvstore.config import MetadataSettings, NodeSettings

    found = read_yaml((ROOT / "deploy" / "prometheus.yml").read_text())
    targets = {job["job_name"]: job["static_configs"][0]["targets"] for job in found["scrape_configs"]}
    assert targets == {
        "kvstore_node": [NodeSettings().metrics_address],
        "kvstore_metadata": [MetadataSettings().metrics_address],
    }
    assert all((ROOT / "deploy" / name).is_file() for name in found["rule_files"])


def test_the_rules_use_names_and_label_values_that_exist() -> None:
    groups = read_yaml((ROOT / "deploy" / "alerts.yml").read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules) >= 6
    known = instruments()
    for rule in rules:
        assert rule.keys() - {"for"} == {"alert", "expr", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"].keys() == {"summary", "remedy"}
        assert re.fullmatch(r"\d+m", rule.get("for", "1m"))
        expression = rule["expr"]
        assert all(expression.count(one) == expression.count(other) for one, other in ("()", "[]", "{}"))
        for name, selector in re.findall(r"(kvstore_\w+)(?:\{([^}]*)\})?", re.sub(r'job=~"[^"]*"', "", expression)):
            kind, labels = known[name.removesuffix("_bucket")]
            assert (kind == "histogram") == name.endswith("_bucket")
            for label, values in re.findall(r'(\w+)=~?"([^"]*)"', selector):
                assert label in labels
                assert label != "outcome" or set(values.split("|")) <= {each.name.lower() for each in Outcome}


@pytest.mark.parametrize(
    "text", ["a: b", "a:\n\tb: 1", "a: 1\na: 2", "a:\n   b: 1", "- 1", "a: 'x'", "a: 1\n- b: 1", "a:", "a: [1", "a:1"]
)
def test_what_is_not_that_plain_is_refused(text: str) -> None:
    with pytest.raises((AssertionError, ValueError)):
        read_yaml(text)


def test_the_reader_itself() -> None:
    text = '# c\ne:\n  - "z"\na: 1\nb:\n  - c: "x"\n    d: [1, 2]\n  - c: "y"\n'
    assert read_yaml(text) == {"e": ["z"], "a": 1, "b": [{"c": "x", "d": [1, 2]}, {"c": "y"}]}
