"""Checksum tables by the compiled code and by xxhash alone: the same values, whatever the shape and where it lies."""

from __future__ import annotations

import shutil
import sys
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvstore.model import checksum

Shape = tuple[int, int, int, int]
POISON = 0xA5
both = pytest.mark.parametrize("way", ["vectors", "any_cpu", "python"])
shapes = st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 4), st.integers(1, 40).map(lambda n: n * 64))
"""(layers, pages, heads, head_page_bytes)"""


def expected_table(stored: np.ndarray) -> np.ndarray:
    """By the definition: xxh3-64 of the pages of one layer and head one after the other."""
    layers, _, heads, _ = stored.shape
    digests = [
        [xxhash.xxh3_64_intdigest(stored[layer, :, head].tobytes()) for head in range(heads)] for layer in range(layers)
    ]
    return np.array(digests, dtype=np.uint64)


def stored_bytes(shape: Shape, seed: int = 1, offset: int = 0) -> np.ndarray:
    """Random pages that begin `offset` bytes behind an address that 64 divides."""
    size = int(np.prod(shape))
    memory = np.zeros(size + 128, dtype=np.uint8)
    start = -memory.ctypes.data % 64 + offset
    memory[start : start + size] = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    return memory[start : start + size].reshape(shape)


@pytest.fixture
def chosen(way: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The code that computes: compiled for this CPU's vectors or for any CPU, or xxhash alone."""
    if way == "python":
        monkeypatch.setattr(checksum, "_native", None)
        yield
        return
    if not checksum.NATIVE:
        pytest.skip("built without a C compiler")
    from kvstore.model import _checksum

    if _checksum.use_vectors(way == "vectors") != (way == "vectors"):
        pytest.skip("no code for this CPU's vectors")
    yield
    _checksum.use_vectors(True)


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.skipif(not Path(sysconfig.get_path("include"), "Python.h").exists(), reason="no headers of Python")
def test_where_there_is_a_compiler_the_code_is_compiled() -> None:
    assert checksum.NATIVE


@given(shapes, st.integers(0, 1000), st.sampled_from([0, 1, 32, 33]))
def test_a_table_is_xxh3_of_each_heads_pages(shape: Shape, seed: int, offset: int) -> None:
    stored = stored_bytes(shape, seed, offset)
    assert np.array_equal(checksum.table_of_layers(stored), expected_table(stored))


@both
@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize(
    "shape",
    [
        (2, 1, 3, 64),  # shorter than XXH3's long path
        (2, 3, 2, 80),  # no whole stripes
        (1, 4, 2, 60),
        (2, 4, 1, 64),  # one byte into the long path would be 241: this is 256
        (1, 1, 1, 1024),  # one block exactly
        (1, 1, 1, 1088),
        (1, 2, 3, 1024),
        (1, 16, 8, 64),  # blocks end inside pages
        (16, 4, 4, 8192),
    ],
)
def test_shapes_at_the_edges_of_the_algorithm(shape: Shape) -> None:
    stored = stored_bytes(shape)
    assert np.array_equal(checksum.table_of_layers(stored), expected_table(stored))
    slot = np.full_like(stored, POISON)
    assert np.array_equal(checksum.copy_out(stored, slot), expected_table(stored))
    assert np.array_equal(slot, stored)
    target = np.full_like(stored, POISON)
    assert checksum.copy_in(stored, expected_table(stored), target)
    assert np.array_equal(target, stored)


@both
@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize("row_bytes", [64, 192, 256, 768, 96, 1536])
@pytest.mark.parametrize("offset", [0, 1, 32])
def test_rows_anywhere_are_gathered_and_scattered(row_bytes: int, offset: int) -> None:
    """Rows that are parts of a head page, some head pages, or neither."""
    shape = (3, 2, 4, 192)  # a layer is 1,536 bytes
    stored = stored_bytes(shape, offset=offset)
    rows = stored.size // row_bytes
    places = np.random.default_rng(2).permutation(rows * 2)[:rows]
    memory = np.full((rows * 2, row_bytes), POISON, dtype=np.uint8)
    assert checksum.scatter(stored, expected_table(stored), memory, places.reshape(3, -1))
    expected = np.full_like(memory, POISON)
    expected[places] = stored.reshape(rows, row_bytes)
    assert np.array_equal(memory, expected)
    slot = stored_bytes(shape, seed=9, offset=offset)
    assert np.array_equal(checksum.gather(memory, places, slot), expected_table(stored))
    assert np.array_equal(slot, stored)
    wide = np.full((3, 2, 6, 192), POISON, dtype=np.uint8)  # a view that is not contiguous
    assert np.array_equal(checksum.gather(memory, places, wide[:, :, 1:5]), expected_table(stored))
    assert np.array_equal(wide[:, :, 1:5], stored) and (wide[:, :, [0, 5]] == POISON).all()
    assert checksum.copy_in(stored, expected_table(stored), wide[:, :, :4]) and np.array_equal(wide[:, :, :4], stored)
    assert np.array_equal(checksum.copy_out(wide[:, :, :4], slot), expected_table(stored))


@both
@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_nothing_is_copied_from_the_first_layer_on_that_differs(bad: int) -> None:
    shape = (3, 2, 4, 512)
    stored = stored_bytes(shape)
    table = expected_table(stored)
    for position in (0, 511, 512 * 8 - 1):  # in the first stripe, in the last of a page, and the layer's last byte
        piece = stored.copy()
        piece[bad].reshape(-1)[position] ^= 1
        target = np.full_like(stored, POISON)
        assert not checksum.copy_in(piece, table, target)
        assert (target[bad:] == POISON).all(), "what is not what was stored is never handed on"
    wrong = table.copy()
    wrong[bad, 3] ^= 1
    for other in (wrong, table.reshape(4, 3), table[:2], table.reshape(-1)):
        assert not checksum.copy_in(stored, other, np.empty_like(stored))


@both
@pytest.mark.usefixtures("chosen")
def test_rows_that_do_not_fit_are_refused_before_a_byte_moves() -> None:
    stored = stored_bytes((2, 1, 2, 256))
    table = expected_table(stored)
    memory = np.full((8, 256), POISON, dtype=np.uint8)
    for places, error in (([0, 1, 2, 8], IndexError), ([0, 1, 2, -1], IndexError), ([0, 1, 2], ValueError)):
        where = np.array(places)
        with pytest.raises(error):
            checksum.scatter(stored, table, memory, where)
        slot = np.full_like(stored, POISON)
        with pytest.raises(error):
            checksum.gather(memory, where, slot)
        assert (memory == POISON).all() and (slot == POISON).all()


@pytest.mark.skipif(not checksum.NATIVE, reason="built without a C compiler")
def test_the_compiled_code_checks_what_it_is_told() -> None:
    from kvstore.model import _checksum

    stored, table = np.zeros(1024, dtype=np.uint8), np.zeros(2, dtype=np.uint64)
    largest = sys.maxsize
    for shape in (
        (1, 1, 1, 1024),  # another table
        (2, 1, 1, 256),
        (2, 1, 1, 1024),
        (-2, 1, 1, -512),
        (2, 1, 1, 0),
        (0, 1, 2, 512),
        (largest, largest, 4, 512),
        (1 << 62, 1, 4, 512),
    ):
        with pytest.raises(ValueError, match="shape"):
            _checksum.table(stored, *shape, table)
    with pytest.raises(ValueError, match="shape"):
        _checksum.table(stored, 2, 1, 1, 512, np.zeros(17, dtype=np.uint8)[1:].view())
    with pytest.raises(ValueError, match="shape"):
        _checksum.table(stored[:0], 0, 1, 1, 512, table[:0])
    places, memory = np.zeros(2, dtype=np.int64), np.zeros((4, 512), dtype=np.uint8)
    for row_bytes in (0, -512, 100, 1024, 64, largest):
        with pytest.raises(ValueError, match="rows"):
            _checksum.gather(memory, row_bytes, places, stored, 2, 1, 1, 512, table)
        with pytest.raises(ValueError, match="rows"):
            _checksum.scatter(stored, 2, 1, 1, 512, table, memory, row_bytes, places)
    read_only = stored.copy()
    read_only.flags.writeable = False
    with pytest.raises((TypeError, BufferError)):
        _checksum.gather(memory, 512, places, read_only, 2, 1, 1, 512, table)
    assert _checksum.scatter(read_only, 2, 1, 1, 512, table, memory, 512, places) == 0


@pytest.mark.skipif(not checksum.NATIVE, reason="built without a C compiler")
@pytest.mark.parametrize("call", ["table", "gather", "scatter"])
def test_other_threads_run_meanwhile(call: str) -> None:
    """Nothing else gives the interpreter's lock up here: with this interval nobody asks for it."""
    from kvstore.model import _checksum

    stored = stored_bytes((64, 1, 1, 1 << 20))
    table, rows, places = checksum.table_of_layers(stored), stored.reshape(64, -1), np.arange(64)
    slot, go, ticks = np.zeros_like(rows), threading.Event(), [0]
    calls = {
        "table": lambda: _checksum.table(stored, *stored.shape, table),
        "gather": lambda: _checksum.gather(rows, 1 << 20, places, slot, *stored.shape, table),
        "scatter": lambda: _checksum.scatter(stored, *stored.shape, table, slot, 1 << 20, places),
    }

    def tick() -> None:
        while not go.wait(0.0005):
            ticks[0] += 1

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=tick)
    thread.start()
    try:
        sys.setswitchinterval(1000)
        start = ticks[0]
        while ticks[0] < start + 2:  # now it waits with this interval
            go.wait(0.001)
        before = ticks[0]
        for _ in range(100):
            calls[call]()
            if (after := ticks[0]) > before:
                break
    finally:
        sys.setswitchinterval(interval)
        go.set()
        thread.join()
    assert after > before


def test_several_threads_at_a_time() -> None:
    stored = [stored_bytes((8, 2, 4, 4096), seed) for seed in range(4)]
    slots = [np.empty_like(each) for each in stored]
    tables: list[np.ndarray | None] = [None] * 4

    def copy(number: int) -> None:
        for _ in range(20):
            tables[number] = checksum.copy_out(stored[number], slots[number])

    threads = [threading.Thread(target=copy, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each, slot, table in zip(stored, slots, tables, strict=True):
        assert table is not None and np.array_equal(table, expected_table(each)) and np.array_equal(slot, each)
