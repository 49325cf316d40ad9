"""The command line of a request.

Converts a request to command-line arguments, so that suggestions can name the arguments to change.
`cli` parses the arguments.
"""

from __future__ import annotations

from collections.abc import Iterator

from duoka.forecast.workload import Training, Workload
from duoka.hardware.parse import format_host

from .constraints import Constraints
from .request import PlanRequest

_USUAL = Workload()
# The defaults of `duoka plan --train`; those of the Python API are for loops of the user.
_USUAL_TRAINING = Training(schedule="1f1b")
DEFAULT_BATCH = 8
"""Sequences of an optimizer step."""
Options = dict[str, tuple[str, ...]]
"""The arguments of each option, its name included, by the option's name."""


def options(request: PlanRequest) -> Options:
    """Return the options of a request, without the model and without options at their default."""
    words: Options = {}
    for name, value, usual in _option_values(request):
        if isinstance(value, tuple):  # repeated
            words[name] = tuple(word for item in value for word in (name, str(item)))
        elif value != usual and value is not None:
            words[name] = (name,) if value is True else (name, str(value))
    if request.host is not None:
        words["--host-memory"] = ("--host-memory", format_host(request.host))
    # New tokens are part of the context: if one of the two changes, both options are repeated.
    words["--context" if "--context" in words else "--max-context"] += words.pop("--new-tokens", ())
    return {name: option for name, option in words.items() if option}


def change(
    request: PlanRequest, changed_request: PlanRequest
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the arguments to add to the command of a request, and the options to remove from it.

    With both changes the command makes `changed_request`.
    """
    # Example: from {--context: 8K, --batch: 4} to {--context: 8K, --quantize: int8} the arguments
    # --quantize int8 are added, and --batch is removed, because 1 is the default.
    old, new = options(request), options(changed_request)
    added_words = tuple(
        word for name, words in new.items() if old.get(name) != words for word in words
    )
    return added_words, tuple(name for name in old if name not in new)


# Fields of `Training` with an option of the same name.
_TRAINING = (
    *("optimizer", "lora_rank", "lora_alpha", "rslora", "lora_dropout", "schedule"),
    *("train_vision", "dpo"),
)


def _option_values(request: PlanRequest) -> Iterator[tuple[str, object, object]]:
    """Yield (option, value, default), in the order of the command; a value of None is left out."""
    workload, training = request.workload, request.workload.training
    constraints = request.constraints
    is_served = workload.is_paged and not workload.pages_for_batch
    yield "--gpus", request.gpus or "all", "all"
    yield "--max-context", request.largest == "context", False
    yield "--context", None if request.largest == "context" else workload.context_tokens, None
    yield "--new-tokens", workload.new_tokens if training is None else None, None
    yield "--serve", is_served, False
    yield "--max-batch", request.largest == "batch", False
    if request.largest != "batch" and training is not None:
        micro_batch = workload.batch // 2 if training.dpo else workload.batch
        yield "--batch", micro_batch * training.micro_batches, DEFAULT_BATCH
        yield "--micro-batch", micro_batch, 1
    elif request.largest != "batch":
        batch = ("--sequences", None) if is_served else ("--batch", _USUAL.batch)
        yield batch[0], workload.batch, batch[1]
    yield "--dtype", workload.dtype, _USUAL.dtype
    yield "--quantize", workload.quantize, _USUAL.quantize
    cache = workload.cache.removeprefix("paged-" if is_served else "")
    yield "--cache", cache, "paged" if is_served else _USUAL.cache
    yield "--adapter", tuple("=".join(pair) for pair in workload.adapters), None
    yield "--no-graphs", not workload.cuda_graphs, False
    if training is None:
        yield "--prefill-chunk", workload.prefill_chunk_tokens or "none", "auto"
    if workload.images:
        height, width = workload.image_size
        yield "--images", workload.images, None
        yield "--image-size", f"{width}x{height}", None
        yield "--vision-batch", workload.vision_batch or "none", "auto"
    if training is not None:
        yield from _training_values(training)
    yield "--objective", request.objective, "auto"
    yield from _expert_values(constraints)
    yield "--use-all", request.use_all, False
    yield "--trust-remote-code", request.trust_remote_code, False
    yield "--strategy", constraints.strategy, "auto"
    yield "--pin", tuple(f"{name}={device}" for name, device in constraints.pins), None
    yield "--reserve", tuple(f"{at}={size}B" for at, size in constraints.reserve), None
    yield "--offload", constraints.offload, False


def _training_values(training: Training) -> Iterator[tuple[str, object, object]]:
    """Yield (option, value, default) of the options for training."""
    yield "--train", training.method, None
    for name in _TRAINING:
        yield _option(name), getattr(training, name), getattr(_USUAL_TRAINING, name)
    yield "--lora-target", training.lora_targets, None
    yield "--checkpointing", training.gradient_checkpointing, False
    yield "--packing", training.rows == "packed", False


def _expert_values(constraints: Constraints) -> Iterator[tuple[str, object, object]]:
    """Yield (option, value, default) of the options for experts."""
    cache_bytes = constraints.expert_cache
    yield "--experts", constraints.experts, "auto"
    yield "--host-experts", constraints.host_experts, "auto"
    yield "--expert-cache", None if cache_bytes is None else f"{cache_bytes}B", None


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
