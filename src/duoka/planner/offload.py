"""Offloads: the candidates of weights to keep in CPU memory, the fewest bytes first.

A candidate is a run of consecutive blocks. It ends with the last block, or before the blocks at the
end that occur once (a norm, a head), because streaming a large head needs a buffer of its size. The
first block is never offloaded, because the model's inputs go to its device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate

from duoka.forecast.allocator import rounded_bytes
from duoka.forecast.profile import Profile


def candidates(profile: Profile) -> list[tuple[int, tuple[int, ...]]]:
    """Return all candidates as (bytes, blocks), the fewest bytes first.

    Of candidates with equal bytes, the one with later blocks comes first.
    """
    runs = set(_runs(profile))
    return sorted(runs, key=lambda run: (run[0], [-block for block in run[1]]))


def _runs(profile: Profile) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield each candidate as (bytes, blocks), unsorted."""
    # For blocks of the kinds a b c c d: runs that end with d and, because kind d occurs once, runs
    # that end with the second c. No run ends earlier, because kind c occurs more than once.
    blocks = offloadable(profile)
    sizes = [weight_bytes(profile, block) for block in blocks]
    uses = Counter(block.kind for block in profile.blocks)
    for stop in range(len(blocks), 0, -1):
        for start, size in zip(
            range(stop - 1, -1, -1), accumulate(reversed(sizes[:stop])), strict=True
        ):
            yield size, tuple(blocks[start:stop])
        if uses[profile.blocks[blocks[stop - 1]].kind] > 1:
            return


def offloadable(profile: Profile) -> list[int]:
    """Return the blocks whose weights can be offloaded, by index, in execution order."""
    tied = {block.tied_to for block in profile.blocks if block.modules}
    return [
        index
        for index, block in enumerate(profile.blocks)
        if index
        and block.streams
        and len(block.modules) == 1
        and block.tied_to is None
        and index not in tied
    ]


def lightest(profile: Profile) -> Profile:
    """Return the profile with all possible blocks offloaded and no buffers to stream them.

    Its memory is a lower bound for every candidate.
    """
    streaming = profile.offloading(offloadable(profile))
    return replace(
        streaming, kinds=tuple(replace(kind, streamed_bytes=0) for kind in streaming.kinds)
    )


def weight_bytes(profile: Profile, block: int) -> int:
    """Return the bytes of a block's weights, each tensor rounded up as by CUDA's allocator."""
    return sum(map(rounded_bytes, profile.kinds[profile.blocks[block].kind].weight_bytes))
