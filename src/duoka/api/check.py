"""Implementation of `duoka.check`: resolve the arguments to a model on a placement, and run it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from duoka.base.model_code import raised_in
from duoka.base.progress import say
from duoka.checker.run import check_subject
from duoka.checker.source_map import place_of
from duoka.checker.stage_splits import iter_splits
from duoka.checker.subject import Subject, complete_map, read_entries, stop_of
from duoka.checkpoint.checkpoint import Checkpoint
from duoka.errors import DuokaError, Faults, InfeasibleError, ModelError, PlacementError, UsageError
from duoka.forecast.tensor_names import Outline
from duoka.forecast.workload import Training, Workload
from duoka.hardware.fleet import Fleet
from duoka.models import make_trainable
from duoka.models.from_checkpoint import build_model
from duoka.models.remote_code import OTHER_VERSIONS, stop_hint
from duoka.planner.constraints import Constraints, strategy_of
from duoka.planner.device_map import DeviceMap, judge
from duoka.planner.placement import Placement
from duoka.planner.plan import Plan
from duoka.planner.resolve import learning, native_training, whole_prompt_note, workload_for
from duoka.report.check_report import CheckReport, Stop
from duoka.runtime.dispatch.place_tensors import empty_modules, tensor_names
from duoka.runtime.image_inputs import ImagePrompts
from duoka.runtime.prepare_training import find_unreached
from duoka.virtual import UnknownValueError

from .plan import find_or_trace, plan

_INPUTS = (Mapping, tuple, list, torch.Tensor)
_SPLIT_BY_BYTES = (
    "the model can't be planned; its modules were assigned to the devices by their size in bytes"
)
_NO_PICTURE = "the model takes images, and none was given: add --images 1 (images=[(1024, 1024)])"
_UNTRACED = "the modules that must stay whole on one device are unknown"

Inputs = Mapping[str, Any] | tuple[Any, ...] | Callable[[nn.Module], Any]
Where = Placement | Plan | DeviceMap | Mapping[str, Any] | str


@dataclass(frozen=True, slots=True, kw_only=True)
class _CheckRequest:
    """Arguments of a check besides the model, and notes collected while they are resolved."""

    placement: Where | None
    inputs: Inputs | None
    workload: Workload
    training: Training | None
    fleet: Fleet | None
    constraints: Constraints = field(default_factory=Constraints)
    notes: list[str] = field(default_factory=list)
    refusals: list[DuokaError] = field(default_factory=list)
    """Errors of planning, if a plan was needed and could not be made."""

    @property
    def to_plan(self) -> Fleet:
        """The devices to plan for; only valid without a placement, which needs no fleet."""
        assert self.fleet is not None, "it was refused before"
        return self.fleet


def check(
    model: str | os.PathLike[str] | Checkpoint | nn.Module,
    placement: Where | None = None,
    inputs: Inputs | None = None,
    workload: Workload | None = None,
    train: bool | Training = False,
    *,
    fleet: Fleet | str | None = None,
    images: Sequence[tuple[int, int]] = (),
) -> CheckReport:
    """Run a model's own code on virtual GPUs and report all faults.

    No weight is read and no GPU is used. After a fault the run continues with the tensors moved, so
    that one check reports every fault, each with its line of code.

    Parameters
    ----------
    model : path, str, Checkpoint or torch.nn.Module
        As in `plan`. A model given as an object is run itself, and restored afterwards.
    placement : Placement, Plan, mapping or str, optional
        Device of each module, as a device name or the index of a GPU or stage. A strategy
        ("balanced", "sequential") or None checks the plan that duoka makes for all devices of
        `fleet`. If the model's code can't be traced for a plan, its modules are split over the
        devices by bytes.
    inputs : mapping, tuple or callable, optional
        Keyword or positional arguments of one call; or a function that is called with the model
        and runs it. Not needed for models of transformers that generate.
    workload : Workload, optional
        Batch, prompt and new tokens for a model that generates; by default `Workload()`.
    train : bool or Training
        Run forward, loss and backward instead of prefill and decode steps. True trains all
        parameters; a `Training` may choose adapters and gradient checkpointing. A model given as
        an object is trained unchanged.
    fleet : Fleet or str
        Devices to plan for if no placement is given. The memory peaks are compared with their
        budgets.
    images : sequence of (int, int)
        Width and height of each image in the prompt.

    Raises
    ------
    UsageError
        If neither a placement nor a fleet is given, if the model needs inputs and none are given,
        or if arguments exclude one another.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    >>> check(model, {"0": 0, "1": 1}, inputs=(__import__("torch").zeros(1, 4),)).ok
    True
    """
    fleet = Fleet.parse(fleet) if isinstance(fleet, str) else fleet and fleet.split_host()[0]
    strategy = strategy_of(placement)
    placement = placement if strategy is None else None
    if placement is None and fleet is None:
        hint = 'give a placement, or a fleet to plan for, as fleet="virtual:2x24GiB"'
        raise UsageError("neither a placement nor a fleet is given", hint=hint)
    if not (inputs is None or callable(inputs) or isinstance(inputs, _INPUTS)):
        hint = "give a tensor, a tuple, a mapping of keyword arguments, or a function"
        raise UsageError(f"inputs can't be {type(inputs).__name__}: {inputs!r:.80}", hint=hint)
    request = _CheckRequest(
        placement=placement,
        inputs=inputs,
        workload=_with_largest_image(workload or Workload(), images),
        training=Training(method="full") if train is True else train or None,
        fleet=fleet,
        constraints=Constraints(strategy=strategy or "auto"),
    )
    subject = _subject(model, request)
    if isinstance(subject, CheckReport):
        return subject
    subject = _with_images(_with_offloaded(subject, placement), images)
    say("running the model on virtual GPUs")
    report = check_subject(subject)
    if subject.inputs is None:
        work, training = subject.workload, request.training
        report = replace(report, workload=work if training is None else learning(work, training))
    if subject.if_too_large and not report.fits:
        report = replace(report, notes=(*report.notes, subject.if_too_large))
    if report.ok and request.refusals:
        # `plan` and `generate` refuse this model on these devices, so the report isn't clean.
        report = replace(report, stop=_planning_stop(request.refusals[0]))
    if report.stop is None or report.stop.hint or not subject.hint:
        return report
    hint = stop_hint(report.stop.message, subject.hint)
    return replace(report, stop=replace(report.stop, hint=hint))


def _planning_stop(error: DuokaError) -> Stop:
    """Describe that a model cannot be planned, with the line of its code."""
    spot = None if error.__cause__ is None else raised_in(error.__cause__)
    place = None if spot is None else place_of(spot)
    return Stop(message=str(error), place=place, phase="plan", hint=error.hint or "")


def _subject(
    model: str | os.PathLike[str] | Checkpoint | nn.Module, request: _CheckRequest
) -> Subject | CheckReport:
    """Return the model on its devices, or a report if its code cannot be built."""
    if isinstance(model, nn.Module):
        if request.training not in (None, Training(method="full")):
            raise UsageError(
                "a model given as an object is trained unchanged: duoka can't apply "
                f"{request.training.method}",
                hint="add adapters to the model first, then use train=True",
            )
        return _subject_of_module(model, request)
    if request.inputs is not None:
        hint = "omit them; the workload defines the inputs"
        raise UsageError("example inputs apply to a module given as an object", hint=hint)
    checkpoint = model if isinstance(model, Checkpoint) else Checkpoint.open(model)
    request = replace(request, training=native_training(checkpoint, request.training))
    try:
        subject = _subject_of_checkpoint(checkpoint, request)
    except ModelError as error:
        stop = stop_of(checkpoint, error) if checkpoint.builds_own_model else None
        if stop is None:
            raise
        is_trained = request.training is not None
        return CheckReport(model=checkpoint.source, devices=(), stop=stop, train=is_trained)
    subject = _prepare_to_train(subject, request.training)
    if checkpoint.builds_own_model:
        note = "" if subject.train else whole_prompt_note(checkpoint, subject.workload)
        sees = any(re.search("vision|visual", key) for key in checkpoint.config)
        hint = _NO_PICTURE if sees and not subject.workload.images else OTHER_VERSIONS
        return replace(subject, hint=hint, if_too_large=note)
    return replace(subject, not_run=checkpoint.untrusted_code)


def _with_offloaded(subject: Subject, placement: Where | None) -> Subject:
    """Return the subject with the plan's offloaded weights in host memory."""
    if not isinstance(placement, Plan) or not placement.offloaded:
        return subject
    if subject.train:
        raise UsageError(
            "a model with offloaded weights can't be trained, and the plan offloads "
            f"{len(placement.offloaded)} modules",
            hint="plan without offload, or check generation",
        )
    return replace(subject, offloaded=placement.offloaded)


def _prepare_to_train(subject: Subject, training: Training | None) -> Subject:
    """Return the subject prepared for its training method."""
    has_images = bool(subject.workload.images)
    if training is None or (training == Training(method="full") and not has_images):
        return subject
    frozen = find_unreached(subject.model) if has_images and not training.train_vision else ()
    make_trainable(subject.model, training, getattr(torch, subject.workload.dtype), frozen)
    # Adapters rename tensors, so that entries of single tensors must be completed again.
    return replace(subject, entries=complete_map(subject.model, subject.entries)[0])


def _with_largest_image(workload: Workload, sizes: Sequence[tuple[int, int]]) -> Workload:
    """Return the workload planned for images: their number, with the largest width and height."""
    if not sizes:
        return workload
    widths, heights = zip(*sizes, strict=True)
    return replace(workload, images=len(sizes), image_size=(max(heights), max(widths)))


def _with_images(subject: Subject, sizes: Sequence[tuple[int, int]]) -> Subject:
    """Return the subject with images in its prompt."""
    if not sizes:
        return subject
    if subject.inputs is not None:
        hint = "include the images in the inputs"
        raise UsageError("images can't be combined with example inputs", hint=hint)
    work, model = subject.workload, subject.model
    if not isinstance(model, PreTrainedModel):
        raise ModelError(
            f"{subject.name} is not a transformers model: its image format is unknown",
            hint="include the images in the inputs",
        )
    prompt = ImagePrompts(model, sizes).inputs(work.batch, work.prompt_tokens)
    return replace(subject, prompt=prompt)


def _subject_of_module(model: nn.Module, request: _CheckRequest) -> Subject:
    """Return the subject for a module: on its placement, a plan, or a split by bytes."""
    placement = request.placement
    if placement is None:
        call = _call_arguments(request.inputs)
        load = request.workload if call is None else None
        placement = _plan_all(partial(plan, model, workload=load, inputs=call), request)
    request, placement = _unpack_plan(request, placement)
    if placement is None:
        entries = _distribute(model, request.to_plan)
    elif isinstance(placement, Placement):
        entries = placement.entries
    else:
        entries = read_entries(dict(DeviceMap.of(placement).entries))
    entries, faults = complete_map(model, entries)
    is_whole = isinstance(placement, Placement) and not faults
    subject = _place_subject(model, entries, faults, request)
    return replace(subject, is_dispatched=is_whole, inputs=request.inputs)


def _unpack_plan(
    request: _CheckRequest, placement: Where | None
) -> tuple[_CheckRequest, Placement | DeviceMap | Mapping[str, Any] | str | None]:
    """Return the request with a plan's workload and fleet, and its placement; others unchanged."""
    if not isinstance(placement, Plan):
        return request, placement
    of_plan = replace(request, workload=placement.workload, fleet=placement.fleet)
    return of_plan, placement.placement


def _place_subject(
    model: nn.Module, entries: tuple[tuple[str, str], ...], faults: Faults, request: _CheckRequest
) -> Subject:
    """Return the subject of a check: a model on its devices."""
    workload, fleet = request.workload, request.fleet
    if workload.prefill_chunk_tokens == "auto":  # a single step, unless a plan or the user set it
        workload = replace(workload, prefill_chunk_tokens=None)
    return Subject(
        model=model,
        name=type(model).__name__,
        entries=entries,
        completeness=faults,
        budgets={device.name: device.budget_bytes for device in fleet.devices} if fleet else {},
        generation=None if fleet is None else fleet.gpu_generation,
        workload=workload,
        notes=tuple(request.notes),
        train=request.training is not None,
    )


def _call_arguments(inputs: Any) -> Mapping[str, Any] | tuple[Any, ...] | None:
    """Return the arguments of a single call; None if there is none, or inputs is a function."""
    if isinstance(inputs, Mapping) or inputs is None:
        return inputs
    if isinstance(inputs, torch.Tensor):
        return (inputs,)
    return None if callable(inputs) else tuple(inputs)


def _subject_of_checkpoint(checkpoint: Checkpoint, request: _CheckRequest) -> Subject:
    """Return the subject for a checkpoint: on its placement, a plan, or a split by bytes."""
    planned = request.placement
    if not isinstance(planned, Plan):
        request = replace(request, workload=workload_for(checkpoint, request.workload))
        if request.workload.quantize == "auto" and planned is not None:
            raise UsageError(
                'quantize="auto" needs a plan: with a device map no search takes place',
                hint="choose none, int8, int4 or nf4",
            )
    # Without a placement a plan decides. If the model's code would keep all layers on one device,
    # the layers are split by bytes instead, so that the check has boundaries to test; the plan is
    # made nevertheless, to report a refusal. A device map is validated against the traced blocks.
    faults, is_whole = Faults(), True
    if planned is None:
        if not _has_joined_layers(checkpoint, request):
            planned = _plan_of(checkpoint, request)
        elif request.training is None:
            try:
                plan(checkpoint, request.to_plan, request.workload, suggest=False)
            except DuokaError as error:
                request.refusals.append(error)
    if isinstance(planned, Plan):
        planned.refuse_other(checkpoint.fingerprint, checkpoint.source)
    request, placement = _unpack_plan(request, planned)
    model = build_model(checkpoint, request.workload)
    if placement is None:
        entries = _distribute(model, request.to_plan)
    elif isinstance(placement, Placement):
        entries = placement.entries
    else:
        outline = _outline(checkpoint, model, request)
        entries, faults, is_whole = _validate_map(outline, model, DeviceMap.of(placement), request)
    subject = _place_subject(model, entries, faults, request)
    return replace(subject, is_dispatched=is_whole, name=checkpoint.source)


def _outline(checkpoint: Checkpoint, model: nn.Module, request: _CheckRequest) -> Outline:
    """Return the blocks of a model; if its code can't be traced, just its tensor names."""
    try:
        return find_or_trace(checkpoint, request.workload).outline
    except (ModelError, UnknownValueError) as error:
        request.notes.append(f"{_UNTRACED}: {error}")
        request.refusals.append(error)
        return Outline.of_names((n for n, _ in tensor_names(model)), [*empty_modules(model)])


def _plan_of(checkpoint: Checkpoint, request: _CheckRequest) -> Plan | None:
    """Plan a checkpoint: for training if that is checked and a plan fits, else for generation.

    None if the model's code can't be traced.
    """

    def planned(load: Workload, *, suggest: bool = True) -> Plan | None:
        return _plan_all(partial(plan, checkpoint, workload=load), request, suggest=suggest)

    workload = request.workload
    if request.training and workload.training is None:
        try:
            training_plan = planned(learning(workload, request.training), suggest=False)
            several = len(request.to_plan.devices) > 1
            if training_plan is None or len(training_plan.devices) > 1 or not several:
                return training_plan
            request.notes.append(
                "this training can't be planned for several devices, because the model's code "
                "combines labels with tensors on another device; the placement is one for "
                "generation"
            )
        except InfeasibleError:
            request.notes.append("this training doesn't fit; the placement is one for generation")
    return planned(workload)


def _has_joined_layers(checkpoint: Checkpoint, request: _CheckRequest) -> bool:
    """Return True if a plan would keep all layers on one device, where nothing can be mixed.

    False if the user chose a strategy: then its plan is checked. Adds a note if True.
    """
    layers = None
    if checkpoint.builds_own_model and request.constraints.strategy == "auto":
        with suppress(ModelError, UnknownValueError):
            layers = find_or_trace(checkpoint, request.workload).outline.joined_layers
    if layers is not None:
        request.notes.append(
            f"the model's code combines the outputs of its layers, so a plan keeps {layers} on "
            'one device; here they are split over the devices as device_map="auto" does'
        )
    return layers is not None


def _plan_all(
    make_plan: Callable[..., Plan], request: _CheckRequest, *, suggest: bool = True
) -> Plan | None:
    """Plan for all devices, or as many as the model has blocks for; None if it can't be traced."""
    fleet, constraints = request.to_plan, request.constraints

    # A check uses as many devices as possible, because faults occur between devices. A model may
    # have fewer blocks than there are devices, so fewer and fewer devices are tried. The last
    # attempt leaves the number of devices to the planner, and its errors are the ones to report.
    def attempt() -> Plan:
        for count in range(len(fleet.devices), 1, -1):
            with suppress(UsageError, InfeasibleError):  # raised below if it persists
                subfleet = fleet.only(fleet.names[:count])
                plan = make_plan(subfleet, use_all=True, constraints=constraints, suggest=False)
                if count < len(fleet.devices):
                    request.notes.append(
                        f"the model has blocks for {count} of {len(fleet.devices)} devices"
                    )
                return plan
        return make_plan(fleet, constraints=constraints, suggest=suggest)

    try:
        return attempt()
    except (ModelError, UnknownValueError) as error:
        request.notes.append(f"{_SPLIT_BY_BYTES}: {error}")
        request.refusals.append(error)
        return None


def _distribute(model: nn.Module, fleet: Fleet) -> tuple[tuple[str, str], ...]:
    """Split a model over devices by bytes, if it can't be planned or its code joins its layers."""
    names = fleet.names
    for num_stages in range(len(names), 1, -1):
        for split in iter_splits(model, num_stages):
            return tuple((module, names[stage]) for module, stage in split.items())
    return (("", names[0]),)


def _validate_map(
    outline: Outline, model: nn.Module, device_map: DeviceMap, request: _CheckRequest
) -> tuple[tuple[tuple[str, str], ...], Faults, bool]:
    """Validate a device map and return its placement and errors.

    A complete map that splits blocks is run unchanged, so that its faults show. The last result is
    False for such a map, and True if the entries are whole blocks.
    """
    try:
        judgement = judge(device_map, outline, request.fleet)
        request.notes.extend(judgement.notes)
        return judgement.placed, Faults(), True
    except PlacementError as error:
        faults = error.faults
    entries, wrong = complete_map(model, read_entries(dict(device_map.entries)))
    if not wrong:
        return entries, faults, False
    if faults.completed is None:
        raise PlacementError("the device map names nothing of this model", hint=None, faults=faults)
    completed = dict(faults.completed)
    return judge(completed, outline, request.fleet).placed, faults, True
