"""Placements of duoka and of "auto" run on virtual GPUs without data, for `planner.py`.

So a verdict about memory isn't only that of the replay which duoka plans by: the model's own code
runs all steps of the workload, and each virtual GPU stops at its budget.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from planner_auto import holds
from planner_cells import Row, Subject, workload_of
from planner_models import MACHINES, MODELS

from duoka import models, virtual
from duoka.forecast.workload import Workload
from duoka.hardware.fleet import Fleet
from duoka.planner.placement import Placement
from duoka.planner.request import PlanProblem
from duoka.planner.solve import solve
from duoka.runtime.call.stepper import Stepper
from duoka.runtime.dispatch.dispatch import dispatch

# More would take minutes: a step without data costs time for each operation, not for each byte.
_MOST_CHUNKS = 16


def measure_some(
    subject: Subject, rows: Sequence[Row], rng: random.Random, share: float
) -> Iterator[Row]:
    """Measure one cell, or with a share below one perhaps none: duoka's placement and auto's."""
    for _ in range(int(share) + (rng.random() < share % 1)):
        own = [row for row in rows if row["model"] == subject.name and _is_short(row)]
        if own:
            row = rng.choice(own)
            yield from _measured(subject, row)


def _is_short(row: Row) -> bool:
    chunk = row["duoka_chunk"] or row["context"]
    return row["duoka"] is not None and row["context"] <= chunk * _MOST_CHUNKS


def _measured(subject: Subject, row: Row) -> Iterator[Row]:
    fleet = Fleet.parse(MACHINES[row["machine"]])
    asked = workload_of(row["context"], row["batch"])
    cell = {name: row[name] for name in ("model", "machine", "context", "batch")}
    plan = solve(subject.profile, PlanProblem(fleet=fleet, workload=asked)) or None
    assert plan is not None, "it was found before"
    at = plan.placement.device_map
    told = {each.device: each for each in plan.forecast.devices}
    started = time.perf_counter()
    for device, (allocated, reserved) in (peaks(at, fleet, plan.workload, subject) or {}).items():
        yield {
            **cell,
            "way": "duoka",
            "device": device,
            "allocated": allocated,
            "reserved": reserved,
            "forecast_allocated": told[device].allocated_bytes,
            "forecast_reserved": told[device].reserved_bytes,
            "fits": True,
            "forecast_fits": True,
            "seconds": time.perf_counter() - started,
        }
    made = subject.auto(row["machine"])
    if made.device_of is not None:
        workload = replace(asked, prefill_chunk_tokens=plan.workload.prefill_chunk_tokens)
        entries = {
            module: device
            for block, device in zip(subject.profile.blocks, made.device_of, strict=True)
            for module in block.modules
        }
        found = peaks(entries, fleet, workload, subject)
        yield {
            **cell,
            "way": "auto",
            "fits": found is not None,
            "forecast_fits": holds(subject.profile, made.device_of, fleet, workload),
        }


def peaks(
    device_map: Mapping[str, str], fleet: Fleet, workload: Workload, subject: Subject
) -> dict[str, tuple[int, int]] | None:
    """Allocated and reserved peaks of each GPU; None where one overflows."""
    names = list(dict.fromkeys(device_map.values()))
    index = {name: f"vgpu:{number}" for number, name in enumerate(names)}
    entries = tuple((module, index[name]) for module, name in device_map.items())
    model: Any = models.build(MODELS[subject.name], dtype=torch.bfloat16)
    budgets = [fleet.device(name).budget_bytes for name in names]
    first = next(module for block in subject.profile.blocks for module in block.modules)
    start = Placement(entries=entries).device_of(first)
    assert start is not None, "the map is complete"
    with virtual.gpus(budgets, data="meta") as world, torch.no_grad():
        try:
            dispatch(model, Placement(entries=entries), empty=True)
            stepper = Stepper.of(model, workload, torch.device(start))
            stepper.run(workload, decode_steps=workload.new_tokens - 1)
        except torch.OutOfMemoryError:
            return None
        return {
            name: (world.max_memory_allocated(number), world.max_memory_reserved(number))
            for number, name in enumerate(names)
        }
