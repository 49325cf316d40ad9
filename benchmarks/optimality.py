"""The search and the planner against brute force, on random small cases.

    python benchmarks/optimality.py [--cases N] [--profiles N] [--fleets N] [--seed N] [--json FILE]

A case of the first kind is made of tables: any stage may need any number of bytes and seconds, on
up to four GPUs whose budgets, speeds and links are drawn, often equal ones, and with pins and
blocks that may not begin a stage. One of the second kind is a made-up profile
(`optimality_profiles.py`), planned whole: prompt chunks, ties, caches and allocator included. For
others such profiles are copied as often as a fleet holds them, or run with as long a context or as
large a batch as it holds (`optimality_fleets.py`).

Every cut is written down with every order of every subset of the GPUs, and the best of them is
told by the words of the documentation, not by duoka's code. Reported are how many cases there
were of what kind, and every difference: in whether anything fits, in the number of GPUs, in the
objective's value, or in a placement that isn't among those that are allowed. It exits with 1 if
there is any.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from made_up_costs import AnyPlace
from optimality_fleets import reach_differs, replicas_differ
from optimality_profiles import Planned, planned_case

from duoka.errors import UsageError
from duoka.hardware.device import Device, Link
from duoka.hardware.fleet import Fleet
from duoka.planner.search import BlockRange, NoPlacement, PlacementLimits, search

Stages = tuple[BlockRange, ...]
AIMS = ("headroom", "latency", "throughput", "balanced", "sequential")


class Tables(AnyPlace):
    """What the search asks about stages, answered from tables."""

    def __init__(self, rng: random.Random, budgets: set[int], speeds: set[float]) -> None:
        self.num_blocks = rng.randint(1, 7)
        shape = (self.num_blocks + 1, self.num_blocks + 1)
        noise = np.random.default_rng(rng.getrandbits(48))
        sizes = np.concatenate([[0], np.cumsum(noise.integers(0, 12, self.num_blocks))])
        bound = np.abs(sizes[None, :] - sizes[:, None])
        if rng.random() < 0.3:  # a longer stage may need less
            bound = noise.integers(0, 30, shape)
        alike = np.arange(bound.size).reshape(shape)
        if rng.random() < 0.4:
            alike = noise.integers(0, rng.choice((3, 12)), shape)
        _, first, number = np.unique(alike, return_index=True, return_inverse=True)

        def shared(table: np.ndarray) -> np.ndarray:
            return table.ravel()[first][number].reshape(shape)

        self.stage_classes, self.lower_bound_bytes = alike, shared(bound)
        self.exact = {}
        for budget in budgets:
            over = noise.integers(0, rng.choice((1, 4, 12)), shape)
            never = noise.random(shape) < rng.choice((0.0, 0.1))
            self.exact[budget] = shared(np.where(never, 1 << 40, bound + over))
        self.boundary_bytes = noise.integers(0, 5, self.num_blocks + 1).astype(float)
        self.boundary_transfers = noise.integers(0, 3, self.num_blocks + 1).astype(float)
        self.by_speed = {speed: noise.integers(0, 20, shape).astype(float) for speed in speeds}

    def requested_bytes(
        self, start: int, stop: int, budget_bytes: int, *, place: int = 1
    ) -> int | None:
        needed = int(self.exact[budget_bytes][start, stop])
        return needed if needed <= budget_bytes else None

    def seconds(self, device: Device) -> np.ndarray | None:
        speed = device.memory_bytes_per_second
        return None if speed is None else self.by_speed[speed]


@dataclass(frozen=True)
class Case:
    costs: Any
    fleet: Fleet
    limits: PlacementLimits
    use_all: bool


def draw_fleet(rng: random.Random, budgets: list[int]) -> Fleet:
    """One to four GPUs; often with equal ones among them, and with links or without."""
    speeds = [1.0, 2.0, 3.0][: rng.randint(1, 3)]
    devices = tuple(
        Device(
            name=f"vgpu:{index}",
            budget_bytes=rng.choice(budgets),
            memory_bytes_per_second=rng.choice(speeds),
        )
        for index in range(rng.randint(1, 4))
    )
    names = [device.name for device in devices]
    even = rng.random() < 0.3
    links = tuple(
        Link(
            source=source,
            target=target,
            bytes_per_second=1.0 if even else rng.choice((1.0, 0.5)),
            latency_seconds=1 if even else rng.choice((0, 0, 3)),
        )
        for source, target in itertools.permutations(names, 2)
        if rng.random() < 0.8
    )
    return Fleet(devices=devices, links=links if rng.random() < 0.6 else ())


def draw_case(rng: random.Random) -> Case:
    drawn = [rng.randint(5, 40) for _ in range(rng.randint(1, 4))]
    fleet = draw_fleet(rng, drawn)
    speeds = {device.memory_bytes_per_second or 0.0 for device in fleet.devices}
    costs = Tables(rng, {device.budget_bytes for device in fleet.devices}, speeds)
    num, count = costs.num_blocks, len(fleet.devices)
    pins = {rng.randrange(num): rng.randrange(count) for _ in range(rng.choice((0, 0, 0, 1, 2)))}
    limits = PlacementLimits(pins=tuple(pins.items()))
    return Case(costs, fleet, limits, use_all=rng.random() < 0.3 and count <= num)


def placements(case: Case) -> Iterator[Stages]:
    """Every placement that fits and is allowed, with fewer stages before more."""
    num, devices = case.costs.num_blocks, case.fleet.devices
    for count in range(1, len(devices) + 1):
        for cuts in itertools.combinations(range(1, num), count - 1):
            edges = (0, *cuts, num)
            for order in itertools.permutations(range(len(devices)), count):
                stages = tuple(
                    BlockRange(start=start, stop=stop, device=device)
                    for start, stop, device in zip(edges, edges[1:], order, strict=False)
                )
                at = {block: s.device for s in stages for block in range(s.start, s.stop)}
                if all(at[block] == device for block, device in case.limits.pins) and all(
                    needed(case, stage) is not None for stage in stages
                ):
                    yield stages


def needed(case: Case, stage: BlockRange) -> int | None:
    budget = case.fleet.devices[stage.device].budget_bytes
    found: int | None = case.costs.requested_bytes(stage.start, stage.stop, budget)
    return found


def transfer(case: Case, one: BlockRange, other: BlockRange) -> float:
    """What the cut before a stage costs; an unknown link is as slow as the slowest one."""

    def seconds(link: Link) -> float:
        pieces = case.costs.boundary_transfers[other.start]
        moved = case.costs.boundary_bytes[other.start]
        return float(link.latency_seconds * pieces + moved / link.bytes_per_second)

    if not case.fleet.links:
        return 0.0
    known = case.fleet.link(case.fleet.names[one.device], case.fleet.names[other.device])
    return seconds(known) if known else max(map(seconds, case.fleet.links))


def value(case: Case, stages: Stages, aim: str) -> float:
    """What an aim makes of a placement: the larger the better."""
    if aim in ("headroom", "balanced"):
        free = []
        for stage in stages:
            budget = case.fleet.devices[stage.device].budget_bytes
            left = budget - (needed(case, stage) or 0)
            free.append(left / budget if aim == "balanced" else float(left))
        return min(free)
    parts = [transfer(case, *pair) for pair in itertools.pairwise(stages)]
    for stage in stages:
        parts.append(
            float(case.costs.seconds(case.fleet.devices[stage.device])[stage.start, stage.stop])
        )
    return -sum(parts) if aim == "latency" else -max(parts)


def best_of(case: Case, aim: str) -> tuple[int, float] | None:
    """How many GPUs the best placement uses, and its value."""
    everything = case.use_all or aim == "balanced"
    best: tuple[int, float] | None = None
    for stages in placements(case):
        if everything and len(stages) < len(case.fleet.devices):
            continue
        if best is not None and len(stages) > best[0]:
            break
        got = value(case, stages, aim)
        best = (len(stages), got if best is None else max(best[1], got))
    return best


def first_in_order(case: Case) -> Stages | None:
    """The placement in the order of the GPUs with the most blocks on the first, and so on."""

    def counts(stages: Stages) -> list[int]:
        on = {stage.device: stage.stop - stage.start for stage in stages}
        return [on.get(device, 0) for device in range(len(case.fleet.devices))]

    ordered = (
        stages
        for stages in placements(case)
        if all(one.device < other.device for one, other in itertools.pairwise(stages))
    )
    return max(ordered, key=counts, default=None)


def ask(case: Case, aim: str) -> Any:
    """duoka's answer; None where it says that nothing fits or is allowed."""
    strategy = aim if aim in ("balanced", "sequential") else "auto"
    try:
        return search(
            case.costs,
            case.fleet,
            objective="auto" if strategy != "auto" else aim,
            use_all=case.use_all and strategy == "auto",
            strategy=strategy,
            limits=case.limits,
        )
    except (NoPlacement, UsageError):
        return None


def differs(case: Case, aim: str) -> str:
    """What is different, in words; empty where nothing is."""
    found = ask(case, aim)
    if aim == "sequential":
        best = first_in_order(case)
        got = None if found is None else found.stages
        return "" if got == best else f"sequential: {got} instead of {best}"
    expected = best_of(case, aim)
    if found is None or expected is None:
        same = found is None and expected is None
        return "" if same else f"{aim}: {found} instead of {expected}"
    told = found.value if aim in ("headroom", "balanced") else -found.value
    bound = found.bound if aim in ("headroom", "balanced") else -found.bound
    attained = value(case, found.stages, aim)
    wrong = [
        text
        for text, ok in (
            ("not allowed", found.stages in set(placements(case))),
            (f"{len(found.stages)} GPUs, not {expected[0]}", len(found.stages) == expected[0]),
            (f"value {attained}, not {expected[1]}", attained == expected[1]),
            (f"says {told} of {attained}", abs(told - attained) < 1e-9),
            (f"says the bound is {bound}", abs(bound - attained) < 1e-9),
        )
        if not ok
    ]
    return f"{aim}: {'; '.join(wrong)}" if wrong else ""


def run_tables(number: int, seed: int) -> tuple[Counter[str], list[str]]:
    counts: Counter[str] = Counter()
    different = []
    for index in range(number):
        case = draw_case(random.Random(f"{seed} tables {index}"))
        for aim in AIMS:
            text = differs(case, aim)
            counts["asked"] += 1
            counts["fit"] += best_of(case, "headroom") is not None
            if text:
                different.append(f"case {index}: {text}")
        counts["cases"] += 1
        counts["with pins"] += bool(case.limits)
        counts["with links"] += bool(case.fleet.links)
        counts["with all GPUs"] += case.use_all
    return counts, different


def run_profiles(number: int, seed: int) -> tuple[Counter[str], list[str]]:
    counts: Counter[str] = Counter()
    different = []
    for index in range(number):
        planned: Planned = planned_case(random.Random(f"{seed} profiles {index}"))
        counts["cases"] += 1
        counts["fit"] += planned.fits
        counts["of several GPUs"] += planned.num_gpus > 1
        counts["in chunks"] += planned.in_chunks
        if planned.difference:
            different.append(f"profile {index}: {planned.difference}")
    return counts, different


def run_fleets(number: int, seed: int) -> tuple[Counter[str], list[str]]:
    counts: Counter[str] = Counter()
    different = []
    for index in range(number):
        for name, differ in (("replicas", replicas_differ), ("largest", reach_differs)):
            fits, text = differ(random.Random(f"{seed} {name} {index}"))
            counts["cases"] += 1
            counts[f"{name} that fit"] += fits
            if text:
                different.append(f"{name} {index}: {text}")
    return counts, different


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--profiles", type=int, default=1000)
    parser.add_argument("--fleets", type=int, default=500, help="of copies, and of largest sizes")
    parser.add_argument("--seed", type=int, default=20261121)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    wrong, rows = False, []
    for name, run, number in (
        ("tables", run_tables, options.cases),
        ("profiles", run_profiles, options.profiles),
        ("fleets", run_fleets, options.fleets),
    ):
        started = time.process_time()
        counts, different = run(number, options.seed)
        told = ", ".join(f"{count} {what}" for what, count in counts.items())
        print(
            f"{name}: {told}; {len(different)} differences; {time.process_time() - started:.0f} s"
        )
        print(*different[:20], sep="\n")
        rows.append({"kind": name, "counts": dict(counts), "differences": len(different)})
        wrong |= bool(different)
    if options.json:
        options.json.write_text(json.dumps({"seed": options.seed, "rows": rows}))
    sys.exit(wrong)


if __name__ == "__main__":
    main()
