"""How long planning takes: the search alone, and plans of published configurations.

    python benchmarks/plan.py [--configs DIR [--fleet GPUS …]] [--json FILE]

The search runs on made-up costs, so that any size can be tried: once with lower bounds that are
exact, and once with bounds that fall short by up to 5 %, differently for every stage, which is
harder than any model that repeats its layers. With --configs, a directory of `config.json` files
under any name, every model is traced, read from the cache, and planned for each fleet at 8192
tokens and at the longest context that it was made for. --fleet takes what `--gpus` takes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from made_up_costs import AnyPlace

from duoka.base.units import format_bytes
from duoka.checkpoint.checkpoint import Checkpoint
from duoka.errors import InfeasibleError
from duoka.forecast.workload import Workload
from duoka.hardware.device import Device, Link
from duoka.hardware.fleet import Fleet
from duoka.planner.request import PlanProblem
from duoka.planner.search import Objective, search
from duoka.planner.solve import find_plan

MIB = 2**20
GIB = 2**30
ROUNDS = 5
FLEETS = ("24GiB,24GiB", "24GiB,12GiB,8GiB", "8x24GiB")


class MadeUp(AnyPlace):
    """Layers of 400 MiB, all a little different, between an embedding and a head of 1200 MiB."""

    def __init__(self, num_blocks: int, *, looseness: float) -> None:
        noise = np.random.default_rng(num_blocks)
        sizes = (400 + noise.integers(0, 40, num_blocks)) * MIB
        sizes[[0, -1]] = 1200 * MIB
        total = np.concatenate([[0], np.cumsum(sizes)])
        shape = (num_blocks + 1, num_blocks + 1)
        self.num_blocks = num_blocks
        self.exact = np.triu(total[None, :] - total[:, None])
        share = 1 - noise.random(shape) * looseness
        self.lower_bound_bytes = (self.exact * share).astype(np.int64)
        self.stage_classes = np.arange(self.exact.size).reshape(shape)
        self.boundary_bytes = np.full(num_blocks + 1, 8192)
        self.boundary_transfers = np.ones(num_blocks + 1)

    def requested_bytes(
        self, start: int, stop: int, budget_bytes: int, *, place: int = 1
    ) -> int | None:
        reserved = int(self.exact[start, stop])
        return reserved if reserved <= budget_bytes else None

    def seconds(self, device: Device) -> np.ndarray | None:
        return self.exact / (device.memory_bytes_per_second or 1e12)


def fleet_of(budgets: list[float], *, linked: bool = False) -> Fleet:
    devices = tuple(
        Device(
            name=f"vgpu:{index}",
            budget_bytes=int(budget * GIB),
            memory_bytes_per_second=1e12 * (1 + 0.1 * index),
        )
        for index, budget in enumerate(budgets)
    )
    links = tuple(
        Link(
            source=one.name,
            target=other.name,
            bytes_per_second=1e9 * (1 + (3 * i + 7 * j) % 5),
            latency_seconds=1e-5,
        )
        for i, one in enumerate(devices)
        for j, other in enumerate(devices)
        if i != j and linked
    )
    return Fleet(devices=devices, links=links)


def searches() -> Iterator[tuple[str, int, Fleet, Objective]]:
    """Machines on which the model just fits, which is where the search is hardest."""
    distinct = [9 + 0.3 * index for index in range(8)]
    roomy = [15.0 + index for index in range(8)]
    yield "28 layers, 2 devices", 30, fleet_of([8, 7]), "headroom"
    yield "40 layers, 3 devices", 42, fleet_of([10, 6, 4.5]), "headroom"
    yield "80 layers, 16 identical", 82, fleet_of([2.6] * 16), "headroom"
    yield "160 layers, 8 distinct, 4 used", 162, fleet_of(roomy), "headroom"
    yield "160 layers, 8 distinct", 162, fleet_of(distinct), "headroom"
    yield "160 layers, 8 distinct, links", 162, fleet_of(distinct, linked=True), "latency"
    yield "160 layers, 8 distinct, links", 162, fleet_of(distinct, linked=True), "throughput"


def time_searches() -> Iterator[dict[str, Any]]:
    print(f"{'search':31} {'objective':10} {'bounds':6} {'used':>4} {'median ms':>9}")
    for name, num_blocks, fleet, objective in searches():
        for looseness in (0.0, 0.05):
            seconds = []
            for _ in range(ROUNDS):
                costs = MadeUp(num_blocks, looseness=looseness)
                start = time.process_time()  # a busy machine doesn't count
                found = search(costs, fleet, objective=objective)
                seconds.append(time.process_time() - start)
            row = {
                "search": name,
                "objective": objective,
                "bounds": "loose" if looseness else "exact",
                "used": len(found.stages),
                "ms": 1e3 * statistics.median(seconds),
            }
            print("{search:31} {objective:10} {bounds:6} {used:4} {ms:9.1f}".format(**row))
            yield row


def time_plans(configs: Path, fleets: list[str]) -> Iterator[dict[str, Any]]:
    from duoka.tracing.get_profile import profile_checkpoint

    for path in sorted(configs.glob("*.json")):
        if "model_type" not in json.loads(path.read_text(encoding="utf-8")):
            continue
        with tempfile.TemporaryDirectory() as directory:
            os.environ["DUOKA_CACHE"] = directory  # nothing of an earlier run is in it
            (Path(directory) / "config.json").write_bytes(path.read_bytes())
            seconds = []
            for _ in ("cold", "cached"):
                start = time.perf_counter()
                profile = profile_checkpoint(Checkpoint.open(directory), Workload())
                seconds.append(time.perf_counter() - start)
        print(f"\n{path.stem}: {format_bytes(profile.weight_bytes)}, ", end="")
        print("traced in {:.2f} s, from the cache {:.3f} s".format(*seconds))
        for context in (8192, profile.max_context_tokens or 8192):
            for fleet in fleets:
                workload = Workload(prompt_tokens=context - 256, dtype=profile.dtype)
                problem = PlanProblem(fleet=Fleet.parse(fleet), workload=workload)
                start = time.perf_counter()
                try:
                    plan = find_plan(profile, problem)
                    answer = ", ".join(
                        f"{item.device} {format_bytes(item.reserved_bytes)}"
                        for item in plan.forecast.devices
                    )
                    chunk = plan.workload.prefill_chunk_tokens
                    answer += f"; chunks of {chunk}" if chunk else ""
                except InfeasibleError as error:
                    answer = f"does not fit; {error.hint}"
                ms = 1e3 * (time.perf_counter() - start)
                print(f"  {context:7} {fleet:16} {ms:7.0f} ms  {answer}")
                yield {"model": path.stem, "context": context, "fleet": fleet, "ms": ms}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--configs", type=Path)
    parser.add_argument("--fleet", action="append", help="may be repeated")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = list(time_searches())
    if options.configs:
        rows += time_plans(options.configs, options.fleet or list(FLEETS))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
