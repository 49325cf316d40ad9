"""Lower bounds of the peak bytes of training stages.

A stage of a pipeline runs its micro-batches in three phases. With 5 micro-batches, 3 in flight::

    pass          F1 F2 F3   B1 F4 B2 F5   B3 B4 B5
    in flight      1  2  3    2  3  2  3    2  1  0
                  warm-up    steady state   cool-down

A micro-batch is in flight from its forward to its backward pass, and holds the activations saved by
its forward pass. With a limit of 3, up to 2 other micro-batches are in flight while a pass runs.
After the first backward pass the stage holds gradients too. So in any schedule, a stage needs at
least its weights and optimizer states, and the largest of

- the optimizer's update: gradients, and temporaries of all matrices;
- the last pass of warm-up or the first backward pass: activations saved by the other micro-batches,
  and the peak of this pass;
- a later backward pass, which accumulates gradients: gradients, saved activations of the other
  micro-batches, and its peak. If all micro-batches are in flight after warm-up, one of them has
  run backward already;
- a later forward pass in steady state: gradients, saved activations of the others, and its peak.

The peak of a pass is reached in one block, when the blocks before it have saved their activations
and the blocks after it have saved none::

    block        0       1       2                peak with block 1 = 6 + 7
    saved        6       2       5                peak with block 2 = 6 + 2 + 9
    peak         8       7       9                the pass needs max(8, 13, 17) = 17
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

import numpy as np
from numpy.typing import NDArray

from .allocator import rounded_bytes
from .optimizer_memory import MOST_TEMPORARIES, state_bytes
from .profile import BlockKind, Profile, Ref, evaluate
from .replay_training import ACCUMULATE, BACKWARD, FORWARD, TrainingReplay
from .stages import Chain, running_peaks, sum_ranges

Ints = NDArray[np.int64]


def training_bounds(chain: Chain, replay: TrainingReplay) -> Ints:
    """[start, stop]: lower bounds of the exact peak bytes of stages at the replay's place."""
    places = [chain.stage(place, place + 1) for place in range(len(chain))]
    training, profile = replay.training, chain.profile
    optimizer, in_flight = training.optimizer, replay.in_flight
    weights = _sums(profile, places, lambda kind: kind.weight_bytes)
    gradients = _sums(profile, places, lambda kind: [t.num_bytes for t in kind.trained])
    matrices = _sums(profile, places, lambda kind: [t.num_bytes for t in kind.trained if t.decays])
    states = _sums(
        profile, places, lambda kind: [n for t in kind.trained for n in state_bytes(optimizer, t)]
    )
    saved = np.array([_saved_bytes(replay, blocks[0]) for blocks in places], np.int64)
    forward, backward, accumulate = (
        _pass_peaks(saved, [_peak(replay, blocks, step) for blocks in places])
        for step in (FORWARD, BACKWARD, ACCUMULATE)
    )
    saved_by_others = (in_flight - 1) * sum_ranges(saved)
    needed = [
        gradients + (matrices if MOST_TEMPORARIES[optimizer] == inf else 0),
        saved_by_others + np.maximum(forward, backward),
    ]
    if training.micro_batches > in_flight:
        needed.append(gradients + saved_by_others + np.maximum(forward, accumulate))
    elif training.micro_batches > 1:
        needed.append(gradients + (in_flight - 2) * sum_ranges(saved) + accumulate)
    return np.triu(weights + states + np.maximum.reduce(needed), 1)


def _sums(
    profile: Profile, places: Sequence[Sequence[int]], sizes: Callable[[BlockKind], Sequence[int]]
) -> Ints:
    """[start, stop]: rounded bytes of tensors in stages; `sizes` returns those of a block kind."""
    return sum_ranges(
        [
            sum(
                rounded_bytes(size)
                for block in blocks
                for size in sizes(profile.kinds[profile.blocks[block].kind])
            )
            for blocks in places
        ]
    )


def _pass_peaks(saved: Ints, peaks: Sequence[int]) -> Ints:
    """[start, stop]: peaks of a pass, from the peak and the saved bytes of each block.

    The peak of a stage is the largest sum of a block's peak and the bytes saved before that block.
    """
    saved_before = np.cumsum(saved) - saved
    table = np.zeros((len(saved) + 1, len(saved) + 1), np.int64)
    table[:-1, 1:] = running_peaks(saved_before + np.array(peaks)) - saved_before[:, None]
    return np.triu(table, 1)


def _saved_bytes(replay: TrainingReplay, block: int) -> int:
    """Return the bytes saved by a block's forward pass for its backward pass."""
    number = len(replay.trace(block, FORWARD).sizes)
    sizes = replay.sizes(block, FORWARD)
    outputs = sum(
        rounded_bytes(sizes[ref.index])
        for ref in replay.trace(block, BACKWARD).events
        if ref is not None and ref.origin == "own" and ref.index < number
    )
    return outputs + _saved_input_bytes(replay, block)


def _saved_input_bytes(replay: TrainingReplay, block: int) -> int:
    """Return the bytes of earlier blocks' outputs saved by a block, as made or as copied."""
    values = replay.steps[FORWARD].values
    inputs = {
        read.ref: rounded_bytes(evaluate(read.size, values))
        for read in replay.trace(block, FORWARD).reads
    }
    freed_refs = set(replay.trace(block, BACKWARD).events)
    return sum(
        min(size, _made_bytes(replay, block, ref))
        for ref, size in inputs.items()
        if ref in freed_refs and ref.origin == "earlier"
    )


def _made_bytes(replay: TrainingReplay, block: int, ref: Ref) -> int:
    """Return the allocated bytes of a tensor referred to in a block's forward trace."""
    maker, number = replay.key_of(block, ref, FORWARD)
    return rounded_bytes(replay.sizes(maker, FORWARD)[number])


def _peak(replay: TrainingReplay, blocks: Sequence[int], step: int) -> int:
    """Return the peak bytes of a pass in a block or one of its attached blocks (all `blocks`)."""
    first_block, *tied = blocks
    saved = _saved_bytes(replay, first_block)
    peaks = [saved + _own_peak(replay, block, step) for block in tied]
    return max([_own_peak(replay, first_block, step), *peaks])


def _own_peak(replay: TrainingReplay, block: int, step: int) -> int:
    """Return the peak of a block's own tensors in a pass."""
    trace = replay.trace(block, step)
    sizes = [rounded_bytes(size) for size in replay.sizes(block, step)]
    forward_sizes = [rounded_bytes(size) for size in replay.sizes(block, FORWARD)]
    start = replay.first_number(block, step)
    # A backward pass begins with the activations saved by the block's forward pass, and frees them.
    # Saved outputs of other blocks are left out: they aren't freed by an "own" reference.
    live = _saved_bytes(replay, block) - _saved_input_bytes(replay, block) if step else 0
    peak, number = live, 0
    for ref in trace.events:
        if ref is None:
            live += sizes[number]
            number += 1
        elif ref.origin == "own":
            live -= sizes[ref.index - start] if ref.index >= start else forward_sizes[ref.index]
        peak = max(peak, live)
    return peak
