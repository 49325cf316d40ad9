"""Playing: what blocks allocate and free, run through the allocator's model.

A stage repeats itself: its layers are alike, and so are its steps. What a block does with small
requests comes out the same whenever the small pool's free blocks are the same, so it is worked out
once and looked up from then on. That holds for as long as no segment is taken from the device on
its account, and none is given back: the pools are worked through together where one is.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .allocator import (
    ADDRESS_BITS,
    SMALL_REQUEST_BYTES,
    Block,
    CachingAllocator,
    rounded_bytes,
    segment_bytes,
)
from .profile import Key

MALLOC, KEEP, RELEASE, DROP, RELEASE_FAR = range(5)
Event = tuple[int, int, int]
"""A code with two numbers: allocate (number, bytes), keep (number, bytes), release (blocks back,
number), drop (slot, 0), release far (block, number)."""

Held = tuple[Block, int]
"""What a request was given, and how many bytes it asked for, rounded."""

_NEVER = -(2**62)


class Part:
    """What one block does in one step.

    Parameters
    ----------
    events : sequence of Event
        In order.
    """

    def __init__(self, events: Sequence[Event]) -> None:
        self.near: list[tuple[int, int]] = []
        self.far: list[Key] = []
        self.dropped: list[int] = []
        self._asked: list[int] = []
        kept: list[int] = []
        made: dict[int, int] = {}  # by number, as long as it lives
        steps: list[tuple[str, int, int]] = []
        for code, number, other in events:
            if code in (MALLOC, KEEP):
                steps.append(("made", len(self._asked), 1))
                if code == KEEP:
                    kept.append(len(self._asked))
                else:
                    made[number] = len(self._asked)
                self._asked.append(rounded_bytes(other))
            elif code == RELEASE and not number and other in made:
                steps.append(("made", made.pop(other), -1))
            elif code == RELEASE:
                steps.append(("near", len(self.near), -1))
                self.near.append((number, other))
            elif code == RELEASE_FAR:
                steps.append(("far", len(self.far), -1))
                self.far.append((number, other))
            else:
                steps.append(("dropped", len(self.dropped), -1))
                self.dropped.append(number)
        dropped = len(self.near) + len(self.far)
        first = {
            "near": 0,
            "far": len(self.near),
            "dropped": dropped,
            "made": dropped + len(self.dropped),
        }
        self._steps = [(first[what] + index, sign) for what, index, sign in steps]
        self._left = [(number, first["made"] + index) for number, index in made.items()]
        self._kept = [first["made"] + index for index in kept]
        self._cached = frozenset([*range(dropped, first["made"]), *self._kept])
        self._passages: dict[tuple[int, ...], Passage] = {}

    def passage(self, given: Sequence[Held | None]) -> Passage:
        """The part with these for what comes from elsewhere: near, far, dropped."""
        sizes = tuple([held[1] if held else 0 for held in given])
        found = self._passages.get(sizes)
        if found is None:
            found = self._passages[sizes] = self._compiled(sizes)
        return found

    def _compiled(self, given: tuple[int, ...]) -> Passage:
        sizes = [*given, *self._asked]
        moves = [
            (place, sizes[place], sign, place in self._cached)
            for place, sign in self._steps
            if sizes[place]
        ]
        small = [move for move in moves if move[1] <= SMALL_REQUEST_BYTES]
        left = [(number, place, sizes[place]) for number, place in self._left]
        kept = [(place, sizes[place]) for place in self._kept]
        behind = [*((place, size) for _, place, size in left), *kept]
        requested = [0, *itertools.accumulate(size * sign for _, size, sign, _ in moves)]
        lead, *large = _large_moves(moves)
        return Passage(
            moves=moves,
            small=[(place, size if sign > 0 else 0) for place, size, sign, _ in small],
            large=large,
            lead=lead[-2:],
            given=[index for index, size in enumerate(given) if 0 < size <= SMALL_REQUEST_BYTES],
            left=left,
            kept=kept,
            out=[place for place, size in behind if size <= SMALL_REQUEST_BYTES],
            num_made=len(self._asked),
            small_by=sum(size * sign for _, size, sign, _ in small),
            small_cached_by=sum(size * sign for _, size, sign, cached in small if cached),
            requested_by=requested[-1],
            peak=max(requested),
        )


Move = tuple[int, int, int, bool]
"""A request, or the end of what one was given: its place, its bytes, 1 or -1, and whether it is a
cache or a gradient. Places are those of what is given, then of what is made."""

LargeMove = tuple[int, int, int, int, int, int]
"""Of the large pool: place; bytes, 0 for an end; how often it counts as cached (-1, 0, 1); its
index among all moves; then the most that small requests come to up to the next such move, beside
what there was when the block began, and what of that is cached then."""


def _large_moves(moves: Sequence[Move]) -> list[LargeMove]:
    """Those of the large pool, after a first one that stands for what is before them."""
    found: list[LargeMove] = []
    last = (0, 0, 0, 0)
    # What small ones come to, the most of that behind a request, and what is cached then.
    level = cached = cached_then = 0
    most = _NEVER
    for index, (place, size, sign, is_cached) in enumerate(moves):
        if size <= SMALL_REQUEST_BYTES:
            level += sign * size
            cached += sign * size * is_cached
        else:
            found.append((*last, most, cached_then))
            last = (place, size if sign > 0 else 0, sign * is_cached, index)
            most = _NEVER
        if sign > 0 and level >= most:
            most, cached_then = level, cached
    return [*found, (*last, most, cached_then)]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Passage:
    """A part, with the sizes of what comes from elsewhere.

    Parameters
    ----------
    moves : list of Move
        All of them, in order.
    small : list of (int, int)
        Those of the small pool: place and bytes, 0 bytes for an end.
    large : list of LargeMove
        Those of the large pool.
    lead : (int, int)
        The most that small requests come to before the first of those, and what of it is cached.
    given : list of int
        The places of what comes from elsewhere and is small.
    left : list of (int, int, int)
        What is there afterwards: its number, place and bytes.
    kept : list of (int, int)
        The caches or gradients that were made: place and bytes.
    out : list of int
        The places of what is small of these two.
    num_made, small_by, small_cached_by, requested_by, peak : int
        How many requests there are; by what small ones change what is allocated and what of it is
        cached; by what all of them change what is requested, and the most of that.
    """

    moves: list[Move]
    small: list[tuple[int, int]]
    large: list[LargeMove]
    lead: tuple[int, int]
    given: list[int]
    left: list[tuple[int, int, int]]
    kept: list[tuple[int, int]]
    out: list[int]
    num_made: int
    small_by: int
    small_cached_by: int
    requested_by: int
    peak: int


class Memo:
    """What becomes of small pools, by their free blocks; for all stages at one workload."""

    def __init__(self) -> None:
        self.frees: list[tuple[Block, ...]] = []
        self.outcomes: dict[tuple[object, ...], tuple[int, list[Block]]] = {}
        self._numbers: dict[tuple[Block, ...], int] = {}

    def number(self, free: Iterable[Block]) -> int:
        """The number of a small pool's free blocks."""
        key = tuple(free)
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = len(self.frees)
            self.frees.append(key)
        return found


class Player:
    """One device on which blocks are played, and what is in use there.

    Attributes
    ----------
    allocated, peak : int
        Bytes in use now, and at most.
    requested_peak : int
        The most that was asked for at a time, rounded: without what blocks have left unsplit.
    cached, cached_at_peak : int
        What of that are caches or gradients.
    aside, aside_at_peak : int
        What of that whoever plays tells apart, and sets.
    """

    def __init__(self, capacity_bytes: int | None, memo: Memo) -> None:
        self.allocator = CachingAllocator(capacity_bytes)
        self.allocated = self.peak = self.requested = self.requested_peak = 0
        self.cached = self.cached_at_peak = self.aside = self.aside_at_peak = 0
        self._memo = memo
        # The number of the small pool's free blocks, once it is known; the pool itself may lag.
        self._state: int | None = None
        self._lags = False

    def hold(self, num_bytes: int, *, cached: bool = False) -> Held:
        """Allocate.

        Raises
        ------
        OutOfCapacity
            As `CachingAllocator.malloc` does.
        """
        size = rounded_bytes(num_bytes)
        self._catch_up()
        block = self.allocator.take(size)
        self.allocated += block >> ADDRESS_BITS
        self.cached += (block >> ADDRESS_BITS) * cached
        self.requested += size
        if self.allocated >= self.peak:
            self._peaks(self.allocated, self.cached)
        if self.requested > self.requested_peak:
            self.requested_peak = self.requested
        return block, size

    def release(self, held: Held, *, cached: bool = False) -> None:
        """Free."""
        self._catch_up()
        block, size = held
        self.allocator.give(block)
        self.allocated -= block >> ADDRESS_BITS
        self.cached -= (block >> ADDRESS_BITS) * cached
        self.requested -= size

    def free_blocks(self) -> tuple[tuple[Block, ...], tuple[Block, ...]]:
        """Of the small pool and of the large one."""
        self._catch_up()
        return tuple(self.allocator.small.free), tuple(self.allocator.large.free)

    def play(self, part: Part, block: int, alive: dict[Key, Held], kept: list[Held]) -> list[Held]:
        """Play what a block does.

        Parameters
        ----------
        part : Part
        block : int
            Its number, to which what comes from near is relative.
        alive : dict
            What there is besides caches; it changes.
        kept : list of Held
            The block's own caches or gradients.

        Returns
        -------
        list of Held
            The block's caches or gradients afterwards.

        Raises
        ------
        OutOfCapacity
            As `CachingAllocator.malloc` does.
        """
        given = [alive.pop((block - back, number), None) for back, number in part.near]
        if part.far:
            given += [alive.pop(key, None) for key in part.far]
        if part.dropped:
            given += [kept[slot] for slot in part.dropped]
            kept = [held for slot, held in enumerate(kept) if slot not in part.dropped]
        passage = part.passage(given)
        at = [held[0] if held else 0 for held in given] + [0] * passage.num_made
        requested = self.requested + passage.peak
        if requested > self.requested_peak:
            self.requested_peak = requested
        self.requested += passage.requested_by
        before = self._state
        if before is None:
            self._catch_up()
            before = self._state = self._memo.number(self.allocator.small.free)
        if passage.small and not self._play_small(passage, at, before):
            self._play_together(passage, at, before, 0)
        else:
            self._play_large(passage, at, before)
        for number, place, size in passage.left:
            alive[block, number] = at[place], size
        if passage.kept:
            return [*kept, *((at[place], size) for place, size in passage.kept)]
        return kept

    def _play_small(self, passage: Passage, at: list[Block], before: int) -> bool:
        """Play the small requests, unless they need a new segment; whether it was done."""
        memo = self._memo
        key = (passage, before, *[at[place] for place in passage.given])
        known = memo.outcomes.get(key)
        if known is None:
            self._catch_up()
            small = self.allocator.small
            for place, size in passage.small:
                if not size:
                    small.give(at[place])
                elif (block := small.take(size)) is not None:
                    at[place] = block
                else:
                    small.become(memo.frees[before])
                    return False
            self._state = memo.number(small.free)
            memo.outcomes[key] = self._state, [at[place] for place in passage.out]
            return True
        self._state, blocks = known
        self._lags = True
        for place, block in zip(passage.out, blocks, strict=True):
            at[place] = block
        return True

    def _play_large(self, passage: Passage, at: list[Block], before: int) -> None:
        """Play the large requests, after the small ones, which need nothing new."""
        allocator, pool = self.allocator, self.allocator.large
        level, peak, cached = self.allocated, self.peak, self.cached
        most, small_cached = passage.lead
        if level + most >= peak:
            peak = self._peaks(level + most, cached + small_cached)
        for place, size, sign, index, most, small_cached in passage.large:
            if size:
                block = pool.take(size)
                if block is None:
                    if not allocator.has_room_for(segment_bytes(size)):
                        self.allocated, self.cached = level, cached
                        self._play_together(passage, at, before, index)
                        return
                    block = allocator.take(size)
                at[place] = block
                level += block >> ADDRESS_BITS
                if sign:
                    cached += block >> ADDRESS_BITS
            else:
                block = at[place]
                pool.give(block)
                level -= block >> ADDRESS_BITS
                if sign:
                    cached -= block >> ADDRESS_BITS
            if level + most >= peak:
                peak = self._peaks(level + most, cached + small_cached)
        self.allocated = level + passage.small_by
        self.cached = cached + passage.small_cached_by

    def _play_together(self, passage: Passage, at: list[Block], before: int, start: int) -> None:
        """Play all requests in order, with the large ones before `start` played already."""
        allocator = self.allocator
        allocator.small.become(self._memo.frees[before])
        self._state, self._lags = None, False
        for index, (place, size, sign, is_cached) in enumerate(passage.moves):
            if index < start and size > SMALL_REQUEST_BYTES:
                continue
            if sign > 0:
                at[place] = allocator.take(size)
            else:
                allocator.give(at[place])
            change = sign * (at[place] >> ADDRESS_BITS)
            self.allocated += change
            self.cached += change * is_cached
            # What is before `start` has been counted, together with what was large then.
            if index >= start and sign > 0 and self.allocated >= self.peak:
                self._peaks(self.allocated, self.cached)

    def _peaks(self, allocated: int, cached: int) -> int:
        self.peak, self.cached_at_peak, self.aside_at_peak = allocated, cached, self.aside
        return allocated

    def _catch_up(self) -> None:
        """Make the small pool what it is known to be; it is about to change."""
        if self._lags:
            assert self._state is not None
            self.allocator.small.become(self._memo.frees[self._state])
            self._lags = False
        self._state = None
