"""From a model to the profile of its steps over a paged cache.

Two kinds of steps are recorded: the first one, which makes the pages, and those after it. What they
take follows from their size and the cache's alone (`forecast.serving`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from duoka.errors import ModelError
from duoka.forecast.profile import Phase, Profile, Regime
from duoka.forecast.serving import FIRST, Capacity, StepSize, serving_monomials
from duoka.runtime.call.paged_model import PagedModel, reads_pages
from duoka.runtime.draw import draw_in_every_way

from .assemble import CALLER, ENDLESS, EVERYWHERE, RegimeTapes, TraceSpec, as_profile
from .blocks import find_groups
from .fit import RecordedStep, Unlike, fit
from .published_names import name_tensors
from .record import Recorder
from .trace import FAILURES, Irregular, running, whole

# Tokens, rows and logits; one token alone may be computed otherwise than several. There are more of
# each than rules have coefficients.
_ONE = ((1, 1, 2),) * 6
_SEVERAL = (
    *((2, 1, 2), (40, 32, 7), (28, 8, 3), (64, 4, 17), (80, 64, 2), (24, 16, 5)),
    *((56, 2, 11), (48, 32, 13), (96, 1, 19), (32, 8, 2)),
)
# The cache of each run: sequences, context, pages.
_CACHES = (
    *((3, 100, 9), (5, 500, 40), (7, 900, 23), (2, 340, 61), (9, 200, 17), (4, 710, 30)),
    *((6, 1000, 11), (3, 1010, 52), (8, 180, 26), (5, 260, 45)),
)


def trace_serving(model: nn.Module, spec: TraceSpec) -> Profile:
    """Run a model's steps over paged caches without data, and record what they cost.

    Raises
    ------
    ModelError
        If its layers can't read from pages.
    """
    name = type(model).__name__
    if not reads_pages(model):  # type: ignore[arg-type]
        raise ModelError(f"{name} can't read from pages", hint=_HINT)
    named = name_tensors(model, spec.published)
    with running(model), whole(model, spec) as device:
        try:
            return _Tracer(model, spec, device).profile(named)
        except (Unlike, *FAILURES) as error:
            raise ModelError(
                f"{name} can't be forecast over pages: {str(error)[:300]}", hint=_HINT
            ) from error


_HINT = "plan for requests with a cache each: duoka plan --batch N"


class _Tracer:
    def __init__(self, model: Any, spec: TraceSpec, device: torch.device) -> None:
        self.model, self.spec, self.device = model, spec, device
        groups = find_groups(model, lambda: self._stepper(0).start())
        self.groups = [*groups, CALLER]
        self.recorder = Recorder(model, self.groups, skip=True)

    def profile(self, named: Any) -> Profile:
        """The profile of all steps."""
        if any(group.returns_to is not None for group in self.groups):
            raise Irregular("the model's code moves tensors back by itself")
        last = len(self.groups) - 2  # tokens are drawn where logits are
        profile = as_profile(
            self.model, self.groups, self.spec, [*self._regimes()], named, caller_at=last
        )
        return replace(profile, needs_movers=self.recorder.needs_movers)

    def _stepper(self, number: int) -> PagedModel:
        sequences, context, pages = _CACHES[number % len(_CACHES)]
        capacity = Capacity(
            sequences=sequences,
            context_tokens=context,
            pages=pages,
            page_tokens=16,
            step_tokens=128,
            is_int8=self.spec.conditions.cache == "paged-int8",
        )
        return PagedModel(self.model, capacity, self.device)

    def _regimes(self) -> Iterator[RegimeTapes]:
        firsts: list[RecordedStep] = []
        for sizes, query in ((_ONE, (1, 2)), (_SEVERAL, (2, ENDLESS))):
            samples: list[RecordedStep] = []
            for number, size in enumerate(sizes):
                first, later = self._record(number, StepSize(**_named(size)))
                firsts.append(first)
                samples.append(later)
            yield _fitted("serve", query, samples)
        yield _fitted("start", (1, 2), firsts)

    def _record(self, number: int, size: StepSize) -> tuple[RecordedStep, RecordedStep]:
        stepper = self._stepper(number)
        capacity, samples = stepper.cache.capacity, []
        runs: tuple[tuple[Phase, StepSize, Callable[[], None]], ...] = (
            ("start", FIRST, stepper.start),
            ("serve", size, partial(self._try_out, stepper, size)),
        )
        with self.recorder as recorder:
            recorder.forget()
            for phase, now, run in runs:
                recorded = recorder.record(run)
                values = serving_monomials(
                    now,
                    gathered=capacity.gathered_tokens,
                    numbers=capacity.page_numbers,
                    pages=capacity.pages,
                )
                samples.append(RecordedStep(phase, 1, now.tokens, 0, recorded, serving=values))
        return samples[0], samples[1]

    def _try_out(self, stepper: PagedModel, size: StepSize) -> None:
        """What `PagedModel.try_out` does; no step draws in all ways, so they count no work."""
        logits = stepper.run(size=size)
        self.recorder.counts_work = False
        draw_in_every_way(logits)
        self.recorder.counts_work = True


def _named(size: tuple[int, int, int]) -> dict[str, int]:
    return dict(zip(("tokens", "rows", "logits"), size, strict=True))


def _fitted(phase: Phase, query: tuple[int, int], samples: Sequence[RecordedStep]) -> RegimeTapes:
    regime = Regime(phase=phase, many=False, query=query, past=EVERYWHERE, keys=EVERYWHERE)
    tapes, carried = fit(samples)
    return replace(regime, carried=carried), tapes
