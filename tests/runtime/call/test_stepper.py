"""Steps make the calls that `generate` makes."""

from __future__ import annotations

from typing import Any

import families
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedModel

from duoka import Placement, Workload, virtual
from duoka.models.cache_argument import CACHE
from duoka.runtime.call.stepper import Stepper
from duoka.runtime.dispatch.place_tensors import place

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CPU = torch.device("cpu")


def make(config: Any) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model.eval()


@pytest.fixture
def model() -> PreTrainedModel:
    return make(LlamaConfig(**SIZES))


def shapes_of_calls(model: PreTrainedModel) -> list[dict[str, Any]]:
    """What later calls of the model are given: shapes of tensors, values of the rest."""
    calls: list[dict[str, Any]] = []

    def note(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        assert not args
        calls.append(
            {
                name: tuple(value.shape) if isinstance(value, torch.Tensor) else value
                for name, value in kwargs.items()
                if value is not None and name != CACHE
            }
        )

    model.register_forward_pre_hook(note, with_kwargs=True)
    return calls


@pytest.mark.parametrize("batch", [1, 3])
def test_the_calls_are_those_of_generate(model: PreTrainedModel, batch: int) -> None:
    calls = shapes_of_calls(model)
    ids = torch.ones((batch, 9), dtype=torch.long)
    mask = torch.ones_like(ids)
    mask[:-1, :1] = 0
    exactly = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    model.generate(ids, attention_mask=mask, **exactly)
    expected = list(calls)
    calls.clear()
    with torch.no_grad():
        Stepper(model, batch, CPU).run(
            Workload(batch=batch, prompt_tokens=9, prefill_chunk_tokens=None), decode_steps=3
        )
    assert len(calls) == len(expected) == 4
    for found, wanted in zip(calls, expected, strict=True):
        if batch == 1:
            # A mask that hides nothing is left out by `generate`, or not, as its version has it.
            del found["attention_mask"]
            wanted.pop("attention_mask", None)
        assert found == wanted


def test_chunks_and_decode_steps_fill_one_cache(model: PreTrainedModel) -> None:
    stepper = Stepper(model, 2, CPU)
    calls = shapes_of_calls(model)
    load = Workload(batch=2, prompt_tokens=10, new_tokens=5, prefill_chunk_tokens=4)
    with torch.no_grad():
        stepper.run(load, decode_steps=2)
    assert [call["input_ids"] for call in calls] == [(2, 4), (2, 4), (2, 2), (2, 1), (2, 1)]
    assert [call["attention_mask"][-1] for call in calls] == [4, 8, 10, 11, 12]
    assert stepper.past == stepper.cache.get_seq_length() == 12


def test_several_sequences_are_padded_on_the_left(model: PreTrainedModel) -> None:
    masks: list[torch.Tensor] = []
    positions: list[torch.Tensor] = []

    def note(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        masks.append(kwargs["attention_mask"])
        positions.append(kwargs["position_ids"])

    model.register_forward_pre_hook(note, with_kwargs=True)
    with torch.no_grad():
        Stepper(model, 2, CPU).step(4)
    assert masks[0].tolist() == [[0, 1, 1, 1], [1, 1, 1, 1]]
    assert positions[0].tolist() == [[0, 0, 1, 2], [0, 1, 2, 3]]


def test_only_the_last_logits_are_asked_for(model: PreTrainedModel) -> None:
    calls = shapes_of_calls(model)
    with torch.no_grad():
        Stepper(model, 1, CPU).step(5)
    assert calls[0]["logits_to_keep"] == 1


def lengths(stepper: Stepper) -> list[int]:
    return [layer.keys.shape[2] for layer in stepper.cache.layers]


def test_a_plain_cache_is_lengthened_at_once(model: PreTrainedModel) -> None:
    calls = shapes_of_calls(model)
    # Without data: what it is lengthened by has no values, and sampling looks at values.
    with virtual.gpus([None], data="meta"), torch.no_grad():
        place(model, Placement(entries=(("", "vgpu:0"),)))
        stepper = Stepper(model, 1, torch.device("vgpu:0"))
        stepper.step(5)
        stepper.lengthen(1000)
        assert len(calls) == 1
        assert lengths(stepper) == [1005, 1005]
        stepper.step(1)
    assert stepper.past == 1006
    assert calls[-1]["attention_mask"] == (1, 1006)
    assert lengths(stepper) == [1006, 1006]


def test_a_cache_with_a_window_is_filled_in_steps() -> None:
    model = make(MistralConfig(**SIZES, sliding_window=16))
    stepper = Stepper(model, 1, CPU)
    with torch.no_grad():
        stepper.step(5)
        stepper.lengthen(300)
    assert stepper.past == stepper.cache.get_seq_length() == 305
    assert lengths(stepper) == [15, 15]


def test_nothing_to_lengthen(model: PreTrainedModel) -> None:
    stepper = Stepper(model, 1, CPU)
    stepper.lengthen(0)
    stepper.lengthen(-3)
    assert stepper.past == 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["minimax", "xlnet"])
def test_a_model_with_a_cache_of_its_own_kind(name: str) -> None:
    stepper = Stepper(families.build(name), 1, CPU)
    assert stepper.cache is None
    with torch.no_grad():
        stepper.step(5)
        stepper.step(1)
    assert stepper.past == 6
