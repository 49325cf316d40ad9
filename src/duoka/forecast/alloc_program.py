"""Scores: what a stage does in one step, written down as one program before it is done.

Which request ends when is the same in every step of a kind; only sizes differ. So a step is one
run of a program on a device's memory, and a run of like blocks is written down once and repeated.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .alloc_events import DROP, KEEP, MALLOC, RELEASE, Ints, Part, Tapes
from .device_memory import BACK, sizes_of
from .profile import Key, Rule, evaluate

_NOTHING = -1


@dataclass(frozen=True, slots=True)
class _Played:
    """What a block did.

    The slots that it used, how many caches it was given, the slots of those that it has afterwards,
    and what is alive then.
    """

    part: Part
    block: int
    slots: Ints
    num_given: int
    kept: list[int]
    alive: dict[Key, int]


class Writer:
    """Writes a program.

    Parameters
    ----------
    num_kept : mapping of int, int
        The stage's blocks, in order, and how many caches or gradients each has.
    given : sequence of Key
        What else there is. The program is given these two.

    Attributes
    ----------
    alive : dict of Key, int
        The slot of what there is besides caches.
    kept : dict of int, list of int
        The slots of each block's caches.
    """

    def __init__(self, num_kept: Mapping[int, int], given: Sequence[Key]) -> None:
        slots = itertools.count()
        self.kept = {
            block: list(itertools.islice(slots, number)) for block, number in num_kept.items()
        }
        self.alive = {key: next(slots) for key in given}
        self._num_slots = next(slots)
        self._moves: list[Ints] = []
        self._last: tuple[_Played | None, _Played | None] = (None, None)

    def take(self, size: int, *, is_cached: bool = False) -> int:
        """Allocate by the index of a size; the slot."""
        slot = self._num_slots
        self._num_slots += 1
        self._moves.append(np.array([[slot, size, is_cached]], np.int64))
        return slot

    def give(self, slot: int, *, is_cached: bool = False) -> None:
        """Free what is in a slot."""
        self._moves.append(np.array([[slot, BACK, is_cached]], np.int64))

    def release(self, key: Key) -> None:
        """Free something, if it is there."""
        if key in self.alive:
            self.give(self.alive.pop(key))

    def play(self, part: Part, block: int, first_size: int) -> None:
        """Do what a block does, whose sizes begin at an index."""
        kept, alive = self.kept[block], self.alive
        given = [alive.pop((block - back, number), _NOTHING) for back, number in part.near]
        given += [alive.pop(key, _NOTHING) for key in part.far]
        given += [kept[index] for index in part.dropped]
        made = range(self._num_slots, self._num_slots + part.num_made)
        slots = np.array([*given, *made], np.int64)
        self._num_slots += part.num_made
        self._write(part, slots[None], first_size)
        for number, place in part.left:
            alive[block, number] = int(slots[place])
        stay = [slot for index, slot in enumerate(kept) if index not in part.dropped]
        self.kept[block] = [*stay, *slots[part.kept].tolist()]
        played = _Played(part, block, slots, len(kept), self.kept[block], {**alive})
        self._last = (self._last[1], played)

    def can_repeat(self) -> bool:
        """Whether what is alive is the same as before the last block, one block on.

        Then the next ones do what it did that are alike, and have as many caches.
        """
        before, last = self._last
        if before is None or last is None or before.part is not last.part:
            return False
        moved_on = {
            (last.block, key[1]) if key[0] == before.block else key: slot
            + (last.part.num_made if key[0] == before.block else 0)
            for key, slot in before.alive.items()
        }
        return (
            last.block == before.block + 1
            and self.alive == last.alive == moved_on
            and before.num_given == last.num_given
            and all(maker < before.block for maker, _ in last.part.far)
        )

    @property
    def num_given(self) -> int:
        """How many caches the last block had before."""
        last = self._last[1]
        return 0 if last is None else last.num_given

    def repeat(self, number: int, first_size: int) -> None:
        """Do the same for the blocks after the last one; `can_repeat` has said that it is so."""
        last = self._last[1]
        assert last is not None, "see can_repeat"
        part, block, on = last.part, last.block, np.arange(1, number + 1)[:, None]
        near = np.where(last.slots[: len(part.near)] == _NOTHING, 0, part.num_made)
        steps = [0] * len(part.far) + [last.num_given] * len(part.dropped)
        stride = np.array([*near, *steps, *[part.num_made] * part.num_made], np.int64)
        self._write(part, last.slots + on * stride, first_size)
        self._num_slots += number * part.num_made
        for number_left, _ in part.left:
            slot = self.alive.pop((block, number_left))
            self.alive[block + number, number_left] = slot + number * part.num_made
        num_stay = len(last.kept) - len(part.kept)
        stride = np.array([last.num_given] * num_stay + [part.num_made] * len(part.kept), np.int64)
        kept = np.array(last.kept, np.int64) + on * stride
        self.kept.update(zip(range(block + 1, block + 1 + number), kept.tolist(), strict=True))
        self._last = (None, None)

    def program(self) -> bytes:
        """All of it."""
        return np.concatenate([np.zeros((0, 3), np.int64), *self._moves]).tobytes()

    def _write(self, part: Part, slots: Ints, first_size: int) -> None:
        """A part, once for each row of slots."""
        moves = np.empty((len(slots), *part.moves.shape), np.int64)
        moves[:, :, 0] = slots[:, part.moves[:, 0]]
        moves[:, :, 1] = np.where(part.moves[:, 1] == BACK, BACK, part.moves[:, 1] + first_size)
        moves[:, :, 2] = part.moves[:, 2]
        self._moves.append(moves[moves[:, :, 0] != _NOTHING])


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What a stage does in one step, whatever the sizes.

    Parameters
    ----------
    program : bytes
    examples : tuple of int
        Blocks whose sizes it counts, one after the other: one of each kind.
    moved : tuple of Rule
        The sizes behind those: of what comes from other devices.
    num_kept : tuple of int
        How many caches or gradients each block has afterwards.
    left : tuple of Key
        What else there is then.
    out : tuple of int
        The slots of both.
    """

    program: bytes
    examples: tuple[int, ...]
    moved: tuple[Rule, ...]
    num_kept: tuple[int, ...]
    left: tuple[Key, ...]
    out: tuple[int, ...]

    def sizes(self, tapes: Tapes, step: int) -> bytes:
        """The sizes of the program in one of the tapes' steps."""
        values = tapes.steps[step].values
        moved = sizes_of([evaluate(rule, values) for rule in self.moved])
        return b"".join([*(tapes.packed_sizes(block, step) for block in self.examples), moved])


class Scoring:
    """Writes the score of a stage.

    Parameters
    ----------
    tapes : Tapes
    step : int
        Of the tapes' steps.
    num_kept : mapping of int, int
        The stage's blocks, in order, and how many caches or gradients each has.
    given : sequence of Key
        What else there is.
    device_of : sequence of str, optional
        The device of each of the model's blocks.
    """

    def __init__(
        self,
        tapes: Tapes,
        step: int,
        num_kept: Mapping[int, int],
        *,
        given: Sequence[Key] = (),
        device_of: Sequence[str] | None = None,
    ) -> None:
        self.tapes, self.step, self.device_of = tapes, step, device_of
        self.blocks = num_kept.keys()
        self.writer = Writer(num_kept, given)
        # Copies of copies: they live as long as what they were made from.
        self.detoured: dict[Key, dict[tuple[str, ...], int]] = {}
        self.moved: list[Rule] = []
        kinds = tapes.profile.blocks
        self.examples = {kinds[block].kind: block for block in self.blocks}
        numbers = (len(tapes.tape(block, step).sizes) for block in self.examples.values())
        *firsts, self.num_sizes = itertools.accumulate(numbers, initial=0)
        self.first_sizes = dict(zip(self.examples, firsts, strict=True))

    def write(self, order: Sequence[int]) -> None:
        """Write what the blocks do, one after the other; those of other stages end things too."""
        repeated: frozenset[int] = frozenset()
        for block in order:
            if block in self.blocks:
                if block not in repeated:
                    repeated = self._write_block(block)
                continue
            for ref in self.tapes.foreign_frees(block, self.step):
                self.release(self.tapes.key_of(block, ref, self.step))

    def release(self, key: Key) -> None:
        """Free something, and its copies, if it is there."""
        self.writer.release(key)
        for copy in self.detoured.pop(key, {}).values():
            self.writer.give(copy)

    def release_all(self) -> None:
        """Free whatever there is but caches."""
        for key in [*self.writer.alive, *self.detoured]:
            self.release(key)

    def score(self) -> Score:
        """What was written."""
        kept, left = self.writer.kept.values(), self.writer.alive
        return Score(
            program=self.writer.program(),
            examples=tuple(self.examples.values()),
            moved=tuple(self.moved),
            num_kept=tuple(map(len, kept)),
            left=tuple(left),
            out=(*itertools.chain(*kept), *left.values()),
        )

    def _write_block(self, block: int) -> frozenset[int]:
        """Write it, and those after it that do the same; which those are."""
        self._move_in(block)
        first_size = self.first_sizes[self.tapes.profile.blocks[block].kind]
        if self.detoured:
            self._write_events(block, first_size)
            return frozenset()
        self.writer.play(self.tapes.part(block, self.step), block, first_size)
        number = self._num_like(block)
        if number:
            self.writer.repeat(number, first_size)
        return frozenset(range(block + 1, block + 1 + number))

    def _num_like(self, block: int) -> int:
        """How many of the next blocks do what the last two did."""
        kinds, number = self.tapes.profile.blocks, 0
        if self.device_of is not None or not self.writer.can_repeat() or self._reads_more(block):
            return 0
        while (
            (after := block + number + 1) in self.blocks
            and kinds[after].kind == kinds[block].kind
            and len(self.writer.kept[after]) == self.writer.num_given
        ):
            number += 1
        return number

    def _reads_more(self, block: int) -> bool:
        """Whether something may have to be moved in for the next blocks of this one's kind."""
        if self.tapes.steps[self.step].large_at_tokens:
            return False
        refs = [read.ref for read in self.tapes.tape(block, self.step).reads]
        far = [self.tapes.key_of(block, ref, self.step) for ref in refs if not ref.back]
        back = max((ref.back for ref in refs), default=0)
        return not all(each in self.blocks for each in range(block + 1 - back, block)) or not all(
            self._is_here(key[0]) or key in self.writer.alive for key in far
        )

    def _write_events(self, block: int, first_size: int) -> None:
        """What a block does one by one, where what is freed may have been copied further."""
        writer = self.writer
        slots: list[int | None] = [*writer.kept[block]]
        born: list[int] = []
        for code, number, other in self.tapes.events(block, self.step):
            if code == MALLOC:
                writer.alive[block, number] = writer.take(first_size + other)
            elif code == RELEASE:
                self.release((block - number, other))
            elif code == KEEP:
                born.append(writer.take(first_size + other, is_cached=True))
            elif code == DROP:
                dropped = slots[number]
                assert dropped is not None, "a cache entry is dropped twice"
                slots[number] = None
                writer.give(dropped, is_cached=True)
            else:
                self.release((number, other))
        writer.kept[block] = [slot for slot in slots if slot is not None] + born

    def _move_in(self, block: int) -> None:
        for key, size, detour in self._coming(block):
            if detour:
                copies = self.detoured.setdefault(key, {})
                if detour not in copies:
                    copies[detour] = self._take(size)
            elif key not in self.writer.alive:
                self.writer.alive[key] = self._take(size)

    def _take(self, size: Rule) -> int:
        self.moved.append(size)
        return self.writer.take(self.num_sizes + len(self.moved) - 1)

    def _coming(self, block: int) -> list[tuple[Key, Rule, tuple[str, ...]]]:
        """What a block reads that isn't made on its device, and the devices that it comes over."""
        if self.tapes.steps[self.step].large_at_tokens:
            return []  # one token of each sequence
        reads = self.tapes.tape(block, self.step).reads
        keys = [self.tapes.key_of(block, read.ref, self.step) for read in reads]
        return [
            (key, read.size, detour)
            for read, key in zip(reads, keys, strict=True)
            if (detour := self._detour(block, key[0])) or not self._is_here(key[0])
        ]

    def _is_here(self, maker: int) -> bool:
        return maker in self.blocks or (maker == -1 and 0 in self.blocks)

    def _detour(self, block: int, maker: int) -> tuple[str, ...]:
        """The devices over which something comes to a block from its maker."""
        inside = self.tapes.profile.blocks[block].inside
        if not inside or self.device_of is None:
            return ()
        at = self.device_of
        # What was made before a module began was given to it, and has gone to where it begins.
        path = [at[max(maker, 0)], *(at[first] for first in inside if first > maker)]
        hops = [device for device, _ in itertools.groupby(path)]
        while hops and hops[-1] == at[block]:
            hops.pop()
        return tuple(hops[1:])
