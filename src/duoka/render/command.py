"""The command that makes a plan again."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from ..constraints import Constraints
from ..plans import Plan
from ..workload import Training, Workload

_DEFAULT = Workload()


def command(plan: Plan) -> str:
    """What to write in a shell to ask again what was asked for a plan.

    A device map isn't in it: it was a file, and the plan keeps only what came of it.
    """
    asked = plan.request
    words = ["duoka", "plan", plan.source or "MODEL"]
    words += ["--gpus", asked.gpus] if asked.gpus and asked.gpus != "all" else []
    words += _sizes(asked.workload)
    words += _training(asked.workload.training)
    if asked.objective != "auto":
        words += ["--objective", asked.objective]
    words += ["--use-all"] if asked.use_all else []
    words += _demands(asked.constraints)
    words += ["--device-map", "FILE"] if plan.objective == "given" else []
    return shlex.join(words)


def _demands(constraints: Constraints) -> Iterator[str]:
    if constraints.strategy != "auto":
        yield from ("--strategy", constraints.strategy)
    for name, device in constraints.pins:
        yield from ("--pin", f"{name}={device}")
    for name in constraints.uncut:
        yield from ("--uncut", name)
    for device, size in constraints.reserve:
        yield from ("--reserve", f"{device}={size}B")
    yield from ["--offload"] if constraints.offload else []


def _sizes(workload: Workload) -> Iterator[str]:
    yield from ("--context", str(workload.context_tokens))
    if workload.training is None:
        yield from ("--new-tokens", str(workload.new_tokens))
    if workload.batch != 1:
        yield from ("--batch", str(workload.batch))
    for option, told in (
        ("--dtype", workload.dtype),
        ("--cache", workload.cache),
        ("--quantize", workload.quantize),
    ):
        if told != getattr(_DEFAULT, option.removeprefix("--")):
            yield from (option, told)
    chunk = workload.prefill_chunk_tokens
    if chunk != _DEFAULT.prefill_chunk_tokens and workload.training is None:
        yield from ("--prefill-chunk", "none" if chunk is None else str(chunk))
    if workload.images:
        height, width = workload.image_size
        yield from ("--images", str(workload.images), "--image-size", f"{width}x{height}")


def _training(training: Training | None) -> Iterator[str]:
    if training is None:
        return
    yield from ("--train", training.method)
    usual = Training()
    for option, told in (
        ("--optimizer", training.optimizer),
        ("--lora-rank", training.lora_rank),
        ("--micro-batches", training.micro_batches),
        ("--schedule", training.schedule),
    ):
        if told != getattr(usual, option.removeprefix("--").replace("-", "_")):
            yield from (option, str(told))
    for name in training.lora_targets:
        yield from ("--lora-target", name)
    yield from ["--gradient-checkpointing"] if training.gradient_checkpointing else []
    yield from ["--master-weights"] if training.master_weights else []
