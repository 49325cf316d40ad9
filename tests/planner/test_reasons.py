"""Reasons: data to sentences and back, by one table."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duoka.forecast.workload import Workload
from duoka.planner import reasons
from duoka.planner.reasons import Reason, gpus_reason, quantization_reason, read_reason

NAMES = {"modules": "model.layers.0, lm_head", "pins": "lm_head on cuda:1", "size": "1.50 GiB"}


@pytest.mark.parametrize("kind", reasons._SENTENCES)
def test_a_sentence_is_read_as_it_was_made(kind: str) -> None:
    fields = re.findall(r"\{(\w+)\}", reasons._SENTENCES[kind])
    reason = Reason(kind, {name: NAMES.get(name, number) for number, name in enumerate(fields)})
    assert read_reason(reason.text) == reason


def test_numbers_are_numbers_again() -> None:
    (reason,) = gpus_reason(2, 3, "cuda:0", is_limited=False)
    assert reason.text == "2 of 3 GPUs are needed; no single one holds the workload."
    assert read_reason(reason.text) == reason
    assert (reason.values["used"], reason.values["gpus"]) == (2, 3)


def test_what_was_tried_is_told() -> None:
    chosen = Workload(quantize="int4")
    (reason,) = quantization_reason(chosen, ["none", "int8"], is_offloaded=False)
    assert reason.text == "The weights become int4: unquantized or in int8 they don't fit."
    assert not [*quantization_reason(chosen, [], is_offloaded=True)]


@pytest.mark.parametrize("number", ["007", "9" * 5000, "-1", "²", "1_000"])
def test_what_is_no_number_stays_text(number: str) -> None:
    sentence = f"The prompt runs in chunks of {number} tokens: whole, it needs more memory."
    assert read_reason(sentence) == Reason("chunks", {"tokens": number})
    assert read_reason(sentence).text == sentence


@given(st.text())
def test_any_sentence_keeps_its_text(sentence: str) -> None:
    assert read_reason(sentence).text == sentence


def test_a_long_one_is_read_at_once() -> None:
    sentence = "1 of 2 GPUs are needed; " + "the workload" * 100_000
    assert read_reason(sentence).kind == "note"
