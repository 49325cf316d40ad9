"""Parts of runs without a search or a tracing: plans made by hand, and what processes train."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from staged import GIB, forecast, staged
from torch import Tensor

from duoka import Checkpoint, TuneSettings
from duoka.base.units import MIB
from duoka.errors import TrainingError
from duoka.forecast.forecast import Forecast
from duoka.planner.plan import Plan
from duoka.tuner import gradient_sum
from duoka.tuner.data import Batches, Dataset
from duoka.tuner.gradient_sum import GradientSum
from duoka.tuner.layout import Layout
from duoka.tuner.part import ModelPart
from duoka.tuner.run import RunDirectory
from duoka.tuner.trainer import LostError, ProcessReport, StepReport, Trainer

NUM_LAYERS = 2
NUM_STEPS = 8
LENGTHS = (12, 9, 16, 10, 14)
"""Of samples, all of one form; with batches of four the second step has one."""


def make_dataset(lengths: Sequence[int], seq_length: int = 32, vocabulary: int = 90) -> Dataset:
    """Samples of so many tokens, of whose tokens about half are trained, as `read_dataset` does."""
    ends = np.cumsum(np.array(lengths, np.int64))
    generator = np.random.default_rng(0)
    is_trained = generator.random(ends[-1]) < 0.5
    is_trained[ends - 1] = True
    is_trained[ends - np.array(lengths)] = False
    return Dataset(
        ids=generator.integers(3, vocabulary, ends[-1]).astype(np.int32),
        is_trained=is_trained,
        ends=ends,
        file_numbers=np.zeros(len(ends), np.int32),
        lines=np.arange(1, len(ends) + 1),
        files=("a.jsonl",),
        seq_length=seq_length,
    )


def make_layout(
    model: Path, settings: TuneSettings, *, stages: int = 1, replicas: int = 1
) -> Layout:
    """Equal stages on virtual GPUs, or all of the model on the processor, which is faster.

    With more stages than the model has layers it is for looking at, not for training. The forecast
    has a GiB for each device.
    """
    checkpoint = Checkpoint.open(model)
    dtype = "float32" if settings.dtype == "auto" else settings.dtype
    workload = replace(settings.workload(checkpoint), dtype=dtype)
    assert workload.training is not None
    share = -(-workload.training.micro_batches // replicas)
    workload = replace(workload, training=replace(workload.training, micro_batches=share))
    plan = staged([max(1, NUM_LAYERS // stages)] * stages, f"virtual:{stages}x4GiB")
    plan = replace(
        plan,
        source=str(model),
        fingerprint=checkpoint.fingerprint,
        placement=replace(plan.placement, fingerprint=checkpoint.fingerprint),
        workload=workload,
        forecast=Forecast(
            devices=tuple(forecast(device.name, 2, 4 * GIB) for device in plan.fleet.devices)
        ),
    )
    if stages == replicas == 1:
        return Layout((renamed(plan, {"vgpu:0": "cpu"}),))
    return Layout(
        tuple(
            renamed(plan, {f"vgpu:{n}": f"vgpu:{number * stages + n}" for n in range(stages)})
            for number in range(replicas)
        )
    )


def make_uneven_layout(model: Path, settings: TuneSettings) -> Layout:
    """A copy on one GPU, and another one on two."""
    one = renamed(make_layout(model, settings).plans[0], {"cpu": "vgpu:0"})
    (two,) = make_layout(model, settings, stages=2).plans
    return Layout((one, renamed(two, {"vgpu:0": "vgpu:1", "vgpu:1": "vgpu:2"})))


def renamed(plan: Plan, devices: dict[str, str]) -> Plan:
    """The same plan on devices of other names."""
    text = plan.to_json()
    for name, other in devices.items():
        text = text.replace(f'"{name}"', f'"new {other}"')
    return Plan.from_json(text.replace('"new ', '"'))


def make_part(layout: Layout, settings: TuneSettings, rank: int = 0) -> ModelPart:
    """What a process has of the model."""
    replica, device = layout.place(rank)
    plan = layout.plans[replica]
    return ModelPart(Checkpoint.open(plan.source), plan, device, settings.seed)


def make_batches(settings: TuneSettings, lengths: Sequence[int] = LENGTHS) -> Batches:
    """The steps of a run."""
    dataset = replace(make_dataset(lengths), group_size=2 if settings.dpo else 1)
    return Batches(dataset, batch=settings.batch, micro_batch=settings.micro_batch)


Gradients = dict[str, Tensor | None]


def write_run(directory: RunDirectory, settings: TuneSettings, layout: Layout) -> None:
    """Write down what is to be done, as `TuneJob.write` does, without a proof."""
    directory.path.mkdir()
    make_dataset(LENGTHS).save(directory.samples)
    directory.write(settings, layout.plans, trust_remote_code=False)


@dataclass(frozen=True)
class Case:
    """A run in two processes; `damage` is done to a parameter in the last of them."""

    settings: TuneSettings
    stages: int = 1
    replicas: int = 1
    damage: Literal["", "nan"] = ""
    lengths: tuple[int, ...] = LENGTHS


@dataclass(frozen=True)
class Trained:
    """What a process has seen and made of its part, and what ended it."""

    evaluation: dict[str, float]
    reports: list[StepReport]
    parameters: dict[str, Tensor]
    error: str = ""


def train(model: Path, case: Case, rank: int = 0) -> Trained:
    """Evaluate a model, and train it for an epoch, in one of the processes of a layout."""
    layout = make_layout(model, case.settings, stages=case.stages, replicas=case.replicas)
    part = make_part(layout, case.settings, rank)
    if case.damage and rank == layout.world_size - 1:
        _damage(part)
    trainer = Trainer(case.settings, layout, rank, part, NUM_STEPS)
    batches = make_batches(case.settings, case.lengths)
    steps = [batches[number] for number in range(batches.steps_per_epoch)]
    evaluation, reports, error = trainer.evaluate(steps), list[StepReport](), ""
    try:
        reports.extend(trainer.step(number, step) for number, step in enumerate(steps))
    except (TrainingError, LostError) as stopped:
        error = f"{type(stopped).__name__}: {stopped}"
    parameters = {name: value.detach().cpu().clone() for name, value in part.trained.items()}
    return Trained(evaluation, reports, parameters, error)


def train_all(model: Path, cases: dict[str, Case]) -> dict[str, Trained]:
    """The same for one case after another."""
    rank = torch.distributed.get_rank()
    return {name: train(model, case, rank) for name, case in cases.items()}


def sum_gradients(layout: Layout, gradients: Sequence[Gradients], bucket_bytes: int) -> Gradients:
    """What a process has of gradients after the sum; there are those of each process before it."""
    own = gradients[torch.distributed.get_rank()]
    parameters = {name: torch.nn.Parameter(torch.zeros(2, 3)) for name in own}
    for name, parameter in parameters.items():
        gradient = own[name]
        # The memory of what comes from the parent is shared with it.
        parameter.grad = None if gradient is None else gradient.clone()
    gradient_sum._BUCKET_BYTES = bucket_bytes
    names = sorted({name for process in gradients for name in process})
    GradientSum(layout, names, parameters).finish()
    return {name: parameter.grad for name, parameter in parameters.items()}


def sum_beside_backward(layout: Layout, dtype: torch.dtype) -> tuple[list[str], list[float]]:
    """Three backward passes of a product of three parameters, in buckets of one parameter each.

    What happens, in order: passes that reach the first factor, where the last pass waits for the
    sums of two buckets, and sums. With it the gradients, from the first factor to the last.
    """
    names = [f"model.layers.{n}.mlp.up_proj.weight" for n in range(NUM_LAYERS)] + ["lm_head.weight"]
    parameters = {
        name: torch.nn.Parameter(torch.full((2, 3), 2.0**number, dtype=dtype))
        for number, name in enumerate(names)
    }
    gradient_sum._BUCKET_BYTES = 1
    events, two_sums, all_reduce = list[str](), threading.Event(), torch.distributed.all_reduce

    def noted(*args: Any, **kwargs: Any) -> Any:
        events.append("sum")
        if events.count("sum") == 2:
            two_sums.set()
        return all_reduce(*args, **kwargs)

    torch.distributed.all_reduce = noted
    sums = GradientSum(layout, names, parameters)
    passes = 3

    def reach(gradient: Tensor) -> None:
        if events.count("backward") == passes - 1:
            assert two_sums.wait(60)
        events.append("backward")

    for number in range(passes):
        if number == passes - 1:
            sums.begin_last_backward()
        product = parameters[names[0]] * (1 + torch.distributed.get_rank())
        product.register_hook(reach)
        for name in names[1:]:
            product = product * parameters[name]
        product.sum().backward()
    sums.finish()
    gradients = [parameter.grad for parameter in parameters.values() if parameter.grad is not None]
    assert all(torch.equal(gradient, gradient[0, 0].expand(2, 3)) for gradient in gradients)
    return events, [float(gradient[0, 0]) for gradient in gradients]


def _damage(part: ModelPart) -> None:
    """Put a number that is none into a process's norm."""
    part.model.model.norm.weight.data[0] = torch.nan


def make_report(layout: Layout, step: int, **changes: Any) -> StepReport:
    """A step of a run, as it is reported: of 100 tokens, in two seconds."""
    processes = [
        ProcessReport(
            device=device,
            replica=replica,
            busy_share=0.75,
            allocated_bytes=layout.forecast(rank).allocated_bytes - MIB,
            reserved_bytes=layout.forecast(rank).reserved_bytes - MIB,
        )
        for rank in range(layout.world_size)
        for replica, device in [layout.place(rank)]
    ]
    report = StepReport(
        step=step,
        epoch=0,
        loss=4.0 / step,
        grad_norm=1.0,
        learning_rate=1e-4,
        tokens=100,
        trained_tokens=50,
        seconds=2.0,
        is_skipped=False,
        saves=False,
        stops=False,
        processes=tuple(processes),
    )
    return replace(report, **changes)
