"""The front door: plan a model, load a plan, spread a model."""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypedDict, TypeVar, Unpack, cast

import torch
from torch import nn

from duoka import checker
from duoka.checkpoint.checkpoint import Checkpoint
from duoka.checkpoint.quantized import method_of
from duoka.errors import CheckpointError, ModelError, UsageError
from duoka.forecast import profile_cache
from duoka.forecast.profile import Profile
from duoka.forecast.workload import DTYPE_BYTES, Dtype, Workload
from duoka.hardware.fleet import Fleet
from duoka.hardware.host import refuse_more
from duoka.models.from_checkpoint import build_model, notes_of
from duoka.planner import replicas
from duoka.planner.constraints import Constraints
from duoka.planner.device_map import DeviceMap
from duoka.planner.limits import fleet_for, usable
from duoka.planner.placement import Placement
from duoka.planner.plan import Largest, Plan
from duoka.planner.planner import Question, with_chunks
from duoka.planner.resolve import answer, answer_checkpoint
from duoka.planner.search import Objective
from duoka.planner.workloads import whole_prompt, workload_for
from duoka.runtime import devices
from duoka.runtime import load as loader
from duoka.runtime.dispatch.dispatch import dispatch as spread
from duoka.runtime.dispatch.dispatch import undispatch
from duoka.runtime.load import Keeping
from duoka.tracing import Irregular, Subject, profile_training, trace, trace_call, trace_workload

Model = TypeVar("Model", bound=nn.Module)
Progress = Callable[[int, int], None]


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
    question, inputs = _question(fleet, workload, choices), choices.get("inputs")
    asked = question.workload
    if inputs is not None and (workload is not None or not isinstance(model, nn.Module)):
        raise UsageError(
            "example inputs are for a module, and are its workload",
            hint="give either inputs or a workload",
        )
    if not isinstance(model, nn.Module):
        checkpoint = model if isinstance(model, Checkpoint) else Checkpoint.open(model)
        return plan_checkpoint(checkpoint, question)
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
        replace(question, workload=replace(asked, dtype=cast(Dtype, own))),
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
    question = _question(fleet, workload, choices)
    if choices.get("inputs") is not None:
        raise UsageError("copies are planned for a workload", hint="leave out the inputs")
    checkpoint = model if isinstance(model, Checkpoint) else Checkpoint.open(model)
    return replicas_checkpoint(checkpoint, question, number)


def replicas_checkpoint(
    checkpoint: Checkpoint, question: Question, number: int | Literal["auto"]
) -> replicas.Replicas:
    """As many copies as a fleet holds; the checkpoint is traced where the cache has no profile."""
    find = partial(profile_checkpoint, checkpoint)
    return replicas.replicas_for(checkpoint, question, number, find)


def _question(fleet: Fleet | str, workload: Workload | None, choices: Choices) -> Question:
    """What the arguments of `plan` ask."""
    _refuse_unknown(choices)
    gpus = fleet if isinstance(fleet, str) else ""
    fleet = Fleet.parse(fleet) if isinstance(fleet, str) else fleet
    given = choices.get("device_map")
    device_map = None if given is None else DeviceMap.of(given)
    constraints = choices.get("constraints", Constraints())
    return Question(
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


def plan_checkpoint(checkpoint: Checkpoint, question: Question) -> Plan:
    """Answer a question about a checkpoint; it is traced where the cache has no profile."""
    return answer_checkpoint(checkpoint, question, partial(profile_checkpoint, checkpoint))


def profile_checkpoint(checkpoint: Checkpoint, workload: Workload) -> Profile:
    """The profile of a checkpoint: from the cache, or traced and kept there."""
    workload = workload_for(checkpoint, workload)
    profile = profile_cache.find_profile(checkpoint.fingerprint, workload)
    if profile is None:
        model = build_model(checkpoint, workload)
        if checkpoint.format == "safetensors" and method_of(checkpoint.config) is None:
            # Such a plan could never be loaded.
            loader.refuse_differences(model, checkpoint)
        notes = notes_of(model, checkpoint, workload)
        subject = Subject(
            fingerprint=checkpoint.fingerprint,
            max_context_tokens=checkpoint.max_context_tokens,
            published=None if checkpoint.tensors is None else tuple(checkpoint.tensors),
            conditions=workload.conditions,
        )
        build = partial(build_model, checkpoint, workload)
        profile, regular = _trace(build, subject, workload)
        # Where parts keep another type, the first parameter may be one of them.
        profile = replace(profile, dtype=workload.dtype, notes=notes)
        profile_cache.keep_profile(profile, workload, alone=not regular)
    return profile


def profile_module(
    model: nn.Module, workload: Workload, inputs: Mapping[str, Any] | tuple[Any, ...] | None
) -> Profile:
    """The profile of a model that is given as an object; the object isn't touched."""
    subject = Subject(fingerprint=fingerprint_module(model), conditions=workload.conditions)
    if inputs is not None:
        return trace_call(without_data(model), subject, inputs)
    if not hasattr(model, "prepare_inputs_for_generation"):
        raise UsageError(
            f"{type(model).__name__} is no generating model of transformers",
            hint="give example inputs as well: plan(model, fleet, inputs=(x,))",
        )
    return _trace(lambda: without_data(model), subject, workload)[0]


def _trace(
    build: Callable[[], nn.Module], subject: Subject, workload: Workload
) -> tuple[Profile, bool]:
    """Trace for every workload where rules hold, which the second result says, or for this one."""
    if workload.training is not None:
        return profile_training(build, subject, workload)
    try:
        found = trace(build(), subject)
    except Irregular:
        found = None
    if found is not None and found.answers(workload.batch):
        return found, True
    return trace_workload(build(), subject, list(with_chunks(workload))), False


def load(
    plan: Plan,
    *,
    progress: Progress | None = None,
    download_progress: Progress | None = None,
    trust_remote_code: bool = False,
    keeping: Keeping | None = None,
) -> Any:
    """Prove a plan, then load the model onto its devices.

    What a model from the Hub lacks on this machine is downloaded in between.

    Parameters
    ----------
    plan : Plan
    progress : callable, optional
        Called with (bytes done, bytes in all) while the weights are read.
    download_progress : callable, optional
        The same, while files are downloaded.
    trust_remote_code : bool
        Run model code that comes with the checkpoint.
    keeping : Keeping, optional
        Whether weights that the model has stacked, as those of experts, are kept in duoka's cache
        as it has them: ``duoka.runtime.load.Keeping(wanted=True)``. By default they aren't.

    Returns
    -------
    transformers.PreTrainedModel
        In evaluation mode, spread as the plan says; `generate` works as ever.

    Raises
    ------
    ProofError
        If the plan fails on virtual GPUs; nothing has been read then.
    FormatError
        If the plan was made for another checkpoint.
    UsageError
        If the plan is for training.
    FleetError
        If a GPU of the plan is gone, or has less free memory now than the plan needs.
    CheckpointError
        If a file can't be had from the Hub, or isn't what it should be.
    LoadError
        If what is in the files isn't what the model expects; nothing stays loaded then.
    """
    _refuse_unloadable(plan)
    checkpoint = Checkpoint.open(plan.source, trust_remote_code=trust_remote_code)
    if not checkpoint.has_weights:
        raise CheckpointError(
            f"{plan.source} has no weights to load",
            hint="plan for a directory that holds the weight files",
        )
    _refuse_untrusted(plan, checkpoint)
    plan.refuse_other(checkpoint.fingerprint, plan.source)
    loader.refuse_unloadable(checkpoint.config, plan.placement)
    devices.give_back()
    plan = plan.here()
    refuse_more(plan.forecast.host_bytes)
    devices.materialise(plan.fleet)
    checker.prove(plan, build_model(checkpoint, plan.workload))
    checkpoint = checkpoint.fetch(download_progress)
    plan.refuse_other(checkpoint.fingerprint, plan.source)
    return _filled(plan, checkpoint, progress, keeping)


def _filled(
    plan: Plan, checkpoint: Checkpoint, progress: Progress | None, keeping: Keeping | None
) -> Any:
    """The model with its weights, spread as the plan says."""
    model = build_model(checkpoint, plan.workload)
    if method_of(checkpoint.config) is not None:
        dtype = getattr(torch, plan.workload.dtype)
        found = loader.load_published(
            checkpoint, model, plan.placement, dtype=dtype, progress=progress
        )
        return spread(found, plan.placement)
    loader.load_weights(
        model,
        checkpoint,
        plan.placement,
        progress=progress,
        offloaded=plan.offloaded,
        keeping=keeping,
    )
    return spread(model, plan.placement, offloaded=plan.offloaded)


def _refuse_unloadable(plan: Plan) -> None:
    """Refuse a plan that nothing is loaded for."""
    if plan.workload.training is not None:
        raise UsageError(
            "the plan is for training, and a model is loaded to generate",
            hint="duoka.dispatch(model, plan) spreads a model that you train; to generate, plan "
            "without training",
        )
    if not plan.source:
        raise CheckpointError(
            "the plan was made for a model that was given as an object; there is nothing to load",
            hint="spread that model with duoka.dispatch(model, plan)",
        )


def _refuse_untrusted(plan: Plan, checkpoint: Checkpoint) -> None:
    """Say so when a plan differs in one thing: that the checkpoint's own code may run."""
    if plan.fingerprint == checkpoint.fingerprint or checkpoint.trust_remote_code:
        return
    trusted = Checkpoint.open(plan.source, trust_remote_code=True)
    if plan.fingerprint == trusted.fingerprint:
        raise ModelError(
            f"the plan was made with the model code that comes with {plan.source}, "
            "and that code may not run",
            hint="it runs only with --trust-remote-code (trust_remote_code=True)",
        )


def dispatch(model: Model, placement: Placement | Plan | Mapping[str, str]) -> Model:
    """Spread a model over devices; the same object comes back.

    Parameters
    ----------
    model : torch.nn.Module
    placement : Placement, Plan or mapping
        A mapping goes from module names to torch's device names.

    Raises
    ------
    PlacementError
        If a parameter or buffer has no device, or a name is unknown; nothing has been moved then.
    """
    offloaded: tuple[str, ...] = ()
    if isinstance(placement, Plan):
        devices.materialise(placement.fleet)
        refuse_more(placement.forecast.host_bytes)
        offloaded = placement.offloaded
        placement = placement.placement
    elif isinstance(placement, Mapping):
        placement = Placement(entries=tuple(placement.items()))
    return spread(model, placement, offloaded=offloaded)


def fingerprint_module(model: nn.Module) -> str:
    """Equal for models of equal class, configuration and tensor names, shapes and types."""
    digest = hashlib.sha256(type(model).__qualname__.encode())
    config = getattr(model, "config", None)
    if config is not None and hasattr(config, "to_json_string"):
        digest.update(config.to_json_string(use_diff=False).encode())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
    return digest.hexdigest()


def without_data(model: nn.Module) -> nn.Module:
    """A copy of a model, not spread, whose parameters have no data; buffers keep theirs."""
    memo: dict[int, Any] = {
        id(buffer): buffer.cpu()
        for buffer in model.buffers()
        if buffer.device.type not in ("cpu", "meta")
    }
    memo |= {
        id(parameter): nn.Parameter(
            torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad
        )
        for parameter in model.parameters()
    }
    with torch.no_grad():
        copied = copy.deepcopy(model, memo)
    undispatch(copied)
    return copied
