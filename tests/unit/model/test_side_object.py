"""Side objects as values: what is refused by name, what the checksum covers, what numpy gets."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import xxhash

from kvstore.errors import InvalidRequest, LayoutMismatch, LimitExceeded
from kvstore.model.layout import Rectangle
from kvstore.model.side_object import SIDE_BYTES_A_TICKET, NeededChunks, SideObject, checksum_of

TICKET = b"t" * 16
HIDDEN = SideObject.made_for(TICKET, "hidden", "float32", (2, 3), np.arange(6, dtype="<f4").tobytes())


def test_an_object_is_what_numpy_had() -> None:
    assert np.array_equal(HIDDEN.as_numpy(), np.arange(6, dtype=np.float32).reshape(2, 3))
    assert HIDDEN.as_numpy().flags.writeable and HIDDEN.raw.nbytes == 24


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int64", "float16", "float64", "complex64"])
def test_every_type_of_numbers_comes_back(dtype: str) -> None:
    values = np.arange(4).astype(dtype)
    item = SideObject.made_for(TICKET, "x", dtype, (4,), values.tobytes())
    assert np.array_equal(item.as_numpy(), values) and item.as_numpy().dtype == values.dtype


def test_bfloat16_comes_as_float32_with_the_same_values() -> None:
    values = np.array([1.0, -2.5, 3.140625, float("inf")], dtype="<f4")
    item = SideObject.made_for(TICKET, "x", "bfloat16", (2, 2), (values.view("<u4") >> 16).astype("<u2").tobytes())
    assert np.array_equal(item.as_numpy(), values.reshape(2, 2))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "object", "str", "datetime64"])
def test_types_that_are_no_numbers_of_numpy_have_raw_bytes_only(dtype: str) -> None:
    item = SideObject.made_for(TICKET, "x", dtype, (8,), bytes(8))
    with pytest.raises(LayoutMismatch, match="raw"):
        item.as_numpy()
    assert item.raw.tolist() == [0] * 8


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_that_do_not_fit_the_type_are_refused(dtype: str) -> None:
    with pytest.raises(LayoutMismatch, match="3 bytes"):
        SideObject.made_for(TICKET, "x", dtype, (3,), b"abc").as_numpy()


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3)])
def test_single_numbers_and_nothing(shape: tuple[int, ...]) -> None:
    item = SideObject.made_for(TICKET, "x", "float32", shape, np.zeros(shape, dtype="<f4").tobytes())
    assert item.as_numpy().shape == shape


def test_the_checksum_is_the_documented_one() -> None:
    assert HIDDEN.checksum == xxhash.xxh3_64_intdigest(TICKET + b"hidden\nfloat32\n2x3\n" + HIDDEN.data)
    assert checksum_of(TICKET, "a", "b", (), b"") == xxhash.xxh3_64_intdigest(TICKET + b"a\nb\n\n")


@pytest.mark.parametrize(
    "changed",
    [
        {"name": "hiddem"},
        {"dtype": "int32"},
        {"shape": (3, 2)},
        {"data": HIDDEN.data[:-1] + b"\xff"},
        {"checksum": HIDDEN.checksum ^ 1},
    ],
)
def test_whatever_changes_on_the_way_is_noticed(changed: dict[str, object]) -> None:
    assert HIDDEN.holds_for(TICKET)
    assert not replace(HIDDEN, **changed).holds_for(TICKET)  # type: ignore[arg-type]


def test_an_object_of_another_ticket_is_noticed() -> None:
    assert not HIDDEN.holds_for(b"u" * 16)


@pytest.mark.parametrize(
    ("fields", "error", "named"),
    [
        (("", "float32", (1,), bytes(4)), InvalidRequest, "name"),
        (("é", "float32", (1,), bytes(4)), InvalidRequest, "name"),
        (("a\nb", "float32", (1,), bytes(4)), InvalidRequest, "name"),
        (("n" * 65, "float32", (1,), bytes(4)), LimitExceeded, "64"),
        (("x", "", (1,), bytes(4)), InvalidRequest, "dtype"),
        (("x", "d" * 33, (1,), bytes(4)), LimitExceeded, "32"),
        (("x", "float32", (1,) * 9, bytes(4)), LimitExceeded, "8"),
        (("x", "float32", (-1, -4), bytes(4)), InvalidRequest, "negative"),
        (("x", "float32", (3,), bytes(4)), InvalidRequest, "4 bytes"),
        (("x", "float32", (3,), b""), InvalidRequest, "0 bytes"),
        (("x", "float32", (0,), bytes(4)), InvalidRequest, "4 bytes"),
        (("x", "uint8", (SIDE_BYTES_A_TICKET + 1,), bytes(SIDE_BYTES_A_TICKET + 1)), LimitExceeded, "16777216"),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(
    fields: tuple[str, str, tuple[int, ...], bytes], error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        SideObject(*fields, 0)


def test_the_longest_name_is_legal() -> None:
    assert SideObject("n" * 64, "d" * 32, (1,) * 8, b"x", 0).shape == (1,) * 8


@pytest.mark.parametrize(("namespace_id", "last_key"), [(b"", b"k" * 16), (b"n" * 16, b"k" * 15)])
def test_keys_have_16_bytes(namespace_id: bytes, last_key: bytes) -> None:
    with pytest.raises(InvalidRequest, match="16 bytes"):
        NeededChunks(namespace_id, last_key, Rectangle(0, 1, 0, 1))
