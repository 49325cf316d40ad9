"""What a subject computes, in real numbers: to compare code before and after a repair."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from duoka.report.check_report import CheckReport, Stop
from duoka.runtime.dispatch.place_tensors import parameter_bytes
from duoka.virtual import REAL_BYTES

from .execute import DECODE_STEPS
from .run import CheckRun, random_state_kept
from .subject import Subject

_SEED = 20
_PROMPT_TOKENS = 256
_NEW_TOKENS = 1 + 2 * DECODE_STEPS


@dataclass(frozen=True, slots=True, eq=False)
class Numbers:
    """What a run computed, on the CPU, and its report."""

    tensors: Mapping[str, Tensor]
    """What each call of the model and the whole run returned, and the parameters' gradients."""
    report: CheckReport


def is_computable(subject: Subject) -> bool:
    """Whether a model is small enough to be run with real numbers."""
    return parameter_bytes(subject.model) <= REAL_BYTES


def compute(subject: Subject, *, on_one: bool = False) -> Numbers:
    """Run a subject with real numbers, from a fixed seed; what mixes devices is moved.

    Of a workload a few hundred tokens and steps are computed.
    """
    run = _Computation(subject, on_one=on_one)
    with random_state_kept():
        torch.manual_seed(_SEED)
        random.seed(_SEED)
        np.random.seed(_SEED)
        report = run.report()
    return Numbers(run.tensors, report)


class _Computation(CheckRun):
    """A run that keeps what it computes."""

    def __init__(self, subject: Subject, *, on_one: bool) -> None:
        super().__init__(_smaller(subject), "cpu")
        self.tensors: dict[str, Tensor] = {}
        self._num_calls = 0
        if on_one:
            # As many GPUs as before: the code may name one.
            first = next((name for name in subject.devices if name != "cpu"), "cpu")
            self.subject = replace(
                self.subject, entries=tuple((name, first) for name, _ in subject.entries)
            )

    def _run(self, first: torch.device) -> Stop | None:
        model = self.subject.model
        model.register_forward_hook(self._called, always_call=False)
        stop = super()._run(first)
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                self._record(f"gradient of {name}", parameter.grad)
        return stop

    def ended(self, result: Any) -> None:
        """Keep what the run returned."""
        self._record("result", result)

    def _called(self, module: nn.Module, args: Any, output: Any) -> None:
        self._num_calls += 1
        self._record(f"output of call {self._num_calls}", output)

    def _record(self, name: str, value: Any) -> None:
        for path, tensor in _named(name, value, set()):
            self.tensors[path] = tensor.detach().to("cpu", copy=True)


def _smaller(subject: Subject) -> Subject:
    """The subject with fewer tokens, and without the jump to the end of the context.

    What a cache is lengthened by holds no numbers.
    """
    work = subject.workload
    tokens = work.prompt_tokens if subject.prompt else min(work.prompt_tokens, _PROMPT_TOKENS)
    few = replace(work, prompt_tokens=tokens, new_tokens=min(work.new_tokens, _NEW_TOKENS))
    return replace(subject, workload=few)


def _named(name: str, value: Any, known: set[int]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in nested containers and plain objects (a cache), with its way there."""
    if isinstance(value, Tensor):
        yield name, value
        return
    if id(value) in known or isinstance(value, (str, bytes, nn.Module, type)):
        return
    known.add(id(value))
    if isinstance(value, Mapping):
        parts: Iterator[tuple[str, Any]] = ((f"[{key!r}]", value[key]) for key in value)
    elif isinstance(value, Sequence):
        parts = ((f"[{index}]", item) for index, item in enumerate(value))
    else:
        parts = ((f".{key}", item) for key, item in getattr(value, "__dict__", {}).items())
    for step, item in parts:
        yield from _named(name + step, item, known)
