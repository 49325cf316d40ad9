"""What `check` calls clean, `plan` accepts and a dispatched model runs; and the other way round."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import families
import pytest
import seeded
import torch
from torch import nn

import duoka
from duoka import virtual
from duoka.errors import ModelError
from duoka.runtime.dispatch.arguments import to_device

FLEET = "virtual:2x1GiB"
LEFT_OUT = {
    "fault_only_on_cuda": "virtual GPUs are no CUDA, but in a check",
    "fault_only_on_cuda_type": "the same",
    "fault_hard_device_number": "a number alone means the virtual GPUs of this run",
    "fault_second_question": "what runs the model is a function, which a plan doesn't take",
}
CASES = [path for path in seeded.paths() if path.stem not in LEFT_OUT]

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning"),
]


class HostMask(nn.Module):
    """Its mask is made on the CPU, and handed to the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Masked() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.arange(x.shape[-1]) < 4
        for layer in self.layers:
            x = layer(x, {"mask": [mask]})
        return x


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, given: Mapping[str, list[torch.Tensor]]) -> torch.Tensor:
        return self.linear(x) * given["mask"][0]


def runs(model: nn.Module, plan: duoka.Plan, inputs: Any) -> bool:
    """Whether a model runs where a plan puts it."""
    with virtual.gpus([2**30] * 2), torch.compiler.set_stance("force_eager"):
        first = torch.device(plan.placement.entries[0][1])
        try:
            spread = duoka.dispatch(model, plan)
            seeded.call(spread, to_device(inputs, first), train=False)
        except virtual.MixedDevicesError:
            return False
    return True


def agree(build: Any, inputs: Any, fleet: str = FLEET) -> bool:
    """Whether a model is clean, which check, plan and run say alike."""
    report = duoka.check(build(), fleet=fleet, inputs=inputs)
    try:
        plan = duoka.plan(build(), fleet, inputs=inputs)
    except ModelError:
        assert not report.ok
        return False
    assert report.ok == runs(build(), plan, inputs)
    return report.ok


@pytest.mark.parametrize("path", CASES)
def test_check_plan_and_run_agree(path: Path) -> None:
    case = seeded.load(path)
    agree(case.build, case.inputs())


@pytest.mark.parametrize("fleet", [FLEET, "virtual:1x1GiB"])
def test_a_mask_that_code_makes_on_the_host_is_brought_to_the_blocks_it_is_given_to(
    fleet: str,
) -> None:
    assert agree(HostMask, (torch.zeros(2, 8),), fleet)
