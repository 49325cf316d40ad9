"""The check, held against models with marked lines, and against models with nothing wrong."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import seeded
import torch
from seeded import Case

import duoka

PATHS = seeded.paths()
FAULTY = seeded.paths(prefix="fault")
# A gradient on the wrong GPU reaches C++ code of autograd's that can't pass on a Python error.
ABORTS = frozenset({"fault_function_gradient_device"})
# torch.compile calls the module as it was before it was dispatched.
COMPILED = frozenset({"clean_compiled"})

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


def named(path: Path) -> str:
    return path.stem


@functools.cache
def checked(path: Path) -> tuple[Case, duoka.Report]:
    case = seeded.load(path)
    report = duoka.check(case.build(), case.placement, inputs=case.inputs(), train=case.train)
    return case, report


@pytest.mark.parametrize("path", PATHS, ids=named)
def test_markers(path: Path) -> None:
    """The model runs on one device, and on several it fails where it is marked."""
    case = seeded.load(path)
    seeded.run_on_one_device(case)
    faults, followups = case.marked("fault"), case.marked("followup")
    assert bool(faults) == path.stem.startswith("fault")
    if path.stem not in ABORTS | COMPILED:
        met = seeded.errors(case)
        assert set(faults) <= set(met)
        assert set(met) <= set(faults) | set(followups)


@pytest.mark.parametrize("path", FAULTY, ids=named)
def test_every_fault_is_found_once_and_no_other(path: Path) -> None:
    case, report = checked(path)
    assert report.stop is None
    found = seeded.lines_of(report.faults)
    assert set(found) - set(case.marked("origin")) == set(case.marked("fault"))
    followups = seeded.lines_of(each for fault in report.faults for each in fault.followups)
    assert set(followups) <= set(case.marked("followup"))


@pytest.mark.parametrize("path", seeded.paths(prefix="clean"), ids=named)
def test_nothing_is_found_in_clean_models(path: Path) -> None:
    _, report = checked(path)
    assert report.ok, report.stop
    assert not report.faults
    assert not report.warnings


@pytest.mark.parametrize("path", seeded.paths(prefix="warning"), ids=named)
def test_what_works_by_luck_or_at_a_price_is_a_warning(path: Path) -> None:
    case, report = checked(path)
    assert report.ok
    warned = {seeded.line_of(fault): fault.kind for fault in report.warnings}
    assert warned == case.marked("warning")


@pytest.mark.parametrize("path", FAULTY, ids=named)
def test_warnings_stand_on_marked_lines(path: Path) -> None:
    case, report = checked(path)
    marked = {*case.marked("origin"), *case.marked("warning"), *case.marked("fault")}
    assert set(seeded.lines_of(report.warnings)) <= marked


@pytest.mark.parametrize("path", PATHS, ids=named)
def test_a_check_leaves_the_model_as_it_was(path: Path) -> None:
    case = seeded.load(path)
    model = case.build()
    before = _picture(model)
    duoka.check(model, case.placement, inputs=case.inputs(), train=case.train)
    after = _picture(model)
    assert before.keys() == after.keys()
    for name, (tensor, content, attributes) in before.items():
        now, _, attributes_now = after[name]
        assert now is tensor
        assert attributes_now == attributes
        assert torch.equal(now.detach(), content)
    seeded.call_on_cpu(case, model)


def _picture(model: torch.nn.Module) -> dict[str, tuple[torch.Tensor, torch.Tensor, object]]:
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
