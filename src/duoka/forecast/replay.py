"""Replay: run the allocation events of a stage through the allocator's model.

This is the one function that the planner optimises, the forecast reports and the virtual run is
held against. A workload is a schedule of passes over a stage's blocks; `replay_serving` and
`replay_training` have schedules of their own. It knows nothing of time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from math import inf
from typing import TypeVar

from .alloc_events import AllocEvents, ForecastStep
from .alloc_program import StageCompiler, StageProgram
from .allocator import OutOfCapacity, rounded_bytes, segment_bytes
from .device_memory import Held, new_memory
from .profile import Key, Phase, Profile, buffer_bytes, evaluate
from .stage_bytes import StageBytes
from .workload import Workload

T = TypeVar("T")

# Decode steps differ in their length alone. Where all of them would be more events than these, only
# the first and last ones and those where a cache outgrows its segment are replayed: allocated bytes
# are the same but for what a cache's block has left unsplit, up to 1 MiB, and reserved bytes differ
# by a segment at most where a token takes up to 4 KiB of a cache's block. Where it takes more
# (large batches), which blocks are free for whom changes with every token: steps in between are
# replayed as well.
_MOST_EVENTS = 200_000
_SMALL_GROWTH_BYTES = 4096
_MOST_STEPS_BETWEEN = 4096
# What a step costs changes slowly with its length: of more steps than these some stand for others.
_MOST_SAMPLES = 64


class Replay(AllocEvents):
    """A profile at a workload, to replay its stages.

    With `brief` it leaves out the steps between the first and the last ones of a phase: for bounds
    and for seconds. Otherwise every step counts that changes what PyTorch's allocator holds.
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
        """Return the peaks of a stage; None where the capacity is too small.

        A replay pauses where more than the usable bytes are reserved; a later one goes on there.
        """
        key = (stage_signature(self.profile, blocks), capacity_bytes)
        try:
            stage_run = self._paused.pop(key, None) if device_of is None else None
            stage_run = stage_run or StageRun(self, blocks, capacity_bytes, device_of)
            peaks = stage_run.run(usable_bytes)
        except OutOfCapacity:
            return None
        if stage_run.is_paused:
            self._paused[key] = stage_run
        return peaks

    def is_paused(self, blocks: Sequence[int], capacity_bytes: int) -> bool:
        """Return True if the peaks of a stage cover its first steps alone."""
        return (stage_signature(self.profile, blocks), capacity_bytes) in self._paused

    def passes(self, stage: StageRun) -> Iterator[None]:
        """Run the passes of a stage, in an iterator with a stop after each pass."""
        for step in range(len(self.steps)):
            stage.run_pass(step)
            yield

    def compile_pass(self, compiler: StageCompiler) -> None:
        """Compile a pass over a stage's blocks."""
        first_block, last_block = min(compiler.blocks), max(compiler.blocks)
        compiler.run(range(first_block, last_block + 1))
        # Blocks behind the last one free what is theirs; nothing is allocated in between.
        compiler.release_all()

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
        """Return a step of so many tokens after so many others."""
        # A one-token step after others is what decoding does.
        phase: Phase = "prefill" if not past else "extend" if query > 1 else "decode"
        if phase == "prefill" and not self.profile.is_of_steps:
            query = max(query, 2)  # rules are made from several tokens; one takes no more
        return self._step(phase, query, past + query)

    def prompt_steps(self) -> list[tuple[ForecastStep, float]]:
        """Return the steps over the prompt with the number of steps represented by each."""
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
        """Return the steps to encode images, before the prompt."""
        if not self.profile.encodes_images:
            return []
        passes = self.workload.passes()
        return [
            self._step("encode", images, encoded)
            for images, encoded in zip(passes, accumulate(passes), strict=True)
        ]

    def _decode_lengths(self, keys: range) -> Sequence[int]:
        """Choose the lengths of the decode steps to replay."""
        if self.brief:
            return _ends(keys)
        if not keys or len(keys) * self._num_events(keys[-1]) <= _MOST_EVENTS:
            return keys
        # Which lengths need a replay follows from the sizes of caches: a cache is allocated anew in
        # every step, and asks for another segment only where its size class changes. A cache that
        # grows over 8, 9, 10, 11, 12, 13 MiB needs segments of 20, 20, 10, 12, 12, 14 MiB: lengths
        # at which it reaches 10, just over 10, and just over 12 MiB are replayed.
        chosen_lengths = {*_ends(keys)}
        rules = {
            trace.sizes[index]
            for kind in self.profile.kinds
            for regime, trace in zip(self.profile.regimes, kind.traces, strict=True)
            if regime.phase == "decode" and regime.is_batched == (self.workload.batch > 1)
            for index in trace.retained
        }
        growth = 0
        for rule in rules:
            sizes = [rounded_bytes(evaluate(rule, self._values(1, length))) for length in keys]
            growth = max(growth, (sizes[-1] - sizes[0]) // len(sizes))
            classes = [segment_bytes(size) for size in sizes]
            chosen_lengths.update(
                length
                for length, before, after in zip(keys[1:], classes, classes[1:], strict=False)
                if before != after
            )
        if growth > _SMALL_GROWTH_BYTES:
            chosen_lengths.update(keys[:: -(-len(keys) // _MOST_STEPS_BETWEEN)])
        return sorted(chosen_lengths)

    def _num_events(self, keys: int) -> int:
        """Count the allocations and frees of a decode step, in all blocks."""
        regime = self._step("decode", 1, keys).regime
        return sum(
            len(self.profile.kinds[block.kind].traces[regime].events)
            for block in self.profile.blocks
        )


def stage_signature(profile: Profile, blocks: Sequence[int]) -> tuple[int, ...]:
    """Return a key, equal for stages of equal costs.

    It has the kinds of blocks in order, how far each is behind the one before, and whether the
    model's input and its end are on the stage.
    """
    kinds = [profile.blocks[block].kind for block in blocks]
    gaps = [after - before for before, after in pairwise(blocks)]
    ends_model = blocks[-1] == len(profile.blocks) - 1
    return (*kinds, *gaps, int(blocks[0] == 0), int(ends_model))


class StageRun:
    """A replay of a stage on a device of its own, pass by pass.

    `retained` are the caches or gradients, block by block, and `num_kept` their number per block.
    The first matrix product of forward passes takes cuBLAS's workspace for good; so does that of
    backward passes, which run in another thread.
    """

    def __init__(
        self,
        replay: Replay,
        blocks: Sequence[int],
        capacity: int | None,
        device_of: Sequence[str] | None,
    ) -> None:
        self.replay, self.device_of = replay, device_of
        profile = replay.profile
        self.blocks = sorted(blocks)
        self.kinds = [profile.kinds[profile.blocks[block].kind] for block in self.blocks]
        self.memory = memory = new_memory(capacity)
        for kind in self.kinds:
            for size in kind.weight_bytes:
                memory.hold(size)
        for size in buffer_bytes(profile.streamed_bytes(self.blocks)):
            memory.hold(size)
        self._weight_bytes = memory.allocated
        self.retained: list[Held] = []
        self.num_kept = (0,) * len(self.blocks)
        self.is_paused = False
        self._passes = replay.passes(self)
        self._has_workspace: set[bool] = set()
        # What the last forward pass has left for a backward pass.
        self._saved: tuple[Key, ...] = ()
        # Programs for copies by way of other devices, or between two passes, hold here alone.
        is_shared = device_of is None and replay.workload.training is None
        self._programs = replay.programs if is_shared else {}
        self._signature = stage_signature(profile, self.blocks)

    def run(self, usable_bytes: float = inf) -> StageBytes:
        """Replay the passes until more is reserved than is usable, and return the peaks."""
        memory, weights = self.memory, self._weight_bytes
        # `any` stops behind the first pass that exceeds the limit. The generator stays there, with
        # the allocator as it is, and the next call goes on from the next pass.
        self.is_paused = any(memory.max_reserved > usable_bytes for _ in self._passes)
        kept_bytes, optimizer = memory.cached_at_peak, memory.aside_at_peak
        is_training = self.replay.workload.training is not None
        return StageBytes(
            weight_bytes=weights,
            kv_cache_bytes=0 if is_training else kept_bytes,
            activation_bytes=memory.peak - weights - kept_bytes - optimizer,
            allocated_bytes=memory.peak,
            reserved_bytes=memory.max_reserved,
            requested_bytes=memory.requested_peak,
            gradient_bytes=kept_bytes if is_training else 0,
            optimizer_bytes=optimizer,
        )

    def run_pass(self, step: int, saved: Sequence[Held] = ()) -> list[Held]:
        """Run a pass and return its saved blocks, with which the backward pass is run."""
        replay = self.replay
        is_backward = replay.is_backward(step)
        workspace = 0 if is_backward in self._has_workspace else replay.workspace_bytes
        # Steps of one regime with as many caches run the same code; only their sizes differ.
        key = (self._signature, workspace, replay.steps[step].regime, self.num_kept)
        if key not in self._programs:
            compiler = StageCompiler(
                replay,
                step,
                dict(zip(self.blocks, self.num_kept, strict=True)),
                alive=self._saved if is_backward else (),
                device_of=self.device_of,
                workspace_bytes=workspace,
            )
            replay.compile_pass(compiler)
            self._programs[key] = compiler.program()
        program = self._programs[key]
        sizes = program.sizes(replay, step)
        out = self.memory.run(program.code, sizes, [*self.retained, *saved], program.live_out)
        if program.takes_workspace:
            self._has_workspace.add(is_backward)
        if not is_backward:
            self._saved = program.saved
        number = sum(program.num_kept)
        self.retained, self.num_kept = out[:number], program.num_kept
        return out[number:]


def sample(items: Sequence[T]) -> list[tuple[T, float]]:
    """Return items at even distances, each with the number of items represented."""
    number = min(len(items), _MOST_SAMPLES)
    ends = [len(items) * index // number for index in range(number + 1)] if number else []
    return [(items[(start + stop) // 2], float(stop - start)) for start, stop in pairwise(ends)]


def _ends(items: Sequence[T]) -> Sequence[T]:
    """Return the first two and the last two items."""
    return items if len(items) <= 4 else [*items[:2], *items[-2:]]
