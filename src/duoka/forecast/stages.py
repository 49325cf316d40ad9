"""Stages: the chain of blocks to cut, classes of equal stages, and lower bounds of their bytes.

Lower bounds of all stages are computed at once, without a replay; the search uses them until it
needs exact bytes. This module knows nothing of devices.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .alloc_program import StageProgram
from .allocator import LARGE_REQUEST_BYTES, SEGMENT_ROUND_BYTES, rounded_bytes, segment_bytes
from .profile import AllocationTrace, Profile, Ref, buffer_bytes, evaluate, evaluate_all, rules_of
from .replay import Replay

_NEVER = -(1 << 62)
"""Fewer bytes than any sum of peaks."""


class Chain:
    """The blocks between which stages may be cut: all blocks that are not tied to an earlier one.

    A stage is a half-open range of `blocks`, which are in execution order. `attached` has for each
    of them the later blocks that are tied to it, and must be on the same stage.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        blocks = profile.blocks
        self.blocks = [index for index, block in enumerate(blocks) if block.tied_to is None]
        self.attached: dict[int, list[int]] = {index: [] for index in self.blocks}
        for index, block in enumerate(blocks):
            if block.tied_to is not None:
                self.attached[profile.root_of(index)].append(index)
        self._likes: dict[tuple[int, int], list[int]] = {}
        # Compiled programs hold for every workload: only their sizes differ.
        self.programs: dict[tuple[object, ...], StageProgram] = {}

    def __len__(self) -> int:
        """Return the number of blocks of the chain."""
        return len(self.blocks)

    def stage(self, start: int, stop: int) -> tuple[int, ...]:
        """Return the blocks of a stage, attached blocks included, in execution order."""
        blocks = self.blocks[start:stop]
        return tuple(
            sorted([*blocks, *(tied for index in blocks for tied in self.attached[index])])
        )

    @cached_property
    def stage_classes(self) -> NDArray[np.int64]:
        """[start, stop]: class numbers, equal only for stages of equal `stage_signature`."""
        kinds, end, num = self.profile.blocks, len(self.profile.blocks) - 1, len(self)
        table = np.zeros((num + 1, num + 1), np.int64)
        codes: dict[tuple[Any, ...], int] = {}
        keys = [(kinds[at].kind, *self.attached[at], at == 0, at == end) for at in self.blocks]
        gaps = np.diff(self.blocks, prepend=-1).tolist()
        first_codes = [codes.setdefault((0, *key), len(codes)) for key in keys]
        later = [codes.setdefault(key, len(codes)) for key in zip(gaps, keys, strict=True)]
        # A stage's number is determined by the number of the stage without its last block, and by
        # the last block with the gap before it (hash consing; `np.unique` keeps the numbers small).
        # With blocks of kinds E L L L N:
        #
        #   start        0        1        2        3        4
        #   1 block      E: 1     L: 2     L: 2     L: 2     N: 3
        #   2 blocks     EL: 4    LL: 5    LL: 5    LN: 6
        #   3 blocks     ELL: 7   LLL: 8   LLN: 9
        starts, numbers = np.arange(num), np.array(first_codes)
        for length in range(1, num + 1):
            _, numbers = np.unique(numbers, return_inverse=True)
            table[starts, starts + length] = numbers + table.max() + 1
            starts, numbers = starts[:-1], numbers[:-1] * len(codes) + later[length:]
        return table

    @cached_property
    def weight_bytes(self) -> NDArray[np.int64]:
        """[start, stop]: weight bytes of stages, attached blocks included."""
        profile = self.profile
        of_kind = [sum(map(rounded_bytes, kind.weight_bytes)) for kind in profile.kinds]
        return np.triu(
            sum_ranges(
                [
                    sum(of_kind[profile.blocks[b].kind] for b in (index, *self.attached[index]))
                    for index in self.blocks
                ]
            )
        )

    def likes(self, block: int, ref: Ref) -> list[int]:
        """Return blocks of a block's kind, one for each kind of block that has made `ref`."""
        if ref.origin != "earlier":
            return [block]
        # A bound holds for all blocks of a kind. Two of them may read tensors made by blocks of
        # different kinds, with different sizes. One block for each kind of maker is enough to find
        # the least size.
        kinds, key = self.profile.blocks, (self.profile.blocks[block].kind, ref.back)
        if key not in self._likes:
            likes = {kinds[index - ref.back].kind: index for index in self._of_kind[key[0]]}
            self._likes[key] = list(likes.values())
        return self._likes[key]

    @cached_property
    def _of_kind(self) -> dict[int, list[int]]:
        """The blocks of the chain by kind."""
        blocks: dict[int, list[int]] = {}
        for index in self.blocks:
            blocks.setdefault(self.profile.blocks[index].kind, []).append(index)
        return blocks


def lower_bounds(chain: Chain, replay: Replay) -> NDArray[np.int64]:
    """[start, stop]: lower bounds of the exact peak bytes of stages.

    While block b of a stage is at its peak in some step, the KV caches of the stage's earlier
    blocks have already grown in this step, and those of later blocks haven't. The stage holds all
    of these caches::

        block            0     1     2     3
        kv_before       10    10    10    10       bytes of its cache before this step
        kv_after        12    12    12    12       bytes of its cache after this step
        peak_alone      30    40    35    50       peak bytes of the block, its cache included

        stage [1, 4)  block 1 at its peak    40 + 10 + 10 = 60
                      block 2                12 + 35 + 10 = 57
                      block 3                12 + 12 + 50 = 74   the bound of this step

    With prefix sums ``grown[b] = kv_after[0] + ... + kv_after[b - 1]`` and ``ungrown``, the same of
    `kv_before`, block b's line is::

        (grown[b] - grown[start]) + peak[b] + (ungrown[stop] - ungrown[b + 1])

    The terms in start and stop are separate from those in b. So a running maximum over b of
    ``grown[b] + peak[b] - ungrown[b + 1]``, from each start on, gives the bounds of all stages that
    begin there.

    The peak is `peak_with_producers` if the stage starts at least `producer_distance` blocks before
    b: then tensors that b frees without reading them are on this stage. The bounds leave out some
    tensors of tied blocks, and tensors held for a later block while the blocks between don't use
    them.
    """
    num = len(chain)
    kinds = [chain.profile.blocks[index].kind for index in chain.blocks]
    block_of = dict(zip(kinds, chain.blocks, strict=True))
    of_kind = {kind: [*_cache_and_peaks(chain, replay, block)] for kind, block in block_of.items()}
    rows = {kind: row for row, kind in enumerate(of_kind)}
    # A profile has few kinds of blocks: the numbers are computed once per kind, and copied to all
    # places of that kind.
    costs = _undominated(np.array([*of_kind.values()]))[:, [rows[kind] for kind in kinds]]
    bounds = np.zeros((num + 1, num + 1), np.int64)
    starts, places = np.arange(num)[:, None], np.arange(num)
    for of_step in costs:
        kv_before, kv_after, peak_alone, peak_with_producers, producer_distance = of_step.T
        grown = np.concatenate([[0], np.cumsum(kv_after)])
        ungrown = np.concatenate([[0], np.cumsum(kv_before)])
        # In the docstring's example `grown` is 0 12 24 36 48 and `ungrown` is 0 10 20 30 40:
        #
        #   block b                               0    1    2    3
        #   grown[b] + peak[b] - ungrown[b + 1]  20   32   29   46
        #   running maximum from start 0         20   32   32   46
        #   + ungrown[b + 1] - grown[0]          30   52   62   86    bounds of stages [0, b + 1)
        #   running maximum from start 1              32   32   46
        #   + ungrown[b + 1] - grown[1]               40   50   74    bounds of stages [1, b + 1)
        #
        # This is O(blocks²) for all stages; a loop over the blocks of each stage is O(blocks³).
        has_producers = starts <= places - producer_distance
        peaks = np.where(has_producers, peak_with_producers, peak_alone)
        largest = running_peaks(grown[:-1] + peaks - ungrown[1:])
        np.maximum(bounds[:-1, 1:], largest + ungrown[1:] - grown[:-1, None], out=bounds[:-1, 1:])
    return bounds + chain.weight_bytes + _buffers(chain)


def running_peaks(at_peak: NDArray[np.int64]) -> NDArray[np.int64]:
    """[start, last]: the maximum of `at_peak` from start to last; far below 0 if last < start.

    `at_peak` is [blocks], or [start, blocks] if its values depend on the start.
    """
    num = at_peak.shape[-1]
    is_stage = np.triu(np.ones((num, num), np.bool_))
    return np.asarray(np.maximum.accumulate(np.where(is_stage, at_peak, _NEVER), axis=1))


def _undominated(costs: NDArray[np.int64]) -> NDArray[np.int64]:
    """[steps, kinds, numbers], from [kinds, steps, numbers]: drop steps without effect on bounds.

    A bound increases with each number except the last, `producer_distance`, with which it
    decreases. So a step is dropped if another step is no smaller in any number of any kind.
    """
    signed = costs.swapaxes(0, 1) * [1, 1, 1, 1, -1]
    kept_steps: list[int] = []
    for step in reversed(range(len(signed))):  # the last steps are mostly the largest
        if not (signed[kept_steps] >= signed[step]).all(axis=(1, 2)).any():
            kept_steps.append(step)
    return costs.swapaxes(0, 1)[kept_steps]


class Growth:
    """Lower bounds of the reserved bytes of stages that must leave some of the budget free.

    PyTorch's allocator returns cached segments only if a new segment would exceed the budget. A
    stage that leaves `room_bytes` free never reserves more than the budget minus these. So as long
    as no segment is larger than `room_bytes`, no cached segment is returned.

    A tensor larger than all segments of earlier steps needs a new segment. So each step newly
    reserves at least the bytes of all such tensors of a block that are live at the same time. The
    sum over the steps is a lower bound for every stage with this block. The weights are added to
    the sum: weights are never freed, and free rests of their segments are smaller than the smallest
    segment that counts.

    Example: a block of one tensor, which each step allocates and frees::

        step                    0     1     2     3
        tensor (MiB)           30    40    35    50
        largest segment so far  -    30    40    40
        new segment (MiB)      30    40     -    50      120 MiB reserved in all

    In step 2 the segment of step 1 is free and large enough.
    """

    def __init__(self, chain: Chain, replay: Replay) -> None:
        kinds, regimes = chain.profile.kinds, np.array([step.regime for step in replay.steps])
        self._kinds = [chain.profile.blocks[index].kind for index in chain.blocks]
        self._held_bytes = chain.weight_bytes + _buffers(chain)
        # The largest tensor of each step, over all blocks, bounds the segments of later steps.
        largest, grown = np.zeros(len(regimes)), np.zeros((len(kinds), len(regimes) + 1), np.int64)
        sizes = dict[tuple[int, int], NDArray[np.int64]]()
        for kind, regime in itertools.product(range(len(kinds)), {*regimes.tolist()}):
            trace, mask = kinds[kind].traces[regime], regimes == regime
            rules = rules_of([*trace.sizes, *(read.size for read in trace.reads)])
            values = [step.values for step in replay.steps if step.regime == regime]
            sizes[kind, regime] = evaluate_all(rules, np.array(values).T)
            largest[mask] = np.maximum(largest[mask], sizes[kind, regime].max(axis=0, initial=0))
        # Segments up to 20 MiB, or as large as the workspace, may exist before the first step.
        least_segment = segment_bytes(max(LARGE_REQUEST_BYTES - 1, replay.workspace_bytes))
        segments = -(-largest // SEGMENT_ROUND_BYTES) * SEGMENT_ROUND_BYTES
        self._largest_segments = np.maximum.accumulate([least_segment, *segments])
        # Of the tensors live at an allocation, [allocations, tensors], each one larger than any
        # segment so far, [tensors, steps], needs a segment of its own.
        for (kind, regime), of_step in sizes.items():
            mask, alive = regimes == regime, _alive(kinds[kind].traces[regime])
            large = np.where(of_step > self._largest_segments[:-1][mask], of_step, 0)[: len(alive)]
            is_large = large.any(axis=1)
            grown[kind, 1:][mask] = (alive[:, is_large] @ large[is_large]).max(axis=0, initial=0)
        self._grown_bytes = np.cumsum(grown, axis=1)

    def bounds(self, room_bytes: int) -> NDArray[np.int64]:
        """[start, stop]: lower bounds of the reserved bytes of stages, `room_bytes` left free."""
        # Count steps before the first segment larger than the room: then caches may be returned.
        num_steps = int(np.searchsorted(self._largest_segments[1:], room_bytes, "right"))
        grown = np.tile(self._grown_bytes[self._kinds, num_steps], (len(self._kinds), 1))
        bounds = self._held_bytes.copy()
        bounds[:-1, 1:] += np.maximum.accumulate(np.triu(grown), axis=1)
        return bounds


# Example: allocation 0, allocation 1, a free of tensor 0, allocation 2.
#
#   tensor                0   1   2
#   at allocation 0       1   0   0
#   at allocation 1       1   1   0
#   at allocation 2       0   1   1
#
# This matrix times the tensors' bytes gives the live bytes at each allocation.
def _alive(trace: AllocationTrace) -> NDArray[np.float64]:
    """[allocations, tensors]: 1 where a block's own tensor is live at an allocation."""
    alive, num_made = np.tri(len(trace.sizes)), 0
    for event in trace.events:
        if event is None:
            num_made += 1
        elif event.origin == "own":
            alive[num_made:, event.index] = 0
    return alive


def sum_ranges(values: ArrayLike) -> NDArray[Any]:
    """[start, stop]: sums of values[start:stop]; below the diagonal negative sums."""
    total = np.cumsum(np.concatenate([[0], np.asarray(values)]))
    return np.asarray(total[None, :] - total[:, None])


def _buffers(chain: Chain) -> NDArray[np.int64]:
    """[start, stop]: bytes of the buffers for streamed weights."""
    num, profile = len(chain), chain.profile
    buffers = np.zeros((num + 1, num + 1), np.int64)
    if profile.offloaded:
        for start in range(num):
            streamed: list[int] = []
            for stop in range(start + 1, num + 1):
                streamed += profile.streamed_bytes([chain.blocks[stop - 1]])
                buffers[start, stop] = sum(map(rounded_bytes, buffer_bytes(streamed)))
    return buffers


def _cache_and_peaks(
    chain: Chain, replay: Replay, block: int
) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield for each step kv_before, kv_after, both peaks and producer_distance of a block.

    `lower_bounds` explains these numbers.
    """
    # `cache` has the bytes of the block's KV cache tensors by slot. A step with a growing cache
    # allocates the longer tensor before freeing the old one, so the peak has both: if a cache grows
    # from 10 to 12 bytes, `kv_before` is 10, `kv_after` is 12, and the peak includes 22.
    cache: list[int] = []
    for step in range(len(replay.steps)):
        trace = replay.trace(block, step)
        sizes = [rounded_bytes(size) for size in replay.sizes(block, step)]
        read = _read_bytes(chain, replay, block, step)
        # Block b may free a tensor without reading it, such as one of block b - 2 that model code
        # drops while b runs. Until then the tensor takes memory on the stage of b only if b - 2 is
        # on the same stage (`producer_distance` is 2).
        freed_only = {
            ref: _made_bytes(chain, replay, block, step, ref)
            for ref in trace.events
            if ref is not None and ref.origin == "earlier" and ref not in read
        }
        producer_distance = max((_distance(chain, block, ref) for ref in freed_only), default=0)
        peak_alone = _peak(trace, sizes, cache, read)
        peak_with_producers = (
            _peak(trace, sizes, cache, read | freed_only) if freed_only else peak_alone
        )
        kv_before = sum(cache)
        freed = {ref.index for ref in trace.events if ref is not None and ref.origin == "kept"}
        cache = [size for slot, size in enumerate(cache) if slot not in freed]
        cache += [sizes[number] for number in sorted(trace.retained)]
        yield kv_before, sum(cache), peak_alone, peak_with_producers, producer_distance


def _peak(
    trace: AllocationTrace, sizes: Sequence[int], cache: Sequence[int], read: dict[Ref, int]
) -> int:
    """Return the peak bytes of a block, which starts with `cache` and the `read` tensors live."""
    live = peak = sum(cache) + sum(read.values())
    count = 0
    for event in trace.events:
        if event is None:
            live += sizes[count]
            peak = max(peak, live)
            count += 1
        elif event.origin == "kept":
            live -= cache[event.index]
        elif event.origin == "own":
            live -= sizes[event.index]
        else:
            live -= read.get(event, 0)
    return peak


def _distance(chain: Chain, block: int, ref: Ref) -> int:
    """Return the distance in chain places from a block back to the maker of a tensor."""
    maker = block - ref.back
    return sum(maker <= index < block for index in chain.blocks) if ref.back else 0


def _read_bytes(chain: Chain, replay: Replay, block: int, step: int) -> dict[Ref, int]:
    """Return the least bytes of each of a block's inputs, over all blocks of its kind.

    At the start of a stage an input is a copy, with the size of the read; within a stage it is the
    tensor itself, with the size of its allocation. The smaller size counts.
    """
    sizes: dict[Ref, int] = {}
    for read in replay.trace(block, step).reads:
        if read.ref.origin in ("earlier", "carried"):
            copied_bytes = rounded_bytes(evaluate(read.size, replay.steps[step].values))
            size = min(copied_bytes, _made_bytes(chain, replay, block, step, read.ref))
            sizes[read.ref] = min(size, sizes.get(read.ref, size))
    return sizes


def _made_bytes(chain: Chain, replay: Replay, block: int, step: int, ref: Ref) -> int:
    """Return the least allocated bytes of the tensor `ref`, over all blocks of the block's kind."""
    sizes = []
    for index in chain.likes(block, ref):
        maker, number = replay.key_of(index, ref, step)
        # A retained tensor already counts as a cache of its maker, which may be on this stage.
        is_kept = number in replay.trace(maker, step).retained
        sizes.append(0 if is_kept else rounded_bytes(replay.sizes(maker, step)[number]))
    return min(sizes)
