"""Implementation of `duoka.plan` and `duoka.plan_replicas`.

torch is imported only if a model must be traced: with a cached profile planning does without.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from duoka.base.progress import say, say_import
from duoka.base.quiet import quiet_libraries
from duoka.base.text import choose
from duoka.checkpoint.checkpoint import Checkpoint
from duoka.errors import UsageError
from duoka.forecast.profile import Profile
from duoka.forecast.profile_cache import find_profile
from duoka.forecast.workload import DTYPE_BYTES, DTYPES, Workload
from duoka.hardware.fleet import Fleet
from duoka.planner.constraints import Constraints, strategy_of
from duoka.planner.device_map import DeviceMap
from duoka.planner.limits import on_fleet
from duoka.planner.plan import Plan
from duoka.planner.replicas import Replicas, replicas_for
from duoka.planner.request import Largest, PlanProblem, PlanRequest
from duoka.planner.resolve import answer, answer_checkpoint, whole_prompt, workload_for
from duoka.planner.search import Objective

if TYPE_CHECKING:
    from torch import nn
    from typing_extensions import TypeIs

Model = str | os.PathLike[str] | Checkpoint
Inputs = Mapping[str, Any] | tuple[Any, ...]
_UNCONSTRAINED = Constraints()


def plan(
    model: str | os.PathLike[str] | Checkpoint | nn.Module,
    fleet: Fleet | str,
    workload: Workload | None = None,
    *,
    use_all: bool = False,
    objective: Objective | Literal["auto"] = "auto",
    device_map: object = None,
    constraints: Constraints = _UNCONSTRAINED,
    largest: Largest | None = None,
    inputs: Inputs | None = None,
    suggest: bool = True,
    trust_remote_code: bool = False,
) -> Plan:
    """Choose a device for every module of a model.

    Parameters
    ----------
    model : path, str, Checkpoint or torch.nn.Module
        A directory with a published checkpoint, a model's name on the Hub ("org/name"), a model
        of transformers, or any module together with example `inputs`.
    fleet : Fleet or str
        The devices that may be used; a str is parsed by `Fleet.parse`.
    workload : Workload, optional
        Batch, prompt and new tokens, or training; by default `Workload()`. A model given as an
        object keeps its dtype.
    use_all : bool
        Use every device, instead of as few devices as fit the workload.
    objective : {"auto", "headroom", "latency", "throughput"}
        Quantity to optimize.
    device_map : mapping, one device, or "auto", "balanced", "sequential"
        Devices of the modules, by names of the model or of its checkpoint; see
        `Placement.from_device_map`. The words of transformers choose a strategy instead.
    constraints : Constraints
        The strategy, modules pinned to devices, and memory to leave free.
    largest : "context" or "batch", optional
        Plan for the longest context or the largest batch that fits, instead of the workload's.
    inputs : mapping or tuple, optional
        Arguments of one call of the module, for which the plan is then made; excludes a workload.
    suggest : bool
        If nothing fits, search for changes that would fit, which can take a minute.
    trust_remote_code : bool
        Run the checkpoint's own model code; ignored for a `Checkpoint`, which has its own setting.

    Raises
    ------
    InfeasibleError
        If nothing fits; the error has the missing bytes and suggestions.
    PlacementError
        If names in the device map are missing, doubled, split or unknown; the error lists them all.

    Examples
    --------
    >>> from torch import nn, zeros
    >>> layers = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    >>> inputs = (zeros(1, 512),)
    >>> plan(layers, "virtual:2x32MiB", inputs=inputs, use_all=True).device_map
    {'0': 'vgpu:0', '1': 'vgpu:1'}
    """
    strategy = strategy_of(device_map)
    if strategy is not None:
        constraints, device_map = replace(constraints, strategy=strategy), None
    request = PlanRequest(
        workload=Workload() if workload is None else workload,
        objective=objective,
        use_all=use_all,
        gpus=fleet if isinstance(fleet, str) else "",
        constraints=constraints,
        largest=largest,
        trust_remote_code=trust_remote_code,
    )
    entries = None if device_map is None else DeviceMap.of(device_map)
    if inputs is not None and (workload is not None or not _is_module(model)):
        hint = "give either inputs or a workload, not both"
        raise UsageError("example inputs already define the workload", hint=hint)
    if _is_module(model):
        return _plan_module(model, on_fleet(request, fleet, entries), inputs, suggest=suggest)
    return plan_request(model, request, fleet, entries, suggest=suggest)


def plan_replicas(
    model: str | os.PathLike[str] | Checkpoint,
    fleet: Fleet | str,
    workload: Workload | None = None,
    *,
    number: int | Literal["auto"] = "auto",
    use_all: bool = False,
    objective: Objective | Literal["auto"] = "auto",
    constraints: Constraints = _UNCONSTRAINED,
    suggest: bool = True,
) -> Replicas:
    """Plan replicas of a model on a fleet, each on devices of its own.

    Parameters
    ----------
    model : path, str or Checkpoint
        As for `plan`.
    fleet : Fleet or str
        As for `plan`.
    workload : Workload, optional
        The workload of one replica.
    number : int or "auto"
        Number of replicas; "auto" for as many as fit.
    use_all : bool
        Leave no device idle.
    objective : {"auto", "headroom", "latency", "throughput"}
        As for `plan`.
    constraints : Constraints
        As for `plan`.
    suggest : bool
        As for `plan`.

    Raises
    ------
    InfeasibleError
        If the fleet has too little memory for one replica, or for `number` replicas.
    UsageError
        If an argument applies to a single replica only.
    """
    request = PlanRequest(
        workload=Workload() if workload is None else workload,
        objective=objective,
        use_all=use_all,
        gpus=fleet if isinstance(fleet, str) else "",
        constraints=constraints,
    )
    return plan_copies(model, request, fleet, number, suggest=suggest)


def plan_request(
    model: Model,
    request: PlanRequest,
    fleet: Fleet | str,
    device_map: DeviceMap | None = None,
    *,
    suggest: bool = True,
) -> Plan:
    """Plan a checkpoint for a request; both `plan` and the command line call this."""
    problem = on_fleet(request, fleet, device_map)
    checkpoint = _open(model, request)
    find = partial(find_or_trace, checkpoint)
    return answer_checkpoint(checkpoint, problem, find, suggest=suggest)


def plan_copies(
    model: Model,
    request: PlanRequest,
    fleet: Fleet | str,
    number: int | Literal["auto"],
    *,
    suggest: bool = True,
) -> Replicas:
    """Plan replicas of a checkpoint for a request, each on devices of its own."""
    problem = on_fleet(request, fleet)
    checkpoint = _open(model, request)
    find = partial(find_or_trace, checkpoint)
    return replicas_for(checkpoint, problem, number, find, suggest=suggest)


def find_or_trace(checkpoint: Checkpoint, workload: Workload) -> Profile:
    """Return the profile of a checkpoint, from the cache or by tracing it."""
    profile = find_profile(checkpoint.fingerprint, workload_for(checkpoint, workload))
    if profile is not None:
        return profile
    say_import("torch")
    with quiet_libraries():
        from duoka.tracing.get_profile import profile_checkpoint

    say(f"tracing {checkpoint.name}{_variant(workload)} (once; later plans use the cached profile)")
    profile = profile_checkpoint(checkpoint, workload)
    say("planning")
    return profile


def _variant(workload: Workload) -> str:
    """Describe how a trace differs from inference with the published weights; "" if it doesn't."""
    forms = [f"{workload.quantize} weights"] if workload.quantize != "none" else []
    forms += [f"{workload.cache} KV cache"] if workload.cache != "dynamic" else []
    training = " in training" if workload.training is not None else ""
    return training + (f" with {' and '.join(forms)}" if forms else "")


def format_table(plan: Plan) -> str:
    """Return the table that ``duoka plan`` prints, for ``print(plan)``."""
    from duoka.report.terminal.plan import plan_text

    return plan_text(plan)


Plan.format_table = format_table


def _open(model: Model, request: PlanRequest) -> Checkpoint:
    """Return the checkpoint of a model, opened if necessary."""
    if isinstance(model, Checkpoint):
        return model
    return Checkpoint.open(model, trust_remote_code=request.trust_remote_code)


def _is_module(model: object) -> TypeIs[nn.Module]:
    """Return True for a torch module, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(model, torch.nn.Module)


def _traced_workload(workload: Workload, problem: PlanProblem) -> Workload:
    """Return the workload to trace: for the largest batch, one of at least two sequences."""
    if problem.largest != "batch":
        return workload
    return replace(workload, batch=max(2, workload.batch))


def _plan_module(
    model: nn.Module, problem: PlanProblem, inputs: Inputs | None, *, suggest: bool
) -> Plan:
    """Plan a model object."""
    from duoka.tracing.get_profile import profile_module

    if problem.workload.quantize != "none":
        raise UsageError(
            f"quantize={problem.workload.quantize!r} applies to checkpoints: weights are "
            "quantized during loading",
            hint="give the checkpoint's directory instead of the model object",
        )
    is_encoder = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
    workload = whole_prompt(problem.workload, is_encoder=is_encoder)
    profile = profile_module(model, _traced_workload(workload, problem), inputs)
    if inputs is not None:
        workload = Workload(prompt_tokens=1, new_tokens=1, gpu_generation=workload.gpu_generation)
    dtype = profile.dtype if profile.dtype in DTYPE_BYTES else "auto"

    def profile_for(work: Workload) -> Profile | None:
        work = whole_prompt(work, is_encoder=is_encoder)
        if work.conditions == profile.conditions:
            return profile
        return profile_module(model, _traced_workload(work, problem), None) if work.images else None

    return answer(
        profile,
        replace(problem, workload=replace(workload, dtype=choose("dtype", dtype, DTYPES))),
        profile_for=profile_for,
        suggest=suggest,
    )
