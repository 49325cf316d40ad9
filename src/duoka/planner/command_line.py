"""The command line that asks for a plan.

A plan keeps the request that it was made for; here the request becomes words again, so that a
person can ask for the same once more, or for something else in its place. How the command line
reads words is unknown here.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from duoka.forecast.workload import Training, Workload

from .plan import Plan
from .request import PlanRequest

_USUAL = Workload()
_USUAL_TRAINING = Training()
Options = dict[str, tuple[str, ...]]
"""The words of each demand, under the name of its option."""


def command(plan: Plan) -> str | None:
    """Return the shell command that asks for a plan again.

    None where no command does: of a device map a plan keeps only its outcome, and a model or fleet
    that was given as an object has no name.
    """
    request = plan.request
    if not plan.source or not request.gpus or plan.objective == "given":
        return None
    if request.workload.logits != _USUAL.logits or request.workload.pages is not None:
        return None
    words = ["duoka", "plan", plan.source]
    for option in options(request).values():
        words += option
    return shlex.join(words)


def options(request: PlanRequest) -> Options:
    """Return the options of a request, without the model; those with usual values are left out."""
    words: Options = {}
    for name, value, usual in _knobs(request):
        if isinstance(value, tuple):  # repeated
            words[name] = tuple(word for item in value for word in (name, str(item)))
        elif value != usual and value is not None:
            words[name] = (name,) if value is True else (name, str(value))
    # New tokens are part of the context: a change of one names both.
    words["--context" if "--context" in words else "--max-context"] += words.pop("--new-tokens", ())
    return {name: option for name, option in words.items() if option}


def change(
    request: PlanRequest, changed_request: PlanRequest
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the words to add to the command of a request, and the options to leave out."""
    # Example: from {--context: 8K, --batch: 4} to {--context: 8K, --quantize: int8} the words
    # --quantize int8 are added, and --batch is left out, as 1 is the usual batch.
    old, new = options(request), options(changed_request)
    added_words = tuple(
        word for name, words in new.items() if old.get(name) != words for word in words
    )
    return added_words, tuple(name for name in old if name not in new)


def _knobs(request: PlanRequest) -> Iterator[tuple[str, object, object]]:
    """Yield each option with its value and its usual value, in the order of the command."""
    workload, training = request.workload, request.workload.training
    constraints, is_paged = request.constraints, workload.is_paged
    yield "--gpus", request.gpus or "all", "all"
    yield "--max-context", request.largest == "context", False
    yield "--context", None if request.largest == "context" else workload.context_tokens, None
    yield "--new-tokens", workload.new_tokens if training is None else None, None
    yield "--serve", is_paged, False
    yield "--max-batch", request.largest == "batch", False
    if request.largest != "batch":
        batch = ("--sequences", None) if is_paged else ("--batch", _USUAL.batch)
        yield batch[0], workload.batch, batch[1]
    yield "--dtype", workload.dtype, _USUAL.dtype
    yield "--quantize", workload.quantize, _USUAL.quantize
    yield "--cache", "int8" if workload.has_int8_cache else None, None
    if training is None:
        yield "--prefill-chunk", workload.prefill_chunk_tokens or "none", "auto"
    if workload.images:
        height, width = workload.image_size
        yield "--images", workload.images, None
        yield "--image-size", f"{width}x{height}", None
        yield "--vision-batch", workload.vision_batch or "none", "auto"
    if training is not None:
        yield "--train", training.method, None
        for name in ("optimizer", "lora_rank", "lora_alpha", "lora_dropout", "micro_batches"):
            yield _option(name), getattr(training, name), getattr(_USUAL_TRAINING, name)
        yield "--schedule", training.schedule, _USUAL_TRAINING.schedule
        yield "--rows", training.rows, _USUAL_TRAINING.rows
        yield "--lora-target", training.lora_targets, None
        yield "--checkpointing", training.gradient_checkpointing, False
        yield "--master-weights", training.master_weights, False
    yield "--objective", request.objective, "auto"
    yield "--use-all", request.use_all, False
    yield "--trust-remote-code", request.trust_remote_code, False
    yield "--strategy", constraints.strategy, "auto"
    yield "--pin", tuple(f"{name}={device}" for name, device in constraints.pins), None
    yield "--reserve", tuple(f"{at}={size}B" for at, size in constraints.reserve), None
    yield "--offload", constraints.offload, False


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
