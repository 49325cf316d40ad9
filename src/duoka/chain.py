"""Chain: the run of a profile's blocks that is cut into stages, and which of its runs are alike."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from .profile import Profile, Ref


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
        """Equal for stages that cost the same: kinds in order, and whether the input is here."""
        kinds = tuple([self.profile.blocks[block].kind for block in blocks])
        ends_model = blocks[-1] == len(self.profile.blocks) - 1
        return (*kinds, int(blocks[0] == 0), int(ends_model))

    @cached_property
    def alike(self) -> NDArray[np.int64]:
        """[start, stop]: equal numbers only where the signatures are equal.

        A stage's number stands for its first block's place and the blocks up to its last one.
        """
        last = len(self.profile.blocks) - 1
        blocks = [
            (self.profile.blocks[index].kind, tuple(self.attached[index]), index == last)
            for index in self.blocks
        ]
        numbers: dict[tuple[int, tuple[int, tuple[int, ...], bool]], int] = {}
        alike = np.zeros((len(self) + 1, len(self) + 1), np.int64)
        for start in range(len(self)):
            number = int(start == 0)
            for stop in range(start + 1, len(self) + 1):
                number = numbers.setdefault((number, blocks[stop - 1]), len(numbers) + 2)
                alike[start, stop] = number
        return alike

    def likes(self, block: int, ref: Ref) -> list[int]:
        """Blocks of a block's kind, one for each kind of block that what they refer to is from."""
        if ref.origin != "earlier":
            return [block]
        kinds = self.profile.blocks
        found = {kinds[index - ref.back].kind: index for index in self._of_kind[kinds[block].kind]}
        return list(found.values())

    @cached_property
    def _of_kind(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for index in self.blocks:
            found.setdefault(self.profile.blocks[index].kind, []).append(index)
        return found


def _root(profile: Profile, index: int) -> int:
    while (partner := profile.blocks[index].tied_to) is not None:
        index = partner
    return index
