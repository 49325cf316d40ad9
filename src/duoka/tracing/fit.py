"""Fitting: traces recorded at several sizes become a trace with rules.

A rule is a polynomial that meets every recorded number exactly, found over fractions: floating
point would leave a byte open. Only work (FLOPs, traffic) may be met nearly.
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
    """Raised for recorded traces of different regimes, without a common trace."""


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A recorded step and its sizes."""

    phase: Phase
    batch: int
    query: int
    keys: int
    recorded: RecordedPass
    serving: tuple[int, ...] = ()

    @property
    def is_aligned(self) -> bool:
        """True where keys are a multiple of `ALIGNED_TOKENS`."""
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

    The shapes of flash attention that are met are added to those of the profile.

    Every size must be met exactly at every sample, and work nearly. There are more samples than
    coefficients, so the rest of them checks a rule at sizes that it was not made from.
    """
    reference = samples[0].recorded
    if any(sample.recorded.model_blocks != reference.model_blocks for sample in samples):
        raise Unlike("different blocks are alike")
    solver = _Solver(samples, shapes)
    carried = sorted({home for sample in samples for home in _carried(sample.recorded)})
    numbers = {home: index for index, home in enumerate(carried)}
    traces: list[AllocationTrace] = []
    for block, model_block in enumerate(reference.model_blocks):
        if model_block != block:
            traces.append(traces[model_block])
            continue
        raws = [sample.recorded.traces[block] for sample in samples]
        resolved = [
            _resolve(raw, block, sample.recorded.step, numbers)
            for raw, sample in zip(raws, samples, strict=True)
        ]
        traces.append(_trace(raws, resolved, solver))
    return traces, tuple(carried)


@dataclass(frozen=True, slots=True)
class _Resolved:
    events: tuple[Ref | None, ...]
    reads: tuple[Ref, ...]
    read_sizes: tuple[int, ...]
    live_through: tuple[int, ...]


def _carried(recorded: RecordedPass) -> set[tuple[int, int]]:
    """Return storages of this step with uses beyond the neighbours of their block."""
    return {
        (maker, index)
        for block, raw in enumerate(recorded.traces)
        if recorded.model_blocks[block] == block
        for number, maker, index in raw.ids()
        if number == recorded.step and abs(block - maker) > 1
    }


# Ids say where a storage was allocated, references where it is seen from the block, so that equal
# blocks have equal traces. Ids in block 5 of step 7, and their references:
#
#   (7, 5, 2)    own 2                    allocation 2 of this block
#   (7, 4, 6)    earlier 6, back 1        a neighbour's; with back -1 a gradient of block 6
#   (7, 0, 3)    carried                  a mask of block 0, used beyond its neighbours
#   (6, 5, 1)    kept, by its slot        the block's KV cache
#   (6, 0, 1)    input 1, back 5          what another block has kept: features of images
def _resolve(
    raw: RecordedTrace, block: int, number: int, carried: dict[tuple[int, int], int]
) -> _Resolved:
    def ref(home: AllocId) -> Ref:
        if home[0] != number:
            slot = raw.slots.get(home)
            if slot is not None:
                return Ref(origin="kept", index=slot)
            back = block - home[1]
            return Ref(origin="input", index=home[2] if back else 0, back=back)
        if home[1] == block:
            return Ref(origin="own", index=home[2])
        # A neighbour's is told from here even if others far off use it too: the trace may stand for
        # other blocks, whose own neighbour is meant.
        if home[1:] in carried and abs(block - home[1]) > 1:
            return Ref(origin="carried", index=carried[home[1:]])
        return Ref(origin="earlier", index=home[2], back=block - home[1])

    reads: dict[Ref, int] = {}
    for home, size in raw.reads.items():
        reads[ref(home)] = reads.get(ref(home), 0) + size
    live_through = {ref(home) for home in raw.live_through} - {
        ref(home) for home in raw.reads.keys() - raw.live_through
    }
    return _Resolved(
        events=tuple(None if home is None else ref(home) for home in raw.events),
        reads=tuple(reads),
        read_sizes=tuple(reads.values()),
        live_through=tuple(number for number, read in enumerate(reads) if read in live_through),
    )


def _trace(
    raws: list[RecordedTrace], resolved: list[_Resolved], solver: _Solver
) -> AllocationTrace:
    reference = resolved[0]
    for raw, sample_trace in zip(raws, resolved, strict=True):
        did = (sample_trace.events, sample_trace.reads, sample_trace.live_through)
        end_state = (raw.retained, raw.matmul_at)
        if did != (reference.events, reference.reads, reference.live_through) or end_state != (
            raws[0].retained,
            raws[0].matmul_at,
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
        flops=solver.estimate([raw.flops for raw in raws]),
        moved_bytes=solver.estimate([raw.moved_bytes for raw in raws]),
        launches=solver.estimate([raw.launches for raw in raws]),
    )


# What sizes depend on in each phase, tried in this order; k is q in a prefill, q is 1 in a decode.
# Padded copies of masks depend on p, masks of a full window on qq and no k; arithmetic on both.
_BASES: dict[Phase, tuple[tuple[str, ...], ...]] = {
    "encode": (("1",), ("1", "q")),  # q is images, of the whole batch
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
# How far the estimated work of a step may be off.
_TOLERANCE = 0.05


class _Solver:
    """Solves for the rules of a phase from the values at its samples."""

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
        values = [sample.monomials for sample in samples]
        if trains:
            self._of_chunks = _basis(("1", "c"), names, values)
        self._bases = []
        for monomial_names in _BASES[samples[0].phase]:
            batched_names = (
                ["b" if name == "1" else f"b{name}" for name in monomial_names]
                if is_batched
                else []
            )
            basis = _basis((*monomial_names, *batched_names), names, values)
            if basis.is_checked:
                self._bases.append(basis)
        assert self._bases, "nothing is left to check a rule with"

    def rule(self, values: Sequence[int]) -> Rule:
        """Return the rule with these values at the samples."""
        if isinstance(values[0], PartBytes) and len(values) > 1:
            return self._part_rule(values[0], values)
        rule = self._chunk_rule(values) if isinstance(values[0], ChunkBytes) else None
        if rule is None:
            rule = self._exact(tuple(values))
        if rule is None:
            raise Unlike("a size is no polynomial of the step's sizes")
        return rule

    def _part_rule(self, reference: PartBytes, values: Sequence[int]) -> Rule:
        """Return the rule of flash attention's parts; in a tower, a constant for the most."""
        # How many splits there are is no polynomial. So the profile keeps the shape, `part_rows` of
        # it is one more value beside the monomials, and the rule has a coefficient for that value.
        shape, row_bytes = reference.shape, reference.row_bytes
        expected = tuple(
            PartBytes.of(shape, row_bytes, sample.batch, sample.query, sample.keys)
            for sample in self._samples
        )
        if values != expected:
            return (float(max(values)),)
        if shape not in self._shapes:
            self._shapes.append(shape)
        return (*(0.0,) * (len(MONOMIALS) + self._shapes.index(shape)), float(row_bytes))

    def _chunk_rule(self, values: Sequence[int]) -> Rule | None:
        """Return the rule of a loss chunk's size; None where all chunks are full."""
        basis = self._of_chunks
        return basis.solve(tuple(values)) if basis is not None and basis.is_checked else None

    def estimate(self, values: Sequence[int]) -> Rule:
        """Return the rule with these values, or nearly: they may be sums over several masks."""
        rule = self._exact(tuple(values))
        if rule is None:
            nearest = (basis.nearest(values) for basis in reversed(self._bases))
            rule = next((close for close in nearest if close is not None), None)
        if rule is None:
            raise Unlike("the work is no polynomial of the step's sizes")
        return rule

    def _exact(self, values: tuple[int, ...]) -> Rule | None:
        # The first basis that meets all samples has the rule. Many tensors have equal sizes at all
        # samples, so that most columns have been solved before.
        if values not in self._known:
            rules = (basis.solve(values) for basis in self._bases)
            self._known[values] = next((rule for rule in rules if rule is not None), None)
        return self._known[values]


# Interpolation with a check. As many samples as monomials, linearly independent, decide on the
# coefficients; every other sample must agree. With the basis 1, q and three prompts:
#
#   q           9    19    36
#   bytes      82   102   136     c0 + 9 c1 = 82, c0 + 19 c1 = 102: c0 = 64, c1 = 2
#                                 check: 64 + 36 * 2 = 136
#
# Of min(q, 16) the first two give c1 = 0.7, c0 = 2.7; 27.9 isn't 16, and the next basis is tried.
class _Basis:
    """Some of `MONOMIALS`, by their places, and their values at the samples."""

    def __init__(self, places: list[int], rows: list[list[int]]) -> None:
        self._places = places
        self._rows = rows
        # The first rows that are linearly independent.
        self._chosen: list[int] = list(_exact(rows).transpose().rref()[1])
        # More samples than coefficients: the others check the rule.
        self.is_checked = len(self._chosen) == len(places) < len(rows)
        self._inverse: Any = None  # fractions, exactly

    def solve(self, values: tuple[int, ...]) -> Rule | None:
        """Return the rule with these values at the samples, or None."""
        if self._inverse is None:
            chosen_rows = [self._rows[index] for index in self._chosen]
            self._inverse = _exact(chosen_rows).inv().to_list()
        # As many samples as coefficients decide on the coefficients, in fractions: a rule in floats
        # would leave a byte open. The other samples must follow from them.
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
        rule = [0.0] * (max(self._places) + 1)
        for place, coefficient in zip(self._places, coefficients, strict=True):
            rule[place] = float(coefficient)
        while rule and not rule[-1]:
            rule.pop()
        return tuple(rule)


def _basis(
    names_used: Sequence[str], names: Sequence[str], values: Sequence[Sequence[int]]
) -> _Basis:
    """Return the basis of the chosen names, with their values at the samples."""
    places = [names.index(name) for name in names_used if name in names]
    return _Basis(places, [[row[place] for place in places] for row in values])


def _exact(rows: Sequence[Sequence[int]]) -> DomainMatrix:
    """Return a matrix of fractions."""
    return DomainMatrix.from_list([[QQ(value) for value in row] for row in rows], QQ)
