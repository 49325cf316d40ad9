"""Programme: the dynamic programme over cuts of a run of blocks and orders of devices.

A state is the next block, how many devices of each group are used after it, and the group of the
first of them. Identical devices are counted, not told apart. So many devices, so many stages: a
state also tells the place from the end of the stage that is put before it, which counts from 1. It
knows costs as numbers only: not what they stand for, and not which of them are exact.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from duoka.errors import UsageError

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]

# Sets of equally many devices. More than this takes minutes; 16 devices that all differ have
# 12,870 at most.
MAX_SETS = 1 << 14
# Numbers that are compared at a time: as many as a processor's cache holds.
_MOST_CELLS = 1 << 18


class UnsearchableError(UsageError):
    """Devices that are too many, or too different, for a placement on them to be searched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The blocks from `start` up to, not with, `stop`, on the fleet's device of that index."""

    start: int
    stop: int
    device: int


Stages: TypeAlias = tuple[Stage, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """The suffixes of so many stages, on sets of so many devices.

    Parameters
    ----------
    useds : [sets, groups]
        How many devices of each group are used.
    codes : [sets]
        A number for each set, in order.
    costs : [sets, groups, num_blocks + 1]
        Least cost of the blocks from each one to the end, by the group of the first stage; one
        for all groups where that doesn't matter.
    """

    useds: Ints
    codes: Ints
    costs: Floats


class Programme:
    """The placements of least cost, under the costs given.

    Parameters
    ----------
    tables : sequence of sequence of [num_blocks + 1, num_blocks + 1]
        For each place from the end, and there for each group, the cost of a stage by start and
        stop; infinite where it can't be. The last place stands for all before it.
    groups : sequence of tuple of int
        The devices of each group: identical ones, in the user's order.
    transfers : [groups, groups, num_blocks + 1], optional
        Cost of the cut before each block, from a device of one group to one of another.
    slowest : bool
        A placement costs as much as its dearest part, instead of all parts together.
    num_stages : range
        How many stages are allowed.
    """

    def __init__(
        self,
        tables: Sequence[Sequence[Floats]],
        groups: Sequence[tuple[int, ...]],
        *,
        transfers: Floats | None = None,
        slowest: bool,
        num_stages: range,
    ) -> None:
        self._join = np.maximum if slowest else np.add
        self._groups = groups
        self._transfers = transfers
        self._num_stages = num_stages
        self._num_blocks = tables[0][0].shape[0] - 1
        # Kept by start and length: the long stages, which fit nowhere, are left out.
        self._lengths = np.array([max(map(_longest, each)) for each in zip(*tables, strict=True)])
        self._num_members = np.array([len(each) for each in groups])
        # What one more device of each group adds to the number of a set.
        numbers = (len(each) + 1 for each in groups)
        *codes, most = itertools.accumulate(numbers, operator.mul, initial=1)
        self._codes = np.array(codes, object if most >> 63 else np.int64)
        shape = (len(tables), len(groups), self._num_blocks + 1, int(self._lengths.max()))
        # [place, group, start, length - 1]: none starts behind the last block.
        self._bands = np.full(shape, np.inf)
        self._tables: list[list[Floats | None]] = [[None for _ in groups] for _ in tables]
        self._first_layer = _Layer(
            useds=np.zeros((1, len(groups)), np.int64),
            codes=np.zeros(1, self._codes.dtype),
            costs=np.full(
                (1, 1 if transfers is None else len(groups), self._num_blocks + 1), np.inf
            ),
        )
        self._first_layer.costs[..., -1] = -np.inf if slowest else 0.0
        self.revise(tables)

    def revise(self, tables: Sequence[Sequence[Floats]]) -> None:
        """Change the costs of stages; none becomes possible that wasn't."""
        for place, here in enumerate(tables):
            for group, table in enumerate(here):
                if table is not self._tables[place][group]:
                    self._tables[place][group] = table
                    self._bands[place, group, :-1] = _band(table, self._bands.shape[-1])

    def fewest(self) -> tuple[Stages, float] | None:
        """The best placement among those of as few stages as can be, and its cost."""
        for number in self._num_stages:
            if (found := self._best_of(number)) is not None:
                return found
            # Nor will there be one after a revision.
            self._num_stages = range(number + 1, self._num_stages.stop)
        return None

    def best(self) -> tuple[Stages, float] | None:
        """The best placement of any allowed number of stages, and its cost."""
        most, found = self._num_stages.stop - 1, list[tuple[Stages, float]]()
        self._layers = [self._first_layer]
        for number in range(1, most + 1):
            if number > 1:
                self._extend(most)
            if number in self._num_stages and (each := self._found(number)) is not None:
                found.append(each)
        return min(found, key=lambda each: each[1], default=None)

    def _best_of(self, number: int) -> tuple[Stages, float] | None:
        """The best placement of so many stages."""
        lengths = np.sort(np.repeat(self._lengths, self._num_members))
        if sum(lengths[-number:]) < self._num_blocks:
            return None
        # One layer for each number of stages of a suffix.
        self._layers = [self._first_layer]
        while len(self._layers) < number:
            self._extend(number)
        return self._found(number)

    def _found(self, number: int) -> tuple[Stages, float] | None:
        found = self._best_set(number)
        return None if found is None else (self._trace(found[0]), found[1])

    def _extend(self, number: int) -> None:
        """Put one more stage before every suffix of the last layer, towards so many at most."""
        last = self._layers[-1]
        _refuse_too_many(self._groups, len(self._layers))
        into = last.useds[:, None] + np.eye(len(self._groups), dtype=np.int64)
        first, width = self._starts(into, number - len(self._layers))
        rows, groups = np.nonzero((last.useds < self._num_members) & (width > 0))
        codes, some, targets = np.unique(
            last.codes[rows] + self._codes[groups], return_index=True, return_inverse=True
        )
        shape = (len(codes), *last.costs.shape[1:])
        flat = np.full(math.prod(shape), np.inf)
        most = int(width[rows, groups].max(initial=0))
        size = max(1, _MOST_CELLS // max(1, most * self._bands.shape[-1]))
        for start in range(0, len(rows), size):
            part = slice(start, start + size)
            row, group = rows[part], groups[part]
            # Those behind the last block are none.
            starts = np.minimum(first[row, group, None] + np.arange(most), self._num_blocks)
            at = (targets[part] * shape[1] + group * (shape[1] > 1)) * shape[2]
            np.minimum.at(flat, at[:, None] + starts, self._before(row, group, starts))
        costs = flat.reshape(shape)
        useds = into[rows, groups][some]
        possible = costs.min(axis=(1, 2), initial=np.inf) < np.inf
        self._layers.append(
            _Layer(useds=useds[possible], codes=codes[possible], costs=costs[possible])
        )

    def _starts(self, useds: Ints, left: int) -> tuple[Ints, Ints]:
        """Where stages on these devices may begin: the first block, and how many from there on.

        What is before them must fit so many of the largest other devices as are left for it.
        """
        first = np.maximum(0, self._num_blocks - useds @ self._lengths)
        largest = np.argsort(-self._lengths, kind="stable")
        free = (self._num_members - useds)[..., largest]
        taken = np.clip(left - (np.cumsum(free, axis=-1) - free), 0, free)
        last = np.minimum(self._num_blocks - 1, taken @ self._lengths[largest])
        return first, last - first + 1

    def _before(self, rows: Ints, groups: Ints, starts: Ints) -> Floats:
        """[pairs, starts]: least cost with a stage of a group before a suffix of the last layer.

        Parameters
        ----------
        rows, groups : [pairs]
        starts : [pairs, starts]
        """
        place, length = len(self._layers), self._bands.shape[-1]
        after = np.full((len(rows), self._num_blocks + 1 + length), np.inf)
        after[:, : self._num_blocks] = self._after(self._layers[-1], rows, groups)[:, 1:]
        pairs = np.arange(len(rows))[:, None]
        costs = self._bands_at(place)[groups[:, None], starts]
        self._join(costs, _windows(after, length)[pairs, starts], out=costs)
        return np.asarray(costs.min(axis=2))

    def _after(self, layer: _Layer, rows: Ints, groups: Ints) -> Floats:
        """[pairs, num_blocks + 1]: least cost of what comes after a stage, transfers included."""
        suffixes: Floats = layer.costs[rows]
        if self._transfers is None or layer is self._first_layer:
            return suffixes[:, 0]
        least: Floats = self._join(self._transfers[groups], suffixes).min(axis=1)
        return least

    def _bands_at(self, place: int) -> Floats:
        """[group, start, length - 1]: the costs of stages at a place from the end."""
        bands: Floats = self._bands[min(place, len(self._bands)) - 1]
        return bands

    def _best_set(self, number: int) -> tuple[list[int], float] | None:
        """How many devices of each group the best placement of so many stages uses; its cost."""
        layer = self._layers[number - 1]
        rows, groups = np.nonzero(layer.useds < self._num_members)
        costs, _ = self._next(number, rows, groups, 0)
        cost = float(costs.min(initial=np.inf))
        if cost == np.inf:
            return None
        best = costs == cost
        useds = layer.useds[rows[best]]
        useds[np.arange(len(useds)), groups[best]] += 1
        # Of equally good sets of devices the one that the user named first.
        return min(useds.tolist(), key=self._devices_of), cost

    def _trace(self, used: Sequence[int]) -> Stages:
        """The best placement on these devices, from the first block on."""
        stages: list[Stage] = []
        left, start, before = np.array(used), 0, -1
        while start < self._num_blocks:
            place = int(left.sum())
            layer = self._layers[place - 1]
            groups = np.flatnonzero(left)
            codes = left @ self._codes - self._codes[groups]
            rows = np.minimum(np.searchsorted(layer.codes, codes), len(layer.codes) - 1)
            known = layer.codes[rows] == codes
            rows, groups = rows[known], groups[known]
            costs, stops = self._next(place, rows, groups, start)
            if self._transfers is not None and stages:
                costs = self._join(self._transfers[before, groups, start], costs)
            devices = [self._groups[group][used[group] - left[group]] for group in groups]
            # Of equally good devices the one that the user named first.
            _, device, stop, before = min(zip(costs, devices, stops, groups, strict=True))
            left[before] -= 1
            stages.append(Stage(start=start, stop=int(stop), device=device))
            start = int(stop)
        return tuple(stages)

    def _next(self, place: int, rows: Ints, groups: Ints, start: int) -> tuple[Floats, Ints]:
        """[pairs]: least cost from `start` on, with a stage of a group there, and where it stops.

        That is a stage at a place from the end, before suffixes of as many stages less one.
        """
        after = self._after(self._layers[place - 1], rows, groups)[:, start + 1 :]
        after = after[:, : self._bands.shape[-1]]
        own = self._bands_at(place)[groups, start, : after.shape[1]]
        costs = self._join(own, after)
        return costs.min(axis=1), start + 1 + costs.argmin(axis=1)

    def _devices_of(self, used: Sequence[int]) -> list[int]:
        return sorted(
            device
            for members, count in zip(self._groups, used, strict=True)
            for device in members[:count]
        )


def _longest(table: Floats) -> int:
    """The length of the longest stage that can be, and 1 where none can."""
    starts, stops = np.nonzero(np.isfinite(table))
    return max(1, int(np.max(stops - starts, initial=0)))


def _band(table: Floats, longest: int) -> Floats:
    """From [start, stop] to [start, length - 1], without the start behind the last block."""
    num_blocks = table.shape[0] - 1
    padded = np.full((num_blocks, num_blocks + 1 + longest), np.inf)
    padded[:, : num_blocks + 1] = table[:-1]
    down, right = padded.strides
    return as_strided(padded[:, 1:], (num_blocks, longest), (down + right, right), writeable=False)


def _windows(after: Floats, length: int) -> Floats:
    """[pairs, blocks, length]: from [pairs, blocks + length - 1], so many of them from each on."""
    down, right = after.strides
    shape = (len(after), after.shape[1] - length + 1, length)
    return as_strided(after, shape, (down, right, right), writeable=False)


def _refuse_too_many(groups: Sequence[tuple[int, ...]], num_devices: int) -> None:
    """Refuse before the work when there are too many sets of so many devices."""
    num_sets = [1]
    for members in groups:
        terms = [0] * (len(num_sets) + len(members))
        for size, count in enumerate(num_sets):
            for more in range(len(members) + 1):
                terms[size + more] += count
        num_sets = terms
    if num_sets[num_devices] > MAX_SETS:
        raise UnsearchableError(
            f"{sum(map(len, groups))} devices of {len(groups)} different kinds give "
            f"{num_sets[num_devices]} sets of {num_devices}; at most {MAX_SETS} can be searched",
            hint="name fewer devices, or give similar ones equal budgets",
        )
