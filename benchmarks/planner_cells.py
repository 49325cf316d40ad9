"""One cell of `planner.py`: judged by the referee, planned by duoka, mapped by "auto"."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from planner_auto import AutoMap, auto_map, holds
from planner_models import BATCHES, CONTEXTS, MACHINES, MODELS
from planner_referee import Bench, Verdict, chunked

from duoka import models
from duoka.checkpoint.checkpoint import Checkpoint
from duoka.forecast.profile import Profile
from duoka.forecast.workload import Workload
from duoka.hardware.fleet import Fleet
from duoka.planner.plan import Plan
from duoka.planner.request import PlanProblem
from duoka.planner.solve import solve
from duoka.tracing.get_profile import profile_checkpoint

NEW_TOKENS = 16
ENDLESS = 1 << 17
Row = dict[str, Any]


@dataclass
class Subject:
    """A model, its profile, and what "auto" makes of it."""

    name: str
    profile: Profile

    @classmethod
    def of(cls, name: str, directory: Path) -> Subject:
        path = directory / f"{name}.json"
        path.write_text(json.dumps(MODELS[name]), encoding="utf-8")
        asked = Workload(prompt_tokens=64, new_tokens=NEW_TOKENS, dtype="bfloat16")
        return cls(name, profile_checkpoint(Checkpoint.open(path), asked))

    @cached_property
    def model(self) -> Any:
        return models.build(MODELS[self.name], dtype=torch.bfloat16)

    @property
    def longest(self) -> int:
        return self.profile.max_context_tokens or ENDLESS

    @cached_property
    def _maps(self) -> dict[str, AutoMap]:
        return {}

    def auto(self, machine: str) -> AutoMap:
        if machine not in self._maps:
            fleet = Fleet.parse(MACHINES[machine])
            self._maps[machine] = auto_map(self.model, self.profile, fleet)
        return self._maps[machine]


def workload_of(context: int, batch: int) -> Workload:
    return Workload(
        batch=batch, prompt_tokens=context - NEW_TOKENS, new_tokens=NEW_TOKENS, dtype="bfloat16"
    )


def cells(subject: Subject, rng: random.Random, most: int) -> Iterator[tuple[Workload, list[str]]]:
    """Each workload with some of the machines."""
    for context in CONTEXTS:
        for batch in BATCHES:
            if context <= subject.longest:
                yield workload_of(context, batch), rng.sample(sorted(MACHINES), most)


def judge(subject: Subject, workload: Workload, machines: Sequence[str]) -> Iterator[Row]:
    bench = Bench(subject.profile, workload)
    for machine in machines:
        fleet = Fleet.parse(MACHINES[machine])
        budgets = [device.budget_bytes for device in fleet.devices]
        plan, seconds, cpu = timed(subject.profile, PlanProblem(fleet=fleet, workload=workload))
        started = time.perf_counter()
        verdict = bench.judge(budgets)
        if verdict.num_gpus != (None if plan is None else len(plan.devices)):
            verdict = bench.judge(budgets)
        yield {
            "model": subject.name,
            "machine": machine,
            "gpus": len(budgets),
            "context": workload.context_tokens,
            "batch": workload.batch,
            "fewest": verdict.num_gpus,
            "fewest_chunk": chunk_of(verdict),
            "referee_seconds": time.perf_counter() - started,
            "duoka": None if plan is None else len(plan.devices),
            "duoka_chunk": None if plan is None else plan.workload.prefill_chunk_tokens,
            "seconds": seconds,
            "cpu_seconds": cpu,
            **auto_row(subject, fleet, machine, workload),
        }


def timed(profile: Profile, problem: PlanProblem) -> tuple[Plan | None, float, float]:
    clock, processor = time.perf_counter(), time.process_time()
    plan = solve(profile, problem, leave_room=False) or None
    return plan, time.perf_counter() - clock, time.process_time() - processor


def chunk_of(verdict: Verdict) -> int | None:
    return None if verdict.referee is None else verdict.referee.workload.prefill_chunk_tokens


def auto_row(subject: Subject, fleet: Fleet, machine: str, workload: Workload) -> Row:
    made = subject.auto(machine)
    held = None
    if made.device_of is not None:
        *chunks, whole = chunked(workload)
        for each in (whole, *chunks):
            if holds(subject.profile, made.device_of, fleet, each):
                held = each.prefill_chunk_tokens or "whole"
                break
    return {"auto": held, "auto_gpus": made.num_gpus, "auto_trouble": made.trouble}
