"""Programme: the dynamic programme over cuts of a run of blocks and orders of devices.

A state is the next block, how many devices of each group are used after it, and the group of the
first of them. Identical devices are counted, not told apart. So many devices, so many stages: a
state also tells the place from the end of the stage that is put before it, which counts from 1. It
knows costs as numbers only: not what they stand for, and not which of them are exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from duoka.errors import UsageError

Floats: TypeAlias = npt.NDArray[np.float64]
Used: TypeAlias = tuple[int, ...]
"""How many devices of each group are used."""

# Sets of equally many devices. More than this takes minutes; 16 devices that all differ have
# 12,870 at most.
MAX_SETS = 1 << 14
# Numbers that are compared at a time: as many as a processor's cache holds.
_MOST_CELLS = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The blocks from `start` up to, not with, `stop`, on the fleet's device of that index."""

    start: int
    stop: int
    device: int


Stages: TypeAlias = tuple[Stage, ...]


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
        self._lengths = [max(map(_longest, each)) for each in zip(*tables, strict=True)]
        self._longest = max(self._lengths)
        by_device = zip(self._lengths, groups, strict=True)
        self._most = sorted((length for length, each in by_device for _ in each), reverse=True)
        self.revise(tables)
        end = np.full(self._num_blocks + 1, np.inf)
        end[-1] = -np.inf if slowest else 0.0
        # One layer for each number of stages: devices used → group of the first stage (-1 when
        # it doesn't matter) → least cost of the blocks from each one to the end.
        self._layers: list[dict[Used, dict[int, Floats]]] = [{(0,) * len(groups): {-1: end}}]

    def fewest(self) -> tuple[Stages, float] | None:
        """The best placement among those of as few stages as can be, and its cost."""
        return next(self._best_by_number(), None)

    def best(self) -> tuple[Stages, float] | None:
        """The best placement of any allowed number of stages, and its cost."""
        return min(self._best_by_number(), key=lambda found: found[1], default=None)

    def walk(self) -> tuple[Stages, float] | None:
        """The placement of the last number of stages that seems best after revisions.

        Every choice takes the revised cost of its stage into account, but not what revisions
        make of the stages after it.
        """
        cost, used = self._finish()
        stages = self._trace(used) if cost < np.inf else ()
        return (stages, cost) if stages else None

    def revise(self, tables: Sequence[Sequence[Floats]]) -> None:
        """Change the costs of stages for later walks; none becomes possible that wasn't."""
        self._bands = [[_band(table, self._longest) for table in here] for here in tables]

    def _best_by_number(self) -> Iterator[tuple[Stages, float]]:
        for num_stages in range(1, self._num_stages.stop):
            if num_stages > 1:
                self._extend(num_stages - 1)
            if num_stages in self._num_stages and (found := self.walk()) is not None:
                yield found

    def _extend(self, num_stages: int) -> None:
        """Put one more stage before every suffix of the last layer."""
        _refuse_too_many(self._groups, num_stages)
        layer: dict[Used, dict[int, Floats]] = {}
        bands = self._bands_at(num_stages)
        states = [*self._layers[-1].items()]
        for group, members in enumerate(self._groups):
            ready = [state for state in states if state[0][group] < len(members)]
            first = -1 if self._transfers is None else group
            for (rest, _), cost in zip(
                ready, self._before(group, bands[group], ready), strict=True
            ):
                if cost.min() == np.inf:
                    continue
                firsts = layer.setdefault(_with_one_more(rest, group), {})
                firsts[first] = np.minimum(firsts[first], cost) if first in firsts else cost
        self._layers.append(layer)

    def _before(
        self, group: int, band: Floats, states: Sequence[tuple[Used, dict[int, Floats]]]
    ) -> Iterator[Floats]:
        """Least cost from each block on with a stage of `group` before each of the states."""
        length, stages = self._lengths[group], len(self._layers)
        # What is before the stage must fit as many of the largest devices as are left for it.
        last = sum(self._most[: max(0, self._num_stages.stop - 1 - stages)])
        first = self._num_blocks - sum(self._most[:stages])
        rows = slice(max(0, first), min(self._num_blocks, last + 1))
        band = band[rows, :length]
        size = max(1, _MOST_CELLS // max(1, band.size))
        for some in (states[start : start + size] for start in range(0, len(states), size)):
            after = np.full((len(some), self._num_blocks + length - 1), np.inf)
            for row, (_, suffixes) in zip(after, some, strict=True):
                row[: self._num_blocks] = self._after(group, suffixes)[1:]
            windows = np.lib.stride_tricks.sliding_window_view(after, length, axis=1)
            costs = np.full((len(some), self._num_blocks + 1), np.inf)
            np.min(self._join(band, windows[:, rows]), axis=2, out=costs[:, rows])
            yield from costs

    def _finish(self) -> tuple[float, Used]:
        """Put the first stage before the last layer: the least cost, and the devices in use."""
        best: tuple[float, list[int], Used] = (np.inf, [], ())
        for rest, suffixes in self._layers[-1].items():
            for group, members in enumerate(self._groups):
                if rest[group] == len(members):
                    continue
                used = _with_one_more(rest, group)
                cost, _ = self._first_stage(sum(used), group, suffixes, 0)
                # Of equally good sets of devices the one that the user named first.
                devices = sorted(
                    device
                    for members, count in zip(self._groups, used, strict=True)
                    for device in members[:count]
                )
                best = min(best, (cost, devices, used))
        return best[0], best[2]

    def _after(self, group: int, suffixes: dict[int, Floats]) -> Floats:
        """Least cost of what comes after a stage of `group`, by block, transfers included."""
        if -1 in suffixes or self._transfers is None:
            return suffixes[-1]
        least = np.full(self._num_blocks + 1, np.inf)
        for first, suffix in suffixes.items():
            np.minimum(least, self._join(self._transfers[group, first], suffix), out=least)
        return least

    def _bands_at(self, place: int) -> list[Floats]:
        return self._bands[min(place, len(self._bands)) - 1]

    def _first_stage(
        self, place: int, group: int, suffixes: dict[int, Floats], start: int
    ) -> tuple[float, int]:
        """Least cost from `start` on when `group` has the first stage, and where that stops."""
        after = self._after(group, suffixes)[start + 1 : start + 1 + self._longest]
        costs = self._join(self._bands_at(place)[group][start, : len(after)], after)
        index = int(np.argmin(costs))
        return float(costs[index]), start + 1 + index

    def _trace(self, used: Used) -> Stages:
        """Walk the best placement on these devices; empty if revisions have closed the way."""
        stages: list[Stage] = []
        left, start, before = list(used), 0, -1
        while start < self._num_blocks:
            choices = []
            layer = self._layers[sum(left) - 1]
            for group, members in enumerate(self._groups):
                rest = (*left[:group], left[group] - 1, *left[group + 1 :])
                if rest not in layer:
                    continue
                cost, stop = self._first_stage(sum(left), group, layer[rest], start)
                if self._transfers is not None and stages:
                    cost = float(self._join(self._transfers[before, group, start], cost))
                # Of equally good devices the one that the user named first.
                choices.append((cost, members[used[group] - left[group]], stop, group))
            cost, device, stop, before = min(choices, default=(np.inf, 0, 0, 0))
            if cost == np.inf:
                return ()
            left[before] -= 1
            stages.append(Stage(start=start, stop=stop, device=device))
            start = stop
        return tuple(stages)


def _longest(table: Floats) -> int:
    """The length of the longest stage that can be, and 1 where none can."""
    starts, stops = np.nonzero(np.isfinite(table))
    return max(1, int(np.max(stops - starts, initial=0)))


def _with_one_more(used: Used, group: int) -> Used:
    return (*used[:group], used[group] + 1, *used[group + 1 :])


def _band(table: Floats, longest: int) -> Floats:
    """From [start, stop] to [start, length - 1], without the start behind the last block."""
    num_blocks = table.shape[0] - 1
    padded = np.concatenate([table, np.full((num_blocks + 1, longest), np.inf)], axis=1)
    columns = np.arange(1, longest + 1)[None, :] + np.arange(num_blocks)[:, None]
    return np.take_along_axis(padded[:-1], columns, axis=1)


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
        raise UsageError(
            f"{sum(map(len, groups))} devices of {len(groups)} different kinds give "
            f"{num_sets[num_devices]} sets of {num_devices}; at most {MAX_SETS} can be searched",
            hint="name fewer devices, or give similar ones equal budgets",
        )
