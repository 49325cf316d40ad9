"""Command: the command line that asks for a plan.

What a person says is kept in a plan's request; here it becomes words again, so that the same can be
asked once more, or something else in its place. It knows nothing of how the words are read.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from duoka.forecast.workload import Training, Workload

from .constraints import Constraints
from .plan import Plan
from .request import PlanRequest

_DEFAULT = Workload()
_TRAINING = Training()
Options = dict[str, tuple[str, ...]]
"""The words of each thing that can be asked for, under the name of its option."""


def command(plan: Plan) -> str | None:
    """What to write in a shell to ask again what was asked for a plan.

    None where no command asks for that: of a device map a plan keeps only what came of it, and a
    model or fleet that was given as an object has no name.
    """
    asked = plan.request
    if not plan.source or not asked.gpus or plan.objective == "given":
        return None
    if asked.workload.logits != _DEFAULT.logits:
        return None
    words = ["duoka", "plan", plan.source]
    for told in options(asked).values():
        words += told
    return shlex.join(words)


def options(asked: PlanRequest) -> Options:
    """What a request says on the command line, but for the model."""
    found: Options = {"--gpus": ("--gpus", asked.gpus)} if asked.gpus not in ("", "all") else {}
    for told in (
        *_sizes(asked),
        *_training(asked.workload.training),
        *_wishes(asked),
        *_demands(asked.constraints),
    ):
        # What can be said several times is one thing.
        found[told[0]] = (*found.get(told[0], ()), *told)
    return found


def change(asked: PlanRequest, other: PlanRequest) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What to add to the command for one request, and what to leave out, to ask for another."""
    old, new = options(asked), options(other)
    added = tuple(word for name, words in new.items() if old.get(name) != words for word in words)
    return added, tuple(name for name in old if name not in new)


def _sizes(asked: PlanRequest) -> Iterator[tuple[str, ...]]:
    workload = asked.workload
    new = ("--new-tokens", str(workload.new_tokens)) if workload.training is None else ()
    if asked.largest == "context":
        yield ("--max-context", *new)
    else:
        yield ("--context", str(workload.context_tokens), *new)
    if asked.largest == "batch":
        yield ("--max-batch",)
    elif workload.batch != _DEFAULT.batch:
        yield ("--batch", str(workload.batch))
    for option, told, usual in (
        ("--dtype", workload.dtype, _DEFAULT.dtype),
        ("--cache", workload.cache, _DEFAULT.cache),
        ("--quantize", workload.quantize, _DEFAULT.quantize),
    ):
        if told != usual:
            yield (option, told)
    chunk = workload.prefill_chunk_tokens
    if chunk != _DEFAULT.prefill_chunk_tokens and workload.training is None:
        yield ("--prefill-chunk", "none" if chunk is None else str(chunk))
    if workload.images:
        height, width = workload.image_size
        yield ("--images", str(workload.images))
        yield ("--image-size", f"{width}x{height}")


def _training(training: Training | None) -> Iterator[tuple[str, ...]]:
    if training is None:
        return
    yield ("--train", training.method)
    for option, told, usual in (
        ("--optimizer", training.optimizer, _TRAINING.optimizer),
        ("--lora-rank", training.lora_rank, _TRAINING.lora_rank),
        ("--micro-batches", training.micro_batches, _TRAINING.micro_batches),
        ("--schedule", training.schedule, _TRAINING.schedule),
    ):
        if told != usual:
            yield (option, str(told))
    for name in training.lora_targets:
        yield ("--lora-target", name)
    if training.gradient_checkpointing:
        yield ("--gradient-checkpointing",)
    if training.master_weights:
        yield ("--master-weights",)


def _wishes(asked: PlanRequest) -> Iterator[tuple[str, ...]]:
    if asked.objective != "auto":
        yield ("--objective", asked.objective)
    if asked.use_all:
        yield ("--use-all",)
    if asked.trust_remote_code:
        yield ("--trust-remote-code",)


def _demands(constraints: Constraints) -> Iterator[tuple[str, ...]]:
    if constraints.strategy != "auto":
        yield ("--strategy", constraints.strategy)
    for name, device in constraints.pins:
        yield ("--pin", f"{name}={device}")
    for name in constraints.uncut:
        yield ("--uncut", name)
    for device, size in constraints.reserve:
        yield ("--reserve", f"{device}={size}B")
    if constraints.offload:
        yield ("--offload",)
