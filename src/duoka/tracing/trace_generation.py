"""Tracing generation: rules for any prompt and new tokens, or only the steps of some workloads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from itertools import combinations
from typing import Any

from torch import nn

from duoka.forecast.profile import Phase, Profile, Regime
from duoka.forecast.workload import Workload
from duoka.runtime.call.encode_images import reads_in_chunks
from duoka.runtime.call.stepper import Stepper
from duoka.runtime.dispatch.arguments import to_device
from duoka.runtime.image_inputs import prompts_for

from .assemble import RegimeTraces, TraceSpec
from .blocks import find_groups
from .fit import RecordedStep, Unlike
from .probe_sizes import ProbeRun, crossing_runs, image_runs, plain_runs
from .recorded import RecordedPass
from .tracer import FAILURES, LOOKED_AT_TOKENS, PROBED_TOKENS, Irregular, Tracer

_SHORTEST_RANGE = 256
# Tokens per step that only fills the cache, between two recorded steps of a workload.
_FILLED_TOKENS = 128
# The most chunks to record of a prompt with images, besides the first two and the last two.
_MOST_CHUNKS = 28


def trace(model: nn.Module, spec: TraceSpec, *, batched: bool = True) -> Profile:
    """Record the steps of a causal language model, and return rules for all workloads.

    Without `batched` the rules hold for a single sequence only, which takes a third of the steps.
    """
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise Irregular("the cost of an encoder-decoder depends on two lengths")
    tracer = GenerationTracer(model, spec)
    return tracer.trace(partial(tracer.rules, batched=batched), tracer.irregular)


def trace_workload(model: nn.Module, spec: TraceSpec, workloads: Sequence[Workload]) -> Profile:
    """Record the steps of the given workloads, and return a profile for these workloads alone."""
    tracer = GenerationTracer(model, spec)
    return tracer.trace(partial(tracer.points_of, workloads))


def trace_call(
    model: nn.Module, spec: TraceSpec, inputs: Mapping[str, Any] | Sequence[Any]
) -> Profile:
    """Record a call of any module on example inputs, and return a profile for this call alone."""
    tracer = _CallTracer(model, spec)
    tracer.inputs = ((), inputs) if isinstance(inputs, Mapping) else (inputs, {})
    return tracer.trace(tracer.schedule)


class _CallTracer(Tracer):
    """Records a call of a module."""

    skip = False
    # Model code may move inputs explicitly: labels to the logits' device, for instance.
    hears_moves = True
    inputs: tuple[Any, Any]

    def start(self) -> None:
        """Find the blocks in the call."""
        self.observe(find_groups(self.model, self._call, hears_moves=True))

    def schedule(self) -> Iterator[RegimeTraces]:
        """Yield the regime of the call."""
        with self.recorder as recorder:
            sample = RecordedStep("prefill", 1, 0, 0, recorder.record(self._call))
        yield self.fit(Regime(phase="prefill"), [sample])

    def _call(self) -> None:
        """Call the module on its example inputs."""
        args, kwargs = self.inputs
        self.model(*to_device(args, self.device), **to_device(kwargs, self.device))


class GenerationTracer(Tracer):
    """Records prefill and decode steps, and passes that encode images."""

    has_cache = False
    """True once a step of the current workload was recorded, which left a KV cache."""

    def __init__(self, model: nn.Module, spec: TraceSpec) -> None:
        super().__init__(model, spec, prompts_for(model, spec.conditions))

    def start(self) -> None:
        """Find the blocks in a short prefill."""
        run = partial(self._run_prefill, max(LOOKED_AT_TOKENS, self.least_tokens))
        self.observe(self.find_blocks(run, encodes_apart=bool(self.stepper(1).passes)))

    def _run_prefill(self, tokens: int) -> None:
        self.stepper(1).step(tokens)

    def stepper(self, batch: int) -> Stepper:
        """Return steps over an empty cache."""
        conditions = self.spec.conditions
        return Stepper(self.model, batch, self.device, conditions=conditions, prompts=self.prompts)

    def rules(self, *, batched: bool) -> Iterator[RegimeTraces]:
        """Yield regimes for every possible step, in order of precedence."""
        ranges = list(self.ranges())
        if self.spec.conditions.image_chunk_tokens is not None:
            raise Unlike("the cost of a chunk depends on the images in it")
        yield from self._regimes(ranges, is_batched=False)
        if not batched or self.spec.conditions.vision_batch is not None:
            return  # with a vision batch, the encoding passes depend on the batch
        try:
            yield from list(self._regimes(ranges, is_batched=True))
        except Unlike:
            # A tower that encodes images one by one has another trace for each batch size.
            if self.prompts is None:
                raise

    def _regimes(
        self, ranges: Sequence[tuple[int, int]], *, is_batched: bool
    ) -> Iterator[RegimeTraces]:
        """Yield the regimes of steps from one range into a later one, then those of each range."""
        for earlier, later in combinations(ranges, 2):
            yield from self._trace_crossing(is_batched, earlier, later)
        for start, stop in ranges:
            yield from self._trace_range(is_batched, start, stop)

    def profile(self, regimes: Sequence[RegimeTraces]) -> Profile:
        """Return the profile with these regimes."""
        in_chunks = self.prompts is not None and reads_in_chunks(self.model)
        return replace(super().profile(regimes), reads_images_in_chunks=in_chunks)

    def points_of(self, workloads: Sequence[Workload]) -> list[RegimeTraces]:
        """Return regimes for the steps of the given workloads."""
        try:
            return self._points_of(workloads, _FILLED_TOKENS)
        except FAILURES:
            if self.has_cache:
                with suppress(*FAILURES):  # with a cache, a model may only accept single tokens
                    return self._points_of(workloads, 1)
            raise

    def _points_of(self, workloads: Sequence[Workload], filled_tokens: int) -> list[RegimeTraces]:
        points = [it for work in workloads for it in self._points(work, filled_tokens)]
        return [*{(it.phase, it.query, it.keys): (it, t) for it, t in points}.values()]

    def _points(self, workload: Workload, filled_tokens: int) -> Iterator[RegimeTraces]:
        """Yield regimes for recorded steps of a workload, each valid back to the step before it."""
        is_batched = workload.batch > 1
        steps = _choose_chunks(workload.chunks(), has_images=self.prompts is not None)
        stepper = Stepper.of(self.model, workload, self.device, self.prompts)
        earlier, self.has_cache = 0, False
        with self.recorder as recorder:
            recorder.forget()
            for sample in self._record_encoding(stepper):
                yield self.fit(_pass_regime(sample, is_batched), [sample])
            for query, past in [*steps, *_decodes(workload)]:
                while stepper.past < past:
                    # Recorded and discarded: blocks stubbed in other steps must be stubs here too.
                    tokens = min(past - stepper.past, max(query, filled_tokens))
                    recorder.record(partial(stepper.step, tokens))
                phase: Phase = "prefill" if not past else "extend" if query > 1 else "decode"
                sample = self._record_step(stepper, phase, query)
                self.has_cache = True
                keys = (earlier + 1, sample.keys + 1)
                regime = Regime(
                    phase=phase, is_batched=is_batched, query=(query, query + 1), keys=keys
                )
                yield self.fit(regime, [sample])
                earlier = sample.keys
                if earlier == workload.prompt_tokens:
                    for sample in self._record_release(stepper):
                        regime = Regime(phase="release", is_batched=is_batched, query=(0, 1))
                        yield self.fit(regime, [sample])

    def _record_step(self, stepper: Stepper, phase: Phase, tokens: int) -> RecordedStep:
        """Record a step of `tokens` tokens; in the phase "encode", of as many images."""
        is_few = stepper.batch == tokens == 1 and phase != "encode"
        recorded = self.recorder.record(partial(stepper.take, phase, tokens), is_few=is_few)
        keys = stepper.past if phase != "release" else 0
        return RecordedStep(phase, stepper.batch, tokens, keys, recorded)

    def _record_encoding(self, stepper: Stepper) -> Iterator[RecordedStep]:
        """Record the passes that encode images; their `keys` count the images encoded so far."""
        encoded = 0
        for images in stepper.passes:
            encoded += images
            yield replace(self._record_step(stepper, "encode", images), keys=encoded)

    def _record_release(self, stepper: Stepper) -> Iterator[RecordedStep]:
        """Record the release of image features after the prompt, if images were encoded."""
        if stepper.passes:
            yield self._record_step(stepper, "release", 0)

    def _trace_range(self, is_batched: bool, start: int, stop: int) -> Iterator[RegimeTraces]:
        """Yield the regimes of a range, for a single sequence or several."""
        # No probe is longer than the longest context of the model.
        high = min(stop, self.longest + 1, start + PROBED_TOKENS)
        runs = list(plain_runs(is_batched, start, high))
        if self.prompts is not None:
            runs = list(image_runs(runs, self.least_tokens))
        samples, complete = self._record_aligned(runs)
        for phase in dict.fromkeys(sample.phase for sample in samples):
            if phase == "encode":
                yield from self._fit_vision_encoder(samples, is_batched)
                continue
            regime = Regime(phase=phase, is_batched=is_batched, keys=(start, stop))
            yield from self.split([regime], samples, complete)

    def _fit_vision_encoder(
        self, samples: Sequence[RecordedStep], is_batched: bool
    ) -> Iterator[RegimeTraces]:
        """Yield the fitted traces of the vision encoder.

        They are one regime, or with `vision_batch` one for each size of a pass (its key tokens).
        """
        encoding = [sample for sample in samples if sample.phase == "encode"]
        if self.spec.conditions.vision_batch is None:  # one pass, with all images of the batch
            yield self.fit(Regime(phase="encode", is_batched=is_batched), encoding)
            return
        for keys in dict.fromkeys(sample.keys for sample in encoding):
            equal_passes = [sample for sample in encoding if sample.keys == keys]
            yield self.fit(_pass_regime(equal_passes[0], is_batched), equal_passes)

    def _trace_crossing(
        self, is_batched: bool, earlier: tuple[int, int], later: tuple[int, int]
    ) -> Iterator[RegimeTraces]:
        """Yield the regime of steps from a range into a later range."""
        # A chunk that begins within a sliding window and ends beyond it: its first queries attend
        # to all keys, its last queries to a window of them. Its masks and caches differ from both
        # ranges, so such steps have their own rules, unless the later range is too short.
        high = min(later[1], self.longest + 1, later[0] + PROBED_TOKENS)
        if high - later[0] < _SHORTEST_RANGE:
            return
        runs = list(crossing_runs(is_batched, earlier, (later[0], high)))
        past = (max(earlier[0], 1), earlier[1])
        regime = Regime(phase="extend", is_batched=is_batched, past=past, keys=later)
        yield from self.split([regime], *self._record_aligned(runs))

    def _record_aligned(
        self, runs: Sequence[ProbeRun]
    ) -> tuple[list[RecordedStep], Callable[[], None]]:
        """Record runs and the first aligned one; return samples, and a function to add the rest."""
        first_run, *rest = (run.aligned() for run in runs)
        samples = self._record([*runs, first_run])

        @cache
        def complete() -> None:
            samples.extend(self._record(rest))

        return samples, complete

    def _record(self, runs: Iterable[ProbeRun]) -> list[RecordedStep]:
        """Record the steps of runs, each run over a cache of its own."""
        samples: list[RecordedStep] = []
        extended: RecordedPass | None = None
        with self.recorder as recorder:
            for run in runs:
                stepper = self.stepper(run.batch)
                recorder.forget()
                samples.extend(self._record_encoding(stepper))
                for number, (phase, tokens) in enumerate(run.steps):
                    sample = self._record_step(stepper, phase or "extend", tokens)
                    if phase is not None:
                        samples.append(sample)
                    if phase == "extend" and not sample.is_aligned:
                        extended = extended or sample.recorded
                        if not sample.recorded.is_like(extended):
                            raise Unlike("the model's code loops over the tokens")
                    if number == 0:
                        samples.extend(self._record_release(stepper))
        return samples


def _choose_chunks(chunks: Sequence[tuple[int, int]], *, has_images: bool) -> list[tuple[int, int]]:
    """Choose the chunks to record: the first two, the last two, and some between with images.

    A chunk between two recorded chunks is replayed as the later of them. The memory that a chunk
    leaves cached in the allocator depends on the length of the KV cache and on its images.
    """
    if len(chunks) <= 4:
        return [*chunks]
    middle = chunks[2:-2] if has_images else ()
    every = max(1, -(-len(middle) // _MOST_CHUNKS))
    return [*chunks[:2], *middle[::every], *chunks[-2:]]


def _decodes(workload: Workload) -> list[tuple[int, int]]:
    """Return the first two and the last two decode steps as (query tokens, past tokens)."""
    pasts = range(workload.prompt_tokens, workload.context_tokens - 1)
    decodes = pasts if len(pasts) <= 4 else [*pasts[:2], *pasts[-2:]]
    return [(1, past) for past in decodes]


def _pass_regime(sample: RecordedStep, is_batched: bool) -> Regime:
    """Return the regime of encoding passes with the sample's images and images so far."""
    query, keys = (sample.query, sample.query + 1), (sample.keys, sample.keys + 1)
    return Regime(phase="encode", is_batched=is_batched, query=query, keys=keys)
