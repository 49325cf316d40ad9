"""Reasons: data, and the sentences that one table makes of them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duoka.base.serialization import from_dict, to_dict
from duoka.errors import FormatError
from duoka.planner import reasons
from duoka.planner.reasons import Reason, gpus_reason


@pytest.mark.parametrize("kind", reasons._SENTENCES)
def test_a_reason_survives_its_json_form(kind: str) -> None:
    fields = re.findall(r"\{(\w+)\}", reasons._SENTENCES[kind])
    reason = Reason(kind, {name: number for number, name in enumerate(fields)})
    assert from_dict(Reason, to_dict(reason)) == reason
    assert all(str(number) in reason.text for number in range(len(fields)))


def test_the_sentence_has_the_numbers() -> None:
    (reason,) = gpus_reason(2, 3, "cuda:0", is_limited=False, lack_room=False)
    assert reason.text == "2 of 3 GPUs are needed: no single GPU fits the workload."
    assert (reason.values["used"], reason.values["gpus"]) == (2, 3)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("", {}),
        ("no such kind", {}),
        ("chunks", {}),
        ("chunks", {"tokens": 1, "other": 2}),
        ("chunks", {"Tokens": 1}),
        ("tied", {"text": "x"}),
        ("chunks", {"tokens": 1.5}),
        ("chunks", {"tokens": [1]}),
    ],
)
def test_what_no_sentence_fits_is_refused(kind: str, values: dict[str, object]) -> None:
    with pytest.raises(FormatError):
        from_dict(Reason, {"kind": kind, "values": values})


@given(st.text())
def test_a_note_keeps_its_text(sentence: str) -> None:
    assert Reason("note", {"text": sentence}).text == sentence
    assert sentence in Reason("pins", {"pins": sentence}).text
