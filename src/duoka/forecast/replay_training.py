"""Replay of training: run its steps through the allocator's model, stage by stage.

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
from .alloc_program import StageCompiler
from .allocator import rounded_bytes
from .device_memory import Held, PlainMemory
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
    """A profile at a workload of training, to replay its stages.

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
        """The most micro-batches with a forward and no backward pass."""
        return in_flight(self.training, self.place)

    def prompt_steps(self) -> list[tuple[ForecastStep, float]]:
        """Return the passes of a training step, each with its number of runs."""
        number = self.training.micro_batches
        return list(zip(self.steps, (float(number), 1.0, number - 1.0), strict=True))

    def passes(self, stage: StageRun) -> Iterator[None]:
        """Run steps until the free blocks at the end of a step repeat.

        Where the free blocks are decides on all that follows: further steps would repeat.
        """
        ends: set[Any] = set()
        while len(ends) < _MOST_STEPS:
            self._run_micro_batches(stage)
            self._update(stage, is_first=not ends)
            yield
            end = _allocator_state(stage.memory)
            if end in ends:
                break
            ends.add(end)

    def _run_micro_batches(self, stage: StageRun) -> None:
        # Warm-up: forward passes until the limit. Steady state: a backward pass of the oldest
        # micro-batch, then a forward pass. Cool-down: the backward passes that are left.
        limit, flying = self.in_flight, list[list[Held]]()
        step = BACKWARD
        last_seen: dict[Any, int] = {}
        remaining = min(self.training.micro_batches, limit + _MOST_ROUNDS)
        while remaining:
            if len(flying) == limit:
                stage.run_pass(step, flying.pop(0))
                step = ACCUMULATE
                # The same allocator state leads to the same states again. If it was last seen with
                # `period` more micro-batches to go, whole periods of the rest change nothing. With
                # equal states at 40 and at 38 micro-batches to go, 38 % 2 = 0 are left to run.
                state = _allocator_state(stage.memory, flying)
                period = last_seen.setdefault(state, remaining) - remaining
                if period:
                    remaining %= period
                    last_seen.clear()
                    if not remaining:
                        break
            flying.append(stage.run_pass(FORWARD))
            remaining -= 1
        while flying:
            stage.run_pass(step, flying.pop(0))
            step = ACCUMULATE

    def compile_pass(self, compiler: StageCompiler) -> None:
        """Compile a pass over a stage's blocks, with the frees of other stages' blocks."""
        blocks = range(len(self.profile.blocks))
        if self.is_backward(compiler.step):
            compiler.run(blocks[::-1])
            compiler.release_all()
            return
        # When the outputs come back to the caller, the last block, that is gone already.
        for part in (blocks[:-1], blocks[-1:]):
            compiler.run(part)
            self._release_unsaved(compiler)

    def _release_unsaved(self, compiler: StageCompiler) -> None:
        """Free tensors without use in a backward pass on this stage, after the forward pass."""
        # What is alive behind the blocks' forward pass, and what becomes of it:
        #
        #   made by               freed in the backward pass of    after the forward pass
        #   a block of the stage  one of the stage                 stays, saved
        #   a block of the stage  none                             stays to the backward pass's end
        #   a block of the stage  another stage's, which has       freed
        #                         saved a copy of its own
        #   another stage         any; a block here reads it       stays: this copy is saved
        #   another stage         any; it only lives through       freed, unless by one of the stage
        inputs = {
            self.key_of(block, read.ref, FORWARD)
            for block in compiler.blocks
            for number, read in enumerate(self.trace(block, FORWARD).reads)
            if number not in self.trace(block, FORWARD).live_through
        }
        for key in list(compiler.alive):
            # What only other stages save is freed on its own device, and so is a copy that was only
            # on its way.
            holder = self.ended_by.get(key)
            ends_here = holder is None if key[0] in compiler.blocks else key in inputs
            if not ends_here and holder not in compiler.blocks:
                compiler.release(key)

    def _update(self, stage: StageRun, *, is_first: bool) -> None:
        """Run the optimizer, and set gradients to None."""
        optimizer = self.training.optimizer
        trained = [tensor for kind in stage.kinds for tensor in kind.trained]
        if is_first:
            for size in shared_bytes(optimizer, trained):
                _hold_aside(stage.memory, size)
        for group in update_groups(trained):
            if is_first:
                for size in [size for tensor in group for size in state_bytes(optimizer, tensor)]:
                    _hold_aside(stage.memory, size)
            if MOST_TEMPORARIES[optimizer]:
                sizes = [tensor.num_bytes for tensor in group]
                _hold_for_update(stage.memory, sizes, MOST_TEMPORARIES[optimizer])
        for gradient in stage.retained:
            stage.memory.release(gradient, cached=True)
        stage.retained, stage.num_kept = [], (0,) * len(stage.blocks)

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


def replay_of(
    profile: Profile, workload: Workload, *, place: int = 1, brief: bool = False
) -> Replay:
    """Return the replay of a profile at a workload; in training at a place from the end."""
    if workload.training is not None:
        return TrainingReplay(profile, workload, place=place)
    kind = ServingReplay if workload.is_paged else Replay
    return kind(profile, workload, brief=brief)


def in_flight(training: Training, place: int) -> int:
    """Return the micro-batches in flight at a stage, at a place from the end."""
    most = {"sequential": 1, "gpipe": training.micro_batches, "1f1b": place}
    return min(most[training.schedule], training.micro_batches)


def _allocator_state(memory: PlainMemory, flying: Sequence[Sequence[Held]] = ()) -> Any:
    """Return the free blocks and saved activations, on which later requests depend."""
    return memory.free_blocks(), *map(tuple, flying)


def _hold_for_update(memory: PlainMemory, sizes: Sequence[int], most: float) -> None:
    """Hold the temporaries of an update, so many at a time."""
    temporaries: list[Held] = []
    for size in sizes:
        temporaries.append(_hold_aside(memory, size))
        if len(temporaries) == most:
            _release_aside(memory, temporaries.pop(0))
    for temporary in temporaries:
        _release_aside(memory, temporary)


def _hold_aside(memory: PlainMemory, size: int) -> Held:
    """Allocate memory of the optimizer, counted as aside."""
    memory.aside += rounded_bytes(size)
    block = memory.hold(size)
    _, num_bytes, requested = block
    if num_bytes > requested:
        # The block isn't split, and all of it counts, at the peak as well: it is taken anew.
        memory.release(block)
        memory.aside += num_bytes - requested
        block = memory.hold(size)
    return block


def _release_aside(memory: PlainMemory, block: Held) -> None:
    memory.aside -= block[1]
    memory.release(block)
