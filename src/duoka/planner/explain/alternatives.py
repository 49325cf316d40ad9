"""Alternatives: usual placements for the same workload on the same fleet.

Each is evaluated with the planner's own costs; none is chosen here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from duoka.errors import UsageError
from duoka.forecast.costs import Costs
from duoka.forecast.latency import Seconds
from duoka.forecast.tensor_names import layer_of, main_list
from duoka.hardware.fleet import Fleet

from ..room import room_bytes
from ..search import BlockRange, NoPlacement, Objective, PlacementLimits, search
from .data import Alternative, Share

# No device has that much: what a stage needs where nothing limits it.
_UNLIMITED = 1 << 62
_LARGER_IS_BETTER = ("headroom", "balance", "order")
_TIMED: tuple[Objective, ...] = ("latency", "throughput")

Stages = tuple[BlockRange, ...]
_NAMES = {
    "headroom": "the most headroom",
    "latency": "the shortest time",
    "throughput": "shortest slowest stage",
}


class Trial:
    """Evaluates placements in stages on a fleet, with the planner's own costs.

    Computes the bytes of stages, and the value of a placement for the objective of a plan.
    """

    def __init__(
        self,
        costs: Costs,
        fleet: Fleet,
        objective: str,
        limits: PlacementLimits,
        *,
        leaves_room: bool,
    ) -> None:
        self.costs = costs
        self.leaves_room = leaves_room
        self.eligible = costs.leaving(room_bytes) if leaves_room else costs
        self.fleet = fleet
        self.limits = limits
        self.has_speeds = all(costs.seconds(device) is not None for device in fleet.devices)
        # A map that was given has no objective, and a file can say anything.
        objectives = (*_LARGER_IS_BETTER, *(_TIMED if self.has_speeds else ()))
        self.objective = objective if objective in objectives else "headroom"

    def shares(self, stages: Sequence[BlockRange]) -> tuple[Share, ...]:
        """Return the shares of the devices of a placement, in execution order."""
        num = len(stages)
        return tuple(self._share(stage, num - number) for number, stage in enumerate(stages))

    def _share(self, stage: BlockRange, place: int) -> Share:
        # Without a limit the replay tells the missing bytes. A stage that fits in bytes and is
        # refused for fragmentation is recorded as one byte too many (`Share.is_fragmented`).
        device = self.fleet.devices[stage.device]
        start, stop, budget = stage.start, stage.stop, device.budget_bytes
        requested = self.costs.requested_bytes(start, stop, budget, place=place)
        roomy = self.eligible.requested_bytes(start, stop, budget, place=place)
        is_tight = requested is not None and roomy is None
        if requested is None:
            unlimited = self.costs.requested_bytes(start, stop, _UNLIMITED, place=place)
            assert unlimited is not None, "there is no limit"
            requested = max(unlimited, budget + 1)
        return Share(
            device=device.name,
            modules=self.modules(start, stop),
            requested_bytes=requested,
            budget_bytes=budget,
            is_tight=is_tight,
        )

    def modules(self, start: int, stop: int) -> tuple[str, ...]:
        """Return the modules of a run of blocks."""
        blocks = self.costs.profile.blocks
        return tuple(
            module
            for index in self.costs.blocks_of(start, stop)
            for module in blocks[index].modules
        )

    def allows(self, stages: Sequence[BlockRange]) -> bool:
        """Return True if a placement obeys the constraints."""
        num = self.costs.num_blocks
        return all(self.limits.allow(num, s.device)[s.start, s.stop] for s in stages)

    def value(self, stages: Stages) -> float | None:
        """Return the value of a placement for the objective; None if it doesn't fit."""
        shares = self.shares(stages)
        headrooms = [share.headroom_bytes for share in shares]
        if not all(share.holds for share in shares):
            return None
        if self.objective == "headroom":
            return float(min(headrooms))
        if self.objective == "balance":
            return min(share.headroom_bytes / share.budget_bytes for share in shares)
        if self.objective == "order":
            return float(sum(s.stop - s.start for s in stages if s.device == 0))
        seconds = self.seconds(stages)
        assert seconds is not None, "what is optimised is known"
        return seconds.total_seconds if self.objective == "latency" else seconds.slowest_seconds

    def seconds(self, stages: Sequence[BlockRange]) -> Seconds | None:
        """Return the seconds of each stage; None if speeds are unknown."""
        devices = self.fleet.devices
        runs = [(devices[stage.device].name, stage.start, stage.stop) for stage in stages]
        return self.costs.latency.seconds_of(runs, self.fleet)

    def is_better(self, value: float, other_value: float) -> bool:
        """Return True if a value is better than another by more than rounding."""
        gain = value - other_value if self.objective in _LARGER_IS_BETTER else other_value - value
        return gain > 1e-9 * max(abs(value), abs(other_value))


def alternatives(trial: Trial, plan_stages: Stages | None) -> Iterator[Alternative]:
    """Yield each placement once, with its shares and its value for the plan's objective."""
    names: dict[Stages, list[str]] = {}
    for name, stages in _placements(trial, plan_stages):
        names.setdefault(stages, []).append(name)
    for stages, titles in names.items():
        value = trial.value(stages)
        seconds = None if value is None else trial.seconds(stages)
        yield Alternative(
            name="; ".join(titles),
            shares=trial.shares(stages),
            fits=value is not None,
            value=value,
            request_seconds=None if seconds is None else seconds.total_seconds,
            is_plan=stages == plan_stages,
        )


def _placements(trial: Trial, plan_stages: Stages | None) -> Iterator[tuple[str, Stages]]:
    yield from _optima(trial, plan_stages)
    if plan_stages is not None and len(plan_stages) > 1:
        used = [stage.device for stage in plan_stages]
        yield "equal numbers of layers, best order", _best_equal(trial, used)
    everything = list(range(min(len(trial.fleet.devices), trial.costs.num_blocks)))
    if len(everything) > 1 and (plan_stages is None or len(plan_stages) != len(everything)):
        yield "equal numbers of layers on all GPUs", _best_equal(trial, everything)


def _optima(trial: Trial, plan_stages: Stages | None) -> Iterator[tuple[str, Stages]]:
    """Yield the optimum of each objective, and on all devices."""
    # The optimum of the plan's own objective is the plan, so it is left out. In training one of the
    # two timed objectives makes no sense: `time_objective` is the one that the schedule implies.
    objectives: tuple[Objective, ...] = ("headroom", *_TIMED) if trial.has_speeds else ("headroom",)
    quickest = trial.costs.time_objective
    if quickest is not None:
        objectives = tuple(name for name in objectives if name in ("headroom", quickest))
    for objective in objectives:
        if objective != trial.objective or plan_stages is None:
            stages = _optimum(trial, objective)
            if stages is not None:
                yield f"{_NAMES[objective]}, on the fewest GPUs", stages
    if plan_stages is None or len(plan_stages) < len(trial.fleet.devices):
        everywhere: Objective = next((aim for aim in _TIMED if aim == trial.objective), "headroom")
        stages = _optimum(trial, everywhere, use_all=True)
        if stages is not None:
            yield f"{_NAMES[everywhere]}, on all GPUs", stages


def _optimum(trial: Trial, objective: Objective, *, use_all: bool = False) -> Stages | None:
    try:
        return search(
            trial.eligible, trial.fleet, objective=objective, use_all=use_all, limits=trial.limits
        ).stages
    except (NoPlacement, UsageError):
        return None  # nothing fits; or there are more devices than blocks, or too many kinds


def _to_stages(cuts: Sequence[int], devices: Sequence[int]) -> Stages:
    return tuple(
        BlockRange(start=start, stop=stop, device=device)
        for (start, stop), device in zip(pairwise(cuts), devices, strict=True)
    )


def _best_equal(trial: Trial, devices: Sequence[int]) -> Stages:
    """Deal equal numbers of layers; the largest stage to the largest device, and so on down.

    No other order of the devices leaves more headroom on the tightest one.
    """
    # Exchange argument: if a smaller device holds a larger stage, swapping the two devices lowers
    # neither of the two headrooms below the lesser one before.
    cuts = _equal_cuts(trial, len(devices))
    needs = [share.requested_bytes for share in trial.shares(_to_stages(cuts, devices))]
    hungriest = sorted(range(len(needs)), key=lambda place: -needs[place])
    largest = sorted(devices, key=lambda device: -trial.fleet.devices[device].budget_bytes)
    at = dict(zip(hungriest, largest, strict=True))
    return _to_stages(cuts, [at[place] for place in range(len(needs))])


def _equal_cuts(trial: Trial, num_stages: int) -> list[int]:
    """Cut the layers evenly; other blocks go to the first and last stage."""
    # Example: embedding, four layers, norm, head on two devices. The layers are places 1 to 4, the
    # inner cut is 1 + ceil(4 / 2) = 3, so the stages are [0, 3) and [3, 7).
    layers = _layer_places(trial)
    start, stop = (layers[0], layers[-1] + 1) if len(layers) >= num_stages else (0, None)
    num = (trial.costs.num_blocks if stop is None else stop) - start
    inner = [start + -(-num * stage // num_stages) for stage in range(1, num_stages)]
    return [0, *inner, trial.costs.num_blocks]


def _layer_places(trial: Trial) -> list[int]:
    """Return the places of the model's layers in the chain."""
    places = [trial.modules(place, place + 1) for place in range(trial.costs.num_blocks)]
    main = main_list([module for modules in places for module in modules])
    return [
        place
        for place, modules in enumerate(places)
        if any((at := layer_of(module)) and at[0] == main for module in modules)
    ]
