"""From the options of a command to a plan, and from a plan to a loaded model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
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
from duoka.forecast.workload import (
    BATCH_CACHES,
    Cache,
    Training,
    read_dtype,
    read_quantization,
)
from duoka.hardware.parse import devices_in
from duoka.planner.constraints import STRATEGIES, Constraints, Strategy, strategy_of
from duoka.planner.device_map import DeviceMap
from duoka.planner.from_device_map import OBJECTIVE as GIVEN
from duoka.planner.limits import given_back
from duoka.planner.replicas import Replicas
from duoka.planner.request import Largest, PlanRequest
from duoka.planner.search import OBJECTIVES

from .options import (
    ModelOptions,
    PlanOptions,
    given_options,
    parse_chunk,
    parse_pixels,
    parse_tokens,
    refuse_beside,
)
from .terminal import progress_bars, stderr, working, write_file

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


def make_plan(
    model: ModelOptions,
    options: PlanOptions,
    training: Training | None = None,
    *,
    to_run: bool = False,
) -> duoka.Plan:
    """Take the saved plan, or make a new plan; with `to_run` for a model to run."""
    return _find_plan(model, options, training, to_run=to_run)[0]


def plan_to_run(
    model: ModelOptions, options: PlanOptions
) -> tuple[duoka.Plan, OpenedModel, PromptReader]:
    """Take or make a plan for the present GPUs, and open its model."""
    return open_model(*_find_plan(model, options, to_run=True))


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


def _find_plan(
    model: ModelOptions,
    options: PlanOptions,
    training: Training | None = None,
    *,
    to_run: bool = False,
) -> tuple[duoka.Plan, duoka.Checkpoint | None]:
    """Take or make a plan; return its checkpoint too, if opened."""
    if model.model is None and model.revision is not None:
        raise UsageError(
            "--revision is for a model on the Hub, and no model was given",
            hint="name the model; a plan keeps its own revision",
        )
    if options.plan_file is None:
        if options.replan:
            raise UsageError("--replan is for a saved plan", hint="name it with --plan FILE")
        device_map = read_device_map(options)
        checkpoint, request, fleet = read_request(model, options, training, to_run=to_run)
        with working():
            return plan_request(checkpoint, request, fleet, device_map), checkpoint
    refuse_beside_plan(options, training)
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


def make_plan_for_requests(
    model: ModelOptions,
    options: PlanOptions,
    *,
    requests: int,
    batch: int,
) -> tuple[duoka.Plan, duoka.Checkpoint | None, str]:
    """Take or make a plan with pages for so many requests, or give the reason for a batch."""
    if options.plan_file is not None:
        return *_find_plan(model, options, to_run=True), ""
    why_not = ""
    if options.offload:
        why_not = "weights are offloaded for a batch"
    elif options.images:
        why_not = "prompts with images aren't read from pages"
    elif options.cache in (None, "int8"):
        number = options.sequences or options.batch or requests
        served = replace(options, serve=True, sequences=number, batch=None)
        try:
            return *_find_plan(model, served, to_run=True), ""
        except ModelError as error:
            why_not = str(error)
    number = options.sequences or options.batch or batch
    options = replace(options, serve=False, sequences=None, batch=number)
    return *_find_plan(model, options, to_run=True), why_not


def make_replicas(
    model: ModelOptions,
    options: PlanOptions,
    training: Training | None,
    number: int | Literal["auto"],
) -> Replicas:
    """Make the plans of several copies of a model."""
    if options.plan_file is not None:
        refuse_beside_plan(options, training)
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


def refuse_beside_plan(options: PlanOptions, training: Training | None = None) -> None:
    """Refuse demands beside a saved plan, with everything decided."""
    names = [item.name for item in fields(options) if item.name not in ("plan_file", "replan")]
    beside = given_options(options, *names) + (["--train"] if training is not None else [])
    again = "--replan asks again what the plan was made for; to ask for something else, "
    hint = f"{again if options.replan else ''}leave out --plan to make a new one"
    refuse_beside(beside, "--plan: the plan has decided that", hint)


def open_checkpoint(options: ModelOptions, to_run: bool = False) -> duoka.Checkpoint:
    """Open the checkpoint of the options; show its own code before any runs."""
    if not options.model:
        raise UsageError(
            "no model was given", hint="name the directory of a checkpoint, or a --plan"
        )
    with working("reading the checkpoint"):
        checkpoint = duoka.Checkpoint.open(
            options.model,
            revision=options.revision,
            trust_remote_code=options.trust_remote_code,
        )
    if not checkpoint.builds_own_model:
        refuse_unbuildable(checkpoint.config)
    if to_run and not checkpoint.has_weights:
        raise CheckpointError(
            f"{checkpoint.source} has no weights to load",
            hint="plan for a directory that holds the weight files",
        )
    if checkpoint.remote_code:
        console = stderr()
        adapted = ""
        if is_for_transformers4(checkpoint.config):
            stated = checkpoint.config.get("transformers_version", "4")
            adapted = f", adapted from transformers {stated!s:.20} to {version('transformers')}"
        heading = f"code that comes with {checkpoint.source} may run{adapted}:"
        console.print(heading, markup=False, soft_wrap=True)
        for name, sha256 in checkpoint.remote_code:
            console.print(f"  {name}  sha256 {sha256}", markup=False, soft_wrap=True)
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
    workload = shorten_default(request.workload, checkpoint.max_context_tokens, options, training)
    return checkpoint, replace(request, workload=workload), fleet


def read_fleet(gpus: str) -> duoka.Fleet | str:
    """Read declared GPUs; leave the text of this machine's own for `Fleet.parse` to detect."""
    return gpus if devices_in(gpus) is None else duoka.Fleet.parse(gpus)


def say_quantization(word: str | None, workload: duoka.Workload) -> None:
    """Report duoka's scheme for a word of bitsandbytes."""
    if word is not None and word != workload.quantize:
        stderr().print(f"--quantize {word}: weights in {workload.quantize}", markup=False)


def _largest(options: PlanOptions) -> Largest | None:
    for is_wanted, size, name, kind in (
        (options.max_context, options.context, "context", "context"),
        (options.max_batch, options.batch, "batch", "batch"),
        (options.max_batch, options.sequences, "sequences", "batch"),
    ):
        if is_wanted and size is not None:
            raise UsageError(
                f"--{name} says how large it is, and --max-{kind} asks for that",
                hint="give one of the two",
            )
    if options.max_context and options.max_batch:
        raise UsageError(
            "--max-context and --max-batch: the more of one, the less of the other",
            hint="give one of them, and a number for the other",
        )
    return "context" if options.max_context else "batch" if options.max_batch else None


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
    strategy = choose("the strategy", options.strategy or word or "auto", STRATEGIES)
    if word not in (None, strategy):
        raise UsageError(
            f"--strategy {strategy} and --device-map {word} say two things of one",
            hint="give one of the two",
        )
    return strategy


def given_map(options: PlanOptions) -> list[str]:
    """Return the option of a device map, unless its value is a strategy."""
    return given_options(options, "device_map") if strategy_of(options.device_map) is None else []


def read_device_map(options: PlanOptions) -> DeviceMap | None:
    """Read the device map; None without a map, and for a strategy."""
    return DeviceMap.load(options.device_map) if options.device_map and given_map(options) else None


def _pairs(option: str, texts: Sequence[str], example: str) -> Iterator[tuple[str, str]]:
    for text in texts:
        name, sign, value = text.rpartition("=")
        if not sign or not name.strip() or not value.strip():
            raise UsageError(
                f"{option} {text[:_SHOWN]!r} is not two parts with a = between them",
                hint=f"as {option} {example}",
            )
        yield name.strip(), value.strip()


def shorten_default(
    workload: duoka.Workload,
    limit: int | None,
    options: PlanOptions,
    training: Training | None = None,
) -> duoka.Workload:
    """Shorten a default context to the model's limit."""
    if limit is None or options.context is not None:
        return workload
    context, new = _tokens(options, training, limit)
    return replace(workload, prompt_tokens=context - new, new_tokens=new)


def read_workload(options: PlanOptions, training: Training | None = None) -> duoka.Workload:
    """Read the workload of the options."""
    context, new = _tokens(options, training)
    refuse_unserved(options, training)
    workload = duoka.Workload(
        batch=_batch(options),
        prompt_tokens=context - new,
        new_tokens=new,
        dtype=read_dtype(options.dtype or "auto"),
        prefill_chunk_tokens=parse_chunk(options.prefill_chunk or "auto"),
        cache=_cache(options),
        quantize=read_quantization(options.quantize or "none"),
        images=options.images or 0,
        vision_batch=parse_chunk(options.vision_batch or "auto"),
        training=training,
    )
    for option, value in (
        ("--image-size", options.image_size),
        ("--vision-batch", options.vision_batch),
    ):
        if value is not None and not options.images:
            raise UsageError(f"{option} is for images, and there are none", hint="say --images N")
    if options.image_size is None:
        return workload
    pixels = parse_pixels(options.image_size)
    if pixels is None:
        raise UsageError(
            f"{options.image_size!r} is not the size of an image",
            hint="write width and height in pixels, as 1120x1120",
        )
    return replace(workload, image_size=(pixels[1], pixels[0]))


def _cache(options: PlanOptions) -> Cache:
    if not options.serve:
        return choose("cache", options.cache or "dynamic", BATCH_CACHES)
    if options.cache not in (None, "int8"):
        raise UsageError(
            f"--cache {options.cache} can't be given with --serve, whose cache is in pages",
            hint="--cache int8 makes pages of 8 bit; without it they are in the model's own type",
        )
    return "paged-int8" if options.cache else "paged"


def _batch(options: PlanOptions) -> int:
    """Return the sequences of a batch, or the requests running at once."""
    if options.serve:
        return _SEQUENCES if options.sequences is None else options.sequences
    return 1 if options.batch is None else options.batch


def refuse_unserved(options: PlanOptions, training: Training | None) -> None:
    """Refuse options against --serve, and options for --serve alone."""
    if not options.serve:
        refuse_beside(
            given_options(options, "sequences"), "a plan for one batch", "say --serve as well"
        )
        return
    names = "batch", "images", "offload"
    refuse_beside(
        [*given_options(options, *names), *(["--train"] if training else [])],
        "--serve",
        "--sequences N says how many requests are answered at once",
    )


def _tokens(
    options: PlanOptions, training: Training | None, limit: int = _CONTEXT_TOKENS
) -> tuple[int, int]:
    """Return the tokens of a sequence in all, and the new tokens."""
    context = min(_CONTEXT_TOKENS, limit)
    if options.context is not None:
        context = parse_tokens(options.context)
    new = max(min(_NEW_TOKENS, context // _NEW_SHARE), 1)
    if training is not None:
        if options.new_tokens is not None:
            raise UsageError(
                "--new-tokens is for answers, and training has none",
                hint="--context is the length of a sequence",
            )
        new = 0
    if options.most_new_tokens is not None:
        new = options.most_new_tokens
    if options.max_context:
        context = max(context, new + 1)  # which is looked for
    if new >= context:
        raise UsageError(
            f"{new} new tokens leave no room for a prompt in a context of {context}",
            hint="--context counts the prompt and the answer together",
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

    console = stderr()
    if not has_template(reader.chat):
        text = "the model comes with no chat template: it continues the text that you write"
        console.print(f"note: {text}", soft_wrap=True)
    reason = why_untold(reader.chat, system) if system else ""
    if reason:
        text = f"note: the model can't be told --system: {reason}"
        console.print(text, markup=False, soft_wrap=True)
    return None if reason else system


def load_engine(
    plan: duoka.Plan, opened: OpenedModel, options: PlanOptions, adapter: str | None = None
) -> Engine:
    """Prove and load a plan in this process, with progress bars."""
    report = partial(stderr().print, markup=False, soft_wrap=True)
    with heard_by(report), progress_bars() as bar:
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
