"""Worker threads: the first touch of a virtual device arms them, whatever it is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from duoka import virtual


@pytest.fixture
def process_world() -> virtual.World:
    return virtual.set_gpus([None, None])


def in_thread(function: Callable[[], Any]) -> Any:
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


@pytest.mark.usefixtures("process_world")
@pytest.mark.parametrize("make", [
    lambda: torch.tensor([1.0], device="vgpu:1"), lambda: torch.tensor(1.0, device="vgpu:1"),
    lambda: torch.as_tensor([1.0], device="vgpu:1"), lambda: torch.ones(1).to("vgpu:1"),
    lambda: torch.ones(1, device="vgpu:1"), lambda: torch.arange(1, 2, device="vgpu:1"),
    lambda: torch.empty(1, device="vgpu:1").fill_(1.0), lambda: torch.ones(1).vgpu(1),
])  # fmt: skip
def test_a_new_thread_makes_tensors(make: Callable[[], torch.Tensor]) -> None:
    made = in_thread(make)
    assert made.device == torch.device("vgpu:1")
    assert made.tolist() == [1.0] or made.item() == 1.0


@pytest.mark.usefixtures("process_world")
def test_a_new_thread_runs_backward() -> None:
    weight = torch.ones(3, device="vgpu:1", requires_grad=True)
    loss = (weight * 2).sum()
    in_thread(loss.backward)
    assert weight.grad is not None
    assert weight.grad.tolist() == [2, 2, 2]
    out = weight * 3
    grad = torch.ones(3, device="vgpu:1")
    assert in_thread(lambda: torch.autograd.grad(out, weight, grad))[0].tolist() == [3, 3, 3]


@pytest.mark.usefixtures("process_world")
def test_a_new_thread_generates() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to("vgpu:1").eval()
    tokens = torch.tensor([[3, 4, 5]], device="vgpu:1")

    def generate() -> torch.Tensor:
        mask = torch.ones_like(tokens)
        return model.generate(tokens, attention_mask=mask, max_new_tokens=5, do_sample=False)

    assert in_thread(generate).tolist() == generate().tolist()
