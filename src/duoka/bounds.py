"""Bounds: what stages need at the least, for all of them at once and without a replay."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from .allocator import rounded_bytes
from .chain import Chain
from .profile import Ref, buffer_bytes, evaluate
from .replay import Replay


def lower_bounds(chain: Chain, replay: Replay) -> NDArray[np.int64]:
    """Never more than the exact bytes: what is requested at the peak of each step's blocks.

    Left out are tensors while no block reads them. While a step is in one block, the caches of
    those before it have grown and those behind it haven't.

    Parameters
    ----------
    chain : Chain
    replay : Replay
        Its steps are those that are looked at.

    Returns
    -------
    [num_blocks + 1, num_blocks + 1]
        By start and stop.
    """
    num, profile = len(chain), chain.profile
    kinds = [profile.blocks[index].kind for index in chain.blocks]
    block_of = dict(zip(kinds, chain.blocks, strict=True))
    steps = {kind: [*_cache_and_peaks(chain, replay, block)] for kind, block in block_of.items()}
    weights = np.zeros(num + 1, np.int64)
    for position, index in enumerate(chain.blocks):
        weights[position + 1] = sum(
            rounded_bytes(size)
            for block in (index, *chain.attached[index])
            for size in profile.kinds[profile.blocks[block].kind].weight_bytes
        )
    bounds = np.zeros((num + 1, num + 1), np.int64)
    ahead = np.triu(np.ones((num, num), np.bool_))
    for step in range(len(replay.steps)):
        before, after, peaks = np.array([steps[kind][step] for kind in kinds]).T
        grown = np.concatenate([[0], np.cumsum(after)])
        to_grow = np.concatenate([[0], np.cumsum(before)])
        own = np.where(ahead, (grown[:-1] - to_grow[1:] + peaks)[None, :], -(1 << 62))
        most = np.maximum.accumulate(own, axis=1)
        bytes_now = most + to_grow[None, 1:] - grown[:-1, None]
        np.maximum(bounds[:-1, 1:], np.where(ahead, bytes_now, 0), out=bounds[:-1, 1:])
    total = np.cumsum(weights)
    return bounds + np.triu(total[None, :] - total[:, None]) + _buffers(chain)


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


def _cache_and_peaks(chain: Chain, replay: Replay, block: int) -> Iterator[tuple[int, int, int]]:
    """For each step the cache bytes of a block before and after it, and its peak with them."""
    cache: list[int] = []
    for step in range(len(replay.steps)):
        tape = replay.tape(block, step)
        sizes = [rounded_bytes(size) for size in replay.sizes(block, step)]
        kept, held = frozenset(tape.kept), _held(chain, replay, block, step)
        before = sum(cache)
        live = peak = before + sum(held.values())
        born: list[int] = []
        dropped: set[int] = set()
        count = 0
        for event in tape.events:
            if event is None:
                if count in kept:
                    born.append(sizes[count])
                live += sizes[count]
                peak = max(peak, live)
                count += 1
            elif event.origin == "kept":
                dropped.add(event.index)
                live -= cache[event.index]
            elif event.origin == "own":
                live -= sizes[event.index]
            elif event in held:
                live -= held.pop(event)
        cache = [size for slot, size in enumerate(cache) if slot not in dropped] + born
        yield before, sum(cache), peak


def _held(chain: Chain, replay: Replay, block: int, step: int) -> dict[Ref, int]:
    """Bytes at least of what other blocks made and this one, or one of its kind, reads.

    Where a stage begins it is moved in, as large as what is read; elsewhere it is still there, as
    large as it was made.
    """
    held: dict[Ref, int] = {}
    for read in replay.tape(block, step).reads:
        if read.ref.origin not in ("earlier", "carried"):
            continue
        sizes = {evaluate(read.size, replay.steps[step].values)}
        for index in chain.likes(block, read.ref):
            maker, number = replay.key_of(index, read.ref, step)
            # What is kept counts as a cache of its maker, on whose stage this one may be.
            is_kept = number in replay.tape(maker, step).kept
            sizes.add(0 if is_kept else replay.sizes(maker, step)[number])
        size = rounded_bytes(min(sizes)) if all(sizes) else 0
        held[read.ref] = min(size, held.get(read.ref, size))
    return held
