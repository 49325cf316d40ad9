"""Prepare a run: read the data, and plan each replica."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from PIL.Image import new as new_image
from transformers import PreTrainedTokenizerBase

from duoka.api.plan import plan as make_plan
from duoka.api.plan import plan_replicas
from duoka.base.progress import say
from duoka.base.units import format_count
from duoka.checker.prove import prove
from duoka.checkpoint.checkpoint import Checkpoint
from duoka.errors import InfeasibleError, UsageError
from duoka.forecast.workload import Workload
from duoka.hardware.fleet import Fleet
from duoka.hardware.host import refuse_more
from duoka.models.from_checkpoint import build_model, chat_format_of, tokenizer_of
from duoka.models.lora import LoraAdapter, fill_adapter, native_form, refuse_other_model
from duoka.models.text.chatglm_tokenizer import ChatGLMTokenizer
from duoka.models.text.prompts import ChatFormat
from duoka.planner.constraints import Constraints
from duoka.planner.plan import Plan
from duoka.planner.search import Objective
from duoka.runtime.image_inputs import prompts_for
from duoka.runtime.load.adapter import read_adapter
from duoka.runtime.prepare_training import prepare_for_training

from .data import Dataset, image_size, read_dataset, refuse_packing
from .result import write_adapter
from .run import RunDirectory
from .settings import TuneSettings
from .suggestions import with_suggestions
from .trackers import refuse_missing

_FLOAT32 = Workload(dtype="float32")  # for models without data
_LENGTH_MULTIPLE = 8  # sequence lengths are rounded up to a multiple, for tensor cores
NumReplicas = int | Literal["auto"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneRun:
    """A run ready to start, with plans and samples.

    Parameters
    ----------
    checkpoint : Checkpoint
        The checkpoint of the model.
    settings : TuneSettings
    plans : tuple of Plan
        The plan of each replica.
    samples, eval_samples, eval_prompts : Dataset
        Samples for training, and for evaluations of the loss; and prompts to answer at these. The
        latter two may be None.
    adapter : LoraAdapter, optional
        The adapter that training starts from, in native form.
    """

    checkpoint: Checkpoint
    settings: TuneSettings
    plans: tuple[Plan, ...]
    samples: Dataset
    eval_samples: Dataset | None = None
    eval_prompts: Dataset | None = None
    adapter: LoraAdapter | None = None

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Tokenizer of the model."""
        return tokenizer_of(self.checkpoint, ChatGLMTokenizer)

    def write(self, directory: RunDirectory) -> None:
        """Prove the plans, download the weights, and write samples, adapter and ``run.json``."""
        prove_plans(self.checkpoint, self.plans)
        self.checkpoint.fetch(None)
        paths = directory.samples, directory.eval_samples, directory.eval_prompts
        datasets = self.samples, self.eval_samples, self.eval_prompts
        for path, dataset in zip(paths, datasets, strict=True):
            if dataset is not None:
                dataset.save(path)
        if self.adapter is not None:
            write_adapter(directory.first_adapter, self.adapter, self.checkpoint)
        trusts = self.checkpoint.trust_remote_code
        directory.write(self.settings, self.plans, trust_remote_code=trusts)


def prepare(
    checkpoint: Checkpoint,
    data: Sequence[str],
    fleet: Fleet | str,
    settings: TuneSettings,
    *,
    replicas: NumReplicas = "auto",
    plan: Plan | None = None,
    adapter: Path | None = None,
) -> TuneRun:
    """Read the data, choose the sequence length, and plan unless a plan is given."""
    if checkpoint.config.get("is_encoder_decoder"):
        raise UsageError(
            f"{checkpoint.name} is an encoder-decoder model, and duoka tune supports causal models",
            hint="use duoka.dispatch(model, plan) with your own training loop",
        )
    refuse_missing(settings.report_to)
    native_adapter = None
    if adapter is not None:
        native_adapter = native_form(read_adapter(adapter), checkpoint.config)
        settings = settings.starting_from(native_adapter)
    if plan is not None:
        plan = _check_plan(plan, checkpoint, settings)
    settings, datasets = read_data(checkpoint, data, settings, plan)
    if native_adapter is not None:
        workload = settings.workload(checkpoint) if plan is None else plan.workload
        _refuse_unfit_adapter(native_adapter, checkpoint, workload)
    if settings.packing:
        refuse_packing(build_model(checkpoint, _FLOAT32).config)
    longest = int(datasets[0].lengths.argmax())
    tokens = f"{datasets[0].lengths[longest]:,} tokens ({datasets[0].place(longest)})"
    because = f"; the longest sample has {tokens}"
    return TuneRun(
        checkpoint=checkpoint,
        settings=settings,
        samples=datasets[0],
        eval_samples=datasets[1] if len(datasets) > 1 else None,
        eval_prompts=datasets[2] if len(datasets) > 2 else None,
        plans=(plan,)
        if plan
        else plans_for(checkpoint, fleet, settings, replicas, because=because),
        adapter=native_adapter,
    )


def read_data(
    checkpoint: Checkpoint, data: Sequence[str], settings: TuneSettings, plan: Plan | None = None
) -> tuple[TuneSettings, list[Dataset]]:
    """Read the samples; return the settings with the images and the length that they need.

    The second result has the samples for training and, if there are any, those for evaluation.
    With a plan its sequence length is kept, and its images must suffice.
    """
    workload = settings.workload(checkpoint) if plan is None else plan.workload
    checkpoint.fetch_tokenizer()
    chat = chat_format_of(checkpoint, tokenizer_of(checkpoint, ChatGLMTokenizer))
    datasets = _read_datasets(chat, data, settings, workload)
    settings = _with_images(settings, datasets, chat)
    workload = settings.workload(checkpoint) if plan is None else workload
    _refuse_unfit_images(settings, workload)
    if plan is None and settings.seq_length is None and not settings.packing:
        length = _sequence_length(datasets, checkpoint, workload)
        settings = replace(settings, seq_length=length)
        datasets = [replace(dataset, seq_length=length) for dataset in datasets]
    return settings, datasets


def _read_datasets(
    chat: ChatFormat, data: Sequence[str], settings: TuneSettings, workload: Workload
) -> list[Dataset]:
    """Read the samples for training, and those and the prompts for evaluation, if there are any."""
    share = settings.eval_share
    sources = (data, settings.eval_data if share is None else (), settings.eval_prompts)
    datasets = [
        read_dataset(
            paths,
            chat,
            settings,
            # A packed row ends with one token of padding: see `TrainingMicroBatch.length`.
            seq_length=workload.prompt_tokens - settings.packing,
            is_training=paths is data,
            has_prompts=paths is settings.eval_prompts,
        )
        for paths in sources
        if paths
    ]
    if share is not None:
        datasets[:1] = datasets[0].split(share, settings.seed)
    return datasets


def _with_images(
    settings: TuneSettings, datasets: Sequence[Dataset], chat: ChatFormat
) -> TuneSettings:
    """Return the settings with the number and the size of images that each sequence may have.

    The size is that of the largest image, and the number such that these have as many pixels as all
    images of any sample: models with one size for all images get the largest number of a sample.
    """
    samples = [[*map(image_size, it)] for data in datasets for it in data.images if it]
    if not samples:
        if settings.train_vision:
            raise UsageError(
                "the data has no images to train the vision tower on", hint="omit --train-vision"
            )
        return settings
    if settings.packing:
        raise UsageError("samples with images can't be packed", hint="train without --packing")
    reader = chat.images
    assert reader is not None, "the images have been read for it"
    sizes = {size for sample in samples for size in sample}
    pixels = {size: reader.pixel_count(new_image("RGB", size)) for size in sizes}
    largest = max(sizes, key=lambda size: (pixels[size], size))
    number = max(-(-sum(pixels[size] for size in sample) // pixels[largest]) for sample in samples)
    return replace(settings, images=number, image_size=largest[::-1])


def _refuse_unfit_images(settings: TuneSettings, planned: Workload) -> None:
    """Raise UsageError for a given plan without memory for the data's images, or its own stages."""
    if settings.image_size is None:
        return
    height, width = settings.image_size
    limits, needs = (planned.images, *planned.image_size), (settings.images, height, width)
    rows = "packed" if planned.training is None else planned.training.rows
    if rows == "padded" or any(map(int.__lt__, limits, needs)):
        options = f"--images {settings.images} --image-size {width}x{height} --rows unpadded"
        raise UsageError(
            f"the plan is for {format_count(planned.images, 'image')} per sequence and {rows} rows;"
            f" the data needs {format_count(settings.images, 'image')} of {width}x{height} and "
            "unpadded rows",
            hint=f"omit --plan, or create a plan with {options}",
        )


def _sequence_length(
    datasets: Sequence[Dataset], checkpoint: Checkpoint, workload: Workload
) -> int:
    """Return the length of the longest sample, rounded up, with room for the planned images."""
    num_tokens = max(int(dataset.lengths.max()) for dataset in datasets)
    length = min(-(-num_tokens // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE, datasets[0].seq_length)
    if not workload.images:
        return length
    prompts = prompts_for(build_model(checkpoint, _FLOAT32), workload.conditions)
    return length if prompts is None else max(length, prompts.least_tokens)


def _refuse_unfit_adapter(adapter: LoraAdapter, checkpoint: Checkpoint, workload: Workload) -> None:
    """Raise LoadError for an adapter that doesn't match the model or the run's LoRA settings."""
    model = build_model(checkpoint, _FLOAT32)
    refuse_other_model(model, adapter)
    prepare_for_training(model, replace(workload, dtype="float32"))
    fill_adapter(model, adapter)


def _check_plan(plan: Plan, checkpoint: Checkpoint, settings: TuneSettings) -> Plan:
    """Return a given plan with the run's scale of adapters, which changes no memory.

    Raises UsageError for a plan of another run.
    """
    training = plan.workload.training
    if training is None:
        raise UsageError("the plan is for generating", hint="create one with --train lora")
    plan.refuse_other(checkpoint.fingerprint, checkpoint.source)
    planned, wanted = plan.workload, settings.workload(checkpoint)
    needed = wanted.training
    assert needed is not None, "the settings are for training"
    size = 2 if settings.dpo else 1
    if planned.batch % size:
        raise UsageError("the plan has odd micro-batches, not pairs", hint="plan with --dpo")
    fixed: dict[str, tuple[object, object]] = {
        "train": (training.method, needed.method),
        "batch": (training.micro_batches * planned.batch // size, settings.batch),
        "context": (planned.prompt_tokens, settings.seq_length or planned.prompt_tokens),
        "optimizer": (training.optimizer, needed.optimizer),
        "schedule": (training.schedule, needed.schedule),
        "lora-rank": (training.lora_rank, needed.lora_rank),
        "train-vision": (training.train_vision, settings.train_vision),
    }
    # Without these options the plan's are used.
    options = fixed | {
        "lora-dropout": (training.lora_dropout, needed.lora_dropout),
        "lora-target": (training.lora_targets, needed.lora_targets),
        "checkpointing": (training.gradient_checkpointing, needed.gradient_checkpointing),
        "dtype": (planned.dtype, wanted.dtype.removeprefix("auto")),
        "quantize": (planned.quantize, wanted.quantize.removeprefix("none")),
    }
    for name, (of_plan, of_run) in options.items():
        if of_plan != of_run and (of_run or name in fixed):
            way = f"use --{name} {of_plan}" if name in fixed else f"omit --{name}"
            raise UsageError(
                f"the plan is for --{name} {of_plan}, not {of_run}", hint=f"{way}, or another plan"
            )
    training = replace(
        training,
        rslora=needed.rslora or training.rslora,
        lora_alpha=needed.lora_alpha or training.lora_alpha,
        dpo=needed.dpo,
    )
    return replace(plan, workload=replace(plan.workload, training=training))


def plans_for(
    checkpoint: Checkpoint,
    fleet: Fleet | str,
    settings: TuneSettings,
    replicas: NumReplicas,
    *,
    suggest: bool = True,
    because: str = "",
) -> tuple[Plan, ...]:
    """Plan the replicas, using all GPUs; all machines of torchrun get the same plans.

    With `replicas` "auto" as many replicas as fit are planned.

    Raises
    ------
    InfeasibleError
        If the run doesn't fit, with suggestions if `suggest`; `because` is appended to its text.
    """
    machines = num_machines()
    fleet = _parse_fleet(fleet, machines)
    micro_batches = max(1, settings.batch // settings.micro_batch // machines)
    # "auto" takes the largest number of replicas that fits, because more replicas have fewer
    # micro-batches each. With four GPUs and 8 micro-batches four replicas are tried, then three,
    # two and one. `fleet` is one machine; the plans of all machines are equal.
    max_replicas = 1 if settings.experts == "host" else min(len(fleet.devices), micro_batches)
    if replicas not in ("auto", 1) and settings.experts == "host":
        raise UsageError("replicas have no experts in host memory", hint="omit --replicas")
    numbers = range(max_replicas, 0, -1) if replicas == "auto" else (replicas,)
    for number in numbers:
        with suppress(InfeasibleError):
            return _plan_machine(checkpoint, fleet, settings, number, machines) * machines
    _refuse_small_gpus(checkpoint, fleet, settings)

    def attempt(changed: TuneSettings, gpus: str | None) -> Plan:
        devices = fleet if gpus is None else _parse_fleet(gpus, machines)
        return _plan_machine(checkpoint, devices, changed, numbers[-1], machines)[0]

    try:
        copies = _plan_machine(checkpoint, fleet, settings, numbers[-1], machines, suggest=suggest)
    except InfeasibleError as error:
        error = with_suggestions(error, settings, attempt)
        raise error.with_ways_out(error.ways_out, because) from None
    return copies * machines


def num_machines() -> int:
    """Return the number of machines on which torchrun started processes."""
    if not torch.distributed.is_torchelastic_launched():
        return 1
    return int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"])


def _parse_fleet(gpus: Fleet | str, machines: int) -> Fleet:
    """Return the fleet of a machine; other machines are assumed to have equal GPUs."""
    fleet = Fleet.parse(gpus) if isinstance(gpus, str) else gpus.split_host()[0]
    if machines == 1:
        return fleet
    return replace(fleet, devices=tuple(replace(d, uuid="", pci_address="") for d in fleet.devices))


def _plan_machine(
    checkpoint: Checkpoint,
    fleet: Fleet,
    settings: TuneSettings,
    number: int,
    machines: int,
    *,
    suggest: bool = False,
) -> tuple[Plan, ...]:
    """Plan `number` replicas for each of `machines` equal machines; return one machine's plans."""
    workload = settings.workload(checkpoint)
    assert workload.training is not None, "the settings are for training"
    # Rounded up: a step of 8 micro-batches on 3 replicas is planned with 3 for each replica.
    micro_batches = max(1, workload.training.micro_batches // machines)
    share = replace(workload.training, micro_batches=-(-micro_batches // number))
    workload = replace(workload, training=share)
    is_known = all(device.memory_bytes_per_second is not None for device in fleet.devices)
    objective: Objective = "throughput" if is_known else "headroom"
    options: dict[str, Any] = {"use_all": True, "objective": objective, "suggest": suggest}
    if number > 1:
        return plan_replicas(checkpoint, fleet, workload, number=number, **options).plans
    if settings.host_memory is not None:
        fleet = fleet.with_host(settings.host_memory)
    constraints = Constraints(experts=settings.experts)
    return (make_plan(checkpoint, fleet, workload, constraints=constraints, **options),)


def _refuse_small_gpus(checkpoint: Checkpoint, fleet: Fleet, settings: TuneSettings) -> None:
    """Raise UsageError with the names of unusable GPUs if the run fits on the other GPUs."""
    with suppress(InfeasibleError):
        used = make_plan(checkpoint, fleet, settings.workload(checkpoint), suggest=False).devices
        idle = ", ".join(device.name for device in fleet.devices if device.name not in used)
        if idle:
            raise UsageError(
                f"the model can't be split over all GPUs; it fits without {idle}",
                hint=f"remove {idle} from --gpus",
            )


def prove_plans(checkpoint: Checkpoint, plans: Sequence[Plan]) -> None:
    """Run each plan on virtual GPUs before a weight is read; check the host's memory."""
    refuse_more(plans[0].forecast.expert_bytes)
    for plan in {id(plan): plan for plan in plans}.values():  # machines share plan objects
        say(f"proving the plan on {', '.join(plan.devices)}")
        prove(plan, build_model(checkpoint, plan.workload))
