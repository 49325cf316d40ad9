"""A run before it starts: its plans, and the samples that it learns from."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

import torch
from transformers import PreTrainedTokenizerBase

from duoka.api.plan import plan as make_plan
from duoka.api.plan import plan_replicas
from duoka.base.files import why
from duoka.base.progress import say
from duoka.checker.prove import prove
from duoka.checkpoint.checkpoint import Checkpoint
from duoka.errors import InfeasibleError, MachineError, UsageError
from duoka.forecast.workload import Workload
from duoka.hardware.fleet import Fleet
from duoka.models.from_checkpoint import build_model, tokenizer_of
from duoka.models.text.chatglm_tokenizer import ChatGLMTokenizer
from duoka.models.text.prompts import chat_format
from duoka.planner.plan import Plan
from duoka.planner.search import Objective

from .data import Dataset, read_dataset, refuse_packing
from .run import RunDirectory
from .settings import TuneSettings

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
    """

    checkpoint: Checkpoint
    settings: TuneSettings
    plans: tuple[Plan, ...]
    samples: Dataset
    eval_samples: Dataset | None = None

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's."""
        return tokenizer_of(self.checkpoint, ChatGLMTokenizer)

    def write(self, directory: RunDirectory) -> None:
        """Prove the plans, bring the weights to this machine, and write down what is to be done."""
        prove_plans(self.checkpoint, self.plans)
        self.checkpoint.fetch(None)
        try:
            directory.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise MachineError(
                f"{directory.path} can't be made: {why(error)}", hint="name another directory"
            ) from error
        self.samples.save(directory.samples)
        if self.eval_samples is not None:
            self.eval_samples.save(directory.eval_samples)
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
) -> TuneRun:
    """Read what is learnt, and plan, unless there is a plan."""
    if checkpoint.config.get("is_encoder_decoder"):
        raise UsageError(
            f"{checkpoint.name} is an encoder with a decoder, and duoka tunes causal models",
            hint="duoka.dispatch(model, plan) spreads it for a training loop of your own",
        )
    if plan is None:
        workload = settings.workload(checkpoint)
    else:
        workload = _refuse_other(plan, checkpoint, settings)
    checkpoint.fetch_tokenizer()
    tokenizer = tokenizer_of(checkpoint, ChatGLMTokenizer)
    chat = chat_format(tokenizer, checkpoint.config, checkpoint.generation_config)

    def read(paths: Sequence[str]) -> Dataset:
        return read_dataset(
            paths,
            chat,
            # A packed row ends in padding: see `data.batches`.
            seq_length=workload.prompt_tokens - settings.packing,
            train_on=settings.train_on,
            skip_bad=settings.skip_bad,
        )

    run = TuneRun(
        checkpoint=checkpoint,
        settings=settings,
        samples=read(data),
        eval_samples=read(settings.eval_data) if settings.eval_data else None,
        plans=plans_for(checkpoint, fleet, workload, replicas) if plan is None else (plan,),
    )
    if settings.packing:
        refuse_packing(build_model(checkpoint, run.plans[0].workload).config)
    return run


def _refuse_other(plan: Plan, checkpoint: Checkpoint, settings: TuneSettings) -> Workload:
    """The workload of a plan that was saved, which has to be for this run."""
    training = plan.workload.training
    if training is None:
        raise UsageError("the plan is for generating", hint="make one with --train lora")
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
    checkpoint: Checkpoint, fleet: Fleet | str, workload: Workload, replicas: NumReplicas
) -> tuple[Plan, ...]:
    """A plan for each replica, all GPUs in use; of several machines, the same on each."""
    assert workload.training is not None, "the workload is to train"
    training = workload.training
    fleet = Fleet.parse(fleet) if isinstance(fleet, str) else fleet
    machines = _num_machines()
    micro_batches = max(1, training.micro_batches // machines)
    objective: Objective = "throughput"
    if any(device.memory_bytes_per_second is None for device in fleet.devices):
        objective = "headroom"

    def plan(number: int) -> tuple[Plan, ...]:
        share = replace(training, micro_batches=-(-micro_batches // number))
        work = replace(workload, training=share)
        if number == 1:
            return (make_plan(checkpoint, fleet, work, use_all=True, objective=objective),)
        return plan_replicas(
            checkpoint, fleet, work, number=number, use_all=True, objective=objective
        ).plans

    # As many as fit, where nobody says how many: with more of them each has less to do.
    number = min(len(fleet.devices), micro_batches) if replicas == "auto" else replicas
    while replicas == "auto" and number > 1:
        try:
            return plan(number) * machines
        except InfeasibleError:
            number -= 1
    try:
        return plan(number) * machines
    except InfeasibleError:
        _refuse_small(checkpoint, fleet, workload)
        raise


def _refuse_small(checkpoint: Checkpoint, fleet: Fleet, workload: Workload) -> None:
    """Say which GPUs are in the way, where it fits on the others."""
    with suppress(InfeasibleError):
        used = make_plan(checkpoint, fleet, workload).devices
        idle = ", ".join(device.name for device in fleet.devices if device.name not in used)
        if idle:
            raise UsageError(
                f"not every GPU can have a part of the model; it fits without {idle}",
                hint=f"all GPUs are used: leave {idle} out of --gpus",
            )


def _num_machines() -> int:
    """How many machines torchrun has started processes on, all with the same GPUs."""
    if not torch.distributed.is_torchelastic_launched():
        return 1
    return int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"])


def prove_plans(checkpoint: Checkpoint, plans: Sequence[Plan]) -> None:
    """Run each on virtual GPUs, before a weight is read."""
    for plan in plans:
        say(f"proving the plan on {', '.join(plan.devices)}")
        prove(plan, build_model(checkpoint, plan.workload))
