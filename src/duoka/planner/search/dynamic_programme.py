"""Dynamic programme: the search over cuts of a chain of blocks and orders of devices.

A placement is a sequence of stages, each a run of blocks on a device of its own. The programme
builds *suffixes* (the last stages of a placement) from the end, one stage per layer. The state of a
suffix is

- the block where it starts,
- the number of devices of each group that it uses, since devices of a group are exchangeable,
- the group of its first stage (its *head*), which decides the transfer from the stage before it.

A state stores the least cost of its suffixes. The recurrence puts a stage [start, stop) on a device
of group g before a suffix that starts at `stop`::

    cost(start, counts + g, g) = min over stop and head h of
        join(table[g][start, stop], join(transfer[g, h, stop], cost(stop, counts, h)))

where `join` is a sum for latency and a maximum for the other objectives. Each stage has a device of
its own, so the sum of the counts is also the place of the first stage, counted from the end (the
last stage has place 1). In training the memory of a stage depends on its place.

Example: four blocks, groups A (two devices) and B (one). Layer 1 holds the suffixes of one stage,
on {A} and on {B}, for each start 0..3. Layer 2 holds {A, A} and {A, B}; the latter is reached by A
before {B} and by B before {A}, and keeps the cheaper one for each start and head. The optimum on
two devices is the cheapest state of layer 2 that starts at block 0. Its stages are recovered by
evaluating the same recurrence forward from that state.

Costs are plain numbers here; `problem` knows their meaning, and which costs are exact.
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

# Limit of the sets of devices in a layer; more take minutes. 16 different devices have 12,870.
MAX_SETS = 1 << 14
# Number of costs to compare at a time, which a processor's cache can hold.
_MAX_CELLS = 1 << 18


class UnsearchableError(UsageError):
    """Raised for fleets with too many different devices, or more required devices than blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRange:
    """A stage: the blocks [start, stop) of the chain, on the fleet's device of this index."""

    start: int
    stop: int
    device: int


Stages: TypeAlias = tuple[BlockRange, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """The states of all suffixes with the same number of stages.

    Each row is a set of devices: the counts by group, and the counts as one number in mixed radix
    (`keys`). Column i of `costs` in a row is for suffixes that start at block `min_starts` + i.
    Without transfer costs the head has no effect, and `costs` has a single entry for all heads.
    """

    counts: Ints  # [sets, groups]: devices used of each group
    keys: Ints  # [sets]: ascending
    min_starts: Ints  # [sets]
    costs: Floats  # [sets, heads, starts]


# Example: blocks of 4, 3 and 6 GiB; device A holds 8 GiB and B 10 GiB; `join` is a maximum. A stage
# costs its bytes minus the budget, so the minimum of the cost maximizes the least headroom.
#
#   table     [0, 1)  [0, 2)  [0, 3)  [1, 2)  [1, 3)  [2, 3)
#     A         -4      -1      inf     -5      inf     -2
#     B         -6      -3      inf     -7      -1      -4
#
#   layer 1 (one stage, up to block 3)     from block 1   from block 2
#     {A}                                       inf            -2
#     {B}                                       -1             -4
#
#   layer 2 (two stages), from block 0          cut at 1             cut at 2
#     {A, B}, A before {B}                  max(-4, -1) = -1     max(-1, -4) = -1
#     {A, B}, B before {A}                  max(-6, inf) = inf   max(-3, -2) = -2
#
# The optimum is -2, that is 2 GiB of headroom: B runs [0, 2), A runs [2, 3).
#
# With S sets of devices in a layer, G groups and N blocks a layer takes O(S G N (N + G)) steps. S
# is the factor that explodes: all layers together have at most the product of (size + 1) over the
# groups, so 16 equal devices give 17 sets, and 16 different ones 65,536.
class Programme:
    """The dynamic programme over placements, for given costs of stages and transfers.

    Parameters
    ----------
    tables : array
        [places, groups, num_blocks + 1, num_blocks + 1]: the cost of a stage by its place from the
        end, group, start and stop; infinite for impossible stages. Entry i is for place i + 1; the
        last entry is also for all higher places.
    groups : sequence of tuple of int
        The exchangeable devices of each group, in the user's order.
    transfers : array, optional
        [groups, groups, num_blocks + 1]: the cost of the cut before each block, from a device of
        one group to one of another.
    slowest : bool
        If True, a placement costs as much as its most expensive stage or transfer; if False, the
        sum of all.
    num_stages : range
        The allowed numbers of stages.
    """

    def __init__(
        self,
        tables: npt.ArrayLike,
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
        self.revise(tables)
        self._num_blocks = self._tables.shape[-1] - 1
        # `revise` leaves the maximal lengths unchanged. Stages can only become impossible, so they
        # remain upper bounds.
        self._max_lengths = _longest_stages(self._tables)
        self._longest_first = np.argsort(-self._max_lengths, kind="stable")
        self._num_members = np.array([len(members) for members in groups])
        # The key of a set of devices in mixed radix: digit g counts the devices of group g, and is
        # below len(group g) + 1. With A of two devices and B of one the digits are worth 1 and 3:
        # {A} = 1, {A, A} = 2, {B} = 3, {A, B} = 4, {A, A, B} = 5. Adding a device of a group adds
        # the worth of its digit, so the keys of a whole layer are computed by one addition. Keys
        # beyond 63 bits are Python integers.
        radices = (len(members) + 1 for members in groups)
        *digits, num_keys = itertools.accumulate(radices, operator.mul, initial=1)
        self._digits = np.array(digits, object if num_keys >> 63 else np.int64)
        # The suffix without stages starts after the last block, and its cost is the neutral element
        # of `join`. So the last stage of a placement needs no special case.
        self._empty_layer = _Layer(
            counts=np.zeros((1, len(groups)), np.int64),
            keys=np.zeros(1, self._digits.dtype),
            min_starts=np.array([self._num_blocks]),
            costs=np.full(
                (1, 1 if transfers is None else len(groups), 1), -np.inf if slowest else 0.0
            ),
        )

    def revise(self, tables: npt.ArrayLike) -> None:
        """Replace the costs of stages. No cost may fall; impossible stages stay impossible."""
        costs = np.asarray(tables, np.float64)
        is_stage = np.triu(np.ones(costs.shape[-2:], np.bool_), 1)
        self._tables = np.where(is_stage, costs, np.inf)

    def find_on_fewest(self) -> tuple[Stages, float] | None:
        """Return the best placement with the fewest possible stages, and its cost.

        None if no placement has an allowed number of stages.
        """
        for number in self._num_stages:
            # No layers are built where even the longest stages of `number` devices are too short.
            lengths = np.sort(np.repeat(self._max_lengths, self._num_members))
            if sum(lengths[-number:]) >= self._num_blocks:
                self._layers = [self._empty_layer]
                while len(self._layers) < number:
                    self._extend(number)
                if (optimum := self._read_optimum(number)) is not None:
                    return optimum
            # `revise` only raises costs, so this number stays impossible and isn't tried again.
            self._num_stages = range(number + 1, self._num_stages.stop)
        return None

    def find_best(self) -> tuple[Stages, float] | None:
        """Return the best placement of any allowed number of stages, and its cost; None if none."""
        max_stages, optima = self._num_stages.stop - 1, list[tuple[Stages, float]]()
        self._layers = [self._empty_layer]
        for number in range(1, max_stages + 1):
            if number > 1:
                self._extend(max_stages)
            if number in self._num_stages and (optimum := self._read_optimum(number)) is not None:
                optima.append(optimum)
        return min(optima, key=lambda optimum: optimum[1], default=None)

    def _extend(self, number: int) -> None:
        """Append the layer with one more stage; keep suffixes of placements of `number` stages."""
        # The new stages are all pairs (row, group with a free device): a stage on the group before
        # the suffixes of the row. Several pairs reach the same new set of devices, so their costs
        # are scattered into the cells of the set by minimum. Pairs are processed in batches that
        # fit the processor's cache, each over all starts and stops at once.
        #
        # Example, groups A (two devices) and B (one), from layer 1 with the keys {A} = 1, {B} = 3:
        #
        #   rows, groups      ({A}, A)   ({A}, B)   ({B}, A)      ({B}, B): B has no free device
        #   key + digit       1 + 1 = 2  1 + 3 = 4  3 + 1 = 4
        #   keys              [2, 4]                              of the new rows, ascending
        #   sets              0          1          1             new row of each pair
        #   representatives   0          1                        a pair that gives the row's counts
        #
        # With transfer costs the head is part of the cell, so ({A}, B) and ({B}, A) have different
        # cells; otherwise they share one. `np.minimum.at` then keeps the smaller cost of the two:
        # `costs[cells] = ...` would apply only one of several values for the same cell.
        layer = self._layers[-1]
        rows, groups = np.nonzero(layer.counts < self._num_members)
        keys, representatives, sets = np.unique(
            layer.keys[rows] + self._digits[groups], return_index=True, return_inverse=True
        )
        if len(keys) > MAX_SETS:
            raise UnsearchableError(
                f"{self._num_members.sum()} devices of {len(self._groups)} different kinds give "
                f"{len(keys)} sets of {len(self._layers)}; at most {MAX_SETS} can be searched",
                hint="use fewer devices, or give similar ones equal budgets",
            )
        counts = layer.counts[rows[representatives]]
        counts[np.arange(len(keys)), groups[representatives]] += 1
        min_starts, widths = self._bound_starts(counts, number - len(self._layers))
        is_useful = widths[sets] > 0
        rows, groups, sets = rows[is_useful], groups[is_useful], sets[is_useful]
        num_heads, offsets = layer.costs.shape[1], np.arange(widths.max(initial=0))
        costs = np.full(len(keys) * num_heads * len(offsets), np.inf)
        size = max(1, _MAX_CELLS // max(1, len(offsets) * layer.costs.shape[2]))
        for batch in (slice(start, start + size) for start in range(0, len(rows), size)):
            group, target = groups[batch], sets[batch]
            # Starts beyond the last block are padding: the tables are infinite there.
            starts = np.minimum(min_starts[target, None] + offsets, self._num_blocks)
            cells = (target * num_heads + group * (num_heads > 1)) * len(offsets)
            extended = self._prepend(rows[batch], group, starts)
            np.minimum.at(costs, cells[:, None] + offsets, extended)
        costs = costs.reshape(len(keys), num_heads, len(offsets))
        possible = costs.min(axis=(1, 2), initial=np.inf) < np.inf
        self._layers.append(
            _Layer(
                counts=counts[possible],
                keys=keys[possible],
                min_starts=min_starts[possible],
                costs=costs[possible],
            )
        )

    def _bound_starts(self, counts: Ints, num_stages_before: int) -> tuple[Ints, Ints]:
        """Return the least start of suffixes on each set of devices, and the number of starts.

        A suffix is at most as long as the longest stages of its devices together. The blocks before
        the suffix need `num_stages_before` stages on other devices, at most as long as the longest
        stages of these. Both results are [sets].
        """
        # Example: 10 blocks; stages of at most 4 blocks on A (two devices) and 3 on B (one). A
        # suffix on {A} starts at 10 - 4 = 6 or later. With one stage before it, of at most 4
        # blocks, it would have to start at 4 or earlier: there is no such start, nor any cost.
        # With two stages before it (on A and B, 4 + 3 blocks) the starts are 6 and 7.
        #
        # `num_taken` takes `num_stages_before` free devices, groups with the longest stages first:
        # free devices [2, 1, 3] and 4 stages give [2, 1, 1].
        min_starts = np.maximum(0, self._num_blocks - counts @ self._max_lengths)
        free = (self._num_members - counts)[:, self._longest_first]
        num_taken = np.clip(num_stages_before - (np.cumsum(free, axis=1) - free), 0, free)
        longest = num_taken @ self._max_lengths[self._longest_first]
        max_starts = np.minimum(self._num_blocks - 1, longest)
        return min_starts, max_starts - min_starts + 1

    def _prepend(self, rows: Ints, groups: Ints, starts: Ints) -> Floats:
        """Return the least cost of a stage before the suffixes of the last layer, [pairs, starts].

        Pair i puts the stage on group `groups[i]` before the suffixes of row `rows[i]`.
        """
        layer = self._layers[-1]
        stops = self._stops(layer, rows)
        tables = self._tables_at(len(self._layers))
        # A flat index is several times as fast as three indices.
        rows_of_table = (groups[:, None] * tables.shape[1] + starts) * tables.shape[2]
        costs = tables.take(rows_of_table[:, :, None] + stops[:, None])
        self._join(costs, self._suffix_costs(layer, rows, groups, stops)[:, None], out=costs)
        return np.asarray(costs.min(axis=2))

    def _stops(self, layer: _Layer, rows: Ints) -> Ints:
        """Return the possible stops of a stage, [pairs, stops]: the starts of its suffixes."""
        offsets = np.arange(layer.costs.shape[2])
        return np.asarray(np.minimum(layer.min_starts[rows, None] + offsets, self._num_blocks))

    def _suffix_costs(self, layer: _Layer, rows: Ints, groups: Ints, stops: Ints) -> Floats:
        """Return the least cost of the suffix after a stage and the transfer to it, [pairs, stops].

        Pair i has the stage on group `groups[i]` before the suffixes of row `rows[i]`.
        """
        suffixes: Floats = layer.costs[rows]
        if self._transfers is None or layer is self._empty_layer:
            return suffixes[:, 0]
        # The transfer depends on the cut and on both groups, but not on where the stage starts:
        # the minimum over heads [pairs, heads, stops] is taken once for all starts.
        heads = np.arange(len(self._groups))
        links = self._transfers[groups[:, None, None], heads[:, None], stops[:, None, :]]
        cheapest: Floats = self._join(links, suffixes).min(axis=1)
        return cheapest

    def _tables_at(self, place: int) -> Floats:
        """Return the costs of stages at a place from the end, [group, start, stop]."""
        tables: Floats = self._tables[min(place, len(self._tables)) - 1]
        return tables

    def _read_optimum(self, number: int) -> tuple[Stages, float] | None:
        """Return the best placement of a number of stages, and its cost."""
        # A placement starts at block 0, so the layer of `number` stages isn't needed for the other
        # starts: the first stage is put here before each suffix of `number - 1` stages.
        layer = self._layers[number - 1]
        if not len(layer.counts):
            return None
        rows, groups = np.nonzero(layer.counts < self._num_members)
        costs, _ = self._best_stages(number, rows, groups, 0)
        cost = float(costs.min(initial=np.inf))
        if cost == np.inf:
            return None
        is_best = costs == cost
        counts = layer.counts[rows[is_best]]
        counts[np.arange(len(counts)), groups[is_best]] += 1
        # Equally good sets of devices: take the first one in the user's order.
        return self._trace_stages(min(counts.tolist(), key=self._devices_of)), cost

    def _trace_stages(self, used: Sequence[int]) -> Stages:
        """Return the stages of the best placement that uses `used[g]` devices of each group g."""
        # Layers store costs, but not the stages that led to them: the recurrence is evaluated again
        # for each stage from the front, over the groups with a device left. `left_counts` are the
        # devices for the remaining stages, so the suffix after a stage on group g has the key of
        # `left_counts` minus one device of g. A set absent from its layer has no possible suffix.
        stages: list[BlockRange] = []
        left_counts, start, sender = np.array(used), 0, -1
        while start < self._num_blocks:
            place = int(left_counts.sum())
            layer = self._layers[place - 1]
            groups = np.flatnonzero(left_counts)
            keys = left_counts @ self._digits - self._digits[groups]
            rows = np.minimum(np.searchsorted(layer.keys, keys), len(layer.keys) - 1)
            is_present = layer.keys[rows] == keys
            rows, groups = rows[is_present], groups[is_present]
            costs, stops = self._best_stages(place, rows, groups, start)
            if self._transfers is not None and stages:
                costs = self._join(self._transfers[sender, groups, start], costs)
            devices = [self._groups[group][used[group] - left_counts[group]] for group in groups]
            # Equally good devices: take the first one in the user's order.
            _, device, stop, sender = min(zip(costs, devices, stops, groups, strict=True))
            left_counts[sender] -= 1
            stages.append(BlockRange(start=start, stop=int(stop), device=device))
            start = int(stop)
        return tuple(stages)

    def _best_stages(self, place: int, rows: Ints, groups: Ints, start: int) -> tuple[Floats, Ints]:
        """Return the least cost of a suffix from `start` on, and the stop of its first stage.

        Pair i has its first stage on group `groups[i]`, at `place` from the end, before the
        suffixes of row `rows[i]` of `place - 1` stages. Both results are [pairs].
        """
        layer = self._layers[place - 1]
        stops = self._stops(layer, rows)
        costs_here = self._tables_at(place)[groups[:, None], start, stops]
        costs = self._join(costs_here, self._suffix_costs(layer, rows, groups, stops))
        cheapest = costs.argmin(axis=1)
        pairs = np.arange(len(rows))
        return costs[pairs, cheapest], stops[pairs, cheapest]

    def _devices_of(self, used: Sequence[int]) -> list[int]:
        """Return the indices of the first `used[g]` devices of each group g, in order."""
        return sorted(
            device
            for members, count in zip(self._groups, used, strict=True)
            for device in members[:count]
        )


def _longest_stages(tables: Floats) -> Ints:
    """Return the number of blocks of the longest possible stage, at least 1, for each group."""
    starts, stops = np.indices(tables.shape[-2:])
    lengths = np.where(np.isfinite(tables), stops - starts, 1)
    return np.asarray(lengths.max(axis=(0, 2, 3)))
