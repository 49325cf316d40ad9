"""Allocation events: allocations and frees of a profile's blocks in the steps of a workload.

It knows neither stages nor devices, nor what an allocator makes of the events.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .device_memory import sizes_of
from .profile import (
    TRAINING_PHASES,
    AllocationTrace,
    BlockKind,
    Key,
    Phase,
    Profile,
    Ref,
    Rules,
    evaluate_all,
    monomials,
    rules_of,
)
from .workload import Workload, refuse_short

MALLOC, KEEP, RELEASE, DROP, RELEASE_FAR, MULTIPLY = range(6)
Event = tuple[int, int, int]
"""A code with two numbers: allocate (number, index of its size), keep (number, index of its size),
release (blocks back, number), drop (slot, 0), release far (block, number), multiply (0, 0)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastStep:
    """A call of the model: its phase, sizes and regime."""

    phase: Phase
    query: int
    keys: int
    regime: int
    values: tuple[int, ...]


class AllocEvents:
    """A profile at a workload with its prefill chunk resolved; a subclass makes its steps.

    Raises UsageError for a workload under other conditions than the profile's, or beyond its sizes.
    """

    def __init__(self, profile: Profile, workload: Workload) -> None:
        profile.refuse_other(workload.conditions)
        refuse_short(workload, profile.least_prompt_tokens)
        self.profile = profile
        self.workload = workload
        self._sizes: dict[tuple[int, int], list[int]] = {}
        self._rules: dict[int, Rules] = {}  # by the trace, which the profile keeps
        self._packed: dict[tuple[int, int], bytes] = {}
        self._events: dict[tuple[int, int], list[Event]] = {}
        self._foreign_frees: dict[tuple[int, int], tuple[Ref, ...]] = {}
        self.steps = self._schedule()

    def _schedule(self) -> list[ForecastStep]:
        raise NotImplementedError

    def trace(self, block: int, step: int) -> AllocationTrace:
        """Return the trace of a block in a step, by its number in `steps`."""
        return self._kind(block).traces[self.steps[step].regime]

    def sizes(self, block: int, step: int) -> list[int]:
        """Return the bytes of each allocation of a block in a step."""
        key = (self.profile.blocks[block].kind, step)
        if key not in self._sizes:
            trace = self.trace(block, step)
            if id(trace) not in self._rules:
                self._rules[id(trace)] = rules_of(trace.sizes)
            self._sizes[key] = evaluate_all(
                self._rules[id(trace)], self.steps[step].values
            ).tolist()
        return self._sizes[key]

    def events(self, block: int, step: int) -> list[Event]:
        """Return the events of a block in a step."""
        key = (self.profile.blocks[block].kind, self.steps[step].regime)
        if key not in self._events:
            self._events[key] = list(self._read_trace(block, step))
        return self._events[key]

    def packed_sizes(self, block: int, step: int) -> bytes:
        """Return `sizes` as a program takes them."""
        key = (self.profile.blocks[block].kind, step)
        if key not in self._packed:
            self._packed[key] = sizes_of(self.sizes(block, step))
        return self._packed[key]

    def foreign_frees(self, block: int, step: int) -> tuple[Ref, ...]:
        """Return the frees in a block's trace of other blocks' allocations."""
        key = (self.profile.blocks[block].kind, self.steps[step].regime)
        if key not in self._foreign_frees:
            self._foreign_frees[key] = tuple(
                ref
                for ref in self.trace(block, step).events
                if ref is not None and ref.origin in ("earlier", "carried", "input")
            )
        return self._foreign_frees[key]

    def key_of(self, block: int, ref: Ref, step: int) -> Key:
        """Return the key of the allocation behind a reference in a block's trace."""
        return self.profile.key_of(block, ref, self.steps[step].regime)

    def is_backward(self, step: int) -> bool:
        """Return True for the backward pass of a micro-batch."""
        return self.steps[step].phase in TRAINING_PHASES[1:]

    def first_number(self, block: int, step: int) -> int:
        """Return the number of the first allocation in a block's trace.

        In a backward pass it goes on where the forward pass, step 0, has ended.
        """
        return len(self.trace(block, 0).sizes) if self.is_backward(step) else 0

    def _read_trace(self, block: int, step: int) -> Iterator[Event]:
        # In the names of a trace, not of its block: kinds stand for many blocks.
        trace = self.trace(block, step)
        caches = frozenset(trace.retained)
        number = start = self.first_number(block, step)
        for position, ref in enumerate(trace.events):
            if position == trace.matmul_at:
                yield MULTIPLY, 0, 0
            if ref is None:
                yield KEEP if number in caches else MALLOC, number, number - start
                number += 1
            elif ref.origin == "kept":
                yield DROP, ref.index, 0
            elif ref.origin in ("own", "earlier"):
                yield RELEASE, ref.back, ref.index
            else:
                yield RELEASE_FAR, *self.key_of(block, ref, step)
        if trace.matmul_at == len(trace.events):
            yield MULTIPLY, 0, 0

    def _kind(self, block: int) -> BlockKind:
        return self.profile.kinds[self.profile.blocks[block].kind]

    def _values(self, query: int, keys: int) -> tuple[int, ...]:
        batch = self.workload.batch
        values = monomials(batch, query, keys)
        return self.profile.values(values, batch, query, keys)
