"""Tracing serving: rules for the steps over a paged cache.

Two kinds of steps are recorded: the first step, which allocates the pages, and later steps. The
memory of a step depends only on its size and on the size of the cache (`forecast.serving`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from duoka.errors import ModelError
from duoka.forecast.profile import ENDLESS, Phase, Profile, Regime
from duoka.forecast.serving import FIRST, Capacity, StepSize, padded, serving_monomials
from duoka.models.quantization import has_interface
from duoka.runtime.call.paged_model import PagedModel, reads_pages
from duoka.runtime.draw import draw_in_every_way

from .assemble import RegimeTraces, TraceSpec
from .blocks import find_groups
from .fit import RecordedStep, Unlike
from .tracer import Tracer

# Step sizes as (tokens, rows, logits), separately for one token and for several, which may take
# other code paths. There are more sizes of each than rules have coefficients.
_ONE = ((1, 1, 2),) * 6
_SEVERAL = (
    *((2, 1, 2), (40, 32, 7), (28, 8, 3), (64, 4, 17), (80, 64, 2), (24, 16, 5)),
    *((56, 2, 11), (48, 32, 13), (96, 1, 19), (32, 8, 2)),
)
_FEW = (
    *((2, 1, 2), (16, 16, 7), (11, 8, 3), (15, 4, 10), (13, 1, 2), (9, 8, 5)),
    *((12, 2, 11), (8, 4, 6), (14, 1, 4), (5, 2, 2)),
)
_Range = tuple[int, int]
# The cache of each run as (sequences, context tokens, pages).
_CACHES = (
    *((3, 100, 9), (5, 500, 40), (7, 900, 23), (2, 340, 61), (9, 200, 17), (4, 710, 30)),
    *((6, 1000, 11), (3, 1010, 52), (8, 180, 26), (5, 260, 45)),
)


_HINT = "plan for a fixed batch: duoka plan --batch N"


def trace_serving(model: nn.Module, spec: TraceSpec) -> Profile:
    """Record a model's steps over paged caches, and return their rules.

    Raises
    ------
    ModelError
        If the model's layers can't read a paged cache, or its steps fail or have no rules.
    """
    name = type(model).__name__
    if not reads_pages(model):  # type: ignore[arg-type]
        raise ModelError(f"{name} doesn't support a paged KV cache", hint=_HINT)

    def failure(error: Exception) -> ModelError:
        text = f"{name} can't be forecast with a paged KV cache: {str(error)[:300]}"
        return ModelError(text, hint=_HINT)

    tracer = _ServingTracer(model, spec)
    return tracer.trace(tracer.schedule, failure)


# Up to E / k tokens, each with k of E experts, count as reading the weights of their own experts;
# more tokens count as reading the weights of all experts. So experts divide the sizes once more.
def _ranges(few: int) -> list[tuple[Sequence[tuple[int, int, int]], _Range]]:
    """Return step sizes to record, each list with the range of tokens for which rules then hold.

    `few` is the least E / k of the model's layers, `ENDLESS` for a model without experts.
    """
    if not 2 < few < ENDLESS:  # one size alone doesn't determine a rule
        return [(_ONE, (1, 2)), (_SEVERAL, (2, ENDLESS))]
    sizes = [size for size in range(2, few + 1) if padded(size) == size]
    smaller = []
    for tokens, rows, logits in _FEW:
        size = max(number for number in sizes if number <= max(2, tokens * few // 16))
        smaller.append((size, min(rows, size), logits))
    larger = [(padded(tokens + few - 1), rows, logits) for tokens, rows, logits in _SEVERAL]
    return [(_ONE, (1, 2)), (smaller, (2, few + 1)), (larger, (few + 1, ENDLESS))]


class _ServingTracer(Tracer):
    """Records steps over paged caches."""

    def schedule(self) -> Iterator[RegimeTraces]:
        """Yield the regimes of all steps."""
        few = [ENDLESS]

        def note(module: Any, args: Any) -> None:
            if has_interface(module) and len(args) > 1:
                few.append(module.num_experts // args[1].shape[1])

        with register_module_forward_pre_hook(note):
            groups = find_groups(self.model, lambda: self._stepper(0).start())
        if any(group.returns_to is not None for group in groups):
            raise Unlike("the model's code moves tensors between devices")
        self.observe(groups)
        self.caller_at = len(groups) - 1  # tokens are sampled on the device of the logits
        ranges, samples = _ranges(min(few)), list[tuple[_Range, RecordedStep]]()
        for number in range(len(_CACHES)):
            sizes = {query: sizes[number] for sizes, query in ranges if number < len(sizes)}
            samples += self._record(number, sizes, min(few))
        for _, query in ranges:
            of_range = [sample for step_range, sample in samples if step_range == query]
            yield self.fit(Regime(phase="serve", query=query), of_range)
        yield self.fit(Regime(phase="start", query=(1, 2)), [sample for _, sample in samples])

    def _stepper(self, number: int) -> PagedModel:
        """Return the model over the cache of a run, by its number in `_CACHES`."""
        sequences, context, pages = _CACHES[number % len(_CACHES)]
        capacity = Capacity(
            sequences=sequences,
            context_tokens=context,
            pages=pages,
            page_tokens=self.spec.conditions.page_tokens,
            step_tokens=128,
            is_int8=self.spec.conditions.cache == "paged-int8",
        )
        return PagedModel(self.model, capacity, self.device, is_spread=True)

    def _record(
        self, number: int, sizes: Mapping[_Range, tuple[int, int, int]], few: int
    ) -> Iterator[tuple[_Range, RecordedStep]]:
        """Record the first step over the cache of a run, and a later step of each size."""
        stepper = self._stepper(number)
        capacity = stepper.cache.capacity
        attended = capacity.attended_tokens
        runs: list[tuple[Phase, _Range, StepSize, Callable[[], None]]] = [
            ("start", (1, 2), FIRST, stepper.start)
        ]
        for query, (tokens, rows, logits) in sizes.items():
            size = StepSize(tokens=tokens, rows=rows, logits=logits)
            runs.append(("serve", query, size, partial(self._try_out, stepper, size)))
        with self.recorder as recorder:
            recorder.forget()
            for phase, query, size, run in runs:
                recorded = recorder.record(run, is_few=query[1] - 1 <= few)
                values = serving_monomials(
                    size,
                    gathered=attended,
                    numbers=capacity.page_numbers,
                    pages=capacity.pages,
                    pairs=size.tokens * attended if capacity.has_block_tables else None,
                )
                yield query, RecordedStep(phase, 1, size.tokens, 0, recorded, serving=values)

    def _try_out(self, stepper: PagedModel, size: StepSize) -> None:
        """Run a step as `PagedModel.try_out` does; sampling in every way counts as no work."""
        logits = stepper.run(size=size)
        self.recorder.begin_sampling()
        draw_in_every_way(logits)
        self.recorder.counts_work = True
