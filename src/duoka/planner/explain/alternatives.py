"""Alternatives: common placements for the same workload on the same fleet, to compare a plan with.

Each placement is evaluated with the costs that the planner optimizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from duoka.errors import UsageError
from duoka.forecast.costs import Costs
from duoka.forecast.latency import Seconds
from duoka.forecast.tensor_names import layer_of, main_list
from duoka.hardware.fleet import Fleet

from ..room import room_bytes
from ..search import BlockRange, NoPlacement, Objective, PlacementLimits, search
from .data import Alternative, Share

# A budget beyond any device, to replay a stage without a limit.
_UNLIMITED = 1 << 62
_MAXIMIZED = ("headroom", "balance", "order")
_TIMED: tuple[Objective, ...] = ("latency", "throughput")

Stages = tuple[BlockRange, ...]
_NAMES = {
    "headroom": "the most headroom",
    "latency": "the shortest time",
    "throughput": "shortest slowest stage",
}


@dataclass
class Trial:
    """Evaluates placements for an explanation, with the costs that the planner optimizes.

    A placement is a sequence of stages, each on a device of its own. Its value is that of the
    plan's objective, or of "headroom" if the plan has another one than the planner's (a device map)
    or the speeds of the fleet are unknown. With `leaves_room` a placement fits only if every device
    keeps the recommended free memory (`room_bytes`); `eligible` are the costs with this condition.
    """

    costs: Costs
    fleet: Fleet
    objective: str
    limits: PlacementLimits
    leaves_room: bool

    def __post_init__(self) -> None:
        self.eligible = self.costs.leaving(room_bytes) if self.leaves_room else self.costs
        speeds = map(self.costs.seconds, self.fleet.devices)
        self.has_speeds = all(seconds is not None for seconds in speeds)
        # A plan of a device map has the objective "given", and a plan file may contain any text.
        objectives = (*_MAXIMIZED, *(_TIMED if self.has_speeds else ()))
        if self.objective not in objectives:
            self.objective = "headroom"

    def shares(self, stages: Sequence[BlockRange]) -> tuple[Share, ...]:
        """Return the share of each device in a placement, in execution order."""
        num = len(stages)
        return tuple(self._share(stage, num - number) for number, stage in enumerate(stages))

    def _share(self, stage: BlockRange, place: int) -> Share:
        """Return the share of a stage at a place from the end, even if it exceeds its budget."""
        # A stage beyond its budget is replayed again without a limit, which gives its bytes. If its
        # bytes fit the budget, the stage was refused for fragmentation, and is recorded as one byte
        # more than the budget (`Share.is_fragmented`).
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
        """Return the modules of the stage [start, stop), in execution order."""
        blocks = self.costs.profile.blocks
        return tuple(
            module
            for index in self.costs.blocks_of(start, stop)
            for module in blocks[index].modules
        )

    def allows(self, stages: Sequence[BlockRange]) -> bool:
        """Return True if a placement satisfies the pins of the plan's request."""
        num = self.costs.num_blocks
        return all(self.limits.allow(num, s.device)[s.start, s.stop] for s in stages)

    def value(self, stages: Stages) -> float | None:
        """Return the value of a placement; None if a share doesn't fit or is tight."""
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
        """Return the seconds of a placement; None if a speed of a device is unknown."""
        devices = self.fleet.devices
        runs = [(devices[stage.device].name, stage.start, stage.stop) for stage in stages]
        return self.costs.latency.seconds_of(runs, self.fleet)

    def is_better(self, value: float, other_value: float) -> bool:
        """Return True if `value` is better than `other_value` by more than rounding errors."""
        gain = value - other_value if self.objective in _MAXIMIZED else other_value - value
        return gain > 1e-9 * max(abs(value), abs(other_value))


def alternatives(trial: Trial, plan_stages: Stages | None) -> Iterator[Alternative]:
    """Yield each alternative placement once, with its shares and its value.

    Equal placements are merged and have all their names. `plan_stages` is the plan's own placement;
    None if the plan has several stages on one device.
    """
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
    """Yield (name, stages): the optimum of each objective, and equal numbers of layers."""
    yield from _best_per_objective(trial, plan_stages)
    if plan_stages is not None and len(plan_stages) > 1:
        used = [stage.device for stage in plan_stages]
        yield "equal numbers of layers, best order", _place_equal_layers(trial, used)
    everything = list(range(min(len(trial.fleet.devices), trial.costs.num_blocks)))
    if len(everything) > 1 and (plan_stages is None or len(plan_stages) != len(everything)):
        yield "equal numbers of layers on all GPUs", _place_equal_layers(trial, everything)


def _best_per_objective(trial: Trial, plan_stages: Stages | None) -> Iterator[tuple[str, Stages]]:
    """Yield (name, stages) of the best placement for each objective, on as few devices as possible.

    If the plan leaves devices unused, also the best placement on all devices.
    """
    # The best placement for the plan's own objective is the plan itself, so it isn't searched. In
    # training the schedule decides whether a step takes as long as the sum of the stages (latency)
    # or as the slowest stage (throughput), so only that objective (`time_objective`) is searched.
    objectives: tuple[Objective, ...] = ("headroom", *_TIMED) if trial.has_speeds else ("headroom",)
    time_objective = trial.costs.time_objective
    if time_objective is not None:
        objectives = tuple(name for name in objectives if name in ("headroom", time_objective))
    for objective in objectives:
        if objective != trial.objective or plan_stages is None:
            stages = _best_placement(trial, objective)
            if stages is not None:
                yield f"{_NAMES[objective]}, on the fewest GPUs", stages
    if plan_stages is None or len(plan_stages) < len(trial.fleet.devices):
        everywhere: Objective = next((aim for aim in _TIMED if aim == trial.objective), "headroom")
        stages = _best_placement(trial, everywhere, use_all=True)
        if stages is not None:
            yield f"{_NAMES[everywhere]}, on all GPUs", stages


def _best_placement(trial: Trial, objective: Objective, *, use_all: bool = False) -> Stages | None:
    """Search the best placement for an objective; return None if the search finds none."""
    try:
        return search(
            trial.eligible, trial.fleet, objective=objective, use_all=use_all, limits=trial.limits
        ).stages
    except (NoPlacement, UsageError):
        return None  # nothing fits, fewer blocks than devices, or too many different devices


def _to_stages(cuts: Sequence[int], devices: Sequence[int]) -> Stages:
    return tuple(
        BlockRange(start=start, stop=stop, device=device)
        for (start, stop), device in zip(pairwise(cuts), devices, strict=True)
    )


def _place_equal_layers(trial: Trial, devices: Sequence[int]) -> Stages:
    """Cut equal numbers of layers, and assign the stages to the devices, both sorted by bytes.

    So the stage that needs the most memory runs on the largest device. No other order of the
    devices leaves more headroom on the tightest device.
    """
    # Exchange argument: if the smaller of two devices holds the larger of two stages, swapping the
    # devices lowers neither headroom below the smaller of the two headrooms before.
    cuts = _cut_equally(trial, len(devices))
    needs = [share.requested_bytes for share in trial.shares(_to_stages(cuts, devices))]
    neediest_places = sorted(range(len(needs)), key=lambda place: -needs[place])
    largest = sorted(devices, key=lambda device: -trial.fleet.devices[device].budget_bytes)
    at = dict(zip(neediest_places, largest, strict=True))
    return _to_stages(cuts, [at[place] for place in range(len(needs))])


def _cut_equally(trial: Trial, num_stages: int) -> list[int]:
    """Return the cuts of stages with equal numbers of layers, from block 0 to the end.

    Blocks before the layers go to the first stage, blocks after them to the last.
    """
    # Example: embedding, four layers, norm, head on two devices. The layers are blocks 1 to 4, the
    # inner cut is 1 + ceil(4 / 2) = 3, so the stages are [0, 3) and [3, 7). A model with fewer
    # layers than stages is cut into equal numbers of blocks.
    layers = _find_layer_places(trial)
    start, stop = (layers[0], layers[-1] + 1) if len(layers) >= num_stages else (0, None)
    num = (trial.costs.num_blocks if stop is None else stop) - start
    inner = [start + -(-num * stage // num_stages) for stage in range(1, num_stages)]
    return [0, *inner, trial.costs.num_blocks]


def _find_layer_places(trial: Trial) -> list[int]:
    """Return the indices in the chain of the blocks with a layer of the model's main layer list."""
    places = [trial.modules(place, place + 1) for place in range(trial.costs.num_blocks)]
    main = main_list([module for modules in places for module in modules])
    return [
        place
        for place, modules in enumerate(places)
        if any((at := layer_of(module)) and at[0] == main for module in modules)
    ]
