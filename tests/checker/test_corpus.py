"""The check, held against models with marked lines, and against models with nothing wrong.

A case is checked once, and everything that is known of it is asserted of that one report.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import seeded
import torch
from checks import run_all
from seeded import Case
from torch import nn

import duoka
from duoka import virtual
from duoka.errors import ModelError
from duoka.runtime.dispatch.arguments import to_device

# One for each way to cure a fault; the benchmark repairs all.
REPAIRED = (
    "fault_add_method",
    "fault_alibi_baddbmm",
    "fault_checkpoint_reentrant",
    "fault_compiled_block",
    "fault_comprehension",
    "fault_hard_device_string",
    "fault_helper_in_another_file",
    "fault_kwargs_attention",
    "fault_loss_class_weights",
    "fault_loss_labels",
    "fault_splice_boolean_setitem",
    "fault_table_cached_on_first_use",
    "fault_table_list",
    "fault_tensor_hook",
    "fault_tied_linear",
    "fault_two_on_one_line",
    "fault_unet_skip_add",
)
# Found, and refused in words: what holds the tensors stands elsewhere, or autograd has a say.
REFUSED = (
    "fault_accumulate",
    "fault_distribution",
    "fault_function_backward",
    "fault_function_forward",
    "fault_function_gradient_device",
    "fault_loss_auxiliary_sum",
    "fault_map_mul",
    "fault_partial_loss",
    "fault_reduce_add",
)

# What a plan, and a model that runs by it, can't be compared with the check on.
NOT_PLANNED = {
    "fault_only_on_cuda": "virtual GPUs are no CUDA, but in a check",
    "fault_only_on_cuda_type": "the same",
    "fault_hard_device_number": "a number alone means the virtual GPUs of this run",
    "fault_second_question": "what runs the model is a function, which a plan doesn't take",
}

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning"),
]
FLEET = "virtual:2x1GiB"
Traits = tuple[torch.Tensor, torch.Tensor, tuple[object, ...]]


def names(prefix: str) -> list[str]:
    return [path.stem for path in seeded.paths(prefix=prefix)]


@dataclass(frozen=True)
class Checked:
    """A case's report, its model after the check, and the model's state before it."""

    case: Case
    report: duoka.Report
    model: torch.nn.Module
    tensors: dict[str, Traits]
    attributes: dict[str, str]

    @property
    def marked_faults(self) -> set[seeded.Line]:
        return set(self.case.marked("fault"))


def run(name: str) -> Checked:
    case = seeded.load(seeded.path(name))
    model = case.build()
    tensors, attributes = _tensors(model), _attributes(model)
    report = duoka.check(model, case.placement, inputs=case.inputs(), train=case.train)
    return Checked(case, report, model, tensors, attributes)


def judge(name: str, *judges: Callable[[Checked], None]) -> None:
    checked = run(name)
    judges = (*judges, model_is_as_it_was, markers_are_true, plan_and_run_agree)
    run_all({each.__name__: partial(each, checked) for each in judges})


def test_every_case_is_read() -> None:
    headers = [
        line
        for theme in seeded.CORPUS.glob("*.py")
        for line in theme.read_text(encoding="utf-8").splitlines()
        if line.startswith(("# case: fault", "# case: warning", "# case: clean"))
    ]
    assert len(names("")) == len(headers) == 179


@pytest.mark.parametrize("name", dict.fromkeys((*REPAIRED, *REFUSED, *names("fault"))))
def test_fault(name: str) -> None:
    more = [repairs_are_proved] if name in REPAIRED else []
    more += [refusals_have_reasons] if name in REFUSED else []
    judge(
        name,
        faults_are_found,
        warnings_stand_on_marked_lines,
        one_device_has_no_other_faults,
        *more,
    )


@pytest.mark.parametrize("name", names("clean"))
def test_clean(name: str) -> None:
    judge(name, nothing_is_found)


@pytest.mark.parametrize("name", names("warning"))
def test_what_works_by_luck_or_at_a_price_is_a_warning(name: str) -> None:
    judge(name, warnings_are_those_marked)


def markers_are_true(checked: Checked) -> None:
    """The model runs on one device, and on several it fails where it is marked."""
    case, faults = checked.case, checked.marked_faults
    assert bool(faults) == case.name.startswith("fault")
    assert bool(case.marked("warning")) == case.name.startswith("warning")
    if not case.unjudged:
        seeded.run_on_one_device(case)
        met = set(seeded.errors(case))
        assert faults <= met <= faults | set(case.marked("followup"))


def faults_are_found(checked: Checked) -> None:
    case, report = checked.case, checked.report
    assert report.stop is None
    found = seeded.lines_of(report.faults)
    assert set(found) - set(case.marked("origin")) == checked.marked_faults
    followups = seeded.lines_of(each for fault in report.faults for each in fault.followups)
    assert set(followups) <= set(case.marked("followup"))


def nothing_is_found(checked: Checked) -> None:
    report = checked.report
    assert report.ok, report.stop
    assert not report.faults
    assert not report.warnings


def warnings_are_those_marked(checked: Checked) -> None:
    assert checked.report.ok
    warned = {seeded.line_of(fault): fault.kind for fault in checked.report.warnings}
    assert warned == checked.case.marked("warning")


def warnings_stand_on_marked_lines(checked: Checked) -> None:
    case = checked.case
    marked = {*case.marked("origin"), *case.marked("warning"), *checked.marked_faults}
    assert set(seeded.lines_of(checked.report.warnings)) <= marked


def one_device_has_no_other_faults(checked: Checked) -> None:
    """What is made on the CPU fails on a single GPU too; nothing else does."""
    case = checked.case
    alone = dict.fromkeys(case.placement, "cuda:0")
    report = duoka.check(case.build(), alone, inputs=case.inputs(), train=case.train)
    assert set(seeded.lines_of(report.faults)) <= checked.marked_faults


def repairs_are_proved(checked: Checked) -> None:
    files = checked.case.files
    before = [path.read_bytes() for path in files]
    repairs = duoka.repair(checked.report)
    assert repairs.proved, [patch.reason for patch in repairs]
    assert {Path(patch.file) for patch in repairs} <= set(files)
    assert [path.read_bytes() for path in files] == before


def refusals_have_reasons(checked: Checked) -> None:
    repairs = duoka.repair(checked.report)
    places = {fault.place for fault in checked.report.faults}
    assert {fault.place for fault, _ in repairs.uncured} == places
    assert all(reason for _, reason in repairs.uncured)
    assert not repairs.patches


def plan_and_run_agree(checked: Checked) -> None:
    """What the check calls clean, a plan accepts and a dispatched model runs, and vice versa."""
    if checked.case.name not in NOT_PLANNED:
        agree(checked.case.build, checked.case.inputs())


def model_is_as_it_was(checked: Checked) -> None:
    now = _tensors(checked.model)
    assert now.keys() == checked.tensors.keys()
    for name, (tensor, content, traits) in checked.tensors.items():
        assert now[name][0] is tensor
        assert now[name][2] == traits
        # A case's `torch.empty` may hold anything, NaN as well.
        torch.testing.assert_close(tensor.detach(), content, rtol=0, atol=0, equal_nan=True)
    assert _attributes(checked.model) == checked.attributes
    if not checked.case.unjudged:
        seeded.call_on_cpu(checked.case, checked.model)


def test_the_same_line_in_eight_layers_is_one_fault() -> None:
    (fault,) = run("fault_many_layers").report.faults
    assert fault.count == 8
    assert fault.modules == tuple(f"layers.{number}" for number in range(8))
    assert fault.devices == ("cpu", "cuda:0")
    assert fault.path[0].place.function == "Deep.forward"
    assert fault.path[-1].place == fault.place


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


def _tensors(model: torch.nn.Module) -> dict[str, Traits]:
    """Every parameter and buffer: itself, what it holds, and what else there is to say of it."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        name: (
            tensor,
            tensor.detach().clone(),
            (tensor.device, tensor.requires_grad, tensor.grad is None, type(tensor)),
        )
        for name, tensor in tensors.items()
    }


def _attributes(model: torch.nn.Module) -> dict[str, str]:
    """Every plain attribute of every module, as text; tensors with their numbers."""
    return {
        f"{name}.{key}": repr(value)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if key not in ("_modules", "_parameters", "_buffers")
    }


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


@pytest.mark.parametrize("fleet", [FLEET, "virtual:1x1GiB"])
def test_a_mask_that_code_makes_on_the_host_is_brought_to_the_blocks_it_is_given_to(
    fleet: str,
) -> None:
    assert agree(HostMask, (torch.zeros(2, 8),), fleet)
