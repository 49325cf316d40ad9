"""What people may write after the options; the commands themselves run, on a planned model."""

from __future__ import annotations

import re

from fuzzing import fuzz
from hypothesis import given
from hypothesis import strategies as st

from duoka.cli.options import parse_chunk, parse_tokens
from duoka.errors import UsageError

WRITTEN = (
    st.text(max_size=12)
    | st.from_regex(r"-?[0-9]{1,25}[kKmMgG]?", fullmatch=True)
    | st.sampled_from(("", " ", "1e3", "8K ", "٣", "½", "0x10", "nan", "inf", "-0", "1_000", "+1"))
)


@fuzz()
@given(WRITTEN)
def test_numbers_of_tokens(text: str) -> None:
    shape = re.fullmatch(r"\s*([1-9][0-9]*)([kKmM]?)\s*", text)
    try:
        number = parse_tokens(text)
    except UsageError:
        assert shape is None or len(shape[1]) > 10
        return
    assert shape is not None
    assert number == int(shape[1]) * {"": 1, "k": 1024, "m": 1024**2}[shape[2].lower()]


@fuzz()
@given(WRITTEN)
def test_chunks(text: str) -> None:
    try:
        chunk = parse_chunk(text)
    except UsageError:
        return
    assert chunk in (None, "auto") or (isinstance(chunk, int) and chunk > 0)
