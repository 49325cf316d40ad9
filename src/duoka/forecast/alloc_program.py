"""Allocation programs: what a stage does in one step, compiled before it is run.

A prompt in chunks and an answer are thousands of steps, but of few kinds: which request ends when
is the same in all steps of a regime in which as many caches are there; only sizes differ. So the
events of all blocks are resolved once to slots, as one program for each kind of step, and a step is
one run of a program on a device's memory, which is compiled C, with the sizes of that step.

It knows nothing of the allocator, and of time.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .alloc_events import DROP, KEEP, MALLOC, MULTIPLY, RELEASE, AllocEvents
from .device_memory import BACK, sizes_of
from .profile import Key, Rule, evaluate


_MOST_ALIVE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProgram:
    """What a stage does in one step, whatever the sizes.

    Its sizes are those of `examples`, a block of each kind, one after the other, then those of what
    comes from other devices (`moved`). Afterwards each block has `num_kept` caches or gradients,
    and `left` is there besides; `out` are the slots of both. `takes_workspace` says that a matrix
    product was the first one, and took cuBLAS's workspace.
    """

    moves: bytes
    examples: tuple[int, ...]
    moved: tuple[Rule, ...]
    num_kept: tuple[int, ...]
    left: tuple[Key, ...]
    out: tuple[int, ...]
    takes_workspace: bool

    def sizes(self, events: AllocEvents, step: int) -> bytes:
        """The sizes of the program in one of the steps."""
        values = events.steps[step].values
        moved = sizes_of([evaluate(rule, values) for rule in self.moved])
        return b"".join([*(events.packed_sizes(block, step) for block in self.examples), moved])


class StageCompiler:
    """Compiles the program of a stage, for one step.

    It is given how many caches or gradients each of the stage's blocks has, in order, and the keys
    of what else there is; with `device_of`, the device of each of the model's blocks, copies that
    come by way of a third device count. With `workspace_bytes` the first matrix product takes so
    much for good. `alive` is the slot of what there is besides caches.
    """

    def __init__(
        self,
        events: AllocEvents,
        step: int,
        num_kept: Mapping[int, int],
        *,
        alive: Sequence[Key] = (),
        device_of: Sequence[str] | None = None,
        workspace_bytes: int = 0,
    ) -> None:
        self.events, self.step, self.device_of = events, step, device_of
        self._workspace_bytes, self._takes_workspace = workspace_bytes, False
        self.blocks, self._num_kept = num_kept.keys(), num_kept
        self._num_inputs = sum(num_kept.values())
        slots = itertools.count()
        self._caches = {
            block: list(itertools.islice(slots, number)) for block, number in num_kept.items()
        }
        self.alive = {key: next(slots) for key in alive}
        self._num_slots = next(slots)
        self._programs = list[bytes]()  # the moves so far, but for the last ones
        self._moves: list[int] = []  # slot, index of a size or BACK, whether it is a cache
        # Copies of copies: they live as long as what they were made from.
        self._detoured: dict[Key, dict[tuple[str, ...], int]] = {}
        self._moved: list[Rule] = []
        kinds = events.profile.blocks
        self._examples = {kinds[block].kind: block for block in self.blocks}
        numbers = (len(events.tape(block, step).sizes) for block in self._examples.values())
        *firsts, self._num_sizes = itertools.accumulate(numbers, initial=0)
        self._first_sizes = dict(zip(self._examples, firsts, strict=True))

    def run(self, order: Sequence[int]) -> None:
        """Go through blocks, one after the other; those of other stages end things too."""
        index, alive = 0, None
        while index < len(order):
            block = order[index]
            index += 1
            if block not in self.blocks:
                alive = None
                for ref in self.events.foreign_frees(block, self.step):
                    self.release(self.events.key_of(block, ref, self.step))
                continue
            before = len(self._moves), self._num_slots, len(self._moved), len(self.alive)
            self._move_in(block)
            self._run_block(block)
            is_steady = before[2:] == (len(self._moved), len(self.alive)) and not self._detoured
            if is_steady and alive is not None:  # as long as before, too
                index += self._repeat(block, order[index:], alive, before[0], before[1])
            # A backward pass needs much of what is alive, and copying it would take long.
            alive = dict(self.alive) if len(self.alive) <= _MOST_ALIVE else None

    def _repeat(
        self, block: int, ahead: Sequence[int], before: dict[Key, int], move: int, slot: int
    ) -> int:
        """Repeat a block's moves, those from `move` on, for the blocks like it that follow.

        Returns how many there are. If a block leaves alive the tensors that were alive `before` it,
        each of one block later, then the next block of its kind finds the same situation: its moves
        are the same but for the slots, which are as many further as the block has taken, from
        `slot` on. Tensors from further back than the block refers to may stay alive as they are.
        """
        number, tape = 0, self.events.tape(block, self.step)
        refs = [ref for ref in (*tape.events, *(read.ref for read in tape.reads)) if ref is not None]
        reach = block - max((ref.back for ref in refs), default=0)
        if all(index in self.blocks for index in range(reach, block)):
            number = self._num_alike(block, ahead)
        taken, alive = self._num_slots - slot, dict[Key, int]()
        for (key, old), (later, new) in zip(before.items(), self.alive.items(), strict=True):
            if (later, new) == ((key[0] + 1, key[1]), old + taken):
                alive[later[0] + number, later[1]] = new + number * taken
            elif (later, new) == (key, old) and key[0] <= reach:
                alive[key] = old
            else:
                return 0
        if number:
            moves = np.array(self._moves[move:]).reshape(-1, 3)
            kept = self._num_kept[block]
            further = np.where(moves[:, 0] < self._num_inputs, kept, taken)
            moves = np.tile(moves, (number, 1, 1))
            moves[:, :, 0] += np.arange(1, number + 1)[:, None] * further
            self._programs += [array("q", self._moves).tobytes(), moves.tobytes()]
            self._moves = []
            for times, index in enumerate(ahead[:number], 1):
                self._caches[index] = [
                    old + times * (kept if old < self._num_inputs else taken)
                    for old in self._caches[block]
                ]
            self.alive, self._num_slots = alive, self._num_slots + number * taken
        return number

    def _num_alike(self, block: int, ahead: Sequence[int]) -> int:
        """How many blocks right behind a block are of its kind, with as many caches as it had."""
        kinds = self.events.profile.blocks
        regime = self.events.profile.regimes[self.events.steps[self.step].regime]
        others = {maker for maker, _ in regime.carried}
        for number, (index, expected) in enumerate(zip(ahead, itertools.count(block + 1))):
            if (
                index != expected
                or index in others
                or self._num_kept.get(index) != self._num_kept[block]
                or kinds[index].kind != kinds[block].kind
            ):
                return number
        return len(ahead)

    def release(self, key: Key) -> None:
        """Free something, and its copies, if it is there."""
        slot = self.alive.pop(key, None)
        if slot is not None:
            self._moves += (slot, BACK, False)
        if self._detoured:
            for copy in self._detoured.pop(key, {}).values():
                self._moves += (copy, BACK, False)

    def release_all(self) -> None:
        """Free whatever there is but caches."""
        for key in [*self.alive, *self._detoured]:
            self.release(key)

    def program(self) -> StageProgram:
        """What was compiled."""
        caches = self._caches.values()
        return StageProgram(
            moves=b"".join([*self._programs, array("q", self._moves).tobytes()]),
            examples=tuple(self._examples.values()),
            moved=tuple(self._moved),
            num_kept=tuple(map(len, caches)),
            left=tuple(self.alive),
            takes_workspace=self._takes_workspace,
            out=(*itertools.chain(*caches), *self.alive.values()),
        )

    def _run_block(self, block: int) -> None:
        first_size = self._first_sizes[self.events.profile.blocks[block].kind]
        caches: list[int | None] = [*self._caches[block]]
        new_caches: list[int] = []
        for code, number, other in self.events.events(block, self.step):
            if code == MALLOC:
                self.alive[block, number] = self._take(first_size + other)
            elif code == RELEASE:
                self.release((block - number, other))
            elif code == KEEP:
                new_caches.append(self._take(first_size + other, is_cached=True))
            elif code == DROP:
                slot = caches[number]
                assert slot is not None, "a cache entry is dropped twice"
                caches[number] = None
                self._moves += (slot, BACK, True)
            elif code == MULTIPLY:
                if self._workspace_bytes and not self._takes_workspace:
                    self._take_moved((float(self._workspace_bytes),))
                    self._takes_workspace = True
            else:
                self.release((number, other))
        self._caches[block] = [slot for slot in caches if slot is not None] + new_caches

    def _take(self, size: int, *, is_cached: bool = False) -> int:
        """Allocate by the index of a size; the slot."""
        slot = self._num_slots
        self._num_slots += 1
        self._moves += (slot, size, is_cached)
        return slot

    def _move_in(self, block: int) -> None:
        for key, size, detour in self._read_from_elsewhere(block):
            if detour:
                copies = self._detoured.setdefault(key, {})
                if detour not in copies:
                    copies[detour] = self._take_moved(size)
            elif key not in self.alive:
                self.alive[key] = self._take_moved(size)

    def _take_moved(self, size: Rule) -> int:
        self._moved.append(size)
        return self._take(self._num_sizes + len(self._moved) - 1)

    def _read_from_elsewhere(self, block: int) -> list[tuple[Key, Rule, tuple[str, ...]]]:
        """What a block reads that isn't made on its device, and the devices that it comes over."""
        reads = self.events.tape(block, self.step).reads
        keys = [self.events.key_of(block, read.ref, self.step) for read in reads]
        return [
            (key, read.size, detour)
            for read, key in zip(reads, keys, strict=True)
            if (detour := self._detour(block, key[0])) or max(key[0], 0) not in self.blocks
        ]

    def _detour(self, block: int, maker: int) -> tuple[str, ...]:
        """The devices over which something comes to a block from its maker."""
        inside = self.events.profile.blocks[block].inside
        if not inside or self.device_of is None:
            return ()
        at = self.device_of
        # What was made before a module began was given to it, and has gone to where it begins.
        path = [at[max(maker, 0)], *(at[first] for first in inside if first > maker)]
        hops = [device for device, _ in itertools.groupby(path)]
        while hops and hops[-1] == at[block]:
            hops.pop()
        return tuple(hops[1:])
