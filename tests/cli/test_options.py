from __future__ import annotations

import pytest

from duoka.cli.options import parse_chunk, parse_tokens
from duoka.errors import UsageError


@pytest.mark.parametrize(
    ("text", "tokens"), [("1", 1), ("8192", 8192), ("8K", 8192), ("128k", 131072), ("1M", 1048576)]
)
def test_tokens(text: str, tokens: int) -> None:
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5K", "8G", "eight", "8 K", "٨", "9" * 30])
def test_what_is_no_number_of_tokens(text: str) -> None:
    with pytest.raises(UsageError, match="number of tokens"):
        parse_tokens(text)


def test_chunks() -> None:
    assert parse_chunk("auto") == "auto"
    assert parse_chunk("none") is None
    assert parse_chunk("2K") == 2048
