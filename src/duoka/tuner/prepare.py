"""A run before it starts: its plans, and the samples that it learns from."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from transformers import PreTrainedTokenizerBase

from duoka.api.plan import plan as make_plan
from duoka.api.plan import plan_replicas
from duoka.base.progress import say
from duoka.checker.prove import prove
from duoka.checkpoint.checkpoint import Checkpoint
from duoka.errors import InfeasibleError, UsageError
from duoka.forecast.workload import Workload
from duoka.hardware.fleet import Fleet
from duoka.models.from_checkpoint import build_model, tokenizer_of
from duoka.models.lora import LoraAdapter, fill_adapter, native_form, refuse_other_model
from duoka.models.text.chatglm_tokenizer import ChatGLMTokenizer
from duoka.models.text.prompts import chat_format
from duoka.planner.plan import Plan
from duoka.planner.search import Objective
from duoka.runtime.load.adapter import read_adapter
from duoka.runtime.prepare_training import prepare_for_training

from .data import Dataset, read_dataset, refuse_packing
from .result import write_adapter
from .run import RunDirectory
from .settings import TuneSettings
from .suggestions import with_suggestions

_MULTIPLE = 8  # of a sequence's length: what matrix units like
NumReplicas = int | Literal["auto"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneRun:
    """A run that can be started: planned, and with its samples.

    Parameters
    ----------
    checkpoint : Checkpoint
        The model's.
    settings : TuneSettings
    plans : tuple of Plan
        One for each replica.
    samples, eval_samples : Dataset
        What is learnt, and what the loss is measured on; the latter may be None.
    adapter : LoraAdapter, optional
        What is learnt starts from it; in native form.
    """

    checkpoint: Checkpoint
    settings: TuneSettings
    plans: tuple[Plan, ...]
    samples: Dataset
    eval_samples: Dataset | None = None
    adapter: LoraAdapter | None = None

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's."""
        return tokenizer_of(self.checkpoint, ChatGLMTokenizer)

    def write(self, directory: RunDirectory) -> None:
        """Prove the plans, bring the weights to this machine, and write down what is to be done."""
        prove_plans(self.checkpoint, self.plans)
        self.checkpoint.fetch(None)
        self.samples.save(directory.samples)
        if self.eval_samples is not None:
            self.eval_samples.save(directory.eval_samples)
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
    """Read what is learnt, and plan, unless there is a plan."""
    if checkpoint.config.get("is_encoder_decoder"):
        raise UsageError(
            f"{checkpoint.name} is an encoder with a decoder, and duoka tunes causal models",
            hint="duoka.dispatch(model, plan) spreads it for a training loop of your own",
        )
    first = None
    if adapter is not None:
        first = native_form(read_adapter(adapter), checkpoint.config)
        settings = settings.starting_from(first)
    workload = _refuse_other(plan, checkpoint, settings) if plan else settings.workload(checkpoint)
    if first is not None:
        _refuse_unfit(first, checkpoint, workload)
    checkpoint.fetch_tokenizer()
    tokenizer = tokenizer_of(checkpoint, ChatGLMTokenizer)
    chat = chat_format(tokenizer, checkpoint.config, checkpoint.generation_config)

    datasets = [
        read_dataset(
            paths,
            chat,
            # A packed row ends in padding: see `data.batches`.
            seq_length=workload.prompt_tokens - settings.packing,
            train_on=settings.train_on,
            skip_bad=settings.skip_bad,
        )
        for paths in (data, settings.eval_data)
        if paths
    ]
    if plan is None:
        settings, datasets = _as_long_as_needed(settings, datasets)
    if settings.packing:
        refuse_packing(build_model(checkpoint, Workload(dtype="float32")).config)
    return TuneRun(
        checkpoint=checkpoint,
        settings=settings,
        samples=datasets[0],
        eval_samples=datasets[1] if len(datasets) > 1 else None,
        plans=(plan,) if plan else _plans(checkpoint, fleet, settings, replicas, datasets[0]),
        adapter=first,
    )


def _as_long_as_needed(
    settings: TuneSettings, datasets: list[Dataset]
) -> tuple[TuneSettings, list[Dataset]]:
    """Where nothing says how long sequences are, let the longest sample fit into them."""
    if settings.seq_length is not None or settings.packing:
        return settings, datasets
    longest = max(int(dataset.lengths.max()) for dataset in datasets)
    length = min(-(-longest // _MULTIPLE) * _MULTIPLE, datasets[0].seq_length)
    shorter = [replace(dataset, seq_length=length) for dataset in datasets]
    return replace(settings, seq_length=length), shorter


def _plans(
    checkpoint: Checkpoint,
    fleet: Fleet | str,
    settings: TuneSettings,
    replicas: NumReplicas,
    samples: Dataset,
) -> tuple[Plan, ...]:
    """Plan a run; where that doesn't fit, the error names the longest sample."""
    try:
        return plans_for(checkpoint, fleet, settings, replicas)
    except InfeasibleError as error:
        longest = int(samples.lengths.argmax())
        tokens = f"{samples.lengths[longest]:,} tokens ({samples.place(longest)})"
        because = f"; the longest sample has {tokens}"
        raise error.with_ways_out(error.ways_out, because) from None


def _refuse_unfit(adapter: LoraAdapter, checkpoint: Checkpoint, workload: Workload) -> None:
    """Refuse an adapter that isn't for the model, before anything is planned for it."""
    model = build_model(checkpoint, Workload(dtype="float32"))
    refuse_other_model(model, adapter)
    prepare_for_training(model, replace(workload, dtype="float32"))
    fill_adapter(model, adapter)


def _refuse_other(plan: Plan, checkpoint: Checkpoint, settings: TuneSettings) -> Workload:
    """The workload of a plan that was saved, which has to be for this run."""
    training = plan.workload.training
    if training is None or plan.workload.images:
        other = "generating" if training is None else "images, and duoka tune learns from text"
        raise UsageError(f"the plan is for {other}", hint="make one with --train lora")
    plan.refuse_other(checkpoint.fingerprint, checkpoint.source)
    wanted = settings.workload(checkpoint).training
    assert wanted is not None, "the settings are for training"
    length = plan.workload.prompt_tokens
    options = {
        "method": (training.method, wanted.method),
        "batch": (training.micro_batches * plan.workload.batch, settings.batch),
        "seq-length": (length, settings.seq_length or length),
        "optimizer": (training.optimizer, wanted.optimizer),
        "schedule": (training.schedule, wanted.schedule),
        "lora-rank": (training.lora_rank, wanted.lora_rank),
    }
    for name, (planned, setting) in options.items():
        if planned != setting:
            raise UsageError(
                f"the plan is for --{name} {planned}, not {setting}",
                hint=f"--{name} {planned}, or another plan",
            )
    return plan.workload


def plans_for(
    checkpoint: Checkpoint,
    fleet: Fleet | str,
    settings: TuneSettings,
    replicas: NumReplicas,
    *,
    suggest: bool = True,
) -> tuple[Plan, ...]:
    """A plan for each replica, all GPUs in use: the same on each machine.

    Raises
    ------
    InfeasibleError
        If it doesn't fit; with what would fit instead, where that is to be suggested.
    """
    machines = num_machines()
    fleet = _on_each(fleet, machines)
    micro_batches = max(1, settings.batch // settings.micro_batch // machines)
    # As many as fit, where nobody says how many: with more of them each has less to do.
    most = min(len(fleet.devices), micro_batches)
    numbers = range(most, 0, -1) if replicas == "auto" else (replicas,)
    for number in numbers:
        with suppress(InfeasibleError):
            return _plan_copies(checkpoint, fleet, settings, number, machines) * machines
    _refuse_small(checkpoint, fleet, settings)

    def attempt(other: TuneSettings, gpus: str | None) -> Plan:
        devices = fleet if gpus is None else _on_each(gpus, machines)
        return _plan_copies(checkpoint, devices, other, numbers[-1], machines)[0]

    try:
        copies = _plan_copies(checkpoint, fleet, settings, numbers[-1], machines, suggest=suggest)
    except InfeasibleError as error:
        raise with_suggestions(error, settings, attempt) from None
    return copies * machines


def num_machines() -> int:
    """How many machines torchrun has started processes on."""
    if not torch.distributed.is_torchelastic_launched():
        return 1
    return int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"])


def _on_each(gpus: Fleet | str, machines: int) -> Fleet:
    """The GPUs that each of some machines has; which ones these are elsewhere isn't known."""
    fleet = Fleet.parse(gpus) if isinstance(gpus, str) else gpus
    if machines == 1:
        return fleet
    return replace(fleet, devices=tuple(replace(d, uuid="", pci_address="") for d in fleet.devices))


def _plan_copies(
    checkpoint: Checkpoint,
    fleet: Fleet,
    settings: TuneSettings,
    number: int,
    machines: int,
    *,
    suggest: bool = False,
) -> tuple[Plan, ...]:
    """The plans of some copies of the model on one of several machines."""
    workload = settings.workload(checkpoint)
    assert workload.training is not None, "the settings are for training"
    micro_batches = max(1, workload.training.micro_batches // machines)
    share = replace(workload.training, micro_batches=-(-micro_batches // number))
    workload = replace(workload, training=share)
    objective: Objective = "throughput"
    if any(device.memory_bytes_per_second is None for device in fleet.devices):
        objective = "headroom"
    if number > 1:
        return plan_replicas(
            checkpoint,
            fleet,
            workload,
            number=number,
            use_all=True,
            objective=objective,
            suggest=suggest,
        ).plans
    return (
        make_plan(checkpoint, fleet, workload, use_all=True, objective=objective, suggest=suggest),
    )


def _refuse_small(checkpoint: Checkpoint, fleet: Fleet, settings: TuneSettings) -> None:
    """Say which GPUs are in the way, where it fits on the others."""
    with suppress(InfeasibleError):
        used = make_plan(checkpoint, fleet, settings.workload(checkpoint), suggest=False).devices
        idle = ", ".join(device.name for device in fleet.devices if device.name not in used)
        if idle:
            raise UsageError(
                f"not every GPU can have a part of the model; it fits without {idle}",
                hint=f"all GPUs are used: leave {idle} out of --gpus",
            )


def prove_plans(checkpoint: Checkpoint, plans: Sequence[Plan]) -> None:
    """Run each on virtual GPUs, before a weight is read."""
    for plan in {id(plan): plan for plan in plans}.values():  # machines share theirs
        say(f"proving the plan on {', '.join(plan.devices)}")
        prove(plan, build_model(checkpoint, plan.workload))
