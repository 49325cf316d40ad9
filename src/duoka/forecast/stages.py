"""Stages: the chain of blocks that is cut into them, which of them are alike, and lower bounds.

A lower bound is what a stage needs at the least, for all stages at once and without a replay; the
search goes by it until it has to know better. It knows nothing of devices.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .allocator import rounded_bytes
from .profile import Profile, buffer_bytes
from .replay import Replay


class Chain:
    """Every block but those tied to an earlier one, which go wherever their partner goes.

    A stage is a half-open run of `blocks`, which are in execution order; `attached` to each of them
    are the blocks that go with it.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        blocks = profile.blocks
        self.blocks = [index for index, block in enumerate(blocks) if block.tied_to is None]
        self.attached: dict[int, list[int]] = {index: [] for index in self.blocks}
        for index, block in enumerate(blocks):
            if block.tied_to is not None:
                self.attached[profile.root_of(index)].append(index)

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
        """[start, stop]: equal numbers only where the signatures are equal."""
        last, num = len(self.profile.blocks) - 1, len(self)
        alike = np.zeros((num + 1, num + 1), np.int64)
        # A stage is what it is without its last block, that block, and how far it is behind.
        numbers: dict[tuple[Any, ...], int] = {}
        for start in range(num):
            number = 0
            for stop, index in enumerate(self.blocks[start:], start + 1):
                gap = index - self.blocks[stop - 2] if stop > start + 1 else 0
                kind, tied = self.profile.blocks[index].kind, tuple(self.attached[index])
                key = number, kind, tied, gap, index == 0, index == last
                number = alike[start, stop] = numbers.setdefault(key, len(numbers) + 1)
        return alike

    @cached_property
    def weight_bytes(self) -> NDArray[np.int64]:
        """[start, stop]: what the weights of stages take, tied blocks included."""
        profile = self.profile
        of_kind = [sum(map(rounded_bytes, kind.weight_bytes)) for kind in profile.kinds]
        return np.triu(
            between(
                [
                    sum(of_kind[profile.blocks[b].kind] for b in (index, *self.attached[index]))
                    for index in self.blocks
                ]
            )
        )


def lower_bounds(chain: Chain, replay: Replay) -> NDArray[np.int64]:
    """[start, stop]: never more than the exact bytes of stages.

    A stage needs at least its weights, and while one of its blocks is at its peak in a step, that
    and the caches of the others, be they those of before the step or of behind it. What blocks read
    of one another is left out.
    """
    num = len(chain)
    kinds = [chain.profile.blocks[index].kind for index in chain.blocks]
    of_kind = {
        kind: [*_cache_and_peaks(replay, block)]
        for kind, block in dict(zip(kinds, chain.blocks, strict=True)).items()
    }
    bounds = np.zeros((num + 1, num + 1), np.int64)
    ahead = np.triu(np.ones((num, num), np.bool_))
    for costs in np.array([of_kind[kind] for kind in kinds], np.int64).swapaxes(0, 1):
        cache, more = costs.T
        most = np.maximum.accumulate(np.where(ahead, more, 0), axis=1)
        np.maximum(bounds[:-1, 1:], between(cache)[:-1, 1:] + most, out=bounds[:-1, 1:])
    return np.triu(bounds, 1) + chain.weight_bytes + _buffers(chain)


def between(values: ArrayLike) -> NDArray[Any]:
    """[start, stop]: sums of values, one for each place; below the diagonal their negatives."""
    total = np.cumsum(np.concatenate([[0], np.asarray(values)]))
    return np.asarray(total[None, :] - total[:, None])


def _buffers(chain: Chain) -> NDArray[np.int64]:
    """[start, stop]: bytes of the buffers for weights that come for a call."""
    num, profile = len(chain), chain.profile
    buffers = np.zeros((num + 1, num + 1), np.int64)
    if profile.offloaded:
        for start in range(num):
            streamed: list[int] = []
            for stop in range(start + 1, num + 1):
                streamed += profile.streamed_bytes([chain.blocks[stop - 1]])
                buffers[start, stop] = sum(map(rounded_bytes, buffer_bytes(streamed)))
    return buffers


def _cache_and_peaks(replay: Replay, block: int) -> Iterator[tuple[int, int]]:
    """For each step the cache bytes of a block at the least, and how much more its peak is."""
    cache: list[int] = []
    for step in range(len(replay.steps)):
        tape = replay.tape(block, step)
        sizes = [rounded_bytes(size) for size in replay.sizes(block, step)]
        before = live = peak = sum(cache)
        count = 0
        for event in tape.events:
            if event is None:
                live += sizes[count]
                peak = max(peak, live)
                count += 1
            elif event.origin in ("kept", "own"):
                live -= (cache if event.origin == "kept" else sizes)[event.index]
        dropped = {ref.index for ref in tape.events if ref is not None and ref.origin == "kept"}
        cache = [size for slot, size in enumerate(cache) if slot not in dropped]
        cache += [sizes[number] for number in sorted(tape.retained)]
        least = min(before, sum(cache))
        yield least, peak - least
