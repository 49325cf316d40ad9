"""Playing: what a block of the model does in one step, done to a device's memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from .memory import BACK, Held, Memory, program_of
from .profile import Key

MALLOC, KEEP, RELEASE, DROP, RELEASE_FAR = range(5)
Event = tuple[int, int, int]
"""A code with two numbers: allocate (number, index of its size), keep (number, index of its size),
release (blocks back, number), drop (slot, 0), release far (block, number)."""


Ints: TypeAlias = npt.NDArray[np.int64]


class Part:
    """What one block does in one step, whatever the sizes.

    Parameters
    ----------
    events : sequence of Event
        In order.

    Attributes
    ----------
    moves : [moves, 3]
        Its program. The first slots are those of what comes from elsewhere: `near` (blocks back,
        number), `far` (block, number) and `dropped` (the block's own caches); then of what is made.
    left, kept : list
        What is there afterwards: the number and slot of each, and the slots of new caches.
    num_made : int
        How many requests there are.
    """

    def __init__(self, events: Sequence[Event]) -> None:
        self.near: list[tuple[int, int]] = []
        self.far: list[Key] = []
        self.dropped: list[int] = []
        made: dict[int, int] = {}  # by number, as long as it lives
        kept: list[int] = []
        self.num_made = 0
        moves: list[tuple[str, int, int]] = []
        for code, number, other in events:
            if code in (MALLOC, KEEP):
                moves.append(("made", self.num_made, other))
                if code == KEEP:
                    kept.append(self.num_made)
                else:
                    made[number] = self.num_made
                self.num_made += 1
            elif code == RELEASE and not number and other in made:
                moves.append(("made", made.pop(other), BACK))
            elif code == RELEASE:
                moves.append(("near", len(self.near), BACK))
                self.near.append((number, other))
            elif code == RELEASE_FAR:
                moves.append(("far", len(self.far), BACK))
                self.far.append((number, other))
            else:
                moves.append(("dropped", len(self.dropped), BACK))
                self.dropped.append(number)
        far = len(self.near)
        dropped = far + len(self.far)
        first_made = dropped + len(self.dropped)
        first = {"near": 0, "far": far, "dropped": dropped, "made": first_made}
        self.left = [(number, first_made + index) for number, index in made.items()]
        self.kept = [first_made + index for index in kept]
        cached = {*range(dropped, first_made), *self.kept}
        places = [(first[where] + index, size) for where, index, size in moves]
        self._program = program_of([(place, size, place in cached) for place, size in places])
        self.moves: Ints = np.frombuffer(self._program, np.int64).reshape(-1, 3)
        self._out = (*(place for _, place in self.left), *self.kept)

    def play(
        self,
        memory: Memory,
        sizes: bytes,
        block: int,
        alive: dict[Key, Held],
        kept: list[Held],
    ) -> list[Held]:
        """Do it.

        Parameters
        ----------
        memory : Memory
        sizes : bytes
            Of what is made, as `sizes_of` makes them.
        block : int
            Its number, to which what comes from near is relative.
        alive : dict
            What there is besides caches; it changes.
        kept : list of Held
            The block's own caches or gradients.

        Returns
        -------
        list of Held
            The block's caches or gradients afterwards.

        Raises
        ------
        OutOfCapacity
            As `CachingAllocator.malloc` does.
        """
        given = [alive.pop((block - back, number), None) for back, number in self.near]
        if self.far:
            given += [alive.pop(key, None) for key in self.far]
        if self.dropped:
            given += [kept[slot] for slot in self.dropped]
            kept = [held for slot, held in enumerate(kept) if slot not in self.dropped]
        found = memory.run(self._program, sizes, given, self._out)
        for (number, _), held in zip(self.left, found, strict=False):
            alive[block, number] = held
        return [*kept, *found[len(self.left) :]]
