"""Playing: what a block of the model does in one step, done to a device's memory."""

from __future__ import annotations

from collections.abc import Sequence

from .memory import BACK, Held, Memory, program_of
from .profile import Key

MALLOC, KEEP, RELEASE, DROP, RELEASE_FAR = range(5)
Event = tuple[int, int, int]
"""A code with two numbers: allocate (number, index of its size), keep (number, index of its size),
release (blocks back, number), drop (slot, 0), release far (block, number)."""


class Part:
    """What one block does in one step, whatever the sizes.

    Parameters
    ----------
    events : sequence of Event
        In order.
    """

    def __init__(self, events: Sequence[Event]) -> None:
        self._near: list[tuple[int, int]] = []
        self._far: list[Key] = []
        self._dropped: list[int] = []
        made: dict[int, int] = {}  # by number, as long as it lives
        kept: list[int] = []
        num_made = 0
        moves: list[tuple[str, int, int]] = []
        for code, number, other in events:
            if code in (MALLOC, KEEP):
                moves.append(("made", num_made, other))
                if code == KEEP:
                    kept.append(num_made)
                else:
                    made[number] = num_made
                num_made += 1
            elif code == RELEASE and not number and other in made:
                moves.append(("made", made.pop(other), BACK))
            elif code == RELEASE:
                moves.append(("near", len(self._near), BACK))
                self._near.append((number, other))
            elif code == RELEASE_FAR:
                moves.append(("far", len(self._far), BACK))
                self._far.append((number, other))
            else:
                moves.append(("dropped", len(self._dropped), BACK))
                self._dropped.append(number)
        far = len(self._near)
        dropped = far + len(self._far)
        first_made = dropped + len(self._dropped)
        first = {"near": 0, "far": far, "dropped": dropped, "made": first_made}
        cached = {*range(dropped, first_made), *(first_made + index for index in kept)}
        places = [(first[where] + index, size) for where, index, size in moves]
        self._program = program_of([(place, size, place in cached) for place, size in places])
        self._left = [*made]
        self._out = tuple(first_made + index for index in (*made.values(), *kept))

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
        given = [alive.pop((block - back, number), None) for back, number in self._near]
        if self._far:
            given += [alive.pop(key, None) for key in self._far]
        if self._dropped:
            given += [kept[slot] for slot in self._dropped]
            kept = [held for slot, held in enumerate(kept) if slot not in self._dropped]
        found = memory.run(self._program, sizes, given, self._out)
        for number, held in zip(self._left, found, strict=False):
            alive[block, number] = held
        return [*kept, *found[len(self._left) :]]
