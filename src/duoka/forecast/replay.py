"""Replay: run the allocation events of a stage through the model of CUDA's caching allocator.

The planner optimises the result of a replay, the forecast reports it, and the virtual run is
compared with it. A workload is a schedule of passes over a stage's blocks; `replay_serving` and
`replay_training` define their own schedules. This module knows nothing of time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from math import inf
from typing import TypeVar

from .alloc_events import AllocEvents, ForecastStep
from .alloc_program import StageCompiler, StageProgram
from .allocator import OutOfCapacity, rounded_bytes, segment_bytes
from .device_memory import Held, new_memory
from .profile import Key, Phase, Profile, Rule, buffer_bytes, evaluate
from .stage_bytes import StageBytes
from .workload import Workload

T = TypeVar("T")

# Decode steps differ only in the length of the KV cache. If all of them have more events than
# _MOST_EVENTS, only the first and last steps are replayed, and those where a cache tensor outgrows
# its segment. Allocated bytes are then exact but for the unsplit rest of a cache's block, up to
# 1 MiB, and reserved bytes are off by one segment at most if a cache tensor grows by up to 4 KiB
# per token. If it grows faster (large batches), each token may change which free blocks fit, so up
# to _MOST_STEPS_BETWEEN steps in between are replayed too. So are they with expandable segments, in
# which a longer cache is placed between those of other layers.
_MOST_EVENTS = 200_000
_SMALL_GROWTH_BYTES = 4096
_MOST_STEPS_BETWEEN = 4096
_LENGTHS: dict[tuple[object, ...], list[int]] = {}
"""The lengths of decode steps that were chosen, by model, workload and rules of its caches."""
# Seconds change slowly with the length: of more steps than these, a sample stands for all.
_MOST_SAMPLES = 64


class Replay(AllocEvents):
    """A profile at a workload, to replay its stages.

    With `brief` only the first two and last two steps of a phase are kept, for lower bounds and for
    seconds. Otherwise every step that changes the allocator's memory is kept.
    """

    def __init__(self, profile: Profile, workload: Workload, *, brief: bool = False) -> None:
        self.brief = brief
        self.workspace_bytes = workload.gpu_generation.workspace_bytes
        self.has_expandable_segments = workload.gpu_generation.expandable_segments
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
        """Return the peaks of a stage; None if the stage needs more than the capacity.

        The replay pauses after the first pass that reserves more than the usable bytes; a later
        call with the same blocks and capacity resumes there.
        """
        key = (stage_signature(self.profile, blocks), capacity_bytes)
        try:
            stage_run = self._paused.pop(key, None) if device_of is None else None
            stage_run = stage_run or StageRun(self, blocks, capacity_bytes, device_of)
            peaks = stage_run.run(usable_bytes)
        except OutOfCapacity:
            return None
        if capacity_bytes is not None and peaks.reserved_bytes > capacity_bytes:
            return None  # with the pool of CUDA graphs
        if stage_run.is_paused:
            self._paused[key] = stage_run
        return peaks

    def is_paused(self, blocks: Sequence[int], capacity_bytes: int) -> bool:
        """Return True if the replay of a stage has paused: its peaks cover only the first steps."""
        return (stage_signature(self.profile, blocks), capacity_bytes) in self._paused

    def passes(self, stage: StageRun) -> Iterator[None]:
        """Run the passes of a stage, yielding after each pass."""
        for step in range(len(self.steps)):
            stage.run_pass(step)
            yield

    def compile_pass(self, compiler: StageCompiler) -> None:
        """Compile a pass over a stage's blocks."""
        first_block, last_block = min(compiler.blocks), max(compiler.blocks)
        compiler.run(range(first_block, last_block + 1))
        # Remaining tensors would be freed by later stages, while this stage allocates nothing.
        compiler.release_all()

    def _step(self, phase: Phase, query: int, keys: int) -> ForecastStep:
        """Return the step of a phase at these sizes."""
        batch = self.workload.batch
        return ForecastStep(
            phase=phase,
            query=query,
            keys=keys,
            regime=self.profile.regime_of(phase, batch=batch, query=query, keys=keys),
            values=self._values(query, keys),
        )

    def step_over(self, query: int, past: int) -> ForecastStep:
        """Return a step of `query` tokens after `past` tokens."""
        # A step of one token after others is a decode step.
        phase: Phase = "prefill" if not past else "extend" if query > 1 else "decode"
        if phase == "prefill" and not self.profile.is_of_steps:
            query = max(query, 2)  # prefill rules hold from 2 tokens on; one token takes no more
        return self._step(phase, query, past + query)

    def prompt_steps(self) -> list[tuple[ForecastStep, float]]:
        """Return steps over the prompt, each with the number of real steps it stands for."""
        chunks = [self.step_over(*chunk) for chunk in self.workload.chunks()]
        return [(step, 1.0) for step in self.encoding_steps()] + sample(chunks)

    def _schedule(self) -> list[ForecastStep]:
        chunks = self.workload.chunks()
        steps = [self.step_over(*chunk) for chunk in (_take_ends(chunks) if self.brief else chunks)]
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
            return _take_ends(keys)
        if not keys or len(keys) * self._num_events(keys[-1]) <= _MOST_EVENTS:
            return keys
        # Every step allocates a longer cache tensor, which needs a segment of another size only if
        # its size class changes. A tensor that grows from 8 to 13 MiB in steps of 1 MiB needs
        # segments of 20, 20, 10, 12, 12, 14 MiB: the lengths at 10, 11 and 13 MiB are replayed.
        rules = frozenset(
            trace.sizes[index]
            for kind in self.profile.kinds
            for regime, trace in zip(self.profile.regimes, kind.traces, strict=True)
            if regime.phase == "decode" and regime.is_batched == (self.workload.batch > 1)
            for index in trace.retained
        )
        # Profiles that differ in the experts on the host have the same caches.
        key = (
            self.profile.fingerprint,
            replace(self.workload, host_experts=(), expert_cache_bytes=0),
            rules,
        )
        if key not in _LENGTHS:
            _LENGTHS[key] = self._lengths_of_classes(keys, rules)
        return _LENGTHS[key]

    def _lengths_of_classes(self, keys: range, rules: Iterable[Rule]) -> list[int]:
        """Return the lengths where a cache's size class changes, and some between."""
        chosen_lengths = {*_take_ends(keys)}
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
        if growth > _SMALL_GROWTH_BYTES or self.has_expandable_segments:
            chosen_lengths.update(keys[:: -(-len(keys) // _MOST_STEPS_BETWEEN)])
        return sorted(chosen_lengths)

    def _num_events(self, keys: int) -> int:
        """Count the allocations and frees of a decode step over `keys` tokens, in all blocks."""
        regime = self._step("decode", 1, keys).regime
        return sum(
            len(self.profile.kinds[block.kind].traces[regime].events)
            for block in self.profile.blocks
        )


def stage_signature(profile: Profile, blocks: Sequence[int]) -> tuple[int, ...]:
    """Return a key that is equal only for stages of equal costs.

    The key has the kinds of the blocks in order, the gap from each block to the next, and whether
    the first and the last block of the model are on the stage.
    """
    kinds = [profile.blocks[block].kind for block in blocks]
    gaps = [after - before for before, after in pairwise(blocks)]
    ends_model = blocks[-1] == len(profile.blocks) - 1
    return (*kinds, *gaps, int(blocks[0] == 0), int(ends_model))


class StageRun:
    """The replay of one stage on the empty memory of a device, pass by pass.

    `retained` are the cache or gradient tensors, block by block, and `num_kept` their number per
    block. cuBLAS's workspace is allocated for good before the first matrix product of a forward
    pass, and once more for backward passes, which run in another thread.
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
        self.memory = memory = new_memory(capacity, replay.has_expandable_segments)
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
        self._graph_pool = new_memory(None, replay.has_expandable_segments)
        # Keys of the allocations that the last forward pass saved for its backward pass.
        self._saved: tuple[Key, ...] = ()
        # Programs with `device_of`, and those of training, are not shared with other stages.
        is_shared = device_of is None and replay.workload.training is None
        self._programs = replay.programs if is_shared else {}
        self._signature = stage_signature(profile, self.blocks)

    @property
    def reserved_bytes(self) -> int:
        """The peak of the reserved bytes, with those of CUDA graphs."""
        return self.memory.max_reserved + self._graph_pool.max_reserved

    def run(self, usable_bytes: float = inf) -> StageBytes:
        """Replay passes until one reserves more than the usable bytes, and return the peaks."""
        memory, weights = self.memory, self._weight_bytes
        # `any` stops after the first pass that exceeds the limit. The generator and the allocator
        # keep their state, so the next call continues with the next pass.
        self.is_paused = any(self.reserved_bytes > usable_bytes for _ in self._passes)
        kept_bytes, optimizer = memory.cached_at_peak, memory.aside_at_peak
        pool = self._graph_pool  # of which graphs keep cuBLAS's workspace, and use the rest again
        is_training = self.replay.workload.training is not None
        return StageBytes(
            weight_bytes=weights,
            kv_cache_bytes=0 if is_training else kept_bytes,
            activation_bytes=memory.peak + pool.allocated - weights - kept_bytes - optimizer,
            allocated_bytes=memory.peak + pool.allocated,
            reserved_bytes=self.reserved_bytes,
            requested_bytes=memory.requested_peak + pool.requested,
            gradient_bytes=kept_bytes if is_training else 0,
            optimizer_bytes=optimizer,
        )

    def record_graphs(self, steps: Iterable[int]) -> None:
        """Run passes as CUDA graphs are recorded: in a pool of their own, with its workspace."""
        memory, self.memory = self.memory, self._graph_pool
        self._has_workspace.clear()
        kinds, blocks = self.replay.profile.kinds, self.replay.profile.blocks
        num_graphs = 1 + sum(kinds[blocks[block].kind].expert_bytes > 0 for block in self.blocks)
        for step in steps:
            for _ in ("seed", "offset") * num_graphs:  # of a graph's random numbers: 8 bytes each
                self.memory.hold(8)
            self.run_pass(step)
        self.memory = memory

    def run_pass(self, step: int, saved: Sequence[Held] = ()) -> list[Held]:
        """Run a pass, and return the blocks to pass as `saved` to its backward pass."""
        replay = self.replay
        is_backward = replay.is_backward(step)
        workspace = 0 if is_backward in self._has_workspace else replay.workspace_bytes
        # Steps of one regime with equal numbers of caches run the same code with other sizes.
        regime = replay.steps[step].regime, replay.steps[step].is_graph
        key = (self._signature, workspace, *regime, self.num_kept)
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
    """Return up to `_MOST_SAMPLES` evenly spaced items, each with the number it stands for."""
    number = min(len(items), _MOST_SAMPLES)
    ends = [len(items) * index // number for index in range(number + 1)] if number else []
    return [(items[(start + stop) // 2], float(stop - start)) for start, stop in pairwise(ends)]


def _take_ends(items: Sequence[T]) -> Sequence[T]:
    """Return the first two and the last two items."""
    return items if len(items) <= 4 else [*items[:2], *items[-2:]]
