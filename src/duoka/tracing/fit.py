"""Fitting: recorded traces at several sizes become one trace whose sizes are rules.

A rule is a polynomial in the step's sizes. It must equal every recorded allocation size exactly, so
coefficients are solved for in fractions: floats may be off by a byte. Rules of work (FLOPs, memory
traffic, launches) may deviate by up to 5 %.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sympy import QQ
from sympy.polys.matrices import DomainMatrix

from duoka.forecast.flash_splits import FlashShape, PartBytes
from duoka.forecast.profile import (
    ALIGNED_TOKENS,
    IMAGE_PHASES,
    MONOMIALS,
    TRAINING_MONOMIALS,
    TRAINING_PHASES,
    AllocationTrace,
    Phase,
    Read,
    Ref,
    Rule,
    monomials,
    training_monomials,
)
from duoka.forecast.serving import SERVING_MONOMIALS

from .record import ChunkBytes
from .recorded import AllocId, RecordedPass, RecordedTrace


class Unlike(Exception):
    """Raised if no common trace with rules fits all recorded samples."""


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A recorded step, with the sizes at which it ran.

    `batch`, `query` and `keys` count sequences, query tokens and key tokens; in image phases
    `query` counts images. `serving` has the values of `SERVING_MONOMIALS` over a paged cache.
    """

    phase: Phase
    batch: int
    query: int
    keys: int
    recorded: RecordedPass
    serving: tuple[int, ...] = ()

    @property
    def is_aligned(self) -> bool:
        """True if the number of keys is a multiple of `ALIGNED_TOKENS`."""
        return self.keys % ALIGNED_TOKENS == 0

    @property
    def monomials(self) -> tuple[int, ...]:
        """Values of the monomials at the sizes of this step."""
        if self.serving:
            return self.serving
        if self.phase in TRAINING_PHASES:
            return training_monomials(self.batch, self.query)
        return monomials(self.batch, self.query, self.keys)


def fit(
    samples: Sequence[RecordedStep], shapes: list[FlashShape] | None = None
) -> tuple[list[AllocationTrace], tuple[tuple[int, int], ...]]:
    """Fit a trace per block to the samples of a regime; return traces and carried allocations.

    Raises Unlike if the samples have no common trace. There are more samples than coefficients, so
    the further samples check each rule at sizes that did not determine it. Shapes of flash
    attention found in the samples are appended to `shapes`, the profile's.
    """
    reference = samples[0].recorded
    if any(sample.recorded.model_blocks != reference.model_blocks for sample in samples):
        raise Unlike("different blocks are alike")
    solver = _Solver(samples, shapes)
    carried = sorted({home for sample in samples for home in _find_carried(sample.recorded)})
    numbers = {home: index for index, home in enumerate(carried)}
    traces: list[AllocationTrace] = []
    for block, model_block in enumerate(reference.model_blocks):
        if model_block != block:
            traces.append(traces[model_block])
            continue
        raws = [sample.recorded.traces[block] for sample in samples]
        resolved = [
            _replace_ids(raw, block, sample.recorded.step, numbers)
            for raw, sample in zip(raws, samples, strict=True)
        ]
        traces.append(_fit_block(raws, resolved, solver))
    return traces, tuple(carried)


@dataclass(frozen=True, slots=True)
class _Resolved:
    """A recorded trace whose allocation ids are replaced by references."""

    events: tuple[Ref | None, ...]
    reads: tuple[Ref, ...]
    read_sizes: tuple[int, ...]
    live_through: tuple[int, ...]


def _find_carried(recorded: RecordedPass) -> set[tuple[int, int]]:
    """Return (block, number) of this step's allocations used beyond their block's neighbours."""
    return {
        (maker, index)
        for block, raw in enumerate(recorded.traces)
        if recorded.model_blocks[block] == block
        for number, maker, index in raw.ids()
        if number == recorded.step and abs(block - maker) > 1
    }


# An id (step, block, number) names an allocation absolutely, a reference relative to the block that
# uses it, so that equal blocks have equal traces. Ids in block 5 of step 7, and their references:
#
#   (7, 5, 2)    own 2                    allocation 2 of this block
#   (7, 4, 6)    earlier 6, back 1        of the block before; back -1 is a gradient of block 6
#   (7, 0, 3)    carried                  a mask of block 0, used beyond its neighbours
#   (6, 5, 1)    kept, by its slot        the block's KV cache
#   (6, 0, 1)    input 1, back 5          an allocation kept by another block: image features
def _replace_ids(
    raw: RecordedTrace, block: int, number: int, carried: dict[tuple[int, int], int]
) -> _Resolved:
    """Replace the ids in a block's trace of step `number` by references."""

    def ref(storage: AllocId) -> Ref:
        if storage[0] != number:
            slot = raw.slots.get(storage)
            if slot is not None:
                return Ref(origin="kept", index=slot)
            back = block - storage[1]
            return Ref(origin="input", index=storage[2] if back else 0, back=back)
        if storage[1] == block:
            return Ref(origin="own", index=storage[2])
        # A neighbour's allocation stays "earlier" even if distant blocks use it too: the trace may
        # stand for other blocks, where it means the allocation of their own neighbour.
        if storage[1:] in carried and abs(block - storage[1]) > 1:
            return Ref(origin="carried", index=carried[storage[1:]])
        return Ref(origin="earlier", index=storage[2], back=block - storage[1])

    reads: dict[Ref, int] = {}
    for storage, size in raw.reads.items():
        reads[ref(storage)] = reads.get(ref(storage), 0) + size
    live_through = {ref(storage) for storage in raw.live_through} - {
        ref(storage) for storage in raw.reads.keys() - raw.live_through
    }
    return _Resolved(
        events=tuple(None if storage is None else ref(storage) for storage in raw.events),
        reads=tuple(reads),
        read_sizes=tuple(reads.values()),
        live_through=tuple(number for number, read in enumerate(reads) if read in live_through),
    )


def _fit_block(
    raws: list[RecordedTrace], resolved: list[_Resolved], solver: _Solver
) -> AllocationTrace:
    """Fit rules to a block's recorded traces, which may differ in sizes and work only."""
    reference = resolved[0]
    for raw, sample_trace in zip(raws, resolved, strict=True):
        actions = (sample_trace.events, sample_trace.reads, sample_trace.live_through)
        end_state = (raw.retained, raw.matmul_at, raw.sampling_at)
        if actions != (reference.events, reference.reads, reference.live_through) or end_state != (
            raws[0].retained,
            raws[0].matmul_at,
            raws[0].sampling_at,
        ):
            raise Unlike("the samples do different things")
    columns = zip(*(raw.sizes for raw in raws), strict=True)
    read_columns = zip(*(item.read_sizes for item in resolved), strict=True)
    return AllocationTrace(
        sizes=tuple(solver.rule(column) for column in columns),
        events=reference.events,
        retained=raws[0].retained,
        reads=tuple(
            Read(ref=ref, size=solver.rule(column))
            for ref, column in zip(reference.reads, read_columns, strict=True)
        ),
        live_through=reference.live_through,
        matmul_at=raws[0].matmul_at,
        sampling_at=raws[0].sampling_at,
        flops=solver.estimate([raw.flops for raw in raws]),
        moved_bytes=solver.estimate([raw.moved_bytes for raw in raws]),
        host_bytes=solver.estimate([raw.host_bytes for raw in raws]),
        host_flops=solver.estimate([raw.host_flops for raw in raws]),
        launches=solver.estimate([raw.launches for raw in raws]),
    )


# The sets of monomials to try in each phase, in this order; k equals q in a prefill, q is 1 in a
# decode. Padded copies of masks depend on p; masks of a full sliding window on qq and not on k.
_BASES: dict[Phase, tuple[tuple[str, ...], ...]] = {
    "encode": (("1",), ("1", "q")),  # q is the number of images in the whole batch
    "release": (("1",),),
    "prefill": (("1", "q", "qq"), ("1", "p", "qp")),
    "extend": (("1", "q", "k", "qk"), ("1", "q", "p", "qp"), ("1", "q", "k", "qk", "qq")),
    "decode": (("1", "k"), ("1", "p")),
    "start": (("1", "n", "p", "g"),),
    "serve": (("1", "n", "p", "g"), ("1", "t", "r", "l", "n", "p"), ("1", "t", "l", "n", "rn")),
    **dict.fromkeys(
        TRAINING_PHASES,
        (("1", "q", "qq"), ("1", "p", "qp"), ("1", "r"), ("1", "s"), ("1", "t"), ("1", "q", "n")),
    ),
}
# The largest relative error of the estimated work of a step.
_TOLERANCE = 0.05


class _Solver:
    """Finds the rules of a phase from values at its samples."""

    def __init__(self, samples: Sequence[RecordedStep], shapes: list[FlashShape] | None) -> None:
        self._of_chunks: _Basis | None = None
        self._known: dict[tuple[int, ...], Rule | None] = {}
        self._samples, self._shapes = samples, [] if shapes is None else shapes
        if len(samples) == 1:
            # One call of a module: every rule is a constant, and there is nothing to check.
            self._bases = [_Basis([0], [[1]])]
            return
        is_batched = samples[0].batch > 1 and samples[0].phase not in IMAGE_PHASES
        trains = samples[0].phase in TRAINING_PHASES
        names = TRAINING_MONOMIALS if trains else MONOMIALS
        names = SERVING_MONOMIALS if samples[0].serving else names
        self._num_monomials = max(len(MONOMIALS), len(names))
        values = [sample.monomials for sample in samples]
        if trains:
            self._of_chunks = _make_basis(("1", "c"), names, values)
        self._bases = []
        for monomial_names in _BASES[samples[0].phase]:
            batched_names = (
                ["b" if name == "1" else f"b{name}" for name in monomial_names]
                if is_batched
                else []
            )
            basis = _make_basis((*monomial_names, *batched_names), names, values)
            if basis.is_checked:
                self._bases.append(basis)
        assert self._bases, "nothing is left to check a rule with"

    def rule(self, values: Sequence[int]) -> Rule:
        """Return the rule that has exactly these values at the samples."""
        if isinstance(values[0], PartBytes) and len(values) > 1:
            return self._part_rule(values[0], values)
        rule = self._chunk_rule(values) if isinstance(values[0], ChunkBytes) else None
        if rule is None:
            rule = self._solve_exactly(tuple(values))
        if rule is None:
            raise Unlike("a size is no polynomial of the step's sizes")
        return rule

    def _part_rule(self, reference: PartBytes, values: Sequence[int]) -> Rule:
        """Return the rule of flash attention's partial outputs; for a tower, their largest size."""
        # The number of splits is no polynomial in the sizes. So the profile keeps the shape, and
        # its `part_rows` is one more value after the monomials, with a coefficient in the rule.
        shape, row_bytes = reference.shape, reference.row_bytes
        expected = tuple(
            PartBytes.of(shape, row_bytes, sample.batch, sample.query, sample.keys)
            for sample in self._samples
        )
        if values != expected:
            return (float(max(values)),)
        if shape not in self._shapes:
            self._shapes.append(shape)
        return (*(0.0,) * (self._num_monomials + self._shapes.index(shape)), float(row_bytes))

    def _chunk_rule(self, values: Sequence[int]) -> Rule | None:
        """Return the rule a + b c of a size in a loss chunk; None if no such rule is checked."""
        basis = self._of_chunks
        return basis.solve(tuple(values)) if basis is not None and basis.is_checked else None

    def estimate(self, values: Sequence[int]) -> Rule:
        """Return the rule with these values, exactly or within `_TOLERANCE`."""
        rule = self._solve_exactly(tuple(values))
        if rule is None:
            nearest = (basis.nearest(values) for basis in reversed(self._bases))
            rule = next((close for close in nearest if close is not None), None)
        if rule is None:
            raise Unlike("the work is no polynomial of the step's sizes")
        return rule

    def _solve_exactly(self, values: tuple[int, ...]) -> Rule | None:
        """Return the rule with exactly these values, or None if no basis has one."""
        # The first basis that matches all samples gives the rule. Many tensors have the same sizes
        # at all samples, so most rules are found in `_known`.
        if values not in self._known:
            rules = (basis.solve(values) for basis in self._bases)
            self._known[values] = next((rule for rule in rules if rule is not None), None)
        return self._known[values]


# Interpolation with a check. As many linearly independent samples as monomials determine the
# coefficients; every further sample must agree. With the basis 1, q and three prompts:
#
#   q           9    19    36
#   bytes      82   102   136     c0 + 9 c1 = 82, c0 + 19 c1 = 102: c0 = 64, c1 = 2
#                                 check: 64 + 36 * 2 = 136
#
# If the size is min(q, 16), the first two samples give c1 = 0.7 and c0 = 2.7. The third then fails:
# 2.7 + 36 * 0.7 = 27.9, not 16, so the next basis is tried.
class _Basis:
    """A set of monomials, given by their indices (`places`), and their values at the samples."""

    def __init__(self, places: list[int], rows: list[list[int]]) -> None:
        self._places = places
        self._rows = rows
        # The first linearly independent rows.
        self._chosen: list[int] = list(_to_fractions(rows).transpose().rref()[1])
        # More samples than coefficients: the others check the rule.
        self.is_checked = len(self._chosen) == len(places) < len(rows)
        self._inverse: Any = None  # fractions, exactly

    def solve(self, values: tuple[int, ...]) -> Rule | None:
        """Return the rule with exactly these values at the samples, or None if there is none."""
        if self._inverse is None:
            chosen_rows = [self._rows[index] for index in self._chosen]
            self._inverse = _to_fractions(chosen_rows).inv().to_list()
        # The chosen samples determine the coefficients, in fractions, since floats may be off by a
        # byte. The rule must then equal the values of all samples.
        chosen_values = [int(values[index]) for index in self._chosen]
        solution = [
            sum(weight * value for weight, value in zip(row, chosen_values, strict=True) if weight)
            for row in self._inverse
        ]
        for row, value in zip(self._rows, values, strict=True):
            if sum(c * v for c, v in zip(solution, row, strict=True)) != value:
                return None
        return self._rule(solution)

    def nearest(self, values: Sequence[int]) -> Rule | None:
        """Return the rule with the least relative errors, or None if an error is too large."""
        if not all(values):
            return None
        # Least squares of relative errors: each row is divided by its value, so that all aim at 1.
        relative = np.array(self._rows, np.float64) / np.array(values, np.float64)[:, None]
        solution = np.linalg.lstsq(relative, np.ones(len(values)), rcond=None)[0]
        close = np.abs(relative @ solution - 1).max() <= _TOLERANCE
        return self._rule(solution) if close else None

    def _rule(self, coefficients: Iterable[Any]) -> Rule:
        """Return a rule with these coefficients at `places`, without trailing zeros."""
        rule = [0.0] * (max(self._places) + 1)
        for place, coefficient in zip(self._places, coefficients, strict=True):
            rule[place] = float(coefficient)
        while rule and not rule[-1]:
            rule.pop()
        return tuple(rule)


def _make_basis(
    names_used: Sequence[str], names: Sequence[str], values: Sequence[Sequence[int]]
) -> _Basis:
    """Return the basis of the monomials `names_used`, from `values` of all `names` per sample."""
    places = [names.index(name) for name in names_used if name in names]
    return _Basis(places, [[row[place] for place in places] for row in values])


def _to_fractions(rows: Sequence[Sequence[int]]) -> DomainMatrix:
    """Return rows of integers as a matrix of fractions."""
    return DomainMatrix.from_list([[QQ(value) for value in row] for row in rows], QQ)
