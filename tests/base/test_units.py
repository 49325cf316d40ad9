"""Sizes: what people write is what the code counts."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duoka.base.units import format_bytes, format_count, parse_bytes, parse_memory
from duoka.errors import DuokaError, UsageError


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("1B", 1),
        ("24GiB", 24 * 2**30),
        ("24 gib", 24 * 2**30),
        (" 0.5MiB ", 2**19),
        ("64KiB", 2**16),
        ("2TiB", 2**41),
        ("80GB", 80 * 10**9),
        ("5mb", 5 * 10**6),
        ("3KB", 3000),
        ("1TB", 10**12),
    ],
)
def test_parse(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["24G", "24g", "24GB", "24 gb", "24GiB", " 24576M "])
def test_memory_is_told_as_its_makers_tell_it(text: str) -> None:
    assert parse_memory(text) == 24 * 2**30


@pytest.mark.parametrize(
    "text",
    [
        *("", "GiB", "24", "24G", "24GiBs", "-1GiB", "1e3MiB", "0GiB", "0.1B", "1,5GiB", "٣GiB"),
        *("nan", "9" * 400 + "B"),
    ],
)
def test_parse_refuses(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_bytes(text)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (2**20 * 3 // 2, "1.50 MiB"),
        (24 * 2**30, "24.00 GiB"),
        (2**50, "1024.00 TiB"),
        (-(2**20), "-1.00 MiB"),
    ],
)
def test_format(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@given(st.integers(1, 2**62))
def test_what_is_formatted_can_be_parsed_again(num_bytes: int) -> None:
    assert parse_bytes(format_bytes(num_bytes)) == pytest.approx(num_bytes, rel=0.006)


@given(st.text(max_size=20))
def test_any_text_is_a_size_or_a_duoka_error(text: str) -> None:
    with contextlib.suppress(DuokaError):
        assert parse_bytes(text) > 0


def test_counts() -> None:
    assert [format_count(n, "GPU") for n in (0, 1, 2)] == ["0 GPUs", "1 GPU", "2 GPUs"]
