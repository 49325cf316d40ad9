"""Dynamic programme: the search over cuts of a run of blocks and orders of devices.

A state is the next block, how many devices of each group are used after it, and the group of the
first of them. Identical devices are counted, not told apart. So many devices, so many stages: a
state also tells the place from the end of the stage that is put before it, which counts from 1. It
knows costs as numbers only: not what they stand for, and not which of them are exact.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

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
class BlockRange:
    """The blocks from `start` up to, not with, `stop`, on the fleet's device of that index."""

    start: int
    stop: int
    device: int


Stages: TypeAlias = tuple[BlockRange, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """The suffixes of so many stages, on sets of so many devices.

    `costs` are the least ones of the blocks to the end, from the first one of the set on, by the
    group of the first stage; one for all groups where that doesn't matter.
    """

    useds: Ints  # [sets, groups]: how many devices of each group are used
    codes: Ints  # [sets]: a number for each set, in order
    firsts: Ints  # [sets]: the first block that each may begin at
    costs: Floats  # [sets, groups, blocks]


class Programme:
    """The placements of least cost, under the costs given.

    `tables` has for each place from the end, and there for each group, the cost of a stage by start
    and stop, [num_blocks + 1, num_blocks + 1]; infinite where it can't be. The last place stands
    for all before it. `groups` are the devices of each group, identical ones, in the user's order.
    `transfers`, [groups, groups, num_blocks + 1], is the cost of the cut before each block, from a
    device of one group to one of another. With `slowest` a placement costs as much as its dearest
    part, instead of all parts together. `num_stages` says how many stages are allowed.
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
        # No stage is longer.
        self._lengths = np.array([max(map(_longest, group)) for group in zip(*tables, strict=True)])
        self._largest = np.argsort(-self._lengths, kind="stable")
        self._num_members = np.array([len(members) for members in groups])
        # What one more device of each group adds to the number of a set.
        numbers = (len(members) + 1 for members in groups)
        *codes, most = itertools.accumulate(numbers, operator.mul, initial=1)
        self._codes = np.array(codes, object if most >> 63 else np.int64)
        self._known: list[list[Floats | None]] = [[None for _ in groups] for _ in tables]
        shape = (self._num_blocks + 1, self._num_blocks + 1)
        self._stages = np.triu(np.ones(shape, np.bool_), 1)
        # [place, group, start, stop]
        self._tables = np.full((len(tables), len(groups), *shape), np.inf)
        self._first_layer = _Layer(
            useds=np.zeros((1, len(groups)), np.int64),
            codes=np.zeros(1, self._codes.dtype),
            firsts=np.array([self._num_blocks]),
            costs=np.full(
                (1, 1 if transfers is None else len(groups), 1), -np.inf if slowest else 0.0
            ),
        )
        self.revise(tables)

    def revise(self, tables: Sequence[Sequence[Floats]]) -> None:
        """Change the costs of stages; none becomes possible that wasn't."""
        for place, of_place in enumerate(tables):
            for group, table in enumerate(of_place):
                if table is not self._known[place][group]:
                    self._known[place][group] = table
                    np.copyto(self._tables[place, group], table, where=self._stages)

    def fewest(self) -> tuple[Stages, float] | None:
        """The best placement among those of as few stages as can be, and its cost."""
        for number in self._num_stages:
            if (best := self._best_of(number)) is not None:
                return best
            # Nor will there be one after a revision.
            self._num_stages = range(number + 1, self._num_stages.stop)
        return None

    def best(self) -> tuple[Stages, float] | None:
        """The best placement of any allowed number of stages, and its cost."""
        most, optima = self._num_stages.stop - 1, list[tuple[Stages, float]]()
        self._layers = [self._first_layer]
        for number in range(1, most + 1):
            if number > 1:
                self._extend(most)
            if number in self._num_stages and (best := self._best_now(number)) is not None:
                optima.append(best)
        return min(optima, key=lambda best: best[1], default=None)

    def _best_of(self, number: int) -> tuple[Stages, float] | None:
        """The best placement of so many stages."""
        lengths = np.sort(np.repeat(self._lengths, self._num_members))
        if sum(lengths[-number:]) < self._num_blocks:
            return None
        # One layer for each number of stages of a suffix.
        self._layers = [self._first_layer]
        while len(self._layers) < number:
            self._extend(number)
        return self._best_now(number)

    def _best_now(self, number: int) -> tuple[Stages, float] | None:
        best = self._best_set(number)
        return None if best is None else (self._trace(best[0]), best[1])

    def _extend(self, number: int) -> None:
        """Put one more stage before every suffix of the last layer, towards so many at most."""
        # Every (suffix, group of the new stage) is a pair, and every pair goes into the set of
        # devices that it uses then. Pairs are gone through in batches that fit the cache, each
        # compared over all starts and stops at once.
        last = self._layers[-1]
        _refuse_too_many(self._groups, len(self._layers))
        rows, groups = np.nonzero(last.useds < self._num_members)
        codes, some, sets = np.unique(
            last.codes[rows] + self._codes[groups], return_index=True, return_inverse=True
        )
        useds = last.useds[rows[some]]
        useds[np.arange(len(some)), groups[some]] += 1
        firsts, widths = self._starts(useds, number - len(self._layers))
        ready = widths[sets] > 0
        rows, groups, sets = rows[ready], groups[ready], sets[ready]
        num_heads, offsets = last.costs.shape[1], np.arange(widths.max(initial=0))
        costs = np.full(len(codes) * num_heads * len(offsets), np.inf)
        size = max(1, _MOST_CELLS // max(1, len(offsets) * last.costs.shape[2]))
        for part in (slice(start, start + size) for start in range(0, len(rows), size)):
            group, into = groups[part], sets[part]
            # Those behind the last block are none.
            starts = np.minimum(firsts[into, None] + offsets, self._num_blocks)
            at = (into * num_heads + group * (num_heads > 1)) * len(offsets)
            np.minimum.at(costs, at[:, None] + offsets, self._before(rows[part], group, starts))
        costs = costs.reshape(len(codes), num_heads, len(offsets))
        possible = costs.min(axis=(1, 2), initial=np.inf) < np.inf
        self._layers.append(
            _Layer(
                useds=useds[possible],
                codes=codes[possible],
                firsts=firsts[possible],
                costs=costs[possible],
            )
        )

    def _starts(self, useds: Ints, left: int) -> tuple[Ints, Ints]:
        """[sets]: the first block that stages on these devices may begin at, and how many may.

        What is before them must fit so many of the largest other devices as are left for it.
        """
        firsts = np.maximum(0, self._num_blocks - useds @ self._lengths)
        free = (self._num_members - useds)[:, self._largest]
        taken = np.clip(left - (np.cumsum(free, axis=1) - free), 0, free)
        lasts = np.minimum(self._num_blocks - 1, taken @ self._lengths[self._largest])
        return firsts, lasts - firsts + 1

    def _before(self, rows: Ints, groups: Ints, starts: Ints) -> Floats:
        """[pairs, starts]: least cost with a stage of a group before a suffix of the last layer."""
        layer = self._layers[-1]
        stops = self._stops(layer, rows)
        tables = self._tables_at(len(self._layers))
        # By one number each, which is several times as quick as by three.
        rows_of_table = (groups[:, None] * tables.shape[1] + starts) * tables.shape[2]
        costs = tables.take(rows_of_table[:, :, None] + stops[:, None])
        self._join(costs, self._after(layer, rows, groups, stops)[:, None], out=costs)
        return np.asarray(costs.min(axis=2))

    def _stops(self, layer: _Layer, rows: Ints) -> Ints:
        """[pairs, stops]: where a stage before a suffix may stop; behind the last block is none."""
        offsets = np.arange(layer.costs.shape[2])
        return np.asarray(np.minimum(layer.firsts[rows, None] + offsets, self._num_blocks))

    def _after(self, layer: _Layer, rows: Ints, groups: Ints, stops: Ints) -> Floats:
        """[pairs, stops]: least cost of what comes after a stage, transfers included."""
        suffixes: Floats = layer.costs[rows]
        if self._transfers is None or layer is self._first_layer:
            return suffixes[:, 0]
        heads = np.arange(len(self._groups))
        links = self._transfers[groups[:, None, None], heads[:, None], stops[:, None, :]]
        least: Floats = self._join(links, suffixes).min(axis=1)
        return least

    def _tables_at(self, place: int) -> Floats:
        """[group, start, stop]: the costs of stages at a place from the end."""
        tables: Floats = self._tables[min(place, len(self._tables)) - 1]
        return tables

    def _best_set(self, number: int) -> tuple[list[int], float] | None:
        """How many devices of each group the best placement of so many stages uses; its cost."""
        layer = self._layers[number - 1]
        if not len(layer.useds):
            return None
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
        stages: list[BlockRange] = []
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
            stages.append(BlockRange(start=start, stop=int(stop), device=device))
            start = int(stop)
        return tuple(stages)

    def _next(self, place: int, rows: Ints, groups: Ints, start: int) -> tuple[Floats, Ints]:
        """[pairs]: least cost from `start` on, with a stage of a group there, and where it stops.

        That is a stage at a place from the end, before suffixes of as many stages less one.
        """
        layer = self._layers[place - 1]
        stops = self._stops(layer, rows)
        costs_here = self._tables_at(place)[groups[:, None], start, stops]
        costs = self._join(costs_here, self._after(layer, rows, groups, stops))
        best = costs.argmin(axis=1)
        pairs = np.arange(len(rows))
        return costs[pairs, best], stops[pairs, best]

    def _devices_of(self, used: Sequence[int]) -> list[int]:
        return sorted(
            device
            for members, count in zip(self._groups, used, strict=True)
            for device in members[:count]
        )


def _longest(table: Floats) -> int:
    """The length of the longest stage that can be, and 1 where none can."""
    possible = np.isfinite(table)
    last = table.shape[1] - 1 - np.argmax(possible[:, ::-1], axis=1)
    lengths = np.where(possible.any(axis=1), last - np.arange(len(table)), 1)
    return max(1, int(lengths.max()))


def _refuse_too_many(groups: Sequence[tuple[int, ...]], num_devices: int) -> None:
    """Refuse before the work when there are too many sets of so many devices."""
    if sum(map(len, groups)) < MAX_SETS.bit_length():
        return  # no more than all sets together
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
