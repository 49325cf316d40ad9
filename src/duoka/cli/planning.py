"""From the options of a command to a plan, and from a plan to a loaded model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import duoka
from duoka.api.plan import plan_copies, plan_request
from duoka.base.progress import heard_by, say, say_import
from duoka.base.text import choose
from duoka.base.units import parse_memory
from duoka.checkpoint.architecture import refuse_unbuildable
from duoka.checkpoint.config import is_for_transformers4
from duoka.checkpoint.tokenizer_files import refuse_unreadable
from duoka.errors import CheckpointError, ModelError, UsageError
from duoka.forecast.workload import BATCH_CACHES, Cache, Training, read_dtype, read_quantization
from duoka.hardware.parse import devices_in
from duoka.planner.constraints import STRATEGIES, Constraints, Strategy, strategy_of
from duoka.planner.device_map import DeviceMap
from duoka.planner.from_device_map import OBJECTIVE as GIVEN
from duoka.planner.limits import given_back
from duoka.planner.replicas import Replicas
from duoka.planner.request import Largest, PlanRequest
from duoka.planner.search import OBJECTIVES

from .groups import all_but, refuse_beside
from .options import IMAGE_SIZE, ModelOptions, PlanOptions, parse_chunk, parse_pixels, parse_tokens
from .terminal import note, progress_bars, stderr, working, write_file

if TYPE_CHECKING:
    from duoka.api.load import OpenedModel
    from duoka.engine import Engine
    from duoka.report.measured import Measured
    from duoka.runtime.prompt_reader import PromptReader

ALL_GPUS = "all"
_CONTEXT_TOKENS = 4096
_NEW_TOKENS = 512
_NEW_SHARE = 4
_SEQUENCES = 16
_SHOWN = 60


def open_model(
    plan: duoka.Plan, checkpoint: duoka.Checkpoint | None
) -> tuple[duoka.Plan, OpenedModel, PromptReader]:
    """Open the model of a plan for the present GPUs, before weights are read."""
    assert checkpoint is not None, "a model that is run was opened for its plan"
    plan = plan.on_this_machine()  # a GPU that is gone is told at once, before torch is imported
    with working():
        say_import("torch")
        from duoka.api.load import OpenedModel

        opened = OpenedModel(checkpoint, plan.workload)
        return plan, opened, opened.reader


def find_plan(
    model: ModelOptions,
    options: PlanOptions,
    training: Training | None = None,
    *,
    to_run: bool = False,
) -> tuple[duoka.Plan, duoka.Checkpoint | None]:
    """Take the saved plan, or make a new one, with `to_run` for a model to run.

    Returns the plan's checkpoint too, if it was opened.
    """
    if options.plan_file is None:
        if options.replan:
            raise UsageError("--replan needs a saved plan", hint="add --plan FILE")
        device_map = read_device_map(options)
        checkpoint, request, fleet = read_request(model, options, training, to_run=to_run)
        with working():
            return plan_request(checkpoint, request, fleet, device_map), checkpoint
    _refuse_beside_plan(options, training)
    if model.model is None:
        hint = "give the model; a saved plan has its own revision"
        model.refuse("revision", beside="--plan alone", hint=hint)
    plan = duoka.Plan.load(options.plan_file)
    if model.model is None and not options.replan and not model.trust_remote_code:
        if not to_run:
            return plan, None  # to look at it, neither need the checkpoint nor the GPUs be here
        checkpoint = duoka.Checkpoint.open(plan.source)
        refuse_unreadable(checkpoint)
        return plan, checkpoint
    checkpoint = open_checkpoint(replace(model, model=model.model or plan.source), to_run)
    if options.replan:
        plan = _plan_again(plan, checkpoint)
        save_plan(plan, options.plan_file)
        return plan, checkpoint
    plan.refuse_other(checkpoint.fingerprint, checkpoint.source)
    return replace(plan, source=checkpoint.source), checkpoint


def find_plan_for_requests(
    model: ModelOptions, options: PlanOptions, *, requests: int, batch: int
) -> tuple[duoka.Plan, duoka.Checkpoint | None, str]:
    """Take or make a plan with pages for so many requests, or give the reason for a batch."""
    # Pages first: the cache then takes all that is free. Models whose state isn't a cache of keys
    # and values raise ModelError when they are traced for it, and get a batch, as do the rest.
    why_not = ""
    if options.plan_file is not None:
        return *find_plan(model, options, to_run=True), ""
    if options.offload:
        why_not = "offloaded weights support only fixed batches"
    elif options.images:
        why_not = "prompts with images don't support the paged KV cache"
    elif options.cache in (None, "int8"):
        number = options.sequences or options.batch or requests
        served = replace(options, serve=True, sequences=number, batch=None)
        try:
            return *find_plan(model, served, to_run=True), ""
        except ModelError as error:
            why_not = str(error)
    number = options.sequences or options.batch or batch
    options = replace(options, serve=False, sequences=None, batch=number)
    return *find_plan(model, options, to_run=True), why_not


def find_replicas(
    model: ModelOptions,
    options: PlanOptions,
    training: Training | None,
    number: int | Literal["auto"],
) -> Replicas:
    """Make the plans of several copies of a model."""
    if options.plan_file is not None:
        _refuse_beside_plan(options, training)
    checkpoint, request, fleet = read_request(model, options, training)
    with working():
        return plan_copies(checkpoint, request, fleet, number)


def _plan_again(plan: duoka.Plan, checkpoint: duoka.Checkpoint) -> duoka.Plan:
    """Plan the request of a plan again, on its own GPUs as they are now."""
    device_map = DeviceMap.of(plan.device_map) if plan.objective == GIVEN else None
    fleet: duoka.Fleet | str = plan.request.gpus
    if not fleet:
        uuids = [device.uuid for device in plan.fleet.devices if device.uuid]
        fleet = duoka.Fleet.detect(",".join(uuids)) if uuids else given_back(plan)
    with working():
        return plan_request(checkpoint, plan.request, fleet, device_map)


def _refuse_beside_plan(options: PlanOptions, training: Training | None) -> None:
    """Refuse demands beside a saved plan, with everything decided."""
    beside = options.given_options(*all_but(PlanOptions, "plan_file", "replan"))
    again = "--replan repeats the original request; for another request "
    hint = f"{again if options.replan else ''}omit --plan to make a new one"
    refuse_beside(
        beside + ["--train"] * bool(training), "--plan, which already contains them", hint
    )


def open_checkpoint(options: ModelOptions, to_run: bool = False) -> duoka.Checkpoint:
    """Open the checkpoint of the options; show its own code before any runs."""
    if not options.model:
        raise UsageError(
            "no model was given", hint="give the directory of a checkpoint, or --plan FILE"
        )
    with working("reading the checkpoint"):
        checkpoint = duoka.Checkpoint.open(
            options.model, revision=options.revision, trust_remote_code=options.trust_remote_code
        )
    if not checkpoint.builds_own_model:
        refuse_unbuildable(checkpoint.config)
    if to_run and not checkpoint.has_weights:
        raise CheckpointError(
            f"{checkpoint.source} has no weight files",
            hint="plan for a directory with the weight files",
        )
    if checkpoint.remote_code:
        adapted = ""
        if is_for_transformers4(checkpoint.config):
            stated = checkpoint.config.get("transformers_version", "4")
            adapted = f", adapted from transformers {stated!s:.20} to {version('transformers')}"
        note(f"code of {checkpoint.source} is allowed to run{adapted}:")
        for name, sha256 in checkpoint.remote_code:
            note(f"  {name}  sha256 {sha256}")
    if to_run:
        refuse_unreadable(checkpoint)
    return checkpoint


# ── from words to a request ──


def read_request(
    model: ModelOptions,
    options: PlanOptions,
    training: Training | None = None,
    *,
    to_run: bool = False,
) -> tuple[duoka.Checkpoint, PlanRequest, duoka.Fleet | str]:
    """Read the model, the request and its fleet; this machine's GPUs are detected later."""
    # In the order of their costs: options that are wrong in themselves, declared GPUs, the model
    # (which may be a download), its limit. GPUs of this machine are detected where it is planned.
    request = PlanRequest(
        workload=read_workload(options, training),
        objective=choose("the objective", options.objective or "auto", OBJECTIVES),
        use_all=options.use_all,
        gpus=ALL_GPUS if options.gpus is None else options.gpus,
        constraints=read_constraints(options),
        largest=_largest(options),
        trust_remote_code=model.trust_remote_code,
        most_new_tokens=options.most_new_tokens,
    )
    fleet = read_fleet(request.gpus)
    say_quantization(options.quantize, request.workload)
    checkpoint = open_checkpoint(model, to_run)
    workload = read_workload(options, training, checkpoint.max_context_tokens)
    return checkpoint, replace(request, workload=workload), fleet


def read_fleet(gpus: str) -> duoka.Fleet | str:
    """Read declared GPUs; leave the text of this machine's own for `Fleet.parse` to detect."""
    return gpus if devices_in(gpus) is None else duoka.Fleet.parse(gpus)


def say_quantization(word: str | None, workload: duoka.Workload) -> None:
    """Report duoka's scheme for a word of bitsandbytes."""
    if word is not None and word != workload.quantize:
        note(f"--quantize {word}: {workload.quantize} weights")


def _largest(options: PlanOptions) -> Largest | None:
    hint = "give only one of them"
    if options.max_context:
        options.refuse("context", "max_batch", beside="--max-context", hint=hint)
        return "context"
    if options.max_batch:
        options.refuse("batch", "sequences", beside="--max-batch", hint=hint)
        return "batch"
    return None


def read_constraints(options: PlanOptions) -> Constraints:
    """Read the constraints of the placement."""
    return Constraints(
        strategy=_strategy(options),
        pins=tuple(_pairs("--pin", options.pin or (), "lm_head=cuda:1")),
        reserve=tuple(
            (device, parse_memory(size))
            for device, size in _pairs("--reserve", options.reserve or (), "cuda:0=2GiB")
        ),
        offload=options.offload,
    )


def _strategy(options: PlanOptions) -> Strategy:
    word = strategy_of(options.device_map)
    if word is not None:
        beside = f"--device-map {word}"
        options.refuse("strategy", beside=beside, hint="give only one of them")
    return choose("the strategy", options.strategy or word or "auto", STRATEGIES)


def given_map(options: PlanOptions) -> list[str]:
    """Return the option of a device map, unless its value is a strategy."""
    return [] if strategy_of(options.device_map) else options.given_options("device_map")


def read_device_map(options: PlanOptions) -> DeviceMap | None:
    """Read the device map; None without a map, and for a strategy."""
    return DeviceMap.load(options.device_map) if options.device_map and given_map(options) else None


def _pairs(option: str, texts: Sequence[str], example: str) -> Iterator[tuple[str, str]]:
    for text in texts:
        name, sign, value = text.rpartition("=")
        if not sign or not name.strip() or not value.strip():
            raise UsageError(
                f"{option} {text[:_SHOWN]!r} is not of the form NAME=VALUE",
                hint=f"for example {option} {example}",
            )
        yield name.strip(), value.strip()


def read_workload(
    options: PlanOptions, training: Training | None = None, limit: int | None = None
) -> duoka.Workload:
    """Read the workload; a context that isn't given is the default, at most the model's limit."""
    if options.serve:
        hint = "use --sequences N for the number of concurrent requests"
        demands = options.given_options("batch", "images", "offload")
        refuse_beside(demands + ["--train"] * bool(training), "--serve", hint)
    else:
        options.refuse("sequences", beside="a plan for one batch", hint="add --serve")
    if not options.images:
        beside = "a prompt without images"
        options.refuse("image_size", "vision_batch", beside=beside, hint="add --images N")
    context, new = _tokens(options, training, limit)
    width, height = parse_pixels(options.image_size or IMAGE_SIZE)
    return duoka.Workload(
        batch=_batch(options),
        prompt_tokens=context - new,
        new_tokens=new,
        dtype=read_dtype(options.dtype or "auto"),
        prefill_chunk_tokens=parse_chunk(options.prefill_chunk or "auto"),
        cache=_cache(options),
        quantize=read_quantization(options.quantize or "none"),
        images=options.images or 0,
        vision_batch=parse_chunk(options.vision_batch or "auto"),
        image_size=(height, width),
        training=training,
    )


def _cache(options: PlanOptions) -> Cache:
    if not options.serve:
        return choose("cache", options.cache or "dynamic", BATCH_CACHES)
    if options.cache not in (None, "int8"):
        raise UsageError(
            f"--cache {options.cache} can't be combined with --serve, whose KV cache is paged",
            hint="use --cache int8 for 8-bit pages, or omit it for the model's own type",
        )
    return "paged-int8" if options.cache else "paged"


def _batch(options: PlanOptions) -> int:
    """Return the sequences of a batch, or the requests running at once."""
    number, default = (options.sequences, _SEQUENCES) if options.serve else (options.batch, 1)
    return default if number is None else number


def _tokens(options: PlanOptions, training: Training | None, limit: int | None) -> tuple[int, int]:
    """Return the tokens of a sequence in all, and the new tokens."""
    context = min(_CONTEXT_TOKENS, limit or _CONTEXT_TOKENS)
    if options.context is not None:
        context = parse_tokens(options.context)
    new = options.most_new_tokens
    if training is not None:
        hint = "use --context for the sequence length"
        options.refuse("new_tokens", beside="training, which generates nothing", hint=hint)
        new = 0
    elif new is None:
        new = max(min(_NEW_TOKENS, context // _NEW_SHARE), 1)
    if options.max_context:
        context = max(context, new + 1)  # which is looked for
    if new >= context:
        raise UsageError(
            f"{new} new tokens leave no tokens for a prompt in a context of {context}",
            hint="--context includes prompt and generated tokens",
        )
    return context, new


# ── from a plan to files, and to a model ──


def save_plan(plan: duoka.Plan, file: Path) -> None:
    """Save a plan, and say so."""
    write_file(file, plan.lasting().to_json() + "\n")


def save_device_map(device_map: Mapping[str, int | str], file: Path) -> None:
    """Save a device map, and say so."""
    text = json.dumps(dict(device_map), indent=1, ensure_ascii=False)
    write_file(file, text + "\n")


def usable_system(reader: PromptReader, system: str | None) -> str | None:
    """Return the system's message if the model supports any; report if not."""
    from duoka.models.text.prompts import has_template, why_untold

    if not has_template(reader.chat):
        note("note: the model has no chat template: it continues the text that you write")
    reason = why_untold(reader.chat, system) if system else ""
    if reason:
        note(f"note: the model doesn't support --system: {reason}")
    return None if reason else system


def load_engine(
    plan: duoka.Plan, opened: OpenedModel, options: PlanOptions, adapter: str | None = None
) -> Engine:
    """Prove and load a plan in this process, with progress bars."""
    with heard_by(note), progress_bars() as bar:
        say(f"{plan.model} on {', '.join(plan.devices)}")
        return duoka.Engine(
            plan,
            processes=False,
            max_new_tokens=options.most_new_tokens,
            adapter=adapter,
            opened=opened,
            progress=bar("loading"),
            download_progress=bar("downloading"),
        )


def tell_measured(plan: duoka.Plan, measured: Measured) -> None:
    """Report the measurements of loading and answering, beside the forecast."""
    from duoka.report.terminal import render_measured

    stderr().print(render_measured(plan, measured))
