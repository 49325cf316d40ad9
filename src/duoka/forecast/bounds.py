"""Bounds: what stages need at the least, for all of them at once and without a replay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from .allocator import rounded_bytes
from .profile import Ref, Tape, buffer_bytes, evaluate
from .replay import Replay
from .stages import Chain


def lower_bounds(chain: Chain, replay: Replay) -> NDArray[np.int64]:
    """Never more than the exact bytes: what is requested at the peak of each step's blocks.

    While a step is in one block, the caches of those before it have grown and those behind it
    haven't. Left out is some of what goes by way of tied blocks.
    """
    num = len(chain)
    kinds = [chain.profile.blocks[index].kind for index in chain.blocks]
    block_of = dict(zip(kinds, chain.blocks, strict=True))
    found = {kind: [*_cache_and_peaks(chain, replay, block)] for kind, block in block_of.items()}
    named = {kind: number for number, kind in enumerate(found)}
    # [steps, places, numbers]
    costs = np.array([*found.values()])[[named[kind] for kind in kinds]].swapaxes(0, 1)
    bounds = np.zeros((num + 1, num + 1), np.int64)
    ahead = np.triu(np.ones((num, num), np.bool_))
    starts, places = np.arange(num)[:, None], np.arange(num)
    for step in _largest(chain, replay, costs):
        before, after, peaks, fuller, back = costs[step].T
        grown = np.concatenate([[0], np.cumsum(after)])
        to_grow = np.concatenate([[0], np.cumsum(before)])
        busiest = np.where(starts <= places - back, fuller, peaks)
        busiest = busiest + _waiting(chain, replay, step)
        own = np.where(ahead, grown[:-1] - to_grow[1:] + busiest, -(1 << 62))
        most = np.maximum.accumulate(own, axis=1)
        bytes_now = most + to_grow[None, 1:] - grown[:-1, None]
        np.maximum(bounds[:-1, 1:], np.where(ahead, bytes_now, 0), out=bounds[:-1, 1:])
    return bounds + chain.weight_bytes + _buffers(chain)


def _largest(chain: Chain, replay: Replay, costs: NDArray[np.int64]) -> list[int]:
    """The steps but those that a later one of their regime exceeds in everything."""
    regimes = [step.regime for step in replay.steps]
    waits = [
        [replay.sizes(wait.block, step)[wait.number] for wait in chain.waits(regime)]
        for step, regime in enumerate(regimes)
    ]
    return [
        step
        for step, regime in enumerate(regimes)
        if not any(
            regimes[later] == regime
            # How far back a block frees something is the same in all of them.
            and bool(np.all(costs[step] <= costs[later]))
            and all(one <= other for one, other in zip(waits[step], waits[later], strict=True))
            for later in range(step + 1, len(regimes))
        )
    ]


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


def _cache_and_peaks(
    chain: Chain, replay: Replay, block: int
) -> Iterator[tuple[int, int, int, int, int]]:
    """For each step the cache bytes of a block before and after it, and its peak with them.

    Then its peak where the blocks before it are on its stage as well, of which it frees something
    that it doesn't read, and how many blocks back that goes.
    """
    cache: list[int] = []
    for step in range(len(replay.steps)):
        tape = replay.tape(block, step)
        sizes = [rounded_bytes(size) for size in replay.sizes(block, step)]
        held = _held(chain, replay, block, step)
        left = {
            ref: _made(chain, replay, block, step, ref)
            for ref in tape.events
            if ref is not None and ref.origin == "earlier" and ref not in held
        }
        back = max((_back(chain, block, ref) for ref in left), default=0)
        peak = _peak(tape, sizes, cache, held)
        fuller = _peak(tape, sizes, cache, held | left) if left else peak
        before = sum(cache)
        dropped = {ref.index for ref in tape.events if ref is not None and ref.origin == "kept"}
        cache = [size for slot, size in enumerate(cache) if slot not in dropped]
        cache += [sizes[number] for number in sorted(tape.kept)]
        yield before, sum(cache), peak, fuller, back


def _peak(tape: Tape, sizes: Sequence[int], cache: Sequence[int], held: dict[Ref, int]) -> int:
    """The most that a block has at a time, with its caches and what it holds of others."""
    live = peak = sum(cache) + sum(held.values())
    count = 0
    for event in tape.events:
        if event is None:
            live += sizes[count]
            peak = max(peak, live)
            count += 1
        elif event.origin == "kept":
            live -= cache[event.index]
        elif event.origin == "own":
            live -= sizes[event.index]
        else:
            live -= held.get(event, 0)
    return peak


def _waiting(chain: Chain, replay: Replay, step: int) -> NDArray[np.int64]:
    """[start, place]: bytes on a stage from `start` on that the block at a place doesn't touch."""
    waiting = np.zeros((len(chain), len(chain)), np.int64)
    for wait in chain.waits(replay.steps[step].regime):
        size = rounded_bytes(replay.sizes(wait.block, step)[wait.number])
        waiting[: wait.place + 1, wait.during] += size
    return waiting


def _back(chain: Chain, block: int, ref: Ref) -> int:
    """How many places before a block's place in the chain something was made."""
    made = block - ref.back
    return sum(made <= index < block for index in chain.blocks) if ref.back else 0


def _held(chain: Chain, replay: Replay, block: int, step: int) -> dict[Ref, int]:
    """Bytes at least of what other blocks made and this one, or one of its kind, reads.

    Where a stage begins it is moved in, as large as what is read; elsewhere it is still there, as
    large as it was made.
    """
    held: dict[Ref, int] = {}
    for read in replay.tape(block, step).reads:
        if read.ref.origin in ("earlier", "carried"):
            moved = rounded_bytes(evaluate(read.size, replay.steps[step].values))
            size = min(moved, _made(chain, replay, block, step, read.ref))
            held[read.ref] = min(size, held.get(read.ref, size))
    return held


def _made(chain: Chain, replay: Replay, block: int, step: int, ref: Ref) -> int:
    """Bytes of what a block refers to, as small as it is for any block of its kind."""
    sizes = []
    for index in chain.likes(block, ref):
        maker, number = replay.key_of(index, ref, step)
        # What is kept counts as a cache of its maker, on whose stage this one may be.
        is_kept = number in replay.tape(maker, step).kept
        sizes.append(0 if is_kept else rounded_bytes(replay.sizes(maker, step)[number]))
    return min(sizes)
