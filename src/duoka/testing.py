"""Assertions for tests of models: a model runs on several devices."""

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
        It is run without its data, and left as it was.
    placement : Placement, Plan or mapping, optional
        Where its modules are, as in `duoka.check`. Without one the model is split in several
        ways: for each number of stages by bytes, and by number of parts. The parts are its
        children in the order of registration, lists of modules element by element; as long as the
        largest part holds more than its share of the bytes, its children take its place. The
        elements of a list, such as decoder layers, stay whole, and so do parts that share weights.
    inputs : mapping, tuple or callable, optional
        Arguments of one call, or what runs the model; a model of transformers that generates
        needs none.
    workload : Workload, optional
        What such a model is asked to do.
    train : bool
        Run the loss and backward.
    devices : int or sequence of int
        Numbers of stages to split the model into; by default 2 and 3. A number of which the model
        has too few parts is left out.

    Raises
    ------
    AssertionError
        If there is a fault, the map is incomplete, or the model's code stops: with the printed
        report. Memory is held against a plan's budgets alone (`duoka.check` takes a fleet).
    UsageError
        If the model can't be split, or nothing says how to run it.

    Examples
    --------
    >>> layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    >>> assert_device_safe(layers, inputs=(__import__("torch").zeros(1, 4),))
    """
    __tracebackhide__ = True
    for split, trial in _placements(model, placement, devices):
        report = check(model, split, inputs, workload, train)
        if not report.ok:
            raise AssertionError(f"{trial}\n\n{render_plain(render_report(report))}")


def _placements(
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
        yield split, f"the model fails on {number} devices, split as {_shown(split)}"


def _shown(split: dict[str, int]) -> str:
    """Return the first part of each stage, for the description."""
    first: dict[int, str] = {}
    for name, stage in split.items():
        first.setdefault(stage, name)
    return ", ".join(f"{name!r} … on cuda:{stage}" for stage, name in sorted(first.items()))
