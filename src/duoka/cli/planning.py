"""Make or load the plan for a command's options, and load the model of a plan."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import duoka
from duoka.api.plan import plan_copies, plan_request
from duoka.base.progress import heard_by, say, say_import
from duoka.base.text import choose
from duoka.base.units import parse_memory
from duoka.checkpoint.adapters import parse_adapter
from duoka.checkpoint.architecture import refuse_unbuildable
from duoka.checkpoint.config import is_for_transformers4
from duoka.checkpoint.tokenizer_files import refuse_unreadable
from duoka.errors import CheckpointError, ModelError, UsageError
from duoka.forecast.workload import CACHES, Cache, Training, read_dtype, read_quantization
from duoka.hardware.parse import devices_in, read_host
from duoka.planner.constraints import (
    STRATEGIES,
    Constraints,
    Experts,
    HostExperts,
    Strategy,
    strategy_of,
)
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
_SEQUENCE_TOKENS = 2048  # in training
_NEW_TOKENS = 512
_CONTEXT_PER_NEW = 4
_SEQUENCES = 16
_SERVED_CACHES = ("paged", "int8", "paged-int8")
_MAX_QUOTED = 60


def open_model(
    plan: duoka.Plan, checkpoint: duoka.Checkpoint | None
) -> tuple[duoka.Plan, OpenedModel, PromptReader]:
    """Open the model of a plan for this machine's GPUs; no weights are read.

    Returns the plan with this machine's devices, the opened model, and its prompt reader.
    """
    assert checkpoint is not None, "a model that is run was opened for its plan"
    plan = plan.on_this_machine()  # refuses a missing GPU before torch is imported
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
    replacement_cache: Cache | None = None,
) -> tuple[duoka.Plan, duoka.Checkpoint | None]:
    """Load the saved plan of --plan, or make a new plan.

    `to_run` also requires weights and a readable tokenizer. A model that doesn't support a paged
    cache gets the `replacement_cache`, if given. Returns the plan and its checkpoint; the
    checkpoint is None if a saved plan is only shown (no model given, nothing to run).
    """
    if options.plan_file is None:
        if options.replan:
            raise UsageError("--replan needs a saved plan", hint="add --plan FILE")
        device_map = read_device_map(options)
        checkpoint, request, fleet = read_request(model, options, training, to_run=to_run)
        with working():
            try:
                return plan_request(checkpoint, request, fleet, device_map), checkpoint
            except ModelError as error:
                if replacement_cache is None:
                    raise
                note(f"A KV cache per prompt instead of a paged one: {error}")
            workload = replace(request.workload, cache=replacement_cache)
            request = replace(request, workload=workload)
            return plan_request(checkpoint, request, fleet, device_map), checkpoint
    _refuse_demands_beside_plan(options, training)
    if model.model is None:
        hint = "give the model; a saved plan has its own revision"
        model.refuse("revision", beside="--plan alone", hint=hint)
    plan = duoka.Plan.load(options.plan_file)
    if model.model is None and not options.replan and not model.trust_remote_code:
        if not to_run:
            return plan, None  # a plan can be shown without its checkpoint and its GPUs
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


def find_plan_to_answer(
    model: ModelOptions, options: PlanOptions
) -> tuple[duoka.Plan, duoka.Checkpoint | None]:
    """Load or make a plan for `generate` and `chat`: with a paged KV cache if possible.

    The cache has the pages of `batch` full contexts. Prompts with images, offloaded weights, and
    models whose layers can't read pages get a cache per sequence.
    """
    has_own_cache = options.images or options.offload or options.cache not in (None, "int8")
    if options.plan_file is not None or has_own_cache:
        return find_plan(model, options, to_run=True)
    cache: Cache = "int8" if options.cache else "dynamic"
    options = replace(options, cache="paged-int8" if options.cache else "paged")
    return find_plan(model, options, to_run=True, replacement_cache=cache)


def find_plan_for_requests(
    model: ModelOptions, options: PlanOptions, *, requests: int, batch: int
) -> tuple[duoka.Plan, duoka.Checkpoint | None, str]:
    """Load or make a plan with a paged KV cache; if that is impossible, plan a fixed batch.

    `requests` and `batch` are the numbers of sequences of the two kinds of plans if no option gives
    one. The third result is the reason for the fixed batch, or "".
    """
    # Pages are tried first: a paged cache fills the free memory. Tracing raises ModelError for
    # models whose state is not a cache of keys and values; they get a fixed batch, as does any
    # request that pages don't support.
    why_not = ""
    if options.plan_file is not None:
        return *find_plan(model, options, to_run=True), ""
    if options.offload:
        why_not = "offloaded weights support only fixed batches"
    elif options.images:
        why_not = "prompts with images don't support the paged KV cache"
    elif options.cache != "dynamic":
        number = options.sequences or options.batch or requests
        served = replace(options, serve=True, sequences=number, batch=None)
        try:
            return *find_plan(model, served, to_run=True), ""
        except ModelError as error:
            if options.adapter:
                raise
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
    """Make a plan for each replica of a model; `number` is their number, or "auto"."""
    if options.plan_file is not None:
        _refuse_demands_beside_plan(options, training)
    checkpoint, request, fleet = read_request(model, options, training)
    with working():
        return plan_copies(checkpoint, request, fleet, number)


def _plan_again(plan: duoka.Plan, checkpoint: duoka.Checkpoint) -> duoka.Plan:
    """Repeat the request of a saved plan, on the same GPUs with their current free memory."""
    device_map = DeviceMap.of(plan.device_map) if plan.objective == GIVEN else None
    fleet: duoka.Fleet | str = plan.request.gpus
    if not fleet:
        uuids = [device.uuid for device in plan.fleet.devices if device.uuid]
        fleet = duoka.Fleet.detect(",".join(uuids)) if uuids else given_back(plan)
    with working():
        return plan_request(checkpoint, plan.request, fleet, device_map)


def _refuse_demands_beside_plan(options: PlanOptions, training: Training | None) -> None:
    """Refuse planning options beside --plan: a saved plan has already decided them."""
    beside = options.given_options(*all_but(PlanOptions, "plan_file", "replan"))
    again = "--replan repeats the original request; for another request "
    hint = f"{again if options.replan else ''}omit --plan to make a new one"
    refuse_beside(
        beside + ["--train"] * bool(training), "--plan, which already contains them", hint
    )


def open_checkpoint(options: ModelOptions, to_run: bool = False) -> duoka.Checkpoint:
    """Open the checkpoint of the options; list its own code files before any of them runs."""
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


# ── from options to a request ──


def read_request(
    model: ModelOptions,
    options: PlanOptions,
    training: Training | None = None,
    *,
    to_run: bool = False,
) -> tuple[duoka.Checkpoint, PlanRequest, duoka.Fleet | str]:
    """Open the checkpoint and read the request and its fleet.

    The fleet is text if it names GPUs of this machine, which are detected later.
    """
    # Cheap checks come first: options that are invalid on their own, declared GPUs, then the model
    # (maybe a download) and its context limit. GPUs of this machine are detected by the planner.
    request = PlanRequest(
        workload=read_workload(options, training),
        objective=choose("the objective", options.objective or "auto", OBJECTIVES),
        use_all=options.use_all,
        gpus=ALL_GPUS if options.gpus is None else options.gpus,
        constraints=read_constraints(options),
        largest=_quantity_to_maximize(options),
        trust_remote_code=model.trust_remote_code,
        host=None if options.host_memory is None else read_host(options.host_memory),
        most_new_tokens=options.most_new_tokens,
    )
    fleet = read_fleet(request.gpus)
    say_quantization(options.quantize, request.workload)
    checkpoint = open_checkpoint(model, to_run)
    workload = read_workload(options, training, checkpoint.max_context_tokens)
    return checkpoint, replace(request, workload=workload), fleet


def read_fleet(gpus: str) -> duoka.Fleet | str:
    """Parse declared GPUs; return text for GPUs of this machine, which are detected later."""
    return gpus if devices_in(gpus) is None else duoka.Fleet.parse(gpus)


def say_quantization(word: str | None, workload: duoka.Workload) -> None:
    """Print the quantization that an alias such as 4bit stands for; nothing for other words."""
    if word is not None and word != workload.quantize:
        note(f"--quantize {word}: {workload.quantize} weights")


def _quantity_to_maximize(options: PlanOptions) -> Largest | None:
    """Return the quantity of --max-context or --max-batch; None without either option."""
    hint = "give only one of them"
    if options.max_context:
        options.refuse("context", "max_batch", beside="--max-context", hint=hint)
        return "context"
    if options.max_batch:
        options.refuse("batch", "sequences", beside="--max-batch", hint=hint)
        return "batch"
    return None


def read_constraints(options: PlanOptions) -> Constraints:
    """Read the strategy, pins, reserved memory and offloading."""
    return Constraints(
        strategy=_read_strategy(options),
        pins=tuple(_read_pairs("--pin", options.pin or (), "lm_head=cuda:1")),
        reserve=tuple(
            (device, parse_memory(size))
            for device, size in _read_pairs("--reserve", options.reserve or (), "cuda:0=2GiB")
        ),
        offload=options.offload,
        experts=cast(Experts, options.experts or "auto"),
        host_experts=cast(HostExperts, options.host_experts or "auto"),
        expert_cache=(
            None if options.expert_cache in (None, "auto") else parse_memory(options.expert_cache)
        ),
    )


def _read_strategy(options: PlanOptions) -> Strategy:
    """Return the strategy, also if it was given as the value of --device-map."""
    word = strategy_of(options.device_map)
    if word is not None:
        beside = f"--device-map {word}"
        options.refuse("strategy", beside=beside, hint="give only one of them")
    return choose("the strategy", options.strategy or word or "auto", STRATEGIES)


def given_map(options: PlanOptions) -> list[str]:
    """Return ["--device-map"] if it gives a map; [] without one or if its value is a strategy."""
    return [] if strategy_of(options.device_map) else options.given_options("device_map")


def read_device_map(options: PlanOptions) -> DeviceMap | None:
    """Read the device map; None if --device-map is not given or names a strategy."""
    return DeviceMap.load(options.device_map) if options.device_map and given_map(options) else None


def _read_pairs(option: str, texts: Sequence[str], example: str) -> Iterator[tuple[str, str]]:
    """Split NAME=VALUE texts of an option at the last "="; UsageError shows the example."""
    for text in texts:
        name, sign, value = text.rpartition("=")
        if not sign or not name.strip() or not value.strip():
            raise UsageError(
                f"{option} {text[:_MAX_QUOTED]!r} is not of the form NAME=VALUE",
                hint=f"for example {option} {example}",
            )
        yield name.strip(), value.strip()


def read_workload(
    options: PlanOptions, training: Training | None = None, limit: int | None = None
) -> duoka.Workload:
    """Read the workload; `limit` is the model's maximum context, which caps the default one."""
    if options.serve:
        hint = "use --sequences N for the number of concurrent requests"
        demands = options.given_options("batch", "images", "offload")
        refuse_beside(demands + ["--train"] * bool(training), "--serve", hint)
    else:
        options.refuse("sequences", beside="a plan for one batch", hint="add --serve")
    if not options.images:
        beside = "a prompt without images"
        options.refuse("image_size", "vision_batch", beside=beside, hint="add --images N")
    cache = _read_cache(options)
    if cache.startswith("paged"):
        options.refuse("offload", beside=f"--cache {cache}", hint="use --cache dynamic")
    context, new = _tokens(options, training, limit)
    width, height = parse_pixels(options.image_size or IMAGE_SIZE)
    return duoka.Workload(
        batch=_concurrent_sequences(options),
        prompt_tokens=context - new,
        new_tokens=new,
        dtype=read_dtype(options.dtype or "auto"),
        prefill_chunk_tokens=parse_chunk(options.prefill_chunk or "auto"),
        cache=cache,
        adapters=tuple(map(parse_adapter, options.adapter or ())),
        pages_for_batch=not options.serve,
        cuda_graphs=not options.no_graphs,
        quantize=read_quantization(options.quantize or "none"),
        images=options.images or 0,
        vision_batch=parse_chunk(options.vision_batch or "auto"),
        image_size=(height, width),
        training=training,
    )


def _read_cache(options: PlanOptions) -> Cache:
    """Return the kind of KV cache, which is always paged with --serve."""
    if not options.serve:
        return choose("cache", options.cache or "dynamic", CACHES)
    cache = choose("the cache for --serve", options.cache or "paged", _SERVED_CACHES)
    return "paged" if cache == "paged" else "paged-int8"


def _concurrent_sequences(options: PlanOptions) -> int:
    """Return the number of concurrent requests with --serve, otherwise the batch size."""
    number, default = (options.sequences, _SEQUENCES) if options.serve else (options.batch, 1)
    return default if number is None else number


def _tokens(options: PlanOptions, training: Training | None, limit: int | None) -> tuple[int, int]:
    """Return the total tokens of a sequence, and how many of them are generated."""
    context = _CONTEXT_TOKENS if training is None else _SEQUENCE_TOKENS
    context = min(context, limit or context)
    if options.context is not None:
        context = parse_tokens(options.context)
    new = options.most_new_tokens
    if training is not None:
        hint = "use --context for the sequence length"
        options.refuse("new_tokens", beside="training, which generates nothing", hint=hint)
        new = 0
    elif new is None:
        new = max(min(_NEW_TOKENS, context // _CONTEXT_PER_NEW), 1)
    if options.max_context:
        context = max(context, new + 1)  # a placeholder: the search replaces it
    if new >= context:
        raise UsageError(
            f"{new} new tokens leave no tokens for a prompt in a context of {context}",
            hint="--context includes prompt and generated tokens",
        )
    return context, new


def fit_to_data(
    model: ModelOptions, options: PlanOptions, training: Training, data: Sequence[str]
) -> PlanOptions:
    """Return the options with the sequence length and the images that training data need."""
    beside = "--data, which has the images"
    options.refuse("images", "image_size", beside=beside, hint="omit them")
    read_fleet(options.gpus or ALL_GPUS)
    checkpoint = open_checkpoint(model)
    with heard_by(note):
        say_import("torch")
        from duoka.tuner.prepare import read_data
        from duoka.tuner.settings import TuneSettings

        settings = TuneSettings(
            seq_length=None if options.context is None else parse_tokens(options.context),
            packing=training.rows == "packed",
            train_vision=training.train_vision,
            dpo=training.dpo,
        )
        settings, _ = read_data(checkpoint, data, settings)
    context = settings.workload(checkpoint).prompt_tokens
    options = replace(options, context=str(context))
    if settings.image_size is None:
        return options
    height, width = settings.image_size
    return replace(options, images=settings.images, image_size=f"{width}x{height}")


# ── saving a plan and loading its model ──


def save_plan(plan: duoka.Plan, file: Path) -> None:
    """Write a plan to a file, and report the file."""
    write_file(file, plan.lasting().to_json() + "\n")


def save_device_map(device_map: Mapping[str, int | str], file: Path) -> None:
    """Write a device map to a JSON file, and report the file."""
    text = json.dumps(dict(device_map), indent=1, ensure_ascii=False)
    write_file(file, text + "\n")


def usable_system(reader: PromptReader, system: str | None) -> str | None:
    """Return the system prompt, or None (with a note) if the model's format has none."""
    from duoka.models.text.prompts import has_template, why_no_system_message

    if not has_template(reader.chat):
        note("note: the model has no chat template: it continues the text that you write")
    reason = why_no_system_message(reader.chat, system) if system else ""
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
            # On virtual GPUs, which compute on the CPU, the largest steps take minutes.
            warm_up="first" if plan.devices[0].startswith("vgpu") else "largest",
            adapter=adapter,
            opened=opened,
            progress=bar("loading"),
            download_progress=bar("downloading"),
        )


def tell_measured(plan: duoka.Plan, measured: Measured) -> None:
    """Print the measured memory and speed beside the forecast."""
    from duoka.report.terminal import render_measured

    stderr().print(render_measured(plan, measured))
