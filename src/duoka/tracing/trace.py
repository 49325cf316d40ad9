"""From a model to its profile: rules from recorded steps, or the steps of one workload.

A model is whole on one virtual GPU. Nothing is known here of several, nor of budgets.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import combinations, pairwise
from threading import RLock
from typing import Any

import torch
from torch import nn

from duoka import virtual
from duoka.base.model_code import where_raised
from duoka.errors import ModelError
from duoka.forecast.flash_splits import FlashShape
from duoka.forecast.profile import Phase, Profile, Regime
from duoka.forecast.tensor_names import NamedTensor
from duoka.forecast.workload import Workload
from duoka.hardware.gpu_generation import GpuGeneration
from duoka.models.quantization import parts
from duoka.planner.placement import Placement
from duoka.runtime.call.encode_images import reads_in_chunks
from duoka.runtime.call.stepper import Stepper
from duoka.runtime.dispatch.arguments import to_device
from duoka.runtime.dispatch.place_tensors import invent_values, place
from duoka.runtime.image_inputs import ImagePrompts, prompts_for

from .assemble import CALLER, ENDLESS, EVERYWHERE, RegimeTapes, TraceSpec, as_profile
from .blocks import find_groups
from .fit import RecordedStep, Unlike, fit
from .probe_sizes import ProbeRun, crossing_runs, image_runs, plain_runs
from .published_names import name_tensors
from .record import RecordedPass, Recorder
from .record_returns import ReturningRecorder

# Rules are made from steps up to this length, counted from the start of a range. Nothing changes
# beyond it: where code changes its ways (windows), a range ends.
_PROBED_TOKENS = 2**11
_SHORTEST_WINDOW = 256
# What a model is shown to find its blocks.
_LOOKED_AT_TOKENS = 8
# Between the recorded steps of one workload, so many tokens are filled in at a time.
_FILLED_TOKENS = 128
# Of the chunks of a prompt with images, so many are recorded besides the first and the last ones.
_MOST_CHUNKS = 28


class Irregular(Exception):
    """A model whose costs follow no rule that the profile could hold for every workload."""


def trace(model: nn.Module, spec: TraceSpec) -> Profile:
    """Run a causal language model without data and record what it costs."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise Irregular("what an encoder and its decoder cost depends on two lengths")
    named = name_tensors(model, spec.published)
    prompts = prompts_for(model, spec.conditions)
    with running(model), whole(model, spec) as device:
        tracer = _Tracer(model, device, spec, prompts)
        try:
            return tracer.profile(list(tracer.rules()), named)
        except (Unlike, *FAILURES) as error:
            # A step far from any that is asked for may fail where the asked one doesn't.
            raise Irregular(f"{type(model).__name__}: {error}") from error


def trace_workload(model: nn.Module, spec: TraceSpec, workloads: Sequence[Workload]) -> Profile:
    """Run the steps of certain workloads, and record what just these cost."""
    named = name_tensors(model, spec.published)
    prompts = prompts_for(model, spec.conditions)
    with running(model), whole(model, spec) as device:
        tracer = _Tracer(model, device, spec, prompts)
        points = tracer.points_of(workloads)
        regimes = {(regime.phase, regime.query, regime.keys): (regime, t) for regime, t in points}
        return tracer.profile([*regimes.values()], named)


def trace_call(
    model: nn.Module, spec: TraceSpec, inputs: Mapping[str, Any] | Sequence[Any]
) -> Profile:
    """Run any module once on example inputs and record what that call costs."""
    args, kwargs = ((), inputs) if isinstance(inputs, Mapping) else (inputs, {})
    named = name_tensors(model, spec.published)
    with running(model), whole(model, spec) as device:

        def call() -> None:
            model(*to_device(args, device), **to_device(kwargs, device))

        # Labels are moved to the logits, as a classifier's code moves what it knows of its inputs.
        groups = [*find_groups(model, call, hears_moves=True), CALLER]
        with ReturningRecorder(model, groups, skip=False) as recorder:
            sample = RecordedStep("prefill", 1, 0, 0, recorder.record(call))
        regime = Regime(
            phase="prefill", many=False, query=EVERYWHERE, past=EVERYWHERE, keys=EVERYWHERE
        )
        profile = as_profile(model, groups, spec, [_fitted(regime, [sample])], named)
        return replace(profile, needs_movers=recorder.needs_movers)


# What model code raises when it can't run as it is asked to.
FAILURES = (
    *(RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError),
    *(AssertionError, ImportError, ArithmeticError),
)


@contextmanager
def running(model: nn.Module) -> Iterator[None]:
    """Say which model failed, and where, when its own code does; what is compiled runs eagerly."""
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
def whole(model: nn.Module, spec: TraceSpec) -> Iterator[torch.device]:
    """Put a model whole on one virtual GPU without data and without limit."""
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
    """Compute on one thread: what masks take is too little for several, which wait for work.

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
    """Let quantized weights have no values.

    Virtual GPUs compute with small tensors of integers, since masks and positions are such. A
    weight in eight bits is one as well: it would be unpacked in earnest in every step.
    """
    for parameter in model.parameters():
        for part in parts(parameter).values():
            if not part.dtype.is_floating_point:
                part.copy_(torch.empty_like(part, device="meta"))


def ranges(config: Any, longest: int, *, has_images: bool) -> Iterator[tuple[int, int]]:
    """Ranges of tokens between which the code of a model may change its ways."""
    parts = [part for part in (config, getattr(config, "text_config", None)) if part]
    windows = {
        value
        for part in parts
        for name, value in vars(part).items()
        if ("window" in name or "chunk" in name) and type(value) is int and value > 1
    }
    edges = [value for value in sorted(windows) if _SHORTEST_WINDOW <= value < longest]
    if edges and has_images:
        raise Unlike("costs with a window and images have more lengths")
    yield from pairwise([0, *edges, ENDLESS])


class _Tracer:
    """Records runs and fits regimes to them."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        spec: TraceSpec,
        prompts: ImagePrompts | None,
    ) -> None:
        self.model: Any = model
        self.device = device
        self.spec = spec
        self.prompts = prompts
        self.longest = spec.max_context_tokens or ENDLESS
        self.least_tokens = 0 if prompts is None else prompts.least_tokens
        self.shapes: list[FlashShape] = []
        self.has_cache = False
        first = max(_LOOKED_AT_TOKENS, self.least_tokens)
        look = partial(find_groups, model, lambda: self.stepper(1).step(first))
        # What a tower makes is moved to the text's embeddings, and is spliced into them there.
        unjoined = partial(look, hears_moves=True, joins_work=False)
        groups = unjoined() if prompts is not None else look()
        recorder: type[Recorder] = ReturningRecorder
        if self.stepper(1).passes:
            # A step of its own made it: that move is no way back.
            groups = [group for group in groups if group.returns_to is None]
            recorder = Recorder
        elif all(group.returns_to is None for group in groups):
            recorder = Recorder
            groups = look() if prompts is not None else groups
        self.groups = [*groups, CALLER]
        self.recorder = recorder(model, self.groups, skip=True)

    def stepper(self, batch: int) -> Stepper:
        """Steps over a cache that is empty."""
        return Stepper(
            self.model,
            batch,
            self.device,
            conditions=self.spec.conditions,
            prompts=self.prompts,
        )

    def rules(self) -> Iterator[RegimeTapes]:
        """Regimes for every step that the model may be asked for; the first that holds counts."""
        cells = list(ranges(self.model.config, self.longest, has_images=bool(self.prompts)))
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

    def _regimes(self, cells: Sequence[tuple[int, int]], *, many: bool) -> Iterator[RegimeTapes]:
        for before, after in combinations(cells, 2):
            yield from self._crossing(many, before, after)
        for start, stop in cells:
            yield from self._cell(many, start, stop)

    def profile(self, regimes: Sequence[RegimeTapes], named: Sequence[NamedTensor]) -> Profile:
        """The profile with these regimes."""
        return replace(
            as_profile(self.model, self.groups, self.spec, regimes, named),
            least_prompt_tokens=self.least_tokens,
            reads_images_in_chunks=self.prompts is not None and reads_in_chunks(self.model),
            flash_shapes=tuple(self.shapes),
            needs_movers=self.recorder.needs_movers,
        )

    def points_of(self, workloads: Sequence[Workload]) -> list[RegimeTapes]:
        """Regimes for the steps of some workloads."""
        try:
            return [point for work in workloads for point in self._points(work, _FILLED_TOKENS)]
        except FAILURES:
            if not self.has_cache:
                raise
            with suppress(*FAILURES):  # it may take one token at a time, once it has a cache
                return [point for work in workloads for point in self._points(work, 1)]
            raise

    def _points(self, workload: Workload, filled_tokens: int) -> Iterator[RegimeTapes]:
        """Regimes for the steps of one workload; between two recorded ones the later counts."""
        many = workload.batch > 1
        chunks = workload.chunks()
        steps = _chosen(chunks, has_images=self.prompts is not None)
        stepper = Stepper.of(self.model, workload, self.device, self.prompts)
        before, self.has_cache = 0, False
        with self.recorder as recorder:
            recorder.forget()
            for sample in self._encoded(stepper):
                yield _fitted(_pass_regime(sample, many), [sample])
            for query, past in [*steps, *_decodes(workload)]:
                while stepper.past < past:
                    # Recorded and thrown away: what is skipped must be skipped here as well.
                    tokens = min(past - stepper.past, max(query, filled_tokens))
                    recorder.record(partial(stepper.step, tokens))
                phase: Phase = "prefill" if not past else "extend" if query > 1 else "decode"
                recorded = recorder.record(
                    partial(stepper.step, query), alone=workload.batch == query == 1
                )
                keys, self.has_cache = past + query, True
                regime = Regime(
                    phase=phase,
                    many=many,
                    query=(query, query + 1),
                    past=EVERYWHERE,
                    keys=(before + 1, keys + 1),
                )
                yield _fitted(regime, [RecordedStep(phase, workload.batch, query, keys, recorded)])
                before = keys
                if keys == workload.prompt_tokens:
                    for sample in self._released(stepper):
                        yield _fitted(_release_regime(many), [sample])

    def _encoded(self, stepper: Stepper) -> Iterator[RecordedStep]:
        """Record the passes in which images are encoded; their keys are how many there are now."""
        encoded = 0
        for images in stepper.passes:
            encoded += images
            recorded = self.recorder.record(stepper.encode)
            yield RecordedStep("encode", stepper.batch, images, encoded, recorded)

    def _released(self, stepper: Stepper) -> Iterator[RecordedStep]:
        """Record how features of images end, if there are any, once their prompt is read."""
        if stepper.passes:
            yield RecordedStep(
                "release", stepper.batch, 0, 0, self.recorder.record(stepper.release)
            )

    def _cell(self, many: bool, start: int, stop: int) -> Iterator[RegimeTapes]:
        """The regimes of one range, for one sequence or several."""
        # What is asked of a model made for few tokens must not be more than it can do.
        high = min(stop, self.longest + 1, start + _PROBED_TOKENS)
        runs = list(plain_runs(many, start, high))
        if self.prompts is not None:
            runs = list(image_runs(runs, self.least_tokens))
        samples = _Samples(runs, self._record)
        for phase in dict.fromkeys(sample.phase for sample in samples.all):
            if phase == "encode":
                yield from self._passes(samples.all, many)
                continue
            regime = Regime(
                phase=phase, many=many, query=EVERYWHERE, past=EVERYWHERE, keys=(start, stop)
            )
            yield from self._split(regime, samples)

    def _passes(self, samples: Sequence[RecordedStep], many: bool) -> Iterator[RegimeTapes]:
        """The regimes of the passes in which images are encoded."""
        encoding = [sample for sample in samples if sample.phase == "encode"]
        if self.spec.conditions.vision_batch is None:  # one pass, with all images of the batch
            everywhere = replace(_pass_regime(encoding[0], many), query=EVERYWHERE, keys=EVERYWHERE)
            yield _fitted(everywhere, encoding)
            return
        for keys in dict.fromkeys(sample.keys for sample in encoding):
            alike = [sample for sample in encoding if sample.keys == keys]
            yield _fitted(_pass_regime(alike[0], many), alike)

    def _crossing(
        self, many: bool, before: tuple[int, int], after: tuple[int, int]
    ) -> Iterator[RegimeTapes]:
        """The regime of steps that begin in one range and end in a later one."""
        high = min(after[1], self.longest + 1, after[0] + _PROBED_TOKENS)
        if high - after[0] < _SHORTEST_WINDOW:
            return
        runs = list(crossing_runs(many, before, (after[0], high)))
        samples = _Samples(runs, self._record)
        regime = Regime(
            phase="extend",
            many=many,
            query=EVERYWHERE,
            past=(max(before[0], 1), before[1]),
            keys=after,
        )
        yield from self._split(regime, samples)

    def _split(self, regime: Regime, samples: _Samples) -> Iterator[RegimeTapes]:
        """One regime, or two where it matters whether masks are aligned."""
        with suppress(Unlike):
            yield _fitted(regime, samples.all, self.shapes)
            return
        samples.complete()
        for aligned in (False, True):
            yield _fitted(replace(regime, aligned=aligned), samples.where(aligned), self.shapes)

    def _record(self, runs: Iterable[ProbeRun]) -> list[RecordedStep]:
        samples: list[RecordedStep] = []
        extended: RecordedPass | None = None
        with self.recorder as recorder:
            for run in runs:
                stepper = self.stepper(run.batch)
                recorder.forget()
                samples.extend(self._encoded(stepper))
                for number, (phase, tokens) in enumerate(run.steps):
                    recorded = recorder.record(
                        partial(stepper.step, tokens), alone=run.batch == tokens == 1
                    )
                    if phase is not None:
                        sizes = run.batch, tokens, stepper.past
                        samples.append(RecordedStep(phase, *sizes, recorded))
                    if phase == "extend" and not samples[-1].is_aligned:
                        extended = extended or recorded
                        if not recorded.is_like(extended):
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
    """The chunks to record: the first two and the last two, of prompts with images more.

    What is between two of them is replayed as the later one; what a chunk leaves in the allocator's
    cache depends on its length of the KV cache, and on the images in it.
    """
    if len(chunks) <= 4:
        return [*chunks]
    between = chunks[2:-2] if has_images else ()
    every = max(1, -(-len(between) // _MOST_CHUNKS))
    return [*chunks[:2], *between[::every], *chunks[-2:]]


def _decodes(workload: Workload) -> list[tuple[int, int]]:
    """The first two and the last two decode steps as (query tokens, past tokens)."""
    pasts = range(workload.prompt_tokens, workload.context_tokens - 1)
    chosen = pasts if len(pasts) <= 4 else [*pasts[:2], *pasts[-2:]]
    return [(1, past) for past in chosen]


def _pass_regime(sample: RecordedStep, many: bool) -> Regime:
    """Where a pass holds that encodes some images: after so many others."""
    query, keys = sample.query, sample.keys
    return Regime(
        phase="encode",
        many=many,
        query=(query, query + 1),
        past=EVERYWHERE,
        keys=(keys, keys + 1),
    )


def _release_regime(many: bool) -> Regime:
    return Regime(phase="release", many=many, query=(0, 1), past=EVERYWHERE, keys=EVERYWHERE)


def _fitted(
    regime: Regime, samples: Sequence[RecordedStep], shapes: list[FlashShape] | None = None
) -> RegimeTapes:
    tapes, carried = fit([sample for sample in samples if sample.phase == regime.phase], shapes)
    return replace(regime, carried=carried), tapes
