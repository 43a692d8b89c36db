"""What may be put beside a handoff: arrays and tensors of any kind come back, all else is refused."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.client import Cache
from kvstore.errors import InvalidRequest, LayoutMismatch, LimitExceeded
from kvstore.model.prefix import Keys
from kvstore.model.ticket import Ticket
from kvstore.model.values import MissReason
from kvstore.node import NodeApi
from tests.unit.client.pages import namespace, pages_of, poisoned, prompt
from tests.unit.client.side_objects import BOTH, HIDDEN, LOGITS, patience, same, ticket_of


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    patience(monkeypatch, 20)


@pytest.fixture
def cache() -> Iterator[Cache]:
    with kvstore.open_local("2MiB") as client:
        yield client.bind(namespace())


@pytest.fixture
def local(cache: Cache) -> tuple[Keys, Ticket]:
    keys = cache.keys(prompt(1, 16))
    assert cache.write(keys, pages_of(keys)).stored == 1
    own = cache._nodes.node
    assert own is not None
    return keys, ticket_of(keys, own)


def test_a_pool_in_one_process_does_the_same(cache: Cache, local: tuple[Keys, Ticket]) -> None:
    keys, ticket = local
    began_s = time.monotonic()
    assert cache.read_side_objects(ticket).reason is MissReason.ABSENT
    assert time.monotonic() - began_s < 10.0
    assert cache.put_side_objects(ticket, BOTH, keys=keys, lifetime_s=1.5) == 1.5
    assert cache.put_side_objects(ticket, BOTH, keys=keys, lifetime_s=1e12) == 60.0
    assert same(cache.read_handoff(ticket, keys, poisoned(cache, 1)), BOTH)
    stats = cache._nodes.stats()
    assert (stats["side_objects_put"], stats["side_objects_read"]) == (4, 2)
    own: Any = cache._nodes.host()
    assert own.core.stats()["side_objects_read"] == 2
    assert stats["side_bytes_read"] == HIDDEN.nbytes + LOGITS.nbytes and stats["side_misses_absent"] == 1
    cache.drop_ticket(ticket)
    assert cache.read_side_objects(ticket).reason is MissReason.DROPPED
    cache.release(ticket)
    assert cache.read_side_objects(ticket).reason is MissReason.ABSENT


@pytest.mark.parametrize(
    "array",
    [
        np.float64(3.5),
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.arange(24).reshape(4, 6)[::2, ::3],
        np.array([True, False]),
        np.zeros((0, 4), dtype=np.float32),
        [1, 2, 3],
    ],
    ids=["number", "big-endian", "strided", "bool", "empty", "list"],
)
def test_arrays_of_any_kind_come_back(cache: Cache, local: tuple[Keys, Ticket], array: Any) -> None:
    keys, ticket = local
    cache.put_side_objects(ticket, {"x": array}, keys=keys)
    found = cache.read_side_objects(ticket).objects["x"].as_numpy()
    assert np.array_equal(found, np.asarray(array)) and found.shape == np.shape(array)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int64", "bool", "float8_e4m3fn"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 3)])
def test_tensors_come_back(cache: Cache, local: tuple[Keys, Ticket], dtype: str, shape: tuple[int, ...]) -> None:
    torch = pytest.importorskip("torch", reason="tensors need torch")
    keys, ticket = local
    tensor = torch.ones(shape).mul(1.5).to(getattr(torch, dtype))
    if len(shape) == 2:
        tensor = tensor.T.contiguous().T  # the rows are not one run
    elif shape:
        tensor = tensor[:1].expand(shape)  # one element in memory
    cache.put_side_objects(ticket, {"x": tensor}, keys=keys)
    found = cache.read_side_objects(ticket).objects["x"]
    assert (found.dtype, found.shape) == (dtype, shape)
    if tensor.numel():
        back = torch.from_numpy(found.raw.copy()).view(tensor.dtype).reshape(found.shape)
        assert torch.equal(back.to(torch.float32), tensor.to(torch.float32))
    if dtype != "float8_e4m3fn":
        assert np.array_equal(found.as_numpy(), tensor.to(torch.float32).numpy())


def test_tensors_elsewhere_are_refused(cache: Cache, local: tuple[Keys, Ticket]) -> None:
    torch = pytest.importorskip("torch", reason="tensors need torch")
    keys, ticket = local
    with pytest.raises(LayoutMismatch, match="meta"):
        cache.put_side_objects(ticket, {"x": torch.empty(3, device="meta")}, keys=keys)


@pytest.mark.parametrize("value", [np.array(["a"]), np.array([None]), np.array(["2020"], dtype="datetime64[Y]"), {}])
def test_what_is_no_array_of_numbers_is_refused(cache: Cache, local: tuple[Keys, Ticket], value: Any) -> None:
    keys, ticket = local
    with pytest.raises(LayoutMismatch, match="'x'"):
        cache.put_side_objects(ticket, {"x": value}, keys=keys)


def test_arguments_that_cannot_be_right_are_refused(cache: Cache, local: tuple[Keys, Ticket]) -> None:
    keys, ticket = local
    for lifetime_s in (0.0, -1.0, float("nan")):
        with pytest.raises(InvalidRequest, match="live for some time"):
            cache.put_side_objects(ticket, BOTH, keys=keys, lifetime_s=lifetime_s)
    with pytest.raises(InvalidRequest, match="at least one"):
        cache.put_side_objects(ticket, BOTH, keys=cache.keys([]))
    with pytest.raises(InvalidRequest, match="another namespace"):
        other = Keys(b"n" * 16, b"n" * 16, b"k" * 16, None, 16, 16)
        cache.put_side_objects(ticket, BOTH, keys=other)
    with pytest.raises(InvalidRequest, match="no side object"):
        cache.put_side_objects(ticket, {}, keys=keys)
    with pytest.raises(InvalidRequest, match="ASCII"):
        cache.put_side_objects(ticket, {"größe": HIDDEN}, keys=keys)
    with pytest.raises(LimitExceeded, match="16777216"):
        cache.put_side_objects(ticket, {"x": np.zeros((16 << 20) + 1, dtype=np.uint8)}, keys=keys)
    assert cache.read_side_objects(ticket).reason is MissReason.ABSENT


def test_every_verb_is_in_the_protocol() -> None:
    assert {"put_side_objects", "get_side_objects", "drop_ticket"} <= set(dir(NodeApi))
