"""The published models' numbers, met on one, two and three virtual GPUs through plan and load."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from closeness import close
from safetensors.torch import load_file
from tiers import only

import duoka

pytestmark = pytest.mark.usefixtures("single_sequences")

NAMES = ("chatglm3-6b-tiny", "chatglm3-6b-128k-tiny", "glm-4-9b-tiny")
BUDGETS = {1: "virtual:1GiB", 2: "virtual:2x1GiB", 3: "virtual:3x1GiB"}
TOLERANCE = 1e-5


@pytest.fixture
def loaded(published_data: Path) -> Callable[[str, int], tuple[Any, dict[str, Any]]]:
    """A reference model on so many virtual GPUs, and what the original code computes on it."""

    def load(name: str, num_gpus: int) -> tuple[Any, dict[str, Any]]:
        directory = published_data / "reference" / name
        workload = duoka.Workload(prompt_tokens=480, new_tokens=24, dtype="float32")
        plan = duoka.plan(directory, BUDGETS[num_gpus], workload, use_all=True)
        assert len(plan.devices) == num_gpus
        model = duoka.load(plan)
        assert {str(p.device) for p in model.parameters()} == set(plan.devices)
        expected = load_file(directory / "reference.safetensors")
        return model, {**expected, **json.loads((directory / "reference.json").read_text())}

    return load


@pytest.mark.parametrize("num_gpus", only([2], BUDGETS))
@pytest.mark.parametrize("name", NAMES)
def test_logits_and_greedy_tokens(name: str, num_gpus: int, loaded: Any) -> None:
    model, expected = loaded(name, num_gpus)
    ids = expected["input_ids"].to(model.device)
    with torch.no_grad():
        assert close(model(ids).logits, expected["logits"])
    tokens = model.generate(ids, max_new_tokens=24, min_new_tokens=24, do_sample=False)
    assert tokens[:, ids.shape[1] :].cpu().equal(expected["greedy.new_ids"])


@pytest.mark.parametrize("num_gpus", BUDGETS)
@pytest.mark.parametrize("name", NAMES)
def test_padded_batch(name: str, num_gpus: int, loaded: Any) -> None:
    model, expected = loaded(name, num_gpus)
    mask = expected["padded.attention_mask"]
    with torch.no_grad():
        logits = model(
            expected["padded.input_ids"].to(model.device),
            attention_mask=mask.to(model.device),
            position_ids=expected["padded.position_ids"].to(model.device),
        ).logits
    # What a model says at a padding token means nothing, and nothing reads it.
    real = mask.bool()
    assert close(logits.cpu()[real], expected["padded.logits"][real])


@pytest.mark.slow
@pytest.mark.parametrize("num_gpus", BUDGETS)
@pytest.mark.parametrize("name", NAMES)
def test_long_prompt(name: str, num_gpus: int, loaded: Any) -> None:
    model, expected = loaded(name, num_gpus)
    with torch.no_grad():
        logits = model(expected["long.input_ids"].to(model.device)).logits[:, -4:]
    assert close(logits, expected["long.last_logits"])


@pytest.mark.parametrize("num_gpus", BUDGETS)
@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradients(name: str, num_gpus: int, loaded: Any) -> None:
    model, expected = loaded(name, num_gpus)
    loss = model(
        expected["input_ids"].to(model.device), labels=expected["train.labels"].to(model.device)
    ).loss
    loss.backward()
    assert loss.item() == pytest.approx(expected["train.loss"], rel=TOLERANCE)
    squares = _published_squares(model)
    norms = {name: value**0.5 for name, value in squares.items()}
    assert norms == pytest.approx(expected["train.grad_norm"], rel=1e-4, abs=TOLERANCE)


def _published_squares(model: torch.nn.Module) -> dict[str, float]:
    """Squared gradient norms under the published names: query, key and value are one there."""
    renames = {
        "model.embed_tokens": "transformer.embedding.word_embeddings",
        "lm_head": "transformer.output_layer",
        "model.norm": "transformer.encoder.final_layernorm",
        "model.layers": "transformer.encoder.layers",
        "self_attn.q_proj": "self_attention.query_key_value",
        "self_attn.k_proj": "self_attention.query_key_value",
        "self_attn.v_proj": "self_attention.query_key_value",
        "self_attn.o_proj": "self_attention.dense",
        "mlp.gate_up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
    }
    squares: dict[str, float] = {}
    for name, parameter in model.named_parameters():
        for ours, theirs in renames.items():
            name = name.replace(ours, theirs)
        assert parameter.grad is not None
        squares[name] = squares.get(name, 0.0) + parameter.grad.double().square().sum().item()
    return squares
