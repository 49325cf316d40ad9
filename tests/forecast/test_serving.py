"""Steps of a finite set of sizes: padding is bounded, and every step has one of them."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duoka import Workload
from duoka.forecast.serving import Capacity, least_pages, padded, power


@given(st.integers(1, 2**20))
def test_padding_adds_a_quarter_at_most_and_leaves_powers_of_two(number: int) -> None:
    assert number <= padded(number) <= max(number, 1.25 * number)
    assert padded(padded(number)) == padded(number)
    assert padded(power(number)) == power(number) < 2 * number


@given(st.integers(1, 3000), st.integers(1, 300))
def test_padding_grows_with_what_is_padded(number: int, more: int) -> None:
    assert padded(number) <= padded(number + more)


def capacity(sequences: int, context: int, step: int) -> Capacity:
    return Capacity(
        sequences=sequences, context_tokens=context, pages=99, page_tokens=16, step_tokens=step
    )


@pytest.mark.parametrize("sizes", [(1, 16, 1), (4, 128, 64), (7, 900, 100), (300, 200, 2048)])
def test_all_tokens_rows_and_logits_are_among_the_sizes(sizes: tuple[int, int, int]) -> None:
    limits = capacity(*sizes)
    steps = limits.steps()
    assert steps[0].tokens == limits.step_tokens
    assert [step.tokens for step in steps] == sorted((s.tokens for s in steps), reverse=True)
    rng = random.Random(str(sizes))
    for _ in range(200):
        number = rng.randint(1, limits.step_tokens)
        tokens = limits.tokens(number)
        assert number <= tokens <= 1.25 * number
        alike = [step for step in steps if step.tokens == tokens]
        rows = min(power(rng.randint(1, min(number, 256))), tokens)
        assert rows in {step.rows for step in alike}
        logits = limits.logits(rng.randint(1, min(number, limits.sequences)))
        assert logits in {step.logits for step in alike}


def test_a_workload_has_the_pages_of_one_request_at_least() -> None:
    work = Workload(cache="paged", batch=3, prompt_tokens=90, new_tokens=10, prefill_chunk_tokens=2)
    limits = Capacity.of(work)
    assert limits.pages == least_pages(work) == 7
    assert limits.step_tokens == 3  # a token for each
