"""Profiles with the experts of some blocks on the host."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from .profile import AllocationTrace, BlockKind, Profile, Ref


def hosting(
    profile: Profile,
    blocks: Collection[int],
    hosted: Profile,
    known: dict[tuple[int, int, bool, bool], BlockKind] | None = None,
) -> Profile:
    """Return the profile with the experts of the given blocks on the host.

    `hosted` is the profile with the experts of all blocks there. Kinds of blocks are compared
    once, and then `known` for further calls.
    """
    assert profile.regimes == hosted.regimes, "code paths don't depend on where experts are"
    known = {} if known is None else known
    number: dict[int, int] = {}
    kinds: list[BlockKind] = []
    changed = []
    for index, block in enumerate(profile.blocks):
        places = index in blocks, index - 1 in blocks
        key = block.kind, hosted.blocks[index].kind, *places
        if key not in known:
            kind, before = (
                part.kinds[part.blocks[index].kind]
                for part in (hosted if place else profile for place in places)
            )
            kind = kind if places[0] == places[1] else _after(kind, before)
            known[key] = next((other for other in known.values() if other == kind), kind)
        if id(known[key]) not in number:
            number[id(known[key])] = len(kinds)
            kinds.append(known[key])
        changed.append(replace(block, kind=number[id(known[key])]))
    conditions = hosted.conditions if blocks else profile.conditions
    return replace(profile, blocks=tuple(changed), kinds=tuple(kinds), conditions=conditions)


# With its experts on the host, a layer makes other allocations than on the GPU, so its output has
# another number. A layer reads and frees the allocations of the layer before in the same order in
# both profiles: the n-th reference of one is the n-th of the other.
def _after(kind: BlockKind, other: BlockKind) -> BlockKind:
    """Return a kind that follows a block as `other` does, the same block in another profile."""
    traces = []
    for trace, like in zip(kind.traces, other.traces, strict=True):
        pairs = zip(_earlier(trace), _earlier(like), strict=True)
        refs: dict[Ref, Ref] = dict(pairs)
        events = tuple(event and refs.get(event, event) for event in trace.events)
        reads = tuple(replace(read, ref=refs.get(read.ref, read.ref)) for read in trace.reads)
        traces.append(replace(trace, events=events, reads=reads))
    return replace(kind, traces=tuple(traces))


def _earlier(trace: AllocationTrace) -> list[Ref]:
    """Return the references to the allocations of other blocks in the same step."""
    refs = [*trace.events, *(read.ref for read in trace.reads)]
    return [ref for ref in refs if ref is not None and ref.origin == "earlier"]
