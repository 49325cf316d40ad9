"""Run a subject with real numbers, to compare code before and after a fix."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from duoka.report.check_report import CheckReport, Stop

from .execute import DECODE_STEPS
from .run import CheckRun, preserve_random_state
from .subject import Subject

_SEED = 20
_PROMPT_TOKENS = 256
_NEW_TOKENS = 1 + 2 * DECODE_STEPS


@dataclass(frozen=True, slots=True, eq=False)
class Numbers:
    """Results of a run on the CPU, and its report."""

    tensors: Mapping[str, Tensor]
    """Outputs of the model's calls and of the whole run, and gradients, by name and path."""
    report: CheckReport


def compute(subject: Subject, *, on_one: bool = False) -> Numbers:
    """Run a subject with real numbers from a fixed seed; with `on_one` entirely on its first GPU.

    A workload is limited to a few hundred tokens and steps.
    """
    run = _Computation(subject, on_one=on_one)
    with preserve_random_state():
        torch.manual_seed(_SEED)
        random.seed(_SEED)
        np.random.seed(_SEED)
        report = run.report()
    return Numbers(run.tensors, report)


class _Computation(CheckRun):
    """A run that keeps CPU copies of its results."""

    def __init__(self, subject: Subject, *, on_one: bool) -> None:
        super().__init__(_smaller(subject), "cpu")
        self.tensors: dict[str, Tensor] = {}
        self._num_calls = 0
        if on_one:
            # The number of GPUs stays the same: model code may name a GPU.
            first_device = next((name for name in subject.devices if name != "cpu"), "cpu")
            self.subject = replace(
                self.subject, entries=tuple((name, first_device) for name, _ in subject.entries)
            )

    def _run(self, first_device: torch.device) -> Stop | None:
        """Run the subject, and keep the outputs of all calls and the gradients."""
        model = self.subject.model
        model.register_forward_hook(self._keep_output, always_call=False)
        stop = super()._run(first_device)
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                self._record(f"gradient of {name}", parameter.grad)
        return stop

    def finish(self, result: Any) -> None:
        """Keep the results of the run."""
        self._record("result", result)

    def _keep_output(self, module: nn.Module, args: Any, output: Any) -> None:
        self._num_calls += 1
        self._record(f"output of call {self._num_calls}", output)

    def _record(self, name: str, value: Any) -> None:
        for path, tensor in _named_tensors(name, value, set()):
            self.tensors[path] = tensor.detach().to("cpu", copy=True)


def _smaller(subject: Subject) -> Subject:
    """Return the subject with fewer tokens and without the jump to the end of the context.

    That jump lengthens the cache by entries without real numbers.
    """
    work = subject.workload
    tokens = work.prompt_tokens if subject.prompt else min(work.prompt_tokens, _PROMPT_TOKENS)
    small_work = replace(work, prompt_tokens=tokens, new_tokens=min(work.new_tokens, _NEW_TOKENS))
    return replace(subject, workload=small_work)


def _named_tensors(name: str, value: Any, visited_ids: set[int]) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor in nested containers and plain objects with its path."""
    for path, leaf in tree_flatten_with_path(value)[0]:
        place = name + keystr(path)
        if isinstance(leaf, Tensor):
            yield place, leaf
        elif id(leaf) not in visited_ids and not isinstance(leaf, (nn.Module, type)):
            visited_ids.add(id(leaf))
            for key, item in getattr(leaf, "__dict__", {}).items():
                yield from _named_tensors(f"{place}.{key}", item, visited_ids)
