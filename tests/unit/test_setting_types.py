"""Sizes and addresses as people write them."""

from __future__ import annotations

import pytest

from kvstore.setting_types import parse_size, size_text, split_address


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("8GiB", 8 << 30),
        ("512MiB", 512 << 20),
        ("64 kib", 64 << 10),
        ("1.5MiB", 3 << 19),
        ("2TiB", 2 << 40),
        ("4096", 4096),
        ("4096B", 4096),
        (1 << 30, 1 << 30),
        ("9007199254740993", (1 << 53) + 1),
    ],
)
def test_sizes(text: object, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes
    assert parse_size(size_text(size_bytes)) == size_bytes


@pytest.mark.parametrize("text", ["0", "-1", "8 potatoes", "8GB", "", "0.3", "GiB", "1e9", "nan", True, -4096, "٣GiB"])
def test_sizes_that_are_none_are_refused_with_examples(text: object) -> None:
    with pytest.raises(ValueError, match="8GiB, 512MiB or 1073741824"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("127.0.0.1:0", "127.0.0.1", 0), ("localhost:7420", "localhost", 7420), ("[::1]:65535", "::1", 65535)],
)
def test_addresses(text: str, host: str, port: int) -> None:
    assert split_address(text) == (host, port)


@pytest.mark.parametrize(
    "text", ["", "7420", "host", ":7420", "host:", "host:65536", "host:x", "::1:7420", "http://h:1", "[a:b]:1"]
)
def test_addresses_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"write for example 127\.0\.0\.1:7420"):
        split_address(text)
