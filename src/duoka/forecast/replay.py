"""Replay: the allocation events of a stage, run through the allocator's model at one workload.

This is the one function that the planner optimises, the forecast reports and the virtual run is
held against. It knows nothing of time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from .alloc_events import AllocEvents, Step
from .alloc_program import StageCompiler, StageProgram
from .allocator import OutOfCapacity, rounded_bytes, segment_bytes
from .device_memory import Held, new_memory
from .profile import Phase, Profile, buffer_bytes, evaluate
from .workload import Workload

T = TypeVar("T")

# Decode steps are alike but for their length. Where all of them would be more events than these,
# only the first and last ones and those where a cache outgrows its segment are replayed whole: what
# is allocated is the same but for what a cache's block has left unsplit, up to 1 MiB, and what is
# reserved differs by a segment at most where a token takes up to 4 KiB of a cache's block. Where it
# takes more (large batches), which blocks are free for whom changes with every token: the steps in
# between are replayed as well, without what comes from small segments.
_MOST_EVENTS = 200_000
_SMALL_GROWTH_BYTES = 4096
_MOST_STEPS_BETWEEN = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBytes:
    """Peaks of one stage on one device, in bytes.

    `weights`, `kv_cache`, `activations`, `gradients` and `optimizer` add up to `allocated`, at
    the moment of its peak; `reserved` is the peak of what the allocator takes from the device.
    `requested` is the most that tensors ask for at a time, rounded, which is the same on any
    device; a block that is hardly larger than what was asked for isn't split and counts whole in
    `allocated`. It was `pressed` where cached memory had to be given back; where not, more of it
    makes no difference.
    """

    weights: int
    kv_cache: int
    activations: int
    allocated: int
    reserved: int
    requested: int
    gradients: int = 0
    optimizer: int = 0
    pressed: bool = False


class Run(Protocol):
    """One replay of a stage."""

    num_begun: int
    """How many steps have been begun."""

    def run(self) -> StageBytes:
        """Replay it; `OutOfCapacity` where it doesn't fit."""


class Replay(AllocEvents):
    """A profile at one workload, whose stages can be replayed.

    With `brief` it leaves out the steps between the first and the last ones of a phase: for bounds
    and for seconds. Otherwise every step counts that changes what PyTorch's allocator holds.
    """

    def __init__(self, profile: Profile, workload: Workload, *, brief: bool = False) -> None:
        self.brief = brief
        super().__init__(profile, workload)
        # The steps of the last run that didn't fit, up to the one where it ended.
        self.refusing: tuple[Step, ...] = ()

    def run(
        self,
        blocks: Sequence[int],
        capacity_bytes: int | None = None,
        *,
        device_of: Sequence[str] | None = None,
    ) -> StageBytes | None:
        """The peaks of a stage; None where it doesn't fit its capacity."""
        run = self._stage_run(blocks, capacity_bytes, device_of)
        try:
            return run.run()
        except OutOfCapacity:
            self.refusing = tuple(self.steps[: run.num_begun])
            return None

    def _stage_run(
        self, blocks: Sequence[int], capacity: int | None, device_of: Sequence[str] | None
    ) -> Run:
        return _StageRun(self, blocks, capacity, device_of)

    def _step(self, phase: Phase, query: int, keys: int) -> Step:
        batch = self.workload.batch
        return Step(
            phase=phase,
            query=query,
            keys=keys,
            regime=self.profile.regime_of(
                phase, batch=batch, query=query, keys=keys, context=self.workload.static_tokens
            ),
            values=self._values(query, keys),
        )

    def step_over(self, query: int, past: int) -> Step:
        """A step of so many tokens after so many others."""
        # A one-token step after others is what decoding does.
        phase: Phase = "prefill" if not past else "extend" if query > 1 else "decode"
        query = max(query, 2) if phase == "prefill" else query
        return self._step(phase, query, past + query)

    def _schedule(self) -> list[Step]:
        chunks = self.workload.chunks()
        steps = [self.step_over(*chunk) for chunk in (_ends(chunks) if self.brief else chunks)]
        keys = range(self.workload.prompt_tokens + 1, self.workload.context_tokens)
        chosen, between = self._decode_lengths(keys)
        last = self.workload.context_tokens
        return steps + [
            replace(
                self._step("decode", 1, length), large_at_tokens=0 if length in chosen else last
            )
            for length in sorted({*chosen, *between})
        ]

    def _decode_lengths(self, keys: range) -> tuple[Collection[int], Sequence[int]]:
        """The lengths of the decode steps to replay, whole and in part."""
        if self.brief:
            return _ends(keys), ()
        if not keys or len(keys) * self._num_events(keys[-1]) <= _MOST_EVENTS:
            return keys, ()
        chosen = {*_ends(keys)}
        rules = {
            tape.sizes[index]
            for kind in self.profile.kinds
            for regime, tape in zip(self.profile.regimes, kind.tapes, strict=True)
            if regime.phase == "decode" and regime.many == (self.workload.batch > 1)
            for index in tape.kept
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
        between = keys[:: -(-len(keys) // _MOST_STEPS_BETWEEN)]
        return chosen, between if growth > _SMALL_GROWTH_BYTES else ()

    def _num_events(self, keys: int) -> int:
        """How many allocations and frees one decode step has, in all blocks."""
        regime = self._step("decode", 1, keys).regime
        return sum(
            len(self.profile.kinds[block.kind].tapes[regime].events)
            for block in self.profile.blocks
        )


class _StageRun:
    """One replay: the device, and the caches on it."""

    def __init__(
        self,
        replay: Replay,
        blocks: Sequence[int],
        capacity: int | None,
        device_of: Sequence[str] | None = None,
    ) -> None:
        self.replay = replay
        self.device_of = device_of
        self.blocks = sorted(blocks)
        self.memory = new_memory(capacity)
        # Block by block, and how many of each.
        self.caches: list[Held] = []
        self.num_kept = (0,) * len(self.blocks)
        self.num_begun = 0
        self._programs: dict[tuple[int, int, tuple[int, ...]], StageProgram] = {}

    def run(self) -> StageBytes:
        profile, memory = self.replay.profile, self.memory
        for block in self.blocks:
            for size in profile.kinds[profile.blocks[block].kind].weight_bytes:
                memory.hold(size)
        for size in buffer_bytes(profile.streamed_bytes(self.blocks)):
            memory.hold(size)
        weights = memory.allocated
        for step in range(len(self.replay.steps)):
            self.num_begun = step + 1
            self._run_step(step)
        return StageBytes(
            weights=weights,
            kv_cache=memory.cached_at_peak,
            activations=memory.peak - weights - memory.cached_at_peak,
            allocated=memory.peak,
            reserved=memory.max_reserved,
            requested=memory.requested_peak,
            pressed=memory.is_pressed,
        )

    def _run_step(self, step: int) -> None:
        call = self.replay.steps[step]
        key = (call.regime, call.large_at_tokens, self.num_kept)
        if key not in self._programs:
            num_kept = dict(zip(self.blocks, self.num_kept, strict=True))
            compiler = StageCompiler(self.replay, step, num_kept, device_of=self.device_of)
            compiler.run(range(self.blocks[0], self.blocks[-1] + 1))
            # Blocks behind the last one free what is theirs; nothing is allocated in between.
            compiler.release_all()
            self._programs[key] = compiler.program()
        program = self._programs[key]
        sizes = program.sizes(self.replay, step)
        self.caches = self.memory.run(program.moves, sizes, self.caches, program.out)
        self.num_kept = program.num_kept


def _ends(items: Sequence[T]) -> Sequence[T]:
    """The first two and the last two."""
    return items if len(items) <= 4 else [*items[:2], *items[-2:]]
