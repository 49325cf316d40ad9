"""Offloads: the weights that may stay in the host's memory, the fewest bytes first.

What stays there is a run of blocks that ends with the last one, or before those at the end that
are unlike any other (a norm, a head): a head is large, and to stream it takes a buffer as large as
itself. The first block is never among them: a model's inputs go to where that is. It knows nothing
of devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate

from duoka.forecast.allocator import rounded_bytes
from duoka.forecast.profile import Profile


def candidates(profile: Profile) -> list[tuple[int, tuple[int, ...]]]:
    """Return all runs of blocks for the host, as (bytes, blocks); the fewest bytes first.

    Of equally many bytes the blocks that run later come first.
    """
    runs = set(_runs(profile))
    return sorted(runs, key=lambda run: (run[0], [-block for block in run[1]]))


def _runs(profile: Profile) -> Iterator[tuple[int, tuple[int, ...]]]:
    # For blocks a b c c d: runs that end with d, then (d is unlike the others) runs that end with
    # the second c; there it stops, because kind c occurs more than once.
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
    """Return the blocks whose weights can stay on the host, in execution order."""
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
    """Offload everything, at no cost: a lower bound of the needs of every offload."""
    streaming = profile.offloading(offloadable(profile))
    return replace(
        streaming, kinds=tuple(replace(kind, streamed_bytes=0) for kind in streaming.kinds)
    )


def weight_bytes(profile: Profile, block: int) -> int:
    """Sum the weights of a block in bytes, each tensor rounded up as by allocators."""
    return sum(map(rounded_bytes, profile.kinds[profile.blocks[block].kind].weight_bytes))
