"""Replay: the allocation events of a stage, run through the allocator's model at one workload.

This is the one function that the planner optimises, the forecast reports and the virtual run is
held against. It knows nothing of time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import inf
from typing import TypeVar

from .alloc_events import AllocEvents, ForecastStep
from .alloc_program import StageCompiler, StageProgram
from .allocator import OutOfCapacity, rounded_bytes, segment_bytes
from .device_memory import Held, new_memory
from .profile import Phase, Profile, buffer_bytes, evaluate
from .stage_bytes import StageBytes
from .workload import Workload

T = TypeVar("T")

# Decode steps are alike but for their length. Where all of them would be more events than these,
# only the first and last ones and those where a cache outgrows its segment are replayed: what is
# allocated is the same but for what a cache's block has left unsplit, up to 1 MiB, and what is
# reserved differs by a segment at most where a token takes up to 4 KiB of a cache's block. Where it
# takes more (large batches), which blocks are free for whom changes with every token: steps in
# between are replayed as well.
_MOST_EVENTS = 200_000
_SMALL_GROWTH_BYTES = 4096
_MOST_STEPS_BETWEEN = 4096
# What a step costs changes slowly with its length: of more steps than these some stand for others.
_MOST_SAMPLES = 64


class Replay(AllocEvents):
    """A profile at one workload, whose stages can be replayed.

    With `brief` it leaves out the steps between the first and the last ones of a phase: for bounds
    and for seconds. Otherwise every step counts that changes what PyTorch's allocator holds.
    A stage takes cuBLAS's workspace in the first step in which it multiplies.
    """

    def __init__(self, profile: Profile, workload: Workload, *, brief: bool = False) -> None:
        self.brief = brief
        self.workspace_bytes = workload.gpu_generation.workspace_bytes
        self.programs: dict[tuple[object, ...], StageProgram] = {}
        self._paused: dict[tuple[tuple[int, ...], int | None], StageRun] = {}
        super().__init__(profile, workload)

    def run(
        self,
        blocks: Sequence[int],
        capacity_bytes: int | None = None,
        *,
        device_of: Sequence[str] | None = None,
        usable_bytes: float = inf,
    ) -> StageBytes | None:
        """The peaks of a stage; None where it doesn't fit its capacity.

        A replay may pause where more than what is usable is reserved; a later one goes on there.
        """
        key = (stage_signature(self.profile, blocks), capacity_bytes)
        try:
            stage_run = self._paused.pop(key, None) if device_of is None else None
            stage_run = stage_run or self._stage_run(blocks, capacity_bytes, device_of)
            peaks = stage_run.run(usable_bytes)
        except OutOfCapacity:
            return None
        if stage_run.is_paused:
            self._paused[key] = stage_run
        return peaks

    def is_paused(self, blocks: Sequence[int], capacity_bytes: int) -> bool:
        """True if the peaks of a stage are those of its first steps alone."""
        return (stage_signature(self.profile, blocks), capacity_bytes) in self._paused

    def _stage_run(
        self, blocks: Sequence[int], capacity: int | None, device_of: Sequence[str] | None
    ) -> StageRun:
        return InferenceRun(self, blocks, capacity, device_of)

    def _step(self, phase: Phase, query: int, keys: int) -> ForecastStep:
        batch = self.workload.batch
        return ForecastStep(
            phase=phase,
            query=query,
            keys=keys,
            regime=self.profile.regime_of(phase, batch=batch, query=query, keys=keys),
            values=self._values(query, keys),
        )

    def step_over(self, query: int, past: int) -> ForecastStep:
        """A step of so many tokens after so many others."""
        # A one-token step after others is what decoding does.
        phase: Phase = "prefill" if not past else "extend" if query > 1 else "decode"
        if phase == "prefill" and not self.profile.is_of_steps:
            query = max(query, 2)  # rules are made from several tokens; one takes no more
        return self._step(phase, query, past + query)

    def prompt_steps(self) -> list[tuple[ForecastStep, float]]:
        """The steps that run over the prompt, each with how many it stands for; in training all."""
        chunks = [self.step_over(*chunk) for chunk in self.workload.chunks()]
        return [(step, 1.0) for step in self.encoding_steps()] + sample(chunks)

    def _schedule(self) -> list[ForecastStep]:
        chunks = self.workload.chunks()
        steps = [self.step_over(*chunk) for chunk in (_ends(chunks) if self.brief else chunks)]
        if encoding := self.encoding_steps():
            steps = [*encoding, *steps, self._step("release", 0, 0)]
        keys = range(self.workload.prompt_tokens + 1, self.workload.context_tokens)
        return steps + [self._step("decode", 1, length) for length in self._decode_lengths(keys)]

    def encoding_steps(self) -> list[ForecastStep]:
        """The steps before the prompt in which images are encoded, if there are any."""
        if not self.profile.encodes_images:
            return []
        passes = self.workload.passes()
        return [
            self._step("encode", images, encoded)
            for images, encoded in zip(passes, accumulate(passes), strict=True)
        ]

    def _decode_lengths(self, keys: range) -> Sequence[int]:
        """The lengths of the decode steps to replay."""
        if self.brief:
            return _ends(keys)
        if not keys or len(keys) * self._num_events(keys[-1]) <= _MOST_EVENTS:
            return keys
        chosen = {*_ends(keys)}
        rules = {
            trace.sizes[index]
            for kind in self.profile.kinds
            for regime, trace in zip(self.profile.regimes, kind.traces, strict=True)
            if regime.phase == "decode" and regime.many == (self.workload.batch > 1)
            for index in trace.retained
        }
        growth = 0
        for rule in rules:
            sizes = [rounded_bytes(evaluate(rule, self._values(1, length))) for length in keys]
            growth = max(growth, (sizes[-1] - sizes[0]) // len(sizes))
            classes = [segment_bytes(size) for size in sizes]
            chosen.update(
                length
                for length, before, after in zip(keys[1:], classes, classes[1:], strict=False)
                if before != after
            )
        if growth > _SMALL_GROWTH_BYTES:
            chosen.update(keys[:: -(-len(keys) // _MOST_STEPS_BETWEEN)])
        return sorted(chosen)

    def _num_events(self, keys: int) -> int:
        """How many allocations and frees one decode step has, in all blocks."""
        regime = self._step("decode", 1, keys).regime
        return sum(
            len(self.profile.kinds[block.kind].traces[regime].events)
            for block in self.profile.blocks
        )


def stage_signature(profile: Profile, blocks: Sequence[int]) -> tuple[int, ...]:
    """Equal for stages that cost the same.

    That is by the kinds in order, how far each is behind the one before, and whether the model's
    input and its end are here.
    """
    kinds = [profile.blocks[block].kind for block in blocks]
    gaps = [after - before for before, after in pairwise(blocks)]
    ends_model = blocks[-1] == len(profile.blocks) - 1
    return (*kinds, *gaps, int(blocks[0] == 0), int(ends_model))


class StageRun:
    """One replay of a stage on a device of its own; a subclass knows its steps."""

    def __init__(self, replay: Replay, blocks: Sequence[int], capacity: int | None) -> None:
        self.profile = replay.profile
        self.blocks = sorted(blocks)
        self.kinds = [self.profile.kinds[self.profile.blocks[block].kind] for block in self.blocks]
        self.memory = memory = new_memory(capacity)
        self.usable_bytes, self.is_paused = inf, False
        for kind in self.kinds:
            for size in kind.weight_bytes:
                memory.hold(size)
        for size in buffer_bytes(self.profile.streamed_bytes(self.blocks)):
            memory.hold(size)
        self._weight_bytes = memory.allocated

    def run(self, usable_bytes: float = inf) -> StageBytes:
        """Replay it; `OutOfCapacity` where it doesn't fit."""
        memory, weights, self.usable_bytes = self.memory, self._weight_bytes, usable_bytes
        caches, gradients = self.run_steps()
        optimizer = memory.aside_at_peak
        return StageBytes(
            weight_bytes=weights,
            kv_cache_bytes=caches,
            activation_bytes=memory.peak - weights - caches - gradients - optimizer,
            allocated_bytes=memory.peak,
            reserved_bytes=memory.max_reserved,
            requested_bytes=memory.requested_peak,
            gradient_bytes=gradients,
            optimizer_bytes=optimizer,
        )

    def run_steps(self) -> tuple[int, int]:
        """Replay the steps; bytes of caches and of gradients at the peak."""
        raise NotImplementedError


class InferenceRun(StageRun):
    """Prefill and decode, with the caches that they leave."""

    def __init__(
        self,
        replay: Replay,
        blocks: Sequence[int],
        capacity: int | None,
        device_of: Sequence[str] | None,
    ) -> None:
        super().__init__(replay, blocks, capacity)
        self.replay = replay
        self.device_of = device_of
        # Block by block, and how many of each.
        self.caches: list[Held] = []
        self.num_kept = (0,) * len(self.blocks)
        self._has_workspace = False
        self._left = iter(range(len(replay.steps)))
        # A program that follows the copies by way of other devices holds there alone.
        self._programs = replay.programs if device_of is None else {}
        self._signature = stage_signature(self.profile, self.blocks)

    def run_steps(self) -> tuple[int, int]:
        """Replay the steps that are left; bytes of caches at the peak, and none of gradients."""
        for step in self._left:
            self._run_step(step)
            if self.memory.max_reserved > self.usable_bytes:
                break
        self.is_paused = self.memory.max_reserved > self.usable_bytes
        return self.memory.cached_at_peak, 0

    def _run_step(self, step: int) -> None:
        workspace = 0 if self._has_workspace else self.replay.workspace_bytes
        key = (self._signature, workspace, self.replay.steps[step].regime, self.num_kept)
        if key not in self._programs:
            compiler = StageCompiler(
                self.replay,
                step,
                dict(zip(self.blocks, self.num_kept, strict=True)),
                device_of=self.device_of,
                workspace_bytes=workspace,
            )
            compiler.run(range(self.blocks[0], self.blocks[-1] + 1))
            # Blocks behind the last one free what is theirs; nothing is allocated in between.
            compiler.release_all()
            self._programs[key] = compiler.program()
        program = self._programs[key]
        sizes = program.sizes(self.replay, step)
        self.caches = self.memory.run(program.moves, sizes, self.caches, program.out)
        self.num_kept = program.num_kept
        self._has_workspace |= program.takes_workspace


def sample(items: Sequence[T]) -> list[tuple[T, float]]:
    """Some of the items, evenly, each with how many it stands for."""
    number = min(len(items), _MOST_SAMPLES)
    ends = [len(items) * index // number for index in range(number + 1)] if number else []
    return [(items[(start + stop) // 2], float(stop - start)) for start, stop in pairwise(ends)]


def _ends(items: Sequence[T]) -> Sequence[T]:
    """The first two and the last two."""
    return items if len(items) <= 4 else [*items[:2], *items[-2:]]
