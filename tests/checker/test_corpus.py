"""The check, held against models with marked lines, and against models with nothing wrong."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import pytest
import seeded
import torch
from _pytest.mark import ParameterSet
from seeded import Case

import duoka

PATHS = seeded.paths()
FAULTY = seeded.paths(prefix="fault")
# What the check can't do yet. A file that begins to pass has to leave this list.
MISSED: dict[str, str] = {}
# One for each way to cure a fault; the benchmark repairs all.
REPAIRED = (
    "fault_add_method",
    "fault_alibi_baddbmm",
    "fault_checkpoint_reentrant",
    "fault_compiled_block",
    "fault_comprehension",
    "fault_hard_device_string",
    "fault_helper_in_another_file",
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

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


def named(path: Path) -> str:
    return path.stem


def judged(prefix: str) -> list[ParameterSet]:
    """The cases; those that the check can't do yet are expected to fail."""
    return [
        pytest.param(
            path,
            id=path.stem,
            marks=pytest.mark.xfail(reason=MISSED[path.stem]) if path.stem in MISSED else (),
        )
        for path in seeded.paths(prefix=prefix)
    ]


@dataclass(frozen=True)
class Checked:
    """A case's report, its model after the check, and what that was like before."""

    case: Case
    report: duoka.Report
    model: torch.nn.Module
    tensors: dict[str, Traits]
    attributes: dict[str, str]


@functools.cache
def run(path: Path) -> Checked:
    case = seeded.load(path)
    model = case.build()
    tensors, attributes = _tensors(model), _attributes(model)
    report = duoka.check(model, case.placement, inputs=case.inputs(), train=case.train)
    return Checked(case, report, model, tensors, attributes)


def checked(path: Path) -> tuple[Case, duoka.Report]:
    return run(path).case, run(path).report


def test_every_case_is_read() -> None:
    headers = [
        line
        for theme in seeded.CORPUS.glob("*.py")
        for line in theme.read_text(encoding="utf-8").splitlines()
        if line.startswith(("# case: fault", "# case: warning", "# case: clean"))
    ]
    assert len(PATHS) == len(headers) == 179


@pytest.mark.parametrize("path", PATHS, ids=named)
def test_markers(path: Path) -> None:
    """The model runs on one device, and on several it fails where it is marked."""
    case = seeded.load(path)
    faults, followups = case.marked("fault"), case.marked("followup")
    assert bool(faults) == path.stem.startswith("fault")
    assert bool(case.marked("warning")) == path.stem.startswith("warning")
    if not case.unjudged:
        seeded.run_on_one_device(case)
        met = seeded.errors(case)
        assert set(faults) <= set(met)
        assert set(met) <= set(faults) | set(followups)


@pytest.mark.parametrize("path", judged("fault"))
def test_every_fault_is_found_once_and_no_other(path: Path) -> None:
    case, report = checked(path)
    assert report.stop is None
    found = seeded.lines_of(report.faults)
    assert set(found) - set(case.marked("origin")) == set(case.marked("fault"))
    followups = seeded.lines_of(each for fault in report.faults for each in fault.followups)
    assert set(followups) <= set(case.marked("followup"))


@pytest.mark.parametrize("path", judged("clean"))
def test_nothing_is_found_in_clean_models(path: Path) -> None:
    _, report = checked(path)
    assert report.ok, report.stop
    assert not report.faults
    assert not report.warnings


@pytest.mark.parametrize("path", judged("warning"))
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


@pytest.mark.parametrize("path", FAULTY, ids=named)
def test_on_one_device_only_what_is_elsewhere_anyway_is_found(path: Path) -> None:
    """What is made on the CPU fails on a single GPU too; nothing else does."""
    case = seeded.load(path)
    alone = dict.fromkeys(case.placement, "cuda:0")
    report = duoka.check(case.build(), alone, inputs=case.inputs(), train=case.train)
    assert set(seeded.lines_of(report.faults)) <= set(case.marked("fault"))


def test_the_same_line_in_eight_layers_is_one_fault() -> None:
    _, report = checked(seeded.path("fault_many_layers"))
    (fault,) = report.faults
    assert fault.modules == tuple(f"layers.{number}" for number in range(8))
    assert fault.devices == ("cpu", "cuda:0")
    assert fault.path[0].place.function == "Deep.forward"
    assert fault.path[-1].place == fault.place


def test_a_fault_is_counted_as_often_as_the_model_meets_it() -> None:
    _, report = checked(seeded.path("fault_many_layers"))
    assert [fault.count for fault in report.faults] == [8]


@pytest.mark.parametrize("name", REPAIRED)
def test_faults_are_repaired_and_proved(name: str) -> None:
    case, report = checked(seeded.path(name))
    before = [path.read_bytes() for path in case.files]
    repairs = duoka.repair(report)
    assert repairs.proved, [patch.reason for patch in repairs]
    assert {Path(patch.file) for patch in repairs} <= set(case.files)
    assert [path.read_bytes() for path in case.files] == before


@pytest.mark.parametrize("name", REFUSED)
def test_what_cant_be_repaired_is_refused_in_words(name: str) -> None:
    _, report = checked(seeded.path(name))
    repairs = duoka.repair(report)
    assert {fault.place for fault, _ in repairs.uncured} == {each.place for each in report.faults}
    assert all(reason for _, reason in repairs.uncured)
    assert not repairs.patches


@pytest.mark.parametrize("path", PATHS, ids=named)
def test_a_check_leaves_the_model_as_it_was(path: Path) -> None:
    after = run(path)
    now = _tensors(after.model)
    assert now.keys() == after.tensors.keys()
    for name, (tensor, content, traits) in after.tensors.items():
        assert now[name][0] is tensor
        assert now[name][2] == traits
        # A case's `torch.empty` may hold anything, NaN as well.
        torch.testing.assert_close(tensor.detach(), content, rtol=0, atol=0, equal_nan=True)
    assert _attributes(after.model) == after.attributes
    if not after.case.unjudged:
        seeded.call_on_cpu(after.case, after.model)


Traits = tuple[torch.Tensor, torch.Tensor, tuple[object, ...]]


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
