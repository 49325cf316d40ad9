"""The tracer: runs a schedule of a model's steps, and fits the rules of its profile to them.

A model is whole on one virtual GPU without data. A schedule says which steps run, at which sizes,
and where the rules from them hold: `trace_generation`, `trace_serving` and `trace_training` have
one each. Nothing is known here of several GPUs, nor of budgets.
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
"""Rules are made from steps up to this length, counted from the start of a range. Nothing changes
beyond it: where code changes its ways (windows), a range ends."""
LOOKED_AT_TOKENS = 8
"""What a model is shown to find its blocks."""
_SHORTEST_WINDOW = 256

# What model code raises when it can't run as it is asked to.
FAILURES = (
    *(RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError),
    *(AssertionError, ImportError, ArithmeticError),
)


class Irregular(Exception):
    """Raised for a model without rules for every workload."""


class Tracer:
    """Records steps of a model, and fits regimes to them; a subclass has the schedule."""

    skip = True
    """Run blocks that are alike once."""
    hears_moves = False
    """Record what model code moves as moved, also where nothing is moved back."""
    caller_at = 0
    """The block on whose device the caller is."""

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
        """Find the blocks, with the model on its device, and hand them to `observe`."""

    def observe(self, groups: Sequence[ModuleGroup]) -> None:
        """Record steps by these blocks from now on."""
        self.groups = [*groups, CALLER]
        self.recorder = Recorder(
            self.model, self.groups, skip=self.skip, hears_moves=self.hears_moves
        )

    def trace(
        self,
        schedule: Callable[[], Iterable[RegimeTraces]],
        failure: Callable[[Exception], Exception] | None = None,
    ) -> Profile:
        """Run a schedule and return the profile, or raise the `failure` made of an error."""
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
        """Return the error of rules for all workloads: a step far from any asked for fails."""
        return Irregular(f"{type(self.model).__name__}: {error}")

    def fit(self, regime: Regime, samples: Iterable[RecordedStep]) -> RegimeTraces:
        """Fit the rules of a regime to the samples of its phase."""
        phase_samples = [sample for sample in samples if sample.phase == regime.phase]
        # Towers attend over patches, of which a step's sizes say nothing.
        shapes = None if regime.phase in IMAGE_PHASES else self.shapes
        traces, carried = fit(phase_samples, shapes)
        return replace(regime, carried=carried), traces

    def split(
        self,
        regimes: Sequence[Regime],
        samples: Sequence[RecordedStep],
        complete: Callable[[], None],
    ) -> list[RegimeTraces]:
        """Fit regimes to their samples, or two for each if costs depend on the alignment of masks.

        A single aligned sample among unaligned ones checks that rules hold for both. Where they
        don't, `complete` adds the samples at all aligned sizes.
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

        Features of images are moved to the text's embeddings, and are spliced into them there. With
        `encodes_apart` a step of its own makes them, so that this is no move back.
        """
        if self.prompts is not None:
            groups = find_groups(self.model, run, hears_moves=True, fuses_glue=False)
            if encodes_apart:
                return [group for group in groups if group.returns_to is None]
            if any(group.returns_to is not None for group in groups):
                return groups
        return find_groups(self.model, run)

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Yield ranges of tokens; at their edges the model's code may take other paths."""
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
    """Run model code eagerly, and raise ModelError with the model and the line of a failure."""
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    except FAILURES as error:
        where = where_raised(error)
        if not where and isinstance(error, AssertionError):
            raise  # one of duoka's own
        raise ModelError(
            f"{type(model).__name__} can't be traced: {type(error).__name__}: "
            f"{virtual.spoken(str(error))}{where}",
            hint="give example inputs that it accepts: duoka.plan(model, fleet, inputs=…)",
        ) from error


@contextmanager
def place_whole(model: nn.Module, spec: TraceSpec) -> Iterator[torch.device]:
    """Place a model on a virtual GPU without data and without limit."""
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
if hasattr(os, "register_at_fork"):  # in a fork (`virtual.apart`) nobody is there who could unlock
    os.register_at_fork(after_in_child=_TRACING._at_fork_reinit)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute on a single thread: masks are too small for several.

    The number is the process's: traces in several threads take turns, so that it is put back.
    """
    with _TRACING:
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(num_threads)


def _forget_values(model: nn.Module) -> None:
    """Take their values from quantized weights.

    Virtual GPUs compute with small tensors of integers, since masks and positions are such. A
    weight in eight bits is one as well: it would be unpacked in earnest in every step.
    """
    for parameter in model.parameters():
        for part in parts(parameter).values():
            if not part.dtype.is_floating_point:
                part.copy_(torch.empty_like(part, device="meta"))
