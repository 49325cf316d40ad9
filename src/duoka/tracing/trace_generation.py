"""Tracing generation: rules for any prompt and answer, or the steps of certain workloads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any

from torch import nn

from duoka.forecast.profile import Phase, Profile, Regime
from duoka.forecast.workload import Workload
from duoka.runtime.dispatch.arguments import to_device
from duoka.runtime.encode_images import reads_in_chunks
from duoka.runtime.image_inputs import prompts_for
from duoka.runtime.steps import Stepper

from .assemble import EVERYWHERE, RegimeTraces, TraceSpec
from .blocks import find_groups
from .fit import RecordedStep, Unlike
from .probe_sizes import ProbeRun, crossing_runs, image_runs, plain_runs
from .recorded import RecordedPass
from .tracer import FAILURES, LOOKED_AT_TOKENS, PROBED_TOKENS, Irregular, Tracer

_SHORTEST_RANGE = 256
# Between the recorded steps of one workload, so many tokens are filled in at a time.
_FILLED_TOKENS = 128
# Of the chunks of a prompt with images, so many are recorded besides the first and the last ones.
_MOST_CHUNKS = 28


def trace(model: nn.Module, spec: TraceSpec) -> Profile:
    """Record the steps of a causal language model, and return rules for all workloads."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise Irregular("what an encoder and its decoder cost depends on two lengths")
    tracer = GenerationTracer(model, spec)
    return tracer.trace(tracer.rules, tracer.irregular)


def trace_workload(model: nn.Module, spec: TraceSpec, workloads: Sequence[Workload]) -> Profile:
    """Record the steps of certain workloads, and return what these cost."""
    tracer = GenerationTracer(model, spec)
    return tracer.trace(partial(tracer.points_of, workloads))


def trace_call(
    model: nn.Module, spec: TraceSpec, inputs: Mapping[str, Any] | Sequence[Any]
) -> Profile:
    """Record one call of any module on example inputs, and return what it costs."""
    tracer = _CallTracer(model, spec)
    tracer.inputs = ((), inputs) if isinstance(inputs, Mapping) else (inputs, {})
    return tracer.trace(tracer.schedule)


class _CallTracer(Tracer):
    """Records one call of a module."""

    skip = False
    # Labels are moved to the logits, as a classifier's code moves what it knows of its inputs.
    hears_moves = True
    inputs: tuple[Any, Any]

    def start(self) -> None:
        self.observe(find_groups(self.model, self._call, hears_moves=True))

    def schedule(self) -> Iterator[RegimeTraces]:
        """Yield the regime of the call."""
        with self.recorder as recorder:
            sample = RecordedStep("prefill", 1, 0, 0, recorder.record(self._call))
        yield self.fit(_regime("prefill", many=False), [sample])

    def _call(self) -> None:
        args, kwargs = self.inputs
        self.model(*to_device(args, self.device), **to_device(kwargs, self.device))


class GenerationTracer(Tracer):
    """Records prefill and decode steps, and those in which images are encoded."""

    has_cache = False

    def __init__(self, model: nn.Module, spec: TraceSpec) -> None:
        super().__init__(model, spec, prompts_for(model, spec.conditions))

    def start(self) -> None:
        """Find the blocks in a short prefill."""
        run = partial(self._looked_at, max(LOOKED_AT_TOKENS, self.least_tokens))
        self.observe(self.find_blocks(run, encodes_apart=bool(self.stepper(1).passes)))

    def _looked_at(self, tokens: int) -> None:
        self.stepper(1).step(tokens)

    def stepper(self, batch: int) -> Stepper:
        """Return steps over a cache that is empty."""
        conditions = self.spec.conditions
        return Stepper(self.model, batch, self.device, conditions=conditions, prompts=self.prompts)

    def rules(self) -> Iterator[RegimeTraces]:
        """Yield regimes for every step that may be asked for; the first that holds counts."""
        cells = list(self.ranges())
        if self.spec.conditions.image_chunk_tokens is not None:
            raise Unlike("what a chunk costs depends on which images are in it")
        yield from self._regimes(cells, many=False)
        if self.spec.conditions.vision_batch is not None:
            return  # the batch decides on the passes
        try:
            yield from list(self._regimes(cells, many=True))
        except Unlike:
            # A tower that takes its images one by one does other things in each batch.
            if self.prompts is None:
                raise

    def _regimes(self, cells: Sequence[tuple[int, int]], *, many: bool) -> Iterator[RegimeTraces]:
        for before, after in combinations(cells, 2):
            yield from self._crossing(many, before, after)
        for start, stop in cells:
            yield from self._cell(many, start, stop)

    def profile(self, regimes: Sequence[RegimeTraces]) -> Profile:
        """Return the profile with these regimes."""
        in_chunks = self.prompts is not None and reads_in_chunks(self.model)
        return replace(super().profile(regimes), reads_images_in_chunks=in_chunks)

    def points_of(self, workloads: Sequence[Workload]) -> list[RegimeTraces]:
        """Return regimes for the steps of some workloads."""
        try:
            return self._points_of(workloads, _FILLED_TOKENS)
        except FAILURES:
            if self.has_cache:
                with suppress(*FAILURES):  # it may take one token at a time, once it has a cache
                    return self._points_of(workloads, 1)
            raise

    def _points_of(self, workloads: Sequence[Workload], filled_tokens: int) -> list[RegimeTraces]:
        points = [it for work in workloads for it in self._points(work, filled_tokens)]
        return [*{(it.phase, it.query, it.keys): (it, t) for it, t in points}.values()]

    def _points(self, workload: Workload, filled_tokens: int) -> Iterator[RegimeTraces]:
        """Yield regimes for the steps of one workload; each holds back to the one before."""
        many = workload.batch > 1
        steps = _chosen(workload.chunks(), has_images=self.prompts is not None)
        stepper = Stepper.of(self.model, workload, self.device, self.prompts)
        before, self.has_cache = 0, False
        with self.recorder as recorder:
            recorder.forget()
            for sample in self._encoded(stepper):
                yield self.fit(_pass_regime(sample, many), [sample])
            for query, past in [*steps, *_decodes(workload)]:
                while stepper.past < past:
                    # Recorded and thrown away: what is skipped must be skipped here as well.
                    tokens = min(past - stepper.past, max(query, filled_tokens))
                    recorder.record(partial(stepper.step, tokens))
                phase: Phase = "prefill" if not past else "extend" if query > 1 else "decode"
                sample = self._recorded(stepper, phase, query)
                self.has_cache = True
                keys = (before + 1, sample.keys + 1)
                yield self.fit(_regime(phase, many, query=(query, query + 1), keys=keys), [sample])
                before = sample.keys
                if before == workload.prompt_tokens:
                    for sample in self._released(stepper):
                        yield self.fit(_regime("release", many, query=(0, 1)), [sample])

    def _recorded(self, stepper: Stepper, phase: Phase, tokens: int) -> RecordedStep:
        """Record a step of so many tokens, or of so many images."""
        alone = stepper.batch == tokens == 1 and phase != "encode"
        recorded = self.recorder.record(partial(stepper.take, phase, tokens), alone=alone)
        keys = stepper.past if phase != "release" else 0
        return RecordedStep(phase, stepper.batch, tokens, keys, recorded)

    def _encoded(self, stepper: Stepper) -> Iterator[RecordedStep]:
        """Record the passes in which images are encoded; their keys are how many there are now."""
        encoded = 0
        for images in stepper.passes:
            encoded += images
            yield replace(self._recorded(stepper, "encode", images), keys=encoded)

    def _released(self, stepper: Stepper) -> Iterator[RecordedStep]:
        """Record how features of images end, if there are any, once their prompt is read."""
        if stepper.passes:
            yield self._recorded(stepper, "release", 0)

    def _cell(self, many: bool, start: int, stop: int) -> Iterator[RegimeTraces]:
        """Yield the regimes of one range, for one sequence or several."""
        # What is asked of a model made for few tokens must not be more than it can do.
        high = min(stop, self.longest + 1, start + PROBED_TOKENS)
        runs = list(plain_runs(many, start, high))
        if self.prompts is not None:
            runs = list(image_runs(runs, self.least_tokens))
        samples = _Samples(runs, self._record)
        for phase in dict.fromkeys(sample.phase for sample in samples.all):
            if phase == "encode":
                yield from self._passes(samples.all, many)
                continue
            yield from self._split(_regime(phase, many, keys=(start, stop)), samples)

    def _passes(self, samples: Sequence[RecordedStep], many: bool) -> Iterator[RegimeTraces]:
        """Yield the regimes of the passes in which images are encoded."""
        encoding = [sample for sample in samples if sample.phase == "encode"]
        if self.spec.conditions.vision_batch is None:  # one pass, with all images of the batch
            yield self.fit(_regime("encode", many), encoding)
            return
        for keys in dict.fromkeys(sample.keys for sample in encoding):
            alike = [sample for sample in encoding if sample.keys == keys]
            yield self.fit(_pass_regime(alike[0], many), alike)

    def _crossing(
        self, many: bool, before: tuple[int, int], after: tuple[int, int]
    ) -> Iterator[RegimeTraces]:
        """Yield the regime of steps that begin in one range and end in a later one."""
        high = min(after[1], self.longest + 1, after[0] + PROBED_TOKENS)
        if high - after[0] < _SHORTEST_RANGE:
            return
        samples = _Samples(list(crossing_runs(many, before, (after[0], high))), self._record)
        past = (max(before[0], 1), before[1])
        yield from self._split(_regime("extend", many, past=past, keys=after), samples)

    def _split(self, regime: Regime, samples: _Samples) -> Iterator[RegimeTraces]:
        """Yield one regime, or two where it matters whether masks are aligned."""
        with suppress(Unlike):
            yield self.fit(regime, samples.all)
            return
        samples.complete()
        for aligned in (False, True):
            yield self.fit(replace(regime, aligned=aligned), samples.where(aligned))

    def _record(self, runs: Iterable[ProbeRun]) -> list[RecordedStep]:
        samples: list[RecordedStep] = []
        extended: RecordedPass | None = None
        with self.recorder as recorder:
            for run in runs:
                stepper = self.stepper(run.batch)
                recorder.forget()
                samples.extend(self._encoded(stepper))
                for number, (phase, tokens) in enumerate(run.steps):
                    sample = self._recorded(stepper, phase or "extend", tokens)
                    if phase is not None:
                        samples.append(sample)
                    if phase == "extend" and not sample.is_aligned:
                        extended = extended or sample.recorded
                        if not sample.recorded.is_like(extended):
                            raise Unlike("the model's code loops over the tokens")
                    if number == 0:
                        samples.extend(self._released(stepper))
        return samples


class _Samples:
    """What was recorded for one range: at lengths that aren't aligned, and at some that are."""

    def __init__(
        self, runs: Sequence[ProbeRun], record: Callable[[list[ProbeRun]], list[RecordedStep]]
    ) -> None:
        first, *self._rest = (run.aligned() for run in runs)
        self._record = record
        self.all = record([*runs, first])

    def complete(self) -> None:
        """Add the rest of the aligned ones."""
        self.all += self._record(self._rest)
        self._rest = []

    def where(self, aligned: bool) -> list[RecordedStep]:
        """Those whose keys are a multiple of `ALIGNED_TOKENS`, or those whose aren't."""
        return [sample for sample in self.all if sample.is_aligned == aligned]


def _chosen(chunks: Sequence[tuple[int, int]], *, has_images: bool) -> list[tuple[int, int]]:
    """Choose the chunks to record: the first two and the last two, of prompts with images more.

    Between two of them the later one is replayed; what a chunk leaves in the allocator's cache
    depends on its length of the KV cache, and on the images in it.
    """
    if len(chunks) <= 4:
        return [*chunks]
    between = chunks[2:-2] if has_images else ()
    every = max(1, -(-len(between) // _MOST_CHUNKS))
    return [*chunks[:2], *between[::every], *chunks[-2:]]


def _decodes(workload: Workload) -> list[tuple[int, int]]:
    """Return the first two and the last two decode steps as (query tokens, past tokens)."""
    pasts = range(workload.prompt_tokens, workload.context_tokens - 1)
    chosen = pasts if len(pasts) <= 4 else [*pasts[:2], *pasts[-2:]]
    return [(1, past) for past in chosen]


def _regime(
    phase: Phase,
    many: bool,
    *,
    query: tuple[int, int] = EVERYWHERE,
    past: tuple[int, int] = EVERYWHERE,
    keys: tuple[int, int] = EVERYWHERE,
) -> Regime:
    return Regime(phase=phase, many=many, query=query, past=past, keys=keys)


def _pass_regime(sample: RecordedStep, many: bool) -> Regime:
    """Return where a pass holds that encodes some images: after so many others."""
    query, keys = (sample.query, sample.query + 1), (sample.keys, sample.keys + 1)
    return _regime("encode", many, query=query, keys=keys)
