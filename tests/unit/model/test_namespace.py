"""Namespaces: what must be equal for bytes to be interchangeable (A06, A08)."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import InvalidRequest, LimitExceeded
from kvstore.model.layout import Attention, Dtype, PageLayout, SideComponent
from kvstore.model.namespace import Namespace
from kvstore.model.prefix import KeyChain

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "keys.json").read_text())
LAYOUT = PageLayout(layers=32, kv_heads=8, head_dim=128, dtype=Dtype.BF16, page_tokens=16, pages_per_chunk=1)
BASE = Namespace("example/llama-8b", "rev-1", LAYOUT)


def with_layout(**changes: Any) -> Namespace:
    return dataclasses.replace(BASE, layout=dataclasses.replace(LAYOUT, **changes))


DIFFERENT = {
    "model": dataclasses.replace(BASE, model="example/llama-70b"),
    "revision (A06)": dataclasses.replace(BASE, revision="rev-2"),
    "kv_group": dataclasses.replace(BASE, kv_group="sliding:4096"),
    "tenant": dataclasses.replace(BASE, tenant="b"),
    "fp8 for bf16 (A08)": with_layout(dtype=Dtype.FP8_E4M3),
    "fp16 for bf16, same size (A08)": with_layout(dtype=Dtype.FP16),
    "fp8 of another kind, same size (A08)": with_layout(dtype=Dtype.FP8_E5M2),
    "scales (A08)": with_layout(dtype=Dtype.FP8_E4M3, side_components=(SideComponent("k_scale", 64),)),
    "another set of scales (A08)": with_layout(dtype=Dtype.FP8_E4M3, side_components=(SideComponent("v_scale", 64),)),
    "layers": with_layout(layers=16),
    "kv_heads": with_layout(kv_heads=4),
    "head_dim": with_layout(head_dim=64),
    "page_tokens": with_layout(page_tokens=32),
    "pages_per_chunk": with_layout(pages_per_chunk=4),
    "attention": with_layout(attention=Attention.MHA),
    "interior": with_layout(interior="k_then_v"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_any_difference_is_another_namespace_without_a_common_key(name: str) -> None:
    """A06: other weights under the same name; A08: other dtype, also of the same size. A miss, never a mix."""
    other = DIFFERENT[name]
    assert other.id != BASE.id
    tokens = list(range(512))
    assert not set(KeyChain(BASE).keys(tokens)) & set(KeyChain(other).keys(tokens))


def test_all_of_them_differ_from_each_other() -> None:
    assert len({other.id for other in DIFFERENT.values()}) == len(DIFFERENT)


@pytest.mark.parametrize("namespace", [BASE, *DIFFERENT.values()], ids=["base", *DIFFERENT])
def test_the_canonical_description_goes_there_and_back(namespace: Namespace) -> None:
    again = Namespace.from_canonical(namespace.canonical)
    assert again == namespace
    assert again.id == namespace.id and len(again.id) == 16


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["name"])
def test_ids_are_golden(case: dict[str, Any]) -> None:
    text = json.dumps(case["namespace"], sort_keys=True, separators=(",", ":")).encode()
    assert Namespace.from_canonical(text).id.hex() == case["namespace_id"]


def altered(**changes: object) -> bytes:
    fields = json.loads(BASE.canonical) | changes
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b"[]",
        b"5",
        b"\xff",
        b"[" * 5000,
        BASE.canonical + b" ",
        BASE.canonical.replace(b'"bf16"', b'"bf17"'),
        altered(one_more="field"),
        altered(model=5),
        altered(tenant=None),
        altered(revision=""),
        altered(model="\ud800"),
        altered(interior=["k_then_v"]),
        altered(layers=32.0),
        altered(layers=True),
        altered(layers="32"),
        altered(side_components=[["k_scale", 64.0]]),
        altered(side_components=[[5, 64]]),
        altered(side_components=[["k_scale"]]),
        altered(side_components=7),
    ],
)
def test_anything_else_is_refused(text: bytes) -> None:
    with pytest.raises(InvalidRequest):
        Namespace.from_canonical(text)


def test_texts_are_bounded() -> None:
    assert dataclasses.replace(BASE, model="é" * 256).model
    with pytest.raises(LimitExceeded, match="model is longer than 512 bytes"):
        dataclasses.replace(BASE, model="é" * 257)
    many = tuple(SideComponent(f"component-{index:04}", 1) for index in range(1000))
    with pytest.raises(LimitExceeded, match="at most 16384 bytes"):
        with_layout(side_components=many)
    with pytest.raises(LimitExceeded, match="at most 16384 bytes"):
        Namespace.from_canonical(b" " * 16385)


@pytest.mark.parametrize("name", ["model", "revision", "kv_group"])
def test_names_are_not_empty(name: str) -> None:
    empty: dict[str, Any] = {name: ""}
    with pytest.raises(InvalidRequest, match=f"non-empty text as {name}"):
        dataclasses.replace(BASE, **empty)


def test_the_title_is_for_people() -> None:
    assert BASE.title == f"example/llama-8b@rev-1 full [{BASE.id.hex()[:8]}]"
