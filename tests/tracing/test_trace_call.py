"""Plans for one call: labels and classifiers spread, and the forecast is what is measured."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import LlamaConfig, PreTrainedModel

import duoka
from duoka import virtual
from duoka.errors import LoadError, UsageError

IDS = torch.tensor([[300, 290, 285, 7, 8, 9]])
SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}


@pytest.mark.parametrize(
    ("head", "extra"),
    [
        ("ForCausalLM", {"labels": IDS}),
        ("ForSequenceClassification", {"labels": torch.tensor([1])}),
        ("ForSequenceClassification", {}),
        ("ForTokenClassification", {"labels": IDS % 2}),
    ],
)
def test_labels_and_classifiers_are_spread(head: str, extra: dict[str, torch.Tensor]) -> None:
    torch.manual_seed(0)
    model: PreTrainedModel = getattr(transformers, f"Llama{head}")(LlamaConfig(**SIZES)).eval()
    inputs = {"input_ids": IDS, **extra}
    plan = duoka.plan(model, "virtual:2x64MiB", inputs=inputs, use_all=True)
    with torch.no_grad():
        expected = model(**inputs)
    with virtual.gpus([None] * 2, data="cpu") as world, torch.no_grad():
        spread = duoka.dispatch(copy.deepcopy(model), plan.placement)
        found = spread(**{name: tensor.to("vgpu:0") for name, tensor in inputs.items()})
        peaks = [world.max_memory_allocated(gpu) for gpu in range(2)]
    assert len(set(plan.device_map.values())) == 2
    torch.testing.assert_close(found.logits.cpu(), expected.logits)
    if extra:
        torch.testing.assert_close(found.loss.cpu(), expected.loss)
    assert [device.allocated_bytes for device in plan.forecast.devices] == peaks


def test_a_checkpoint_that_generates_no_text_is_refused_in_words(tmp_path: Path) -> None:
    transformers.LlamaForSequenceClassification(LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    with pytest.raises(
        UsageError, match="LlamaForSequenceClassification is not a text generation model"
    ):
        duoka.plan(tmp_path, "virtual:2x64MiB", duoka.Workload(prompt_tokens=32, new_tokens=8))


def test_a_body_without_its_head_is_refused_in_words(tmp_path: Path) -> None:
    transformers.LlamaModel(LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    with pytest.raises(LoadError, match=r"missing from it: lm_head\.weight") as caught:
        duoka.plan(tmp_path, "virtual:2x64MiB", duoka.Workload(prompt_tokens=32, new_tokens=8))
    assert "including the head" in str(caught.value.hint)


PLACES = torch.tensor([[1]]), torch.tensor([[3]])


@pytest.mark.parametrize(
    ("head", "extra"),
    [
        ("ForQuestionAnswering", {}),
        # Of one dimension they stay where they are, and its code can't be spread.
        ("ForQuestionAnswering", {"start_positions": PLACES[0], "end_positions": PLACES[1]}),
        ("Model", {}),
    ],
)
def test_answers_in_a_text_and_bodies_are_spread(head: str, extra: dict[str, torch.Tensor]) -> None:
    torch.manual_seed(0)
    model: PreTrainedModel = getattr(transformers, f"Llama{head}")(LlamaConfig(**SIZES)).eval()
    inputs = {"input_ids": IDS, **extra}
    plan = duoka.plan(model, "virtual:2x64MiB", inputs=inputs, use_all=True)
    assert len(set(plan.device_map.values())) == 2
    with torch.no_grad():
        expected = model(**inputs).to_tuple()
    with virtual.gpus([None] * 2, data="cpu"), torch.no_grad():
        spread = duoka.dispatch(copy.deepcopy(model), plan.placement)
        found = spread(**{name: tensor.to("vgpu:0") for name, tensor in inputs.items()}).to_tuple()
        for value, one in zip(found, expected, strict=True):
            if isinstance(one, torch.Tensor):
                torch.testing.assert_close(value.cpu(), one)
