"""Replay of training: its steps, run through the allocator's model stage by stage.

One step is some micro-batches, each a forward pass over a stage's blocks and a backward pass over
them in reverse, then the optimizer, which makes its states in its first step. Gradients are set to
None at the end of a step.

It knows nothing of how long anything takes, nor of copies that reach a block by way of a third
device: a placement that isn't contiguous is replayed as if they came straight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .alloc_events import ForecastStep
from .alloc_program import StageCompiler, StageProgram
from .allocator import rounded_bytes
from .device_memory import Held
from .optimizer_memory import MOST_TEMPORARIES, shared_bytes, state_bytes, update_groups
from .profile import TRAINING_PHASES, Key, Profile, training_monomials
from .replay import Replay, StageRun
from .replay_serving import ServingReplay
from .workload import Training, Workload

FORWARD, BACKWARD, ACCUMULATE = range(3)
"""The steps of a replay: passes of a micro-batch, by their place in `TrainingReplay.steps`."""

# Where what is free doesn't come round to what it was before, so many steps and micro-batches stand
# for all. The optimizer's states are made in the first step, and are there from the second one on.
_MOST_STEPS = 6
_MOST_ROUNDS = 64


class TrainingReplay(Replay):
    """A profile for training at one workload, whose stages can be replayed.

    `place` is how many stages there are from this one to the end, itself included: with the
    schedule "1f1b" that many micro-batches are in flight.
    """

    def __init__(self, profile: Profile, workload: Workload, *, place: int = 1) -> None:
        assert workload.training is not None, "the workload is to train"
        self.training: Training = workload.training
        self.place = place
        super().__init__(profile, workload)
        # The block whose backward pass ends what a forward pass made.
        self.ended_by = dict(self._ends())

    @property
    def in_flight(self) -> int:
        """Micro-batches that have run forward and not backward, at most."""
        return in_flight(self.training, self.place)

    def prompt_steps(self) -> list[tuple[ForecastStep, float]]:
        """The passes of a step of training, each with how often it runs."""
        number = self.training.micro_batches
        return list(zip(self.steps, (float(number), 1.0, number - 1.0), strict=True))

    def first_number(self, block: int, step: int) -> int:
        """The number of the first allocation in a block's trace."""
        return 0 if step == FORWARD else len(self.trace(block, FORWARD).sizes)

    def _stage_run(
        self, blocks: Sequence[int], capacity: int | None, device_of: Sequence[str] | None
    ) -> StageRun:
        return _TrainingRun(self, blocks, capacity)

    def _ends(self) -> Iterator[tuple[Key, int]]:
        for block in range(len(self.profile.blocks)):
            for ref in self.trace(block, BACKWARD).events:
                if ref is not None and ref.origin in ("own", "earlier", "carried"):
                    yield self.key_of(block, ref, BACKWARD), block

    def _schedule(self) -> list[ForecastStep]:
        batch, tokens = self.workload.batch, self.workload.prompt_tokens
        values = self.profile.values(training_monomials(batch, tokens), batch, tokens, tokens)
        return [
            ForecastStep(
                phase=phase,
                query=tokens,
                keys=tokens,
                regime=self.profile.regime_of(phase, batch=batch, query=tokens, keys=tokens),
                values=values,
            )
            for phase in TRAINING_PHASES
        ]


def replay_of(profile: Profile, workload: Workload, *, place: int = 1) -> Replay:
    """What replays a stage at a workload; in training, one at a place from the end."""
    if workload.is_paged:
        return ServingReplay(profile, workload)
    if workload.training is None:
        return Replay(profile, workload)
    return TrainingReplay(profile, workload, place=place)


def in_flight(training: Training, place: int) -> int:
    """Micro-batches in flight at a stage that has `place` stages from itself to the end."""
    most = {"sequential": 1, "gpipe": training.micro_batches, "1f1b": place}
    return min(most[training.schedule], training.micro_batches)


class _TrainingRun(StageRun):
    """Steps of training; what `Memory` tells apart as aside are the optimizer's states."""

    def __init__(self, replay: TrainingReplay, blocks: Sequence[int], capacity: int | None) -> None:
        super().__init__(replay, blocks, capacity)
        self.replay = replay
        # Block by block, and how many of each.
        self.gradients: list[Held] = []
        self.num_gradients = (0,) * len(self.blocks)
        self.trained = [tensor for kind in self.kinds for tensor in kind.trained]
        self._programs: dict[tuple[bool, int, tuple[int, ...]], StageProgram] = {}
        # Of the threads of forward and backward passes those that have no workspace yet.
        self._to_begin = {FORWARD, BACKWARD}

    def run_steps(self) -> tuple[int, int]:
        # What a step does follows from where the free blocks are: once they are where they were at
        # the end of an earlier step, all further steps repeat what has been seen.
        ends: set[Any] = set()
        while len(ends) < _MOST_STEPS:
            self._run_micro_batches()
            self._update(is_first=not ends)
            end = self._allocator_state(())
            if end in ends:
                break
            ends.add(end)
        return 0, self.memory.cached_at_peak

    def _run_micro_batches(self) -> None:
        limit, flying = self.replay.in_flight, list[list[Held]]()
        step = BACKWARD
        seen: dict[Any, int] = {}
        left = min(self.replay.training.micro_batches, limit + _MOST_ROUNDS)
        while left:
            if len(flying) == limit:
                self._pass(step, flying.pop(0))
                step = ACCUMULATE
                # From the same state of the allocator the same follows: so many micro-batches
                # later it has come round, and whole rounds more needn't be run.
                period = seen.setdefault(self._allocator_state(flying), left) - left
                if period:
                    left %= period
                    seen.clear()
                    if not left:
                        break
            flying.append(self._pass(FORWARD, []))
            left -= 1
        while flying:
            self._pass(step, flying.pop(0))
            step = ACCUMULATE

    def _allocator_state(self, flying: Sequence[Sequence[Held]]) -> Any:
        """What is free, and where what the micro-batches in flight have made is."""
        return self.memory.free_blocks(), *map(tuple, flying)

    def _pass(self, step: int, saved: Sequence[Held]) -> list[Held]:
        """Run a pass over all blocks, with what the forward one has saved; what this one leaves."""
        is_first = step in self._to_begin
        self._to_begin.discard(step)
        key = (is_first, step, self.num_gradients)
        if key not in self._programs:
            self._programs[key] = self._compile(step, is_first * self.replay.workspace_bytes)
        program = self._programs[key]
        number = sum(program.num_kept)
        sizes = program.sizes(self.replay, step)
        out = self.memory.run(program.moves, sizes, [*self.gradients, *saved], program.out)
        self.gradients, self.num_gradients = out[:number], program.num_kept
        return out[number:]

    def _compile(self, step: int, workspace_bytes: int) -> StageProgram:
        replay, blocks = self.replay, range(len(self.profile.blocks))
        num_kept = dict(zip(self.blocks, self.num_gradients, strict=True))
        if step != FORWARD:
            # The same whatever gradients there were then.
            forward = next(known for key, known in self._programs.items() if key[1] == FORWARD)
            compiler = StageCompiler(
                replay, step, num_kept, alive=forward.left, workspace_bytes=workspace_bytes
            )
            compiler.run(blocks[::-1])
            compiler.release_all()
            return compiler.program()
        compiler = StageCompiler(replay, step, num_kept, workspace_bytes=workspace_bytes)
        # When the outputs come back to the caller, the last block, that is gone already.
        for part in (blocks[:-1], blocks[-1:]):
            compiler.run(part)
            self._release_passing(compiler)
        return compiler.program()

    def _release_passing(self, compiler: StageCompiler) -> None:
        """Free what no backward pass here needs, when the forward pass is over."""
        replay = self.replay
        inputs = {
            replay.key_of(block, read.ref, FORWARD)
            for block in self.blocks
            for number, read in enumerate(replay.trace(block, FORWARD).reads)
            if number not in replay.trace(block, FORWARD).passing
        }
        for key in list(compiler.alive):
            # What only others hold for their backward pass is gone from its own device, and so is a
            # copy that was only on its way.
            holder = replay.ended_by.get(key)
            ends_here = holder is None if key[0] in compiler.blocks else key in inputs
            if not ends_here and holder not in compiler.blocks:
                compiler.release(key)

    def _update(self, *, is_first: bool) -> None:
        """What the optimizer does, and gradients set to None."""
        optimizer = self.replay.training.optimizer
        if is_first:
            for size in shared_bytes(optimizer, self.trained):
                self._hold_aside(size)
        for group in update_groups(self.trained):
            if is_first:
                for size in [size for tensor in group for size in state_bytes(optimizer, tensor)]:
                    self._hold_aside(size)
            if MOST_TEMPORARIES[optimizer]:
                self._compute([tensor.num_bytes for tensor in group], MOST_TEMPORARIES[optimizer])
        for gradient in self.gradients:
            self.memory.release(gradient, cached=True)
        self.gradients, self.num_gradients = [], (0,) * len(self.blocks)

    def _compute(self, sizes: Sequence[int], most: float) -> None:
        """What is there for the time of an update, so many at a time."""
        temporaries: list[Held] = []
        for size in sizes:
            temporaries.append(self._hold_aside(size))
            if len(temporaries) == most:
                self._release_aside(temporaries.pop(0))
        for temporary in temporaries:
            self._release_aside(temporary)

    def _hold_aside(self, size: int) -> Held:
        memory = self.memory
        memory.aside += rounded_bytes(size)
        block = memory.hold(size)
        _, num_bytes, requested = block
        if num_bytes > requested:
            # The block isn't split, and all of it counts, at the peak as well: it is taken anew.
            memory.release(block)
            memory.aside += num_bytes - requested
            block = memory.hold(size)
        return block

    def _release_aside(self, block: Held) -> None:
        self.memory.aside -= block[1]
        self.memory.release(block)
