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
        self._moves = array("q")  # slot, index of a size or BACK, whether it is a cache
        # Copies of copies: they live as long as what they were made from.
        self._detoured: dict[Key, dict[tuple[str, ...], int]] = {}
        self._moved: list[Rule] = []
        kinds = events.profile.blocks
        self._examples = {kinds[block].kind: block for block in self.blocks}
        numbers = (len(events.trace(block, step).sizes) for block in self._examples.values())
        *firsts, self._num_sizes = itertools.accumulate(numbers, initial=0)
        self._first_sizes = dict(zip(self._examples, firsts, strict=True))

    def run(self, order: range) -> None:
        """Go through blocks, one after the other; those of other stages end things too."""
        alive: dict[Key, int] | None = None
        while order:
            block, order = order[0], order[1:]
            if block not in self.blocks:
                alive = None
                for ref in self.events.foreign_frees(block, self.step):
                    self.release(self.events.key_of(block, ref, self.step))
                continue
            before = len(self._moves), self._num_slots, len(self._moved), len(self.alive)
            self._move_in(block)
            self._run_block(block)
            is_steady = before[2:] == (len(self._moved), len(self.alive)) and not self._detoured
            if is_steady and alive is not None:
                order = order[self._repeat(block, order, alive, *before[:2]) :]
            alive = dict(self.alive) if is_steady else None

    def _repeat(
        self, block: int, order: range, before: dict[Key, int], move: int, slot: int
    ) -> int:
        """Repeat the moves of a block for the blocks like it that follow; how many these are.

        If a block leaves alive the tensors that were alive `before` it, each of one block later,
        the next block of its kind finds what this one found: by induction, its moves are those from
        `move` on. Only slots are others, as many further as this block has taken from `slot` on.
        A tensor may also stay as it is if it is from further back than blocks of this kind refer.
        """
        profile, trace = self.events.profile, self.events.trace(block, self.step)
        num_kept, taken = self._num_kept[block], self._num_slots - slot
        refs = [*filter(None, trace.events), *(read.ref for read in trace.reads)]
        reach = block - max((ref.back for ref in refs), default=0)
        if not (order and order[0] == block + 1 and self.blocks >= {*range(reach, block)}):
            return 0
        makers = dict(profile.regimes[self.events.steps[self.step].regime].carried)
        alike = (profile.blocks[block].kind, num_kept, False)
        kinds = ((profile.blocks[at].kind, self._num_kept.get(at), at in makers) for at in order)
        number = next((count for count, one in enumerate(kinds) if one != alike), len(order))
        alive: dict[Key, int] = {}
        for (key, old), (later, new) in zip(before.items(), self.alive.items(), strict=True):
            if (later, new) == ((key[0] + 1, key[1]), old + taken):
                alive[later[0] + number, later[1]] = new + number * taken
            elif (later, new) == (key, old) and key[0] <= reach:
                alive[key] = old
            else:
                return 0
        self.alive, self._num_slots = alive, self._num_slots + number * taken
        moves = np.array(self._moves[move:]).reshape(-1, 3)
        further = np.where(moves[:, :1] < self._num_inputs, num_kept, taken) * [1, 0, 0]
        times = np.arange(1, number + 1)[:, None, None]
        self._moves.frombytes((times * further + moves).view(np.uint8).data)
        caches = np.array(self._caches[block], np.int64)
        shift = np.where(caches < self._num_inputs, num_kept, taken)
        for count, index in enumerate(order[:number], 1):
            self._caches[index] = (caches + count * shift).tolist()
        return number

    def release(self, key: Key) -> None:
        """Free something, and its copies, if it is there."""
        slot = self.alive.pop(key, None)
        if slot is not None:
            self._moves.extend((slot, BACK, False))
        if self._detoured:
            for copy in self._detoured.pop(key, {}).values():
                self._moves.extend((copy, BACK, False))

    def release_all(self) -> None:
        """Free whatever there is but caches."""
        for key in [*self.alive, *self._detoured]:
            self.release(key)

    def program(self) -> StageProgram:
        """What was compiled."""
        caches = self._caches.values()
        return StageProgram(
            moves=self._moves.tobytes(),
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
                self._moves.extend((slot, BACK, True))
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
        self._moves.extend((slot, size, is_cached))
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
        reads = self.events.trace(block, self.step).reads
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
