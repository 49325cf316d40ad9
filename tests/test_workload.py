from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duoka.errors import UsageError
from duoka.serial import from_dict, to_dict
from duoka.workload import DTYPE_BYTES, Workload


@pytest.mark.parametrize(
    "wrong",
    [
        {"batch": 0},
        {"prompt_tokens": 0},
        {"new_tokens": -1},
        {"prefill_chunk_tokens": 0},
        {"prefill_chunk_tokens": -5},
        {"prefill_chunk_tokens": "whole"},
        {"dtype": "int8"},
    ],
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        Workload(**wrong)
    assert str(next(iter(wrong.values()))) in str(caught.value)


def test_context_is_prompt_and_answer() -> None:
    assert Workload(prompt_tokens=100, new_tokens=28).context_tokens == 128


def test_auto_dtype_is_resolved_into_a_new_workload() -> None:
    asked = Workload(batch=3)
    assert asked.resolved(dtype="float16") == Workload(batch=3, dtype="float16")
    assert asked.dtype == "auto"
    assert Workload(dtype="float32").resolved(dtype="float16").dtype == "float32"
    assert set(DTYPE_BYTES) == {"float32", "float16", "bfloat16"}


def test_the_whole_prompt_is_one_chunk() -> None:
    assert Workload(prompt_tokens=10, prefill_chunk_tokens=None).chunks() == ((10, 0),)
    assert Workload(prompt_tokens=10, prefill_chunk_tokens=99).chunks() == ((10, 0),)


@given(st.integers(1, 500), st.integers(1, 500))
def test_chunks_cover_the_prompt_once_in_order(prompt: int, size: int) -> None:
    chunks = Workload(prompt_tokens=prompt, prefill_chunk_tokens=size).chunks()
    done = 0
    for query, past in chunks:
        assert past == done
        assert 1 <= query <= size
        done += query
    assert done == prompt
    assert all(query == size for query, _ in chunks[:-1])


@pytest.mark.parametrize("chunk", ["auto", None, 512])
def test_round_trip_through_its_json_form(chunk: Any) -> None:
    workload = Workload(batch=2, dtype="bfloat16", prefill_chunk_tokens=chunk)
    assert from_dict(Workload, to_dict(workload)) == workload
