"""Command: the command line that asks for a plan.

What a person says is kept in a plan's request; here it becomes words again, so that the same can be
asked once more, or something else in its place. It knows nothing of how the words are read.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from duoka.forecast.workload import Training, Workload

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
    request = plan.request
    if not plan.source or not request.gpus or plan.objective == "given":
        return None
    if request.workload.logits != _DEFAULT.logits or request.workload.pages is not None:
        return None
    words = ["duoka", "plan", plan.source]
    for option in options(request).values():
        words += option
    return shlex.join(words)


def options(request: PlanRequest) -> Options:
    """What a request says on the command line, but for the model."""
    words: Options = {}
    for option in _options(request):
        # What can be said several times is one thing.
        words[option[0]] = (*words.get(option[0], ()), *option)
    return words


def change(request: PlanRequest, other: PlanRequest) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What to add to the command for one request, and what to leave out, to ask for another."""
    old, new = options(request), options(other)
    added = tuple(word for name, words in new.items() if old.get(name) != words for word in words)
    return added, tuple(name for name in old if name not in new)


def _options(request: PlanRequest) -> Iterator[tuple[str, ...]]:
    if request.gpus not in ("", "all"):
        yield ("--gpus", request.gpus)
    yield from _sizes(request)
    yield from _training(request.workload.training)
    constraints = request.constraints
    yield from _unusual(("--objective", request.objective, "auto"))
    yield from _flags(
        ("--use-all", request.use_all), ("--trust-remote-code", request.trust_remote_code)
    )
    yield from _unusual(("--strategy", constraints.strategy, "auto"))
    for name, device in constraints.pins:
        yield ("--pin", f"{name}={device}")
    for device, size in constraints.reserve:
        yield ("--reserve", f"{device}={size}B")
    yield from _flags(("--offload", constraints.offload))


def _sizes(request: PlanRequest) -> Iterator[tuple[str, ...]]:
    workload = request.workload
    new = ("--new-tokens", str(workload.new_tokens)) if workload.training is None else ()
    if request.largest == "context":
        yield ("--max-context", *new)
    else:
        yield ("--context", str(workload.context_tokens), *new)
    if workload.is_paged:
        yield ("--serve",)
    if request.largest == "batch":
        yield ("--max-batch",)
    elif workload.is_paged:
        yield ("--sequences", str(workload.batch))
    else:
        yield from _unusual(("--batch", workload.batch, _DEFAULT.batch))
    yield from _unusual(
        ("--dtype", workload.dtype, _DEFAULT.dtype),
        ("--quantize", workload.quantize, _DEFAULT.quantize),
    )
    yield from _unusual(("--cache", workload.cache.removeprefix("paged-"), _cache(workload)))
    if workload.training is None:
        yield from _unusual(("--prefill-chunk", workload.prefill_chunk_tokens or "none", "auto"))
    if workload.images:
        height, width = workload.image_size
        yield ("--images", str(workload.images))
        yield ("--image-size", f"{width}x{height}")
        yield from _unusual(("--vision-batch", workload.vision_batch or "none", "auto"))


def _cache(workload: Workload) -> str:
    """The kind of cache where none is named."""
    return "paged" if workload.is_paged else _DEFAULT.cache


def _training(training: Training | None) -> Iterator[tuple[str, ...]]:
    if training is None:
        return
    yield ("--train", training.method)
    yield from _unusual(
        ("--optimizer", training.optimizer, _TRAINING.optimizer),
        ("--lora-rank", training.lora_rank, _TRAINING.lora_rank),
        ("--lora-alpha", training.lora_alpha, _TRAINING.lora_alpha),
        ("--lora-dropout", training.lora_dropout, _TRAINING.lora_dropout),
        ("--micro-batches", training.micro_batches, _TRAINING.micro_batches),
        ("--schedule", training.schedule, _TRAINING.schedule),
        ("--rows", training.rows, _TRAINING.rows),
    )
    for name in training.lora_targets:
        yield ("--lora-target", name)
    yield from _flags(
        ("--gradient-checkpointing", training.gradient_checkpointing),
        ("--master-weights", training.master_weights),
    )


def _unusual(*options: tuple[str, object, object]) -> Iterator[tuple[str, ...]]:
    """The options whose value is another one than where nothing is said."""
    return ((name, str(value)) for name, value, usual in options if value != usual)


def _flags(*options: tuple[str, bool]) -> Iterator[tuple[str, ...]]:
    return ((name,) for name, is_set in options if is_set)
