"""The front door of the check: what people give, turned into a model on a placement."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypedDict, Unpack

from torch import nn

from . import profiles
from .api import build_model, plan, plan_checkpoint, profile_checkpoint
from .checker import Subject, check_subject, complete, read_entries
from .checkpoint import Checkpoint
from .errors import Faults, PlacementError, UsageError
from .fleet import Fleet
from .maps import DeviceMap
from .placement import Placement
from .planner import Question
from .plans import Plan
from .profile import Profile
from .report import Report
from .workload import Workload

Inputs = Mapping[str, Any] | tuple[Any, ...] | Callable[[nn.Module], Any]
Where = Placement | Plan | DeviceMap | Mapping[str, Any]


class Choices(TypedDict, total=False):
    """The keyword arguments of `check`."""

    fleet: Fleet | str | None
    images: Sequence[tuple[int, int]]


def check(
    model: str | os.PathLike[str] | Checkpoint | nn.Module,
    placement: Where | None = None,
    inputs: Inputs | None = None,
    workload: Workload | None = None,
    train: bool = False,
    **choices: Unpack[Choices],
) -> Report:
    """Run a model's own code on a placement's virtual GPUs, and say all that is wrong with it.

    No weight is read and no GPU is touched. After a fault the run goes on with the tensors moved,
    so that one check reports every fault, each with the line of code that it stands in.

    Parameters
    ----------
    model : path, str, Checkpoint or torch.nn.Module
        As in `plan`. A model that is given as an object is run itself, and left as it was.
    placement : Placement, Plan or mapping, optional
        Where its modules are: by device names, or by numbers of GPUs or stages. Without one, the
        plan that duoka makes for `fleet` is checked.
    inputs : mapping, tuple or callable, optional
        Keyword or positional arguments of one call; or a function that is called with the model
        and runs it. Models of transformers that generate need none.
    workload : Workload, optional
        What such a model is asked to do; by default `Workload()`.
    train : bool
        Run the loss and backward, instead of the prompt and decode steps.
    fleet : Fleet or str
        Devices with budgets that the peaks are held against.
    images : sequence of (int, int)
        Width and height of pictures in the prompt.

    Raises
    ------
    UsageError
        If nothing says where the modules are, or nothing says how to run the model.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    >>> check(model, {"0": 0, "1": 1}, inputs=(__import__("torch").zeros(1, 4),)).ok
    True
    """
    return check_subject(subject_of(model, placement, inputs, workload, train, **choices))


def subject_of(
    model: str | os.PathLike[str] | Checkpoint | nn.Module,
    placement: Where | None = None,
    inputs: Inputs | None = None,
    workload: Workload | None = None,
    train: bool = False,
    **choices: Unpack[Choices],
) -> Subject:
    """What `check` checks: a model, a complete placement and what to run."""
    unknown = choices.keys() - Choices.__annotations__.keys()
    if unknown:
        raise TypeError(f"check() has no argument {', '.join(sorted(unknown))}")
    given = choices.get("fleet")
    fleet = Fleet.parse(given) if isinstance(given, str) else given
    if placement is None and fleet is None:
        raise UsageError(
            "nothing says where the modules are",
            hint='give a placement, or a fleet to plan for: fleet="virtual:2x24GiB"',
        )
    rest = {"train": train, "images": tuple(choices.get("images", ()))}
    if isinstance(model, nn.Module):
        return _of_module(model, placement, inputs, _Asked(fleet, workload), rest)
    if inputs is not None:
        raise UsageError(
            "example inputs are for a module that is given as an object",
            hint="leave them out; a workload says what is run",
        )
    checkpoint = model if isinstance(model, Checkpoint) else Checkpoint.open(model)
    return _of_checkpoint(checkpoint, placement, _Asked(fleet, workload), rest)


class _Asked:
    """Devices and work that a check was asked for."""

    def __init__(self, fleet: Fleet | None, workload: Workload | None) -> None:
        self.fleet = fleet
        self.workload = workload or Workload()

    def budgets(self, fleet: Fleet | None = None) -> dict[str, int]:
        """Bytes by device name."""
        fleet = fleet or self.fleet
        return {} if fleet is None else {each.name: each.budget_bytes for each in fleet.devices}


def _of_module(
    model: nn.Module, placement: Where | None, inputs: Inputs | None, asked: _Asked, rest: Any
) -> Subject:
    workload, budgets = asked.workload, asked.budgets()
    if placement is None:
        assert asked.fleet is not None
        own = None if inputs is None or callable(inputs) else inputs
        placement = plan(model, asked.fleet, None if own else workload, inputs=own)
    if isinstance(placement, Plan):
        workload, budgets = placement.workload, asked.budgets(placement.fleet)
        placement = placement.placement
    if isinstance(placement, Placement):
        entries = placement.entries
    else:
        entries = read_entries(dict(DeviceMap.of(placement).entries))
    entries, faults = complete(model, entries)
    return Subject(
        is_dispatched=isinstance(placement, Placement) and not faults,
        model=model,
        name=type(model).__name__,
        entries=entries,
        completeness=faults,
        budgets=budgets,
        workload=_whole(workload),
        inputs=inputs,
        **rest,
    )


def _of_checkpoint(
    checkpoint: Checkpoint, placement: Where | None, asked: _Asked, rest: Any
) -> Subject:
    workload = profiles.workload_for(checkpoint, asked.workload)
    faults, budgets = Faults(), asked.budgets()
    if placement is None:
        assert asked.fleet is not None
        placement = plan_checkpoint(checkpoint, Question(fleet=asked.fleet, workload=workload))
    if isinstance(placement, Plan):
        placement.refuse_other(checkpoint.fingerprint, checkpoint.source)
        workload, budgets = placement.workload, asked.budgets(placement.fleet)
        placement = placement.placement
    model = build_model(checkpoint, workload.dtype)
    is_whole = True
    if isinstance(placement, Placement):
        entries = placement.entries
    else:
        profile = profile_checkpoint(checkpoint, workload)
        entries, faults, is_whole = _judged(profile, model, DeviceMap.of(placement), asked.fleet)
    return Subject(
        is_dispatched=is_whole,
        model=model,
        name=checkpoint.source,
        entries=entries,
        completeness=faults,
        budgets=budgets,
        workload=_whole(workload),
        **rest,
    )


def _whole(workload: Workload) -> Workload:
    """The workload with its prompt in one step, unless a plan or a person said otherwise."""
    is_open = workload.prefill_chunk_tokens == "auto"
    return replace(workload, prefill_chunk_tokens=None) if is_open else workload


def _judged(
    profile: Profile, model: nn.Module, device_map: DeviceMap, fleet: Fleet | None
) -> tuple[tuple[tuple[str, str], ...], Faults, bool]:
    """A map by hand, in the names of the model or of its checkpoint, and what is wrong with it.

    One that only splits what should stay whole is run as it stands: then the faults are shown. The
    last result says whether the entries are whole blocks instead.
    """
    try:
        return Placement.from_device_map(device_map, profile, fleet).entries, Faults(), True
    except PlacementError as error:
        faults = error.faults
    entries, wrong = complete(model, read_entries(dict(device_map.entries)))
    if not wrong:
        return entries, faults, False
    if faults.completed is None:
        raise PlacementError("the device map names nothing of this model", hint=None, faults=faults)
    completed = dict(faults.completed)
    return Placement.from_device_map(completed, profile, fleet).entries, faults, True
