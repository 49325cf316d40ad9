"""Run a subject as users would: a single call, prefill and decode steps, or loss and backward."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from duoka.errors import UsageError
from duoka.models.cache_argument import CACHE_NAMES
from duoka.models.kv_cache import layer_tensors
from duoka.runtime.call.generate import refuse_without_generation
from duoka.runtime.call.stepper import Stepper
from duoka.runtime.dispatch.arguments import tensors_in, to_device
from duoka.virtual import UnknownValueError

from .mixed_call import Args, Kwargs
from .subject import Subject

DECODE_STEPS = 2
BETWEEN = "decode, many steps"
"""Phase in which the KV cache is lengthened by many tokens at once, without running steps."""

_TRAIN_STEPS = 2


class StepListener:
    """Listener for the steps of a run and its tensors; it does nothing by default."""

    def begin(self, phase: str) -> None:
        """Handle the start of a step of a phase."""

    def mark(self, kind: str, tensors: Any) -> None:
        """Handle tensors of a memory kind, such as "inputs" or "cache"."""

    def note(self, text: str) -> None:
        """Handle a note for the report."""


def run(subject: Subject, device: torch.device, steps: StepListener) -> Any:
    """Run a subject whose model is on its devices, eagerly; inputs start on `device`."""
    with torch.compiler.set_stance("force_eager"):
        return _run(subject, device, steps)


def _run(subject: Subject, device: torch.device, steps: StepListener) -> Any:
    """Call the inputs' function, or run one call, training steps, or generation."""
    model, inputs = subject.model, subject.inputs
    if callable(inputs) and not isinstance(inputs, Mapping):
        # The function runs the model: each call of it is a step.
        model.register_forward_pre_hook(lambda *_: steps.begin("forward"))
        with torch.set_grad_enabled(subject.train):
            return inputs(model)
    if inputs is not None:
        args, kwargs = _arguments(inputs, device)
        steps.mark("inputs", tensors_in((args, kwargs)))
        call = partial(model, *args, **kwargs)
        return _train(call, steps) if subject.train else _infer(model, call, kwargs, steps)
    refuse_without_generation(model)
    if subject.train:
        inputs = _training_inputs(subject, device)
        steps.mark("inputs", inputs.values())
        return _train(partial(model, **inputs), steps)
    return _generate(subject, device, steps)


def _arguments(inputs: Any, device: torch.device) -> tuple[Args, Kwargs]:
    """Return positional and keyword arguments on a device; a single tensor is the only argument."""
    if isinstance(inputs, Mapping):
        return (), to_device(dict(inputs), device)
    args = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    return to_device(args, device), {}


def _train(call: Callable[[], Any], steps: StepListener) -> torch.Tensor:
    """Run forward, loss and backward twice; the second run meets the first run's gradients."""
    with torch.enable_grad():
        for _ in range(_TRAIN_STEPS):
            steps.begin("forward")
            loss = find_loss(call())
            steps.begin("backward")
            loss.backward()
    return loss


def find_loss(outputs: Any) -> torch.Tensor:
    """Return the loss in a model's output; else the sum of its first tensor with a gradient."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if isinstance(outputs, torch.Tensor):
        loss = outputs
    if not isinstance(loss, torch.Tensor):
        loss = next((tensor for tensor in tensors_in(outputs) if tensor.requires_grad), None)
    if loss is None:
        hint = "give inputs that include labels, or check without training"
        raise UsageError("the model's output has no tensor with a gradient", hint=hint)
    return loss if loss.dim() == 0 else loss.float().sum()


# Tables that the first call leaves behind (masks, rotary tables in an attribute or a global) are
# read by the second call from its first layer on: one that was last made on cuda:1 meets inputs on
# cuda:0 there. The decode step continues the cache of the first call, as `generate` would.
@torch.no_grad()
def _infer(model: nn.Module, call: Callable[[], Any], kwargs: Kwargs, steps: StepListener) -> Any:
    """Run a call twice, the second time with tables in place, then a decode step if possible."""
    steps.begin("forward")
    outputs = call()
    again = _decode_arguments(model, outputs, kwargs)
    steps.begin("forward")
    outputs = call()
    if again:
        steps.begin("decode")
        try:
            model(**again)
        except UnknownValueError:
            raise
        except Exception as error:  # the model may not accept these arguments
            steps.note(f"a decode step (one token with the KV cache) failed: {error}")
    return outputs


def _decode_arguments(model: nn.Module, outputs: Any, kwargs: Kwargs) -> Kwargs | None:
    """Return the arguments of a decode step; None if no cache is returned, or none is accepted."""
    accepted, ids = inspect.signature(model.forward).parameters, kwargs.get("input_ids")
    for name in CACHE_NAMES if isinstance(ids, torch.Tensor) else ():
        cache = outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)
        if cache is not None and name in accepted:
            option = {key: kwargs[key] for key in ("use_cache",) if key in kwargs}
            return {**option, "input_ids": kwargs["input_ids"][:, -1:], name: cache}
    return None


def _training_inputs(subject: Subject, device: torch.device) -> dict[str, Any]:
    """Return the keyword arguments of a training step: prompt, labels, and mask if accepted."""
    work = subject.workload
    shape = (work.batch, work.prompt_tokens)
    accepted = inspect.signature(subject.model.forward).parameters
    inputs: dict[str, Any] = {name: tensor.to(device) for name, tensor in subject.prompt.items()}
    if not inputs:
        inputs["input_ids"] = torch.ones(shape, dtype=torch.long, device=device)
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    ids = inputs["input_ids"]
    if "labels" in accepted or "kwargs" in accepted:
        inputs["labels"] = ids.clone()
    if getattr(getattr(subject.model, "config", None), "is_encoder_decoder", False):
        inputs.pop("attention_mask")
    elif "attention_mask" not in accepted:
        del inputs["attention_mask"]
    return {**inputs, **({"use_cache": False} if "use_cache" in accepted else {})}


def _generate(subject: Subject, device: torch.device, steps: StepListener) -> Any:
    """Run prefill and decode steps, and the cache reordering of beam search for a split layer."""
    work = subject.workload
    with torch.no_grad():
        model: Any = subject.model
        stepper = Stepper.of(model, work, device)

        def step(phase: str, tokens: int) -> None:
            steps.begin(phase)
            advance = stepper.lengthen if phase == BETWEEN else stepper.step
            advance(tokens)
            steps.mark("cache", tensors_in(_contents(stepper.cache)))

        if subject.prompt:
            inputs = {name: tensor.to(device) for name, tensor in subject.prompt.items()}
            steps.mark("inputs", inputs.values())
            steps.begin("prefill")
            stepper.prefill(inputs)
        else:
            for query, _ in work.chunks():
                step("prefill", query)
        for phase, tokens in decode_phases(work.new_tokens - 1):
            step(phase, tokens)
        if any(len({t.device for t in tensors_in(it)}) > 1 for it in layer_tensors(stepper.cache)):
            steps.begin("beam search")
            stepper.cache.reorder_cache(torch.arange(work.batch, device=device))
    return None


# A step for each token of a long context would take too long. The first two and the last two steps
# are run; between them `Stepper.lengthen` makes the cache as long as it will be. Of 99 tokens:
#
#   tokens   1        1        95                   1        1
#   phase    decode   decode   decode, many steps   decode   decode
def decode_phases(tokens: int) -> Iterator[tuple[str, int]]:
    """Yield the phases in which `tokens` tokens are decoded, each with its number of tokens."""
    first_steps = min(tokens, DECODE_STEPS)
    last_steps = min(tokens - first_steps, DECODE_STEPS)
    yield from [("decode", 1)] * first_steps
    if tokens > first_steps + last_steps:
        yield BETWEEN, tokens - first_steps - last_steps
    yield from [("decode", 1)] * last_steps


def _contents(cache: Any) -> Any:
    """Return the attributes of a cache's layers, or else of the cache; they hold its tensors."""
    return layer_tensors(cache) or (vars(cache) if hasattr(cache, "__dict__") else cache)
