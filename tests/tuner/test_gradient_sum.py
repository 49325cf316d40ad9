"""Sums of gradients over the processes that share a parameter, beside the backward pass."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from processes import run_together
from torch import nn
from trainers import Gradients, make_layout, make_uneven_layout, sum_beside_backward, sum_gradients

from duoka import TuneSettings
from duoka.tuner.gradient_sum import GradientSum

SETTINGS = TuneSettings(seq_length=32)
FIRST, LAST = (f"model.layers.{n}.mlp.up_proj.lora_A.default.weight" for n in (0, 1))


def test_one_copy_needs_no_sum(llama: Path) -> None:
    """Nor a process group, which isn't there."""
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([1.0, 2.0])
    layout = make_layout(llama, SETTINGS, stages=2)
    GradientSum(layout, [FIRST], {FIRST: parameter}).finish()
    assert parameter.grad.tolist() == [1, 2]


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("bucket_bytes", [1, 2**26])
def test_gradients_are_summed_over_those_that_share_them(
    llama: Path, tmp_path: Path, bucket_bytes: int
) -> None:
    uneven = make_uneven_layout(llama, SETTINGS)
    unequal = torch.arange(6.0).view(3, 2).t()  # not contiguous, as a parameter may be
    alone, nowhere = (name.replace("lora_A", "lora_B") for name in (FIRST, LAST))
    processes: list[Gradients] = [
        {FIRST: unequal, alone: None, LAST: torch.ones(2, 3), nowhere: None},
        {FIRST: torch.full((2, 3), 10.0), alone: torch.full((2, 3), 7.0)},
        {LAST: torch.full((2, 3), torch.inf), nowhere: None},
    ]
    sums = run_together(3, sum_gradients, tmp_path / "store", uneven, processes, bucket_bytes)
    first, second, third = sums
    assert first.keys() == processes[0].keys()
    for process in (first, second):
        assert torch.equal(process[FIRST], unequal + 10)
        assert torch.equal(process[alone], torch.full((2, 3), 7.0))
    for process in (first, third):
        assert torch.equal(process[LAST], torch.full((2, 3), torch.inf))
        assert process[nowhere] is None  # as on one GPU


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_begin_before_backward_ends(llama: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    """Backward waits in its last layer until the first bucket's sum has begun."""
    layout = make_layout(llama, SETTINGS, replicas=2)
    sums = run_together(2, sum_beside_backward, tmp_path / "store", layout, dtype)
    assert sums[0] == sums[1]
    events, gradients = sums[0]
    # A bucket for each factor, from the last to the first. Of three passes two only accumulate.
    assert events == ["backward", "backward", "sum", "sum", "backward", "sum"]
    # Passes times inputs of both processes times the other factors.
    assert gradients == [3 * (1 + 2) * 8 / factor for factor in (1, 2, 4)]
