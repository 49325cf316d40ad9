"""Chain: the run of a profile's blocks that is cut into stages, and which of its runs are alike."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from .allocator import rounded_bytes
from .profile import Profile, Ref, Tape


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Wait:
    """Something that a block leaves to others, while blocks between them don't touch it.

    Parameters
    ----------
    block, number, place : int
        The block that makes it, the number of the allocation in its tape, and its place.
    during : [places]
        The places of the blocks that don't touch it while it is there.
    """

    block: int
    number: int
    place: int
    during: NDArray[np.int64]


class Chain:
    """Every block but those tied to an earlier one, which go wherever their partner goes.

    Parameters
    ----------
    profile : Profile

    Attributes
    ----------
    blocks : list of int
        The blocks that are cut apart, in execution order. A stage is a half-open run of these.
    attached : dict of int, list of int
        To each of them the blocks that go with it.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        blocks = profile.blocks
        self.blocks = [index for index, block in enumerate(blocks) if block.tied_to is None]
        self.attached: dict[int, list[int]] = {index: [] for index in self.blocks}
        for index, block in enumerate(blocks):
            if block.tied_to is not None:
                self.attached[_root(profile, index)].append(index)
        self._waits: dict[int, list[Wait]] = {}
        self._likes: dict[tuple[int, int], list[int]] = {}

    def __len__(self) -> int:
        """How many blocks can be cut apart."""
        return len(self.blocks)

    def stage(self, start: int, stop: int) -> tuple[int, ...]:
        """The blocks of a stage, tied ones included, in execution order."""
        blocks = self.blocks[start:stop]
        return tuple(
            sorted([*blocks, *(tied for index in blocks for tied in self.attached[index])])
        )

    def signature(self, blocks: Sequence[int]) -> tuple[int, ...]:
        """Equal for stages that cost the same.

        That is by the kinds in order, how far each is behind the one before, and whether the
        model's input and its end are here.
        """
        kinds = [self.profile.blocks[block].kind for block in blocks]
        gaps = [after - before for before, after in itertools.pairwise(blocks)]
        ends_model = blocks[-1] == len(self.profile.blocks) - 1
        return (*kinds, *gaps, int(blocks[0] == 0), int(ends_model))

    @cached_property
    def alike(self) -> NDArray[np.int64]:
        """[start, stop]: equal numbers only where the signatures are equal.

        A stage's number is that of the first one that it is like.
        """
        last, num = len(self.profile.blocks) - 1, len(self)
        kinds = [
            (
                index == 0,
                self.profile.blocks[index].kind,
                tuple(self.attached[index]),
                index == last,
            )
            for index in self.blocks
        ]
        names = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
        named = np.array([names[kind] for kind in kinds])
        gaps = np.diff(self.blocks, append=-1)
        # [start, start]: of how many blocks what begins at the one is like what does at the other.
        common = np.zeros((num + 1, num + 1), np.int64)
        for start in reversed(range(num)):
            goes_on = np.where(gaps == gaps[start], common[start + 1, 1:], 0)
            common[start, :-1] = np.where(named == named[start], goes_on + 1, 0)
        longest = np.maximum.accumulate(common, axis=0)
        alike = np.zeros((num + 1, num + 1), np.int64)
        for start in range(num):
            lengths = np.arange(1, num - start + 1)
            first = np.searchsorted(longest[: start + 1, start], lengths)
            alike[start, start + 1 :] = first * (num + 1) + lengths
        return alike

    @cached_property
    def weight_bytes(self) -> NDArray[np.int64]:
        """[start, stop]: what the weights of stages take, tied blocks included."""
        profile = self.profile
        of_kind = [sum(map(rounded_bytes, kind.weight_bytes)) for kind in profile.kinds]
        total = np.zeros(len(self) + 1, np.int64)
        for place, index in enumerate(self.blocks):
            together = (index, *self.attached[index])
            total[place + 1] = sum(of_kind[profile.blocks[block].kind] for block in together)
        total = np.cumsum(total)
        return np.triu(total[None, :] - total[:, None])

    def likes(self, block: int, ref: Ref) -> list[int]:
        """Blocks of a block's kind, one for each kind of block that what they refer to is from."""
        if ref.origin != "earlier":
            return [block]
        kinds, key = self.profile.blocks, (self.profile.blocks[block].kind, ref.back)
        if key not in self._likes:
            found = {kinds[index - ref.back].kind: index for index in self._of_kind[key[0]]}
            self._likes[key] = list(found.values())
        return self._likes[key]

    def waits(self, regime: int) -> list[Wait]:
        """What is there for longer than from one block to the next, in steps of a regime."""
        if regime not in self._waits:
            self._waits[regime] = [*self._found_waits(regime)]
        return self._waits[regime]

    def _found_waits(self, regime: int) -> Iterator[Wait]:
        blocks, carried = self.profile.blocks, self.profile.regimes[regime].carried
        tapes = [kind.tapes[regime] for kind in self.profile.kinds]
        reads = [{read.ref for read in tape.reads} for tape in tapes]
        left = [_left(tape) for tape in tapes]
        ended = {
            self.profile.key_of(index, ref, regime): index
            for index, block in reversed([*enumerate(blocks)])
            for ref in tapes[block.kind].events
            if ref is not None and ref.origin in ("earlier", "carried")
        }
        kinds = np.array([block.kind for block in blocks])[self.blocks]
        for place, block in enumerate(self.blocks):
            for number in left[blocks[block].kind]:
                stop = ended.get((block, number), len(blocks))
                if stop == block + 1:
                    continue
                by_index = carried.index((block, number)) if (block, number) in carried else -1
                far = Ref(origin="carried", index=by_index)
                distances = np.array(self.blocks) - block
                during = (distances > 0) & (distances < stop - block)
                for kind, refs in enumerate(reads):
                    near = {
                        ref.back for ref in refs if (ref.origin, ref.index) == ("earlier", number)
                    }
                    touched = far in refs or np.isin(distances, [*near])
                    during &= ~((kinds == kind) & touched)
                if during.any():
                    during_places = np.flatnonzero(during)
                    yield Wait(block=block, number=number, place=place, during=during_places)

    @cached_property
    def _of_kind(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for index in self.blocks:
            found.setdefault(self.profile.blocks[index].kind, []).append(index)
        return found


def _left(tape: Tape) -> list[int]:
    """The numbers of what a block leaves to others in its step."""
    gone = {ref.index for ref in tape.events if ref is not None and ref.origin == "own"}
    return [
        number
        for number in range(len(tape.sizes))
        if number not in gone and number not in tape.kept
    ]


def _root(profile: Profile, index: int) -> int:
    while (partner := profile.blocks[index].tied_to) is not None:
        index = partner
    return index
