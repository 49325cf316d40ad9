"""Assertion for tests: a model's code runs on several devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from duoka.base.quiet import quiet_libraries
from duoka.errors import UsageError
from duoka.forecast.workload import Workload
from duoka.report.terminal import render_plain, render_report

with quiet_libraries():
    from duoka.api.check import Inputs, Where, check
    from duoka.checker.stage_splits import iter_splits


def assert_device_safe(
    model: nn.Module,
    placement: Where | None = None,
    *,
    inputs: Inputs | None = None,
    workload: Workload | None = None,
    train: bool = False,
    devices: int | Sequence[int] = (2, 3),
) -> None:
    """Assert that a model's own code runs on several devices.

    Parameters
    ----------
    model : torch.nn.Module
        The model. It runs without its weights' values, and is not changed.
    placement : Placement, Plan or mapping, optional
        Devices of the modules, as in `duoka.check`. By default the model is split in two ways for
        each number of stages: into equal bytes, and into equal numbers of parts. The parts are the
        model's children in the order of registration; a list of modules counts as its elements.
        While the largest part has more than its share of the bytes, it is replaced by its children.
        Elements of a list, such as decoder layers, stay whole; parts that share weights stay
        together.
    inputs : mapping, tuple or callable, optional
        Arguments of one call, or a function that runs the model. Generative models of transformers
        need none.
    workload : Workload, optional
        Workload of a generative model without `inputs`.
    train : bool
        Also run the loss and the backward pass.
    devices : int or sequence of int
        Numbers of stages to split the model into; by default 2 and 3. Numbers larger than the
        number of parts are skipped.

    Raises
    ------
    AssertionError
        If there is a fault, the map is incomplete, the model's code stops, or a plan's budget is
        exceeded; the message has the report. Budgets other than a plan's need `duoka.check`.
    UsageError
        If the model can't be split, or needs `inputs` to run.

    Examples
    --------
    >>> layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    >>> assert_device_safe(layers, inputs=(__import__("torch").zeros(1, 4),))
    """
    __tracebackhide__ = True
    for split, trial in _trial_placements(model, placement, devices):
        report = check(model, split, inputs, workload, train)
        if not report.ok:
            raise AssertionError(f"{trial}\n\n{render_plain(render_report(report))}")


def _trial_placements(
    model: nn.Module, placement: Where | None, devices: int | Sequence[int]
) -> Iterator[tuple[Where, str]]:
    """Yield the placements to try, with a description of each."""
    if placement is not None:
        yield placement, "the model fails on this placement"
        return
    numbers = [devices] if isinstance(devices, int) else devices
    trials = [(number, split) for number in numbers for split in iter_splits(model, number)]
    if not trials:
        raise UsageError(
            f"{type(model).__name__} has too few modules for "
            f"{' or '.join(str(number) for number in numbers)} stages",
            hint="give a placement: assert_device_safe(model, {'encoder': 0, 'head': 1}, …)",
        )
    for number, split in trials:
        yield split, f"the model fails on {number} devices, split as {_describe_split(split)}"


def _describe_split(split: dict[str, int]) -> str:
    """Describe a split by the first part of each stage."""
    first: dict[int, str] = {}
    for name, stage in split.items():
        first.setdefault(stage, name)
    return ", ".join(f"{name!r} … on cuda:{stage}" for stage, name in sorted(first.items()))
