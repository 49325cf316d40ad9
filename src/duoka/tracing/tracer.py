"""The tracer: runs a schedule of a model's steps, and fits the rules of its profile to them.

The whole model is on one virtual GPU without data. A schedule says which steps run, at which sizes,
and for which regimes the fitted rules hold: `trace_generation`, `trace_serving` and
`trace_training` have one schedule each. This module knows nothing of several GPUs or of budgets.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import pairwise
from threading import RLock
from typing import Any

import torch
from torch import nn

from duoka import virtual
from duoka.base.model_code import where_raised
from duoka.errors import ModelError
from duoka.forecast.flash_splits import FlashShape
from duoka.forecast.profile import ENDLESS, IMAGE_PHASES, Profile, Regime
from duoka.hardware.gpu_generation import GpuGeneration
from duoka.models.quantization import parts
from duoka.planner.placement import Placement
from duoka.runtime.dispatch.place_tensors import invent_values, place
from duoka.runtime.image_inputs import ImagePrompts

from .assemble import CALLER, RegimeTraces, TraceSpec, as_profile
from .blocks import ModuleGroup, find_groups
from .fit import RecordedStep, Unlike, fit
from .published_names import name_tensors
from .record import Recorder

PROBED_TOKENS = 2**11
"""The longest step that rules are fitted to, in tokens from the start of a range. The rules hold to
the end of the range: a range ends where model code takes another path, such as at a window."""
LOOKED_AT_TOKENS = 8
"""Tokens of the step in which a model's blocks are found."""
_SHORTEST_WINDOW = 256

# Exceptions by which model code rejects inputs or sizes.
FAILURES = (
    *(RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError),
    *(AssertionError, ImportError, ArithmeticError),
)


class Irregular(Exception):
    """Raised for a model whose costs have no rules for every workload."""


class Tracer:
    """Records steps of a model and fits regimes to them; subclasses define the schedule."""

    skip = True
    """Run identical blocks once."""
    hears_moves = False
    """Record explicit moves in model code even if nothing is moved back to an earlier block."""
    caller_at = 0
    """The block whose device the caller uses."""

    def __init__(self, model: nn.Module, spec: TraceSpec, prompts: ImagePrompts | None = None):
        self.model: Any = model
        self.spec = spec
        self.prompts = prompts
        self.longest = spec.max_context_tokens or ENDLESS
        self.least_tokens = 0 if prompts is None else prompts.least_tokens
        self.named = name_tensors(model, spec.published)
        self.shapes: list[FlashShape] = []
        self.device: torch.device
        self.groups: list[ModuleGroup]
        self.recorder: Recorder

    def start(self) -> None:
        """Find the blocks of the placed model, and pass them to `observe`; for subclasses."""

    def observe(self, groups: Sequence[ModuleGroup]) -> None:
        """Create the recorder for these blocks."""
        self.groups = [*groups, CALLER]
        self.recorder = Recorder(
            self.model, self.groups, skip=self.skip, hears_moves=self.hears_moves
        )

    def trace(
        self,
        schedule: Callable[[], Iterable[RegimeTraces]],
        failure: Callable[[Exception], Exception] | None = None,
    ) -> Profile:
        """Run a schedule and return the profile; `failure` converts an error into one to raise."""
        with running(self.model), place_whole(self.model, self.spec) as self.device:
            self.start()
            try:
                regimes = list(schedule())
            except (Unlike, *FAILURES) as error:
                if failure is None:
                    raise
                raise failure(error) from error
            return self.profile(regimes)

    def irregular(self, error: Exception) -> Irregular:
        """Return the Irregular error for a failed probe step or a failed fit."""
        return Irregular(f"{type(self.model).__name__}: {error}")

    def fit(self, regime: Regime, samples: Iterable[RecordedStep]) -> RegimeTraces:
        """Fit the rules of a regime to the samples of its phase."""
        phase_samples = [sample for sample in samples if sample.phase == regime.phase]
        # Vision towers attend over patches, whose number isn't among the sizes of a step.
        shapes = None if regime.phase in IMAGE_PHASES else self.shapes
        traces, carried = fit(phase_samples, shapes)
        return replace(regime, carried=carried), traces

    def split(
        self,
        regimes: Sequence[Regime],
        samples: Sequence[RecordedStep],
        complete: Callable[[], None],
    ) -> list[RegimeTraces]:
        """Fit regimes to samples, or two regimes for each if costs depend on mask alignment.

        `samples` has a single aligned sample, which checks that one rule holds for aligned and
        unaligned sizes. Otherwise `complete` adds the remaining aligned samples, and each regime is
        split into an unaligned and an aligned one.
        """
        with suppress(Unlike):
            return [self.fit(regime, samples) for regime in regimes]
        complete()
        return [
            self.fit(
                replace(regime, aligned=aligned),
                [sample for sample in samples if sample.is_aligned == aligned],
            )
            for aligned in (False, True)
            for regime in regimes
        ]

    def profile(self, regimes: Sequence[RegimeTraces]) -> Profile:
        """Return the profile with these regimes."""
        return replace(
            as_profile(
                self.model, self.groups, self.spec, regimes, self.named, caller_at=self.caller_at
            ),
            least_prompt_tokens=self.least_tokens,
            flash_shapes=tuple(self.shapes),
            needs_movers=self.recorder.needs_movers,
        )

    def find_blocks(
        self, run: Callable[[], Any], *, encodes_apart: bool = False
    ) -> list[ModuleGroup]:
        """Find the blocks of a model, which may read images.

        Model code moves image features to the device of the text embeddings, an earlier block, and
        inserts them there: a move back. With `encodes_apart` a separate earlier step encodes the
        images, so groups that stand for such moves are dropped.
        """
        if self.prompts is not None:
            groups = find_groups(self.model, run, hears_moves=True, fuses_glue=False)
            if encodes_apart:
                return [group for group in groups if group.returns_to is None]
            if any(group.returns_to is not None for group in groups):
                return groups
        return find_groups(self.model, run)

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Yield ranges of tokens within which the model's code takes the same path."""
        config = self.model.config
        parts = [part for part in (config, getattr(config, "text_config", None)) if part]
        windows = {
            value
            for part in parts
            for name, value in vars(part).items()
            if ("window" in name or "chunk" in name) and type(value) is int and value > 1
        }
        # A sliding window changes masks and caches at its length, chunked code at a chunk's.
        edges = [value for value in sorted(windows) if _SHORTEST_WINDOW <= value < self.longest]
        if edges and self.prompts is not None:
            raise Unlike("costs with a sliding window and images have more lengths")
        yield from pairwise([0, *edges, ENDLESS])


@contextmanager
def running(model: nn.Module) -> Iterator[None]:
    """Run model code eagerly; turn a failure into ModelError with the model and the code line."""
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    except FAILURES as error:
        where = where_raised(error)
        if not where and isinstance(error, AssertionError):
            raise  # an assertion of duoka, not of model code
        raise ModelError(
            f"{type(model).__name__} can't be traced: {type(error).__name__}: "
            f"{virtual.spoken(str(error))}{where}",
            hint="give example inputs that it accepts: duoka.plan(model, fleet, inputs=…)",
        ) from error


@contextmanager
def place_whole(model: nn.Module, spec: TraceSpec) -> Iterator[torch.device]:
    """Place a model on a virtual GPU without a memory limit, and yield the device."""
    if next(model.parameters(), None) is None:
        raise ModelError(f"{type(model).__name__} has no parameters to place")
    device = virtual.virtual_device(0)
    generation = GpuGeneration(workspace_bytes=0, before_ampere=spec.conditions.before_ampere)
    with (
        virtual.unnamed_gpus([None], data=spec.data, generation=generation),
        torch.no_grad(),
        _one_thread(),
    ):
        place(model, Placement(entries=(("", str(device)),)))
        if spec.data == "cpu":
            invent_values(model)
        else:
            _forget_values(model)
        yield device


_TRACING: Any = RLock()
if hasattr(os, "register_at_fork"):  # a forked child (`virtual.apart`) has no thread to unlock it
    os.register_at_fork(after_in_child=_TRACING._at_fork_reinit)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Limit PyTorch to a single thread: masks are too small for several.

    The number of threads is global to the process, so traces in several threads run one at a time,
    and each restores the number.
    """
    with _TRACING:
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(num_threads)


def _forget_values(model: nn.Module) -> None:
    """Drop the values of quantized weights, so that they are never unpacked.

    Virtual GPUs compute the values of small integer tensors, because masks and positions are
    integers. An 8-bit weight is an integer tensor too, and every step would dequantize it.
    """
    for parameter in model.parameters():
        for part in parts(parameter).values():
            if not part.dtype.is_floating_point:
                part.copy_(torch.empty_like(part, device="meta"))
