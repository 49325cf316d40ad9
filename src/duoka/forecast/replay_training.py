"""Replay of training: run training steps through the allocator's model, stage by stage.

One step is several micro-batches, each a forward pass over a stage's blocks and a backward pass in
reverse order, then the optimizer's update. The optimizer allocates its states in the first step.
Gradients are set to None at the end of a step.

This module knows nothing of time, nor of copies that reach a block by way of a third device: in a
placement that isn't contiguous, copies are replayed as if they came directly.
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
"""Indices into `TrainingReplay.steps`: the passes of a micro-batch."""

# If the allocator's state doesn't repeat, at most _MOST_STEPS steps are replayed, each with at most
# _MOST_ROUNDS micro-batches beyond those in flight. The optimizer's states exist from the end
# of the first step on.
_MOST_STEPS = 6
_MOST_ROUNDS = 64


class TrainingReplay(Replay):
    """A profile at a workload of training, to replay its stages.

    `place` is the number of stages from this one to the last, itself included: with the schedule
    "1f1b" it limits the micro-batches in flight.
    """

    def __init__(self, profile: Profile, workload: Workload, *, place: int = 1) -> None:
        assert workload.training is not None, "the workload is to train"
        self.training: Training = workload.training
        self.place = place
        super().__init__(profile, workload)
        # For each allocation freed in a backward pass, the block whose backward pass frees it.
        self.ended_by = dict(self._find_freeing_blocks())

    @property
    def in_flight(self) -> int:
        """The largest number of micro-batches between their forward and their backward pass."""
        return in_flight(self.training, self.place)

    def prompt_steps(self) -> list[tuple[ForecastStep, float]]:
        """Return the passes of a training step, each with the number of its runs."""
        number = self.training.micro_batches
        forward_passes = 2.0 * number if self.training.dpo else float(number)
        return list(zip(self.steps, (forward_passes, 1.0, number - 1.0), strict=True))

    def passes(self, stage: StageRun) -> Iterator[None]:
        """Run training steps until the allocator's state at the end of a step repeats.

        The free blocks determine all later allocations, so further steps would repeat too.
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
        """Run all passes of one training step, leaving out repetitions."""
        # Warm-up: forward passes up to the limit. Steady state: a backward pass of the oldest
        # micro-batch, then a forward pass. Cool-down: the remaining backward passes.
        limit, pending = self.in_flight, list[list[Held]]()
        step = BACKWARD
        last_seen: dict[Any, int] = {}
        remaining = min(self.training.micro_batches, limit + _MOST_ROUNDS)
        while remaining:
            if len(pending) == limit:
                stage.run_pass(step, pending.pop(0))
                step = ACCUMULATE
                # Equal allocator states are followed by equal states. If the same state was seen
                # with `period` more micro-batches remaining, whole periods of the rest can be left
                # out. With equal states at 40 and 38 remaining, 38 % 2 = 0 still have to run.
                state = _allocator_state(stage.memory, pending)
                period = last_seen.setdefault(state, remaining) - remaining
                if period:
                    remaining %= period
                    last_seen.clear()
                    if not remaining:
                        break
            pending.append(stage.run_pass(FORWARD))
            remaining -= 1
        while pending:
            stage.run_pass(step, pending.pop(0))
            step = ACCUMULATE

    def compile_pass(self, compiler: StageCompiler) -> None:
        """Compile a pass over all blocks of the model: other stages' blocks only free tensors."""
        blocks = range(len(self.profile.blocks))
        if self.is_backward(compiler.step):
            compiler.run(blocks[::-1])
            compiler.release_all()
            return
        # Unsaved tensors are freed before the outputs come back to the caller, the last block.
        for part in (blocks[:-1], blocks[-1:]):
            compiler.run(part)
            self._release_unsaved(compiler)

    def _release_unsaved(self, compiler: StageCompiler) -> None:
        """After a forward pass, free the tensors that no backward pass on this stage needs."""
        # Tensors that are live after the blocks' forward pass:
        #
        #   made by               freed in the backward pass of    after the forward pass
        #   a block of the stage  one of the stage                 stays, saved
        #   a block of the stage  none                             stays to its backward pass's end
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
            # A tensor saved by other stages alone is freed here, and so is a copy that only lived
            # through.
            holder = self.ended_by.get(key)
            ends_here = holder is None if key[0] in compiler.blocks else key in inputs
            if not ends_here and holder not in compiler.blocks:
                compiler.release(key)

    def _update(self, stage: StageRun, *, is_first: bool) -> None:
        """Run the optimizer's update, and set gradients to None."""
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
                _replay_optimizer_temporaries(stage.memory, sizes, MOST_TEMPORARIES[optimizer])
        for gradient in stage.retained:
            stage.memory.release(gradient, cached=True)
        stage.retained, stage.num_kept = [], (0,) * len(stage.blocks)

    def _find_freeing_blocks(self) -> Iterator[tuple[Key, int]]:
        """Yield the allocations freed in a backward pass, each with the freeing block."""
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
    """Return the replay for the kind of workload; in training, of a stage at this place."""
    if workload.training is not None:
        return TrainingReplay(profile, workload, place=place)
    kind = ServingReplay if workload.is_paged else Replay
    return kind(profile, workload, brief=brief)


def in_flight(training: Training, place: int) -> int:
    """Return the most micro-batches in flight at a stage (`place`: see `TrainingReplay`)."""
    most = {"sequential": 1, "gpipe": training.micro_batches, "1f1b": place}
    return min(most[training.schedule], training.micro_batches)


def _allocator_state(memory: PlainMemory, flying: Sequence[Sequence[Held]] = ()) -> Any:
    """Return the free blocks and saved activations, which determine all later allocations."""
    return memory.free_blocks(), *map(tuple, flying)


def _replay_optimizer_temporaries(memory: PlainMemory, sizes: Sequence[int], most: float) -> None:
    """Allocate and free the temporaries of an update, with at most `most` live at a time."""
    temporaries: list[Held] = []
    for size in sizes:
        temporaries.append(_hold_aside(memory, size))
        if len(temporaries) == most:
            _release_aside(memory, temporaries.pop(0))
    for temporary in temporaries:
        _release_aside(memory, temporary)


def _hold_aside(memory: PlainMemory, size: int) -> Held:
    """Allocate memory of the optimizer, counted in `memory.aside`."""
    memory.aside += rounded_bytes(size)
    block = memory.hold(size)
    _, num_bytes, requested = block
    if num_bytes > requested:
        # The block wasn't split, so all its bytes count as `aside`. The block is allocated again,
        # so that the peak has the larger number too.
        memory.release(block)
        memory.aside += num_bytes - requested
        block = memory.hold(size)
    return block


def _release_aside(memory: PlainMemory, block: Held) -> None:
    """Free memory of the optimizer, counted in `memory.aside`."""
    memory.aside -= block[1]
    memory.release(block)
