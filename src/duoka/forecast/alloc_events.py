"""Allocation events: allocations and frees of a profile's blocks in the steps of a workload.

This module knows nothing of stages, devices or allocators.
"""

from __future__ import annotations

from dataclasses import dataclass

from duoka.base.units import format_count
from duoka.errors import UsageError

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
from .workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastStep:
    """A call of the model: its phase, its sizes and the index of its regime.

    `values` are the arguments of rules in this step (`Profile.values`). A step that `is_graph` is
    recorded as a CUDA graph, which doesn't sample tokens.
    """

    phase: Phase
    query: int
    keys: int
    regime: int
    values: tuple[int, ...]
    is_graph: bool = False


class AllocEvents:
    """The allocation events of a profile at a workload; subclasses define the steps.

    The workload must have its prefill chunk resolved. Raises UsageError if the workload's
    conditions differ from the profile's, or its sizes exceed those of the profile.
    """

    def __init__(self, profile: Profile, workload: Workload) -> None:
        profile.refuse_other(workload.conditions)
        refuse_short(workload, profile.least_prompt_tokens)
        self.profile = profile
        self.workload = workload
        self._sizes: dict[tuple[int, int], list[int]] = {}
        self._rules: dict[int, Rules] = {}  # by `id` of the trace, which the profile keeps alive
        self._packed: dict[tuple[int, int], bytes] = {}
        self._foreign_frees: dict[tuple[int, int], tuple[Ref, ...]] = {}
        self.steps = self._schedule()

    def _schedule(self) -> list[ForecastStep]:
        """Return the steps of the workload, in order."""
        raise NotImplementedError

    def trace(self, block: int, step: int) -> AllocationTrace:
        """Return the trace of a block in a step; `step` is an index into `steps`."""
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

    def packed_sizes(self, block: int, step: int) -> bytes:
        """Return `sizes` packed for a `StageProgram`."""
        key = (self.profile.blocks[block].kind, step)
        if key not in self._packed:
            self._packed[key] = sizes_of(self.sizes(block, step))
        return self._packed[key]

    def foreign_frees(self, block: int, step: int) -> tuple[Ref, ...]:
        """Return the frees of other blocks' allocations in a block's trace."""
        key = (self.profile.blocks[block].kind, self.steps[step].regime)
        if key not in self._foreign_frees:
            self._foreign_frees[key] = tuple(
                ref
                for ref in self.trace(block, step).events
                if ref is not None and ref.origin in ("earlier", "carried", "input")
            )
        return self._foreign_frees[key]

    def key_of(self, block: int, ref: Ref, step: int) -> Key:
        """Return the key of the allocation that a reference in a block's trace means."""
        return self.profile.key_of(block, ref, self.steps[step].regime)

    def is_backward(self, step: int) -> bool:
        """Return True if a step is the backward pass of a micro-batch."""
        return self.steps[step].phase in TRAINING_PHASES[1:]

    def first_number(self, block: int, step: int) -> int:
        """Return the number of the first allocation in a block's trace: 0 in a forward pass.

        In a backward pass the numbers continue from the forward pass, step 0.
        """
        return len(self.trace(block, 0).sizes) if self.is_backward(step) else 0

    def _kind(self, block: int) -> BlockKind:
        """Return the kind of a block."""
        return self.profile.kinds[self.profile.blocks[block].kind]

    def _values(self, query: int, keys: int) -> tuple[int, ...]:
        """Return the arguments of rules at these sizes, with the workload's batch."""
        batch = self.workload.batch
        values = monomials(batch, query, keys)
        return self.profile.values(values, batch, query, keys)


def refuse_short(workload: Workload, least_tokens: int) -> None:
    """Raise UsageError if the prompt is too short for its images."""
    if workload.images and workload.prompt_tokens < least_tokens:
        height, width = workload.image_size
        raise UsageError(
            f"{format_count(workload.images, 'image')} of {width}x{height} and a question need "
            f"{least_tokens} tokens; the prompt has {workload.prompt_tokens}",
            hint=f"use a context of at least {least_tokens + workload.new_tokens} tokens, or "
            "smaller images",
        )
