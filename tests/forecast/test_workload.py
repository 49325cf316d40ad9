from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from duoka.base.serialization import from_dict, to_dict
from duoka.errors import UsageError
from duoka.forecast.replay import Replay
from duoka.forecast.workload import (
    DTYPE_BYTES,
    QUANTIZED,
    Training,
    Workload,
    read_quantization,
    with_quantization,
)


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
        {"batch": 1.5},
        {"batch": "3"},
        {"batch": None},
        {"batch": True},
        {"prompt_tokens": float("nan")},
        {"new_tokens": []},
        {"images": True},
        {"images": -1},
        {"image_size": 7},
        {"image_size": (1,)},
        {"image_size": (10, 10, 10)},
        {"image_size": (10,)},
        {"prefill_chunk_tokens": True},
        {"prefill_chunk_tokens": 1.5},
        {"prefill_chunk_tokens": 2**25},
        {"cache": ["int8"]},
        {"quantize": None},
    ],
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        Workload(**wrong)
    assert str(next(iter(wrong.values()))) in str(caught.value)


@pytest.mark.parametrize(
    "wrong", [{"lora_rank": 2.0}, {"micro_batches": True}, {"lora_targets": "q_proj"}]
)
def test_training_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        Training(**wrong)
    assert str(next(iter(wrong.values()))) in str(caught.value)


def test_numbers_are_kept_as_pythons_own() -> None:
    three: Any = np.int64(3)
    size: Any = [three, three]
    workload = Workload(batch=three, prefill_chunk_tokens=three, image_size=size)
    assert workload == Workload(batch=3, prefill_chunk_tokens=3, image_size=(3, 3))
    assert from_dict(Workload, to_dict(workload)) == workload
    assert {type(workload.batch), type(workload.prefill_chunk_tokens)} == {int}


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


def test_training_has_sequences_and_generates_nothing() -> None:
    workload = Workload(prompt_tokens=2048, new_tokens=0, training=Training())
    assert workload.context_tokens == 2048
    with pytest.raises(UsageError, match="training doesn't generate tokens"):
        Workload(prompt_tokens=2048, training=Training())
    with pytest.raises(UsageError, match="new_tokens is 0"):
        Workload(new_tokens=0)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"lora_rank": 0}, "lora_rank is 0; it must be at least 1"),
        ({"micro_batches": -1}, "micro_batches is -1"),
        ({"method": "some"}, "method 'some' is unknown"),
        ({"optimizer": "lion"}, "optimizer 'lion' is unknown"),
        ({"schedule": "none"}, "schedule 'none' is unknown"),
        ({"lora_alpha": 0}, "lora_alpha is 0; it must be at least 1"),
        ({"lora_dropout": 1}, "lora_dropout is 1; it must be at least 0 and below 1"),
        ({"lora_dropout": "much"}, "lora_dropout is 'much'"),
    ],
)
def test_a_training_that_makes_no_sense_is_refused(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        Training(**wrong)


def test_training_takes_images_whole() -> None:
    load: dict[str, Any] = {"prompt_tokens": 9, "new_tokens": 0, "images": 2, "image_size": (5, 7)}
    work = Workload(**load, training=Training())
    assert (work.conditions.images, work.conditions.image_size) == (2, (5, 7))
    assert work.conditions != replace(work, images=0).conditions
    with pytest.raises(UsageError, match="vision_batch is 1, which is not supported in training"):
        Workload(**load, vision_batch=1, training=Training())
    with pytest.raises(UsageError, match="images on packed rows is 2"):
        Workload(**load, training=Training(rows="packed"))


def test_conditions_leave_out_what_changes_sizes_only() -> None:
    training = Training(optimizer="sgd", micro_batches=4, schedule="gpipe", lora_alpha=3)
    one = Workload(prompt_tokens=64, new_tokens=0, training=training)
    other = Workload(prompt_tokens=9, new_tokens=0, batch=3, training=Training())
    assert one.conditions == other.conditions
    assert one.conditions != Workload().conditions
    dropped = [replace(one, training=replace(training, lora_dropout=part)) for part in (0.1, 0.2)]
    assert dropped[0].conditions == dropped[1].conditions != one.conditions
    assert Workload(image_size=(1, 1)).conditions == Workload().conditions
    assert Workload(image_size=(1, 1), images=1).conditions != Workload(images=1).conditions


def test_a_profile_refuses_workloads_under_other_conditions() -> None:
    profile = tiny.made_up([100, 100], tiny.Costs(cache=64))
    with pytest.raises(UsageError, match=r"doesn't cover cache int8 \(not dynamic\)"):
        Replay(profile, Workload(cache="int8", prefill_chunk_tokens=None))


def test_words_of_others_are_understood() -> None:
    words = ("4bit", "4-bit", "load_in_8bit", "8BIT", "int8", "none")
    forms = [Workload(quantize=word).quantize for word in words]  # type: ignore[arg-type]
    assert forms == ["nf4", "nf4", "int8", "int8", "int8", "none"]
    assert Workload(dtype="BF16").dtype == "bfloat16"  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="quantize '3bit' is unknown"):
        Workload(quantize="3bit")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="quantize 'none' is unknown"):
        read_quantization("none", QUANTIZED)


def test_adapters_may_lie_beside_quantized_weights() -> None:
    work = Workload(prompt_tokens=9, new_tokens=0, quantize="auto", training=Training())
    assert [each.quantize for each in with_quantization(work)] == ["none", "int8", "nf4"]
    for form in ("auto", "int8", "nf4"):
        with pytest.raises(UsageError, match="quantized weights are frozen"):
            replace(work, quantize=form, training=Training(method="full"))
    with pytest.raises(UsageError, match="whose kernels"):
        replace(work, quantize="int4")


@pytest.mark.parametrize("size", [32, 256])
def test_pages_of_another_kind_of_cache_have_16_tokens(size: int) -> None:
    work = Workload(cache="paged", page_tokens=size)
    assert work.conditions.page_tokens == size
    for cache in ("paged-int8", "dynamic", "int8"):
        other = replace(work, cache=cache)
        assert (other.page_tokens, other.conditions.page_tokens) == (16, 16)
    with pytest.raises(UsageError, match="page_tokens is 64"):
        Workload(cache="paged", page_tokens=64)
