"""The front door: plan a model, load a plan, spread a model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypedDict, Unpack, cast

from torch import nn

from duoka.checkpoint.checkpoint import Checkpoint
from duoka.errors import UsageError
from duoka.forecast.profile import Profile
from duoka.forecast.workload import DTYPE_BYTES, Dtype, Workload
from duoka.hardware.fleet import Fleet
from duoka.planner import replicas
from duoka.planner.constraints import Constraints
from duoka.planner.device_map import DeviceMap
from duoka.planner.limits import fleet_for, usable
from duoka.planner.plan import Plan
from duoka.planner.request import Largest, PlanProblem
from duoka.planner.resolve import answer, answer_checkpoint, whole_prompt
from duoka.planner.search import Objective
from duoka.tracing.get_profile import profile_checkpoint, profile_module


class Choices(TypedDict, total=False):
    """The keyword arguments of `plan`."""

    use_all: bool
    objective: Objective | Literal["auto"]
    device_map: object
    constraints: Constraints
    largest: Largest | None
    inputs: Mapping[str, Any] | tuple[Any, ...] | None


def plan(
    model: str | os.PathLike[str] | Checkpoint | nn.Module,
    fleet: Fleet | str,
    workload: Workload | None = None,
    **choices: Unpack[Choices],
) -> Plan:
    """Find where every module goes.

    Parameters
    ----------
    model : path, str, Checkpoint or torch.nn.Module
        A directory with a published checkpoint, a model's name on the Hub ("org/name"), a model
        of transformers, or any module together with example `inputs`. Model code that comes
        with a checkpoint runs only when this is
        ``Checkpoint.open(path, trust_remote_code=True)``.
    fleet : Fleet or str
        The devices that may be used; a text is read by `Fleet.parse`.
    workload : Workload, optional
        What the model will be asked to do; by default `Workload()`. A model that is given as an
        object has the dtype that it has.
    use_all : bool
        Use every device, instead of as few as hold the workload.
    objective : {"auto", "headroom", "latency", "throughput"}
        What to optimise.
    device_map : mapping, or one device
        Put the modules where it says, in the names of the model or of its checkpoint; see
        `Placement.from_device_map`.
    constraints : Constraints, optional
        The strategy, pins, modules that stay uncut, and memory to leave free.
    largest : {"context", "batch"}, optional
        Plan for the longest context or the largest batch that fits, instead of the workload's.
    inputs : mapping or tuple, optional
        Arguments of one call of the module. The plan is then for such a call; a workload can't
        be given as well.

    Raises
    ------
    InfeasibleError
        If nothing fits: with the shortfall and what would fit.
    PlacementError
        If the device map misses, doubles, splits or invents a name: with all of them.

    Examples
    --------
    >>> layers = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    >>> plan(layers, "virtual:2x2MiB", inputs=(torch.zeros(1, 512),)).device_map
    {'0': 'vgpu:0', '1': 'vgpu:1'}
    """
    problem, inputs = _problem(fleet, workload, choices), choices.get("inputs")
    asked = problem.workload
    if inputs is not None and (workload is not None or not isinstance(model, nn.Module)):
        raise UsageError(
            "example inputs are for a module, and are its workload",
            hint="give either inputs or a workload",
        )
    if not isinstance(model, nn.Module):
        checkpoint = model if isinstance(model, Checkpoint) else Checkpoint.open(model)
        return plan_checkpoint(checkpoint, problem)
    if asked.quantize != "none":
        raise UsageError(
            f"quantize={asked.quantize!r} is for checkpoints: weights become smaller while they "
            "are loaded",
            hint="give the checkpoint's directory instead of the model",
        )
    asked = whole_prompt(asked, is_encoder=_is_encoder(model))
    profile = profile_module(model, asked, inputs)
    asked = asked if inputs is None else Workload(prompt_tokens=1, new_tokens=1)
    own = profile.dtype if profile.dtype in DTYPE_BYTES else "auto"
    return answer(
        profile,
        replace(problem, workload=replace(asked, dtype=cast(Dtype, own))),
        profile_for=partial(_known, profile, _is_encoder(model)),
    )


def plan_replicas(
    model: str | os.PathLike[str] | Checkpoint,
    fleet: Fleet | str,
    workload: Workload | None = None,
    *,
    number: int | Literal["auto"] = "auto",
    **choices: Unpack[Choices],
) -> replicas.Replicas:
    """Find as many copies of a model as a fleet holds, each on devices of its own.

    Parameters
    ----------
    model : path, str or Checkpoint
    fleet, workload
        As for `plan`; each copy serves the whole workload.
    number : int or "auto"
        How many copies; "auto" is as many as can be.
    use_all, objective, constraints
        As for `plan`: with `use_all` no device stays idle.

    Raises
    ------
    InfeasibleError
        If the fleet doesn't hold one copy, or so many.
    UsageError
        If something was asked that is for one copy alone.
    """
    problem = _problem(fleet, workload, choices)
    if choices.get("inputs") is not None:
        raise UsageError("copies are planned for a workload", hint="leave out the inputs")
    checkpoint = model if isinstance(model, Checkpoint) else Checkpoint.open(model)
    return replicas_checkpoint(checkpoint, problem, number)


def replicas_checkpoint(
    checkpoint: Checkpoint, problem: PlanProblem, number: int | Literal["auto"]
) -> replicas.Replicas:
    """As many copies as a fleet holds; the checkpoint is traced where the cache has no profile."""
    find = partial(profile_checkpoint, checkpoint)
    return replicas.replicas_for(checkpoint, problem, number, find)


def _problem(fleet: Fleet | str, workload: Workload | None, choices: Choices) -> PlanProblem:
    """What the arguments of `plan` ask."""
    _refuse_unknown(choices)
    gpus = fleet if isinstance(fleet, str) else ""
    fleet = Fleet.parse(fleet) if isinstance(fleet, str) else fleet
    given = choices.get("device_map")
    device_map = None if given is None else DeviceMap.of(given)
    constraints = choices.get("constraints", Constraints())
    return PlanProblem(
        fleet=usable(fleet_for(fleet, device_map, offload=constraints.offload), constraints),
        workload=workload or Workload(),
        use_all=choices.get("use_all", False),
        objective=choices.get("objective", "auto"),
        gpus=gpus,
        device_map=device_map,
        constraints=constraints,
        largest=choices.get("largest"),
    )


def _known(profile: Profile, is_encoder: bool, workload: Workload) -> Profile | None:
    """The profile of a model that was given as an object, where it answers a workload."""
    workload = whole_prompt(workload, is_encoder=is_encoder)
    return profile if workload.conditions == profile.conditions else None


def _is_encoder(model: nn.Module) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def _refuse_unknown(choices: Choices) -> None:
    unknown = choices.keys() - Choices.__annotations__.keys()
    if unknown:
        raise TypeError(f"plan() has no argument {', '.join(sorted(unknown))}")


def plan_checkpoint(checkpoint: Checkpoint, problem: PlanProblem) -> Plan:
    """Answer a problem about a checkpoint; it is traced where the cache has no profile."""
    return answer_checkpoint(checkpoint, problem, partial(profile_checkpoint, checkpoint))
