"""Rehearsal: steps of training, run through the allocator's model stage by stage.

One step is some micro-batches, each a forward pass over a stage's blocks and a backward pass over
them in reverse, then the optimizer, which is torch's with default arguments: on a GPU it works on
lists of tensors, and AdamW makes two states for every trained parameter in its first step and a
temporary one in every step. Gradients are set to None at the end of a step.

It knows nothing of how long anything takes, nor of copies that reach a block by way of a third
device: a placement that isn't contiguous is rehearsed as if they came straight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .allocator import Allocation, CachingAllocator, OutOfCapacity, rounded_bytes
from .profile import TRAINING_PHASES, Profile, evaluate, training_monomials
from .replay import DROP, KEEP, MALLOC, RELEASE, RELEASE_FAR, Event, Key, Replay, StageBytes, Step
from .workload import Training, Workload

FORWARD, BACKWARD, ACCUMULATE = range(3)
"""The steps of a rehearsal: passes of a micro-batch, by their place in `Rehearsal.steps`."""

# States are made in the first step, and are there from the second one on.
_STEPS = 2
# Micro-batches after which a schedule has come round: more of them do what the last ones did.
_ROUNDS = 2
STATES = {"adamw": 2, "sgd": 0}
TEMPORARIES = {"adamw": 1, "sgd": 0}


class Rehearsal(Replay):
    """A profile for training at one workload.

    Parameters
    ----------
    profile : Profile
    workload : Workload
    brief : bool
        Rehearse one step, with the optimizer's states there, instead of the first two.
    place : int
        How many stages there are from this one to the end, itself included: with the schedule
        "1f1b" that many micro-batches are in flight.

    Raises
    ------
    UsageError
        If the workload is larger than what the profile knows, or under other conditions.
    """

    def __init__(
        self, profile: Profile, workload: Workload, *, brief: bool = False, place: int = 1
    ) -> None:
        assert workload.training is not None, "the workload is to train"
        self.training: Training = workload.training
        self.place = place
        super().__init__(profile, workload, brief=brief)
        self._ended_by = dict(self._ends())

    @property
    def in_flight(self) -> int:
        """Micro-batches that have run forward and not backward, at most."""
        return in_flight(self.training, self.place)

    def run(
        self,
        blocks: Sequence[int],
        capacity_bytes: int | None = None,
        *,
        device_of: Sequence[str] | None = None,
    ) -> StageBytes | None:
        """The peaks of a stage; None where it doesn't fit its capacity.

        Parameters
        ----------
        blocks : sequence of int
            The stage's blocks in execution order.
        capacity_bytes : int, optional
            The device's budget. When it is reached, cached segments are given back, as CUDA does.
        device_of : sequence of str, optional
            Makes no difference here.
        """
        try:
            return _StageRun(self, blocks, capacity_bytes).run()
        except OutOfCapacity:
            return None

    def weighted_steps(self) -> list[tuple[Step, float]]:
        """The passes of a step of training, each with how often it runs."""
        number = self.training.micro_batches
        return list(zip(self.steps, (float(number), 1.0, number - 1.0), strict=True))

    def ended_by(self, key: Key) -> int | None:
        """The block whose backward pass ends what a forward pass made; None if none does."""
        return self._ended_by.get(key)

    def first_number(self, block: int, step: int) -> int:
        """The number of the first allocation in a block's tape."""
        return 0 if step == FORWARD else len(self.tape(block, FORWARD).sizes)

    def _compile(self, block: int, step: int) -> Iterator[Event]:
        # In the names of a tape, not of its block: kinds stand for many blocks.
        tape, sizes = self.tape(block, step), self.sizes(block, step)
        kept = frozenset(tape.kept)
        number = first = self.first_number(block, step)
        for ref in tape.events:
            if ref is None:
                yield KEEP if number in kept else MALLOC, number, sizes[number - first]
                number += 1
            elif ref.origin == "kept":
                yield DROP, ref.index, 0
            elif ref.origin in ("own", "earlier"):
                yield RELEASE, ref.back, ref.index
            else:
                yield RELEASE_FAR, *self.key_of(block, ref, step)

    def _ends(self) -> Iterator[tuple[Key, int]]:
        for block in range(len(self.profile.blocks)):
            for ref in self.tape(block, BACKWARD).events:
                if ref is not None and ref.origin in ("own", "earlier", "carried"):
                    yield self.key_of(block, ref, BACKWARD), block

    def _schedule(self) -> list[Step]:
        batch, tokens = self.workload.batch, self.workload.prompt_tokens
        values = training_monomials(batch, tokens)
        return [
            Step(
                phase=phase,
                query=tokens,
                keys=tokens,
                regime=self.profile.regime_of(phase, batch=batch, query=tokens, keys=tokens),
                values=values,
            )
            for phase in TRAINING_PHASES
        ]


def replay_of(
    profile: Profile, workload: Workload, *, brief: bool = False, place: int = 1
) -> Replay:
    """What replays a stage at a workload; in training, one at a place from the end."""
    if workload.training is None:
        return Replay(profile, workload, brief=brief)
    return Rehearsal(profile, workload, brief=brief, place=place)


def in_flight(training: Training, place: int) -> int:
    """Micro-batches in flight at a stage that has `place` stages from itself to the end."""
    most = {"sequential": 1, "gpipe": training.micro_batches, "1f1b": place}
    return min(most[training.schedule], training.micro_batches)


class _StageRun:
    """One rehearsal: the allocator and what is alive on it."""

    def __init__(self, rehearsal: Rehearsal, blocks: Sequence[int], capacity: int | None) -> None:
        self.rehearsal = rehearsal
        self.blocks = frozenset(blocks)
        self.allocator = CachingAllocator(capacity)
        self.order = range(len(rehearsal.profile.blocks))
        self.gradients: dict[int, list[Allocation]] = {block: [] for block in blocks}
        self.gradient_bytes = self.optimizer_bytes = 0
        self.at_peak = (0, 0)
        profile = rehearsal.profile
        self.kinds = [profile.kinds[profile.blocks[block].kind] for block in sorted(blocks)]
        self.trained = [size for kind in self.kinds for size in kind.trained_bytes]

    def run(self) -> StageBytes:
        for kind in self.kinds:
            for size in kind.weight_bytes:
                self.allocator.malloc(size)
        weights = self.allocator.allocated_bytes
        if self.rehearsal.brief:
            self._make_states()
        for step in range(1 if self.rehearsal.brief else _STEPS):
            self._run_micro_batches()
            self._update(is_first=step == 0 and not self.rehearsal.brief)
        peak, (gradients, optimizer) = self.allocator.max_allocated_bytes, self.at_peak
        return StageBytes(
            weights=weights,
            kv_cache=0,
            activations=peak - weights - gradients - optimizer,
            allocated=peak,
            reserved=self.allocator.max_reserved_bytes,
            gradients=gradients,
            optimizer=optimizer,
            pressed=self.allocator.is_pressed,
        )

    def _run_micro_batches(self) -> None:
        training, limit = self.rehearsal.training, self.rehearsal.in_flight
        flying: list[dict[Key, Allocation]] = []
        step = BACKWARD
        for _ in range(min(training.micro_batches, limit + _ROUNDS)):
            if len(flying) == limit:
                self._backward(flying.pop(0), step)
                step = ACCUMULATE
            flying.append(self._forward())
        while flying:
            self._backward(flying.pop(0), step)
            step = ACCUMULATE

    def _forward(self) -> dict[Key, Allocation]:
        alive: dict[Key, Allocation] = {}
        for block in self.order:
            self._pass(block, FORWARD, alive)
        for key in list(alive):
            # What only others hold for their backward pass is gone from its own device.
            holder = self.rehearsal.ended_by(key)
            if key[0] in self.blocks and holder is not None and holder not in self.blocks:
                self._release(alive, key)
        return alive

    def _backward(self, alive: dict[Key, Allocation], step: int) -> None:
        for block in reversed(self.order):
            self._pass(block, step, alive)
        for key in list(alive):
            self._release(alive, key)

    def _pass(self, block: int, step: int, alive: dict[Key, Allocation]) -> None:
        if block in self.blocks:
            self._move_in(block, step, alive)
            self._run_block(block, step, alive)
            return
        for ref in self.rehearsal.foreign_frees(block, step):
            self._release(alive, self.rehearsal.key_of(block, ref, step))

    def _run_block(self, block: int, step: int, alive: dict[Key, Allocation]) -> None:
        malloc, free = self._malloc, self.allocator.free
        slots: list[Allocation | None] = list(self.gradients[block])
        born: list[Allocation] = []
        for code, number, other in self.rehearsal.events(block, step):
            if code == MALLOC:
                alive[block, number] = malloc(other)
            elif code == RELEASE:
                allocation = alive.pop((block - number, other), None)
                if allocation is not None:
                    free(allocation)
            elif code == KEEP:
                born.append(self._keep(other))
            elif code == DROP:
                self._drop(slots, number)
            else:
                self._release(alive, (number, other))
        self.gradients[block] = [slot for slot in slots if slot is not None] + born

    def _move_in(self, block: int, step: int, alive: dict[Key, Allocation]) -> None:
        rehearsal = self.rehearsal
        values = rehearsal.steps[step].values
        for read in rehearsal.tape(block, step).reads:
            key = rehearsal.key_of(block, read.ref, step)
            here = key[0] in self.blocks or (key[0] == -1 and 0 in self.blocks)
            if not here and key not in alive:
                alive[key] = self._malloc(evaluate(read.size, values))

    def _update(self, *, is_first: bool) -> None:
        """What the optimizer does, and gradients set to None."""
        if is_first:
            self._make_states()
        optimizer = self.rehearsal.training.optimizer
        before = self.optimizer_bytes
        temporary = []
        for size in self.trained * TEMPORARIES[optimizer]:
            self.optimizer_bytes += rounded_bytes(size)
            temporary.append(self._malloc(size))
        for allocation in temporary:
            self.allocator.free(allocation)
        self.optimizer_bytes = before
        for kept in self.gradients.values():
            for allocation in kept:
                self.allocator.free(allocation)
            kept.clear()
        self.gradient_bytes = 0

    def _make_states(self) -> None:
        for size in self.trained:
            for _ in range(STATES[self.rehearsal.training.optimizer]):
                self.optimizer_bytes += rounded_bytes(size)
                self._malloc(size)

    def _malloc(self, num_bytes: int) -> Allocation:
        allocator = self.allocator
        allocation = allocator.malloc(num_bytes)
        if allocator.allocated_bytes == allocator.max_allocated_bytes:
            self.at_peak = self.gradient_bytes, self.optimizer_bytes
        return allocation

    def _keep(self, num_bytes: int) -> Allocation:
        allocation = self.allocator.malloc(num_bytes)
        self.gradient_bytes += allocation.size
        if self.allocator.allocated_bytes == self.allocator.max_allocated_bytes:
            self.at_peak = self.gradient_bytes, self.optimizer_bytes
        return allocation

    def _drop(self, slots: list[Allocation | None], index: int) -> None:
        allocation = slots[index]
        assert allocation is not None, "a gradient is dropped twice"
        slots[index] = None
        self.gradient_bytes -= allocation.size
        self.allocator.free(allocation)

    def _release(self, alive: dict[Key, Allocation], key: Key) -> None:
        allocation = alive.pop(key, None)
        if allocation is not None:
            self.allocator.free(allocation)
