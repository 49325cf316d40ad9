"""The room that plans leave: thirty models on machines, as they are planned and to the last byte.

    python benchmarks/room.py

Each row has the GPUs that a plan uses, what each has left of its budget beside all that is
reserved, in MiB, and the chunk in which the prompt runs; first where every byte may be taken,
then as duoka plans.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from planner_models import MODELS

from duoka.checkpoint.checkpoint import Checkpoint
from duoka.forecast.workload import Workload
from duoka.hardware.fleet import Fleet
from duoka.planner.plan import Plan
from duoka.planner.request import PlanProblem
from duoka.planner.solve import solve
from duoka.tracing.get_profile import profile_checkpoint

NEW_TOKENS = 512
MIB = 2**20
PAIRS: tuple[tuple[str, int, tuple[str, ...]], ...] = (
    ("chatglm3-6b", 4096, ("12GiB,8GiB", "24GiB", "16GiB,16GiB")),
    ("chatglm3-6b", 8192, ("12GiB,8GiB", "2x8GiB", "24GiB,12GiB", "2x12GiB", "8GiB,6GiB")),
    ("chatglm3-6b-128k", 131072, ("24GiB", "2x24GiB", "16GiB,16GiB")),
    ("glm-4-9b-chat", 8192, ("12GiB,8GiB", "24GiB,12GiB,8GiB", "3x8GiB", "20GiB,20GiB")),
    ("glm-4-9b-chat", 131072, ("2x24GiB", "3x16GiB")),
    ("qwen3-8b", 8192, ("16GiB,16GiB", "24GiB", "12GiB,8GiB")),
    ("llama-3.1-8b", 8192, ("16GiB,12GiB", "2xRTX4090", "8GiB,12GiB")),
    ("qwen2.5-14b", 16384, ("2x16GiB", "RTX4090+RTX3060", "32GiB,24GiB")),
    ("llama-2-13b", 4096, ("24GiB,24GiB", "2x16GiB")),
    ("glm-4-32b-0414", 32768, ("80GiB", "4x24GiB")),
)


def told(plan: Plan | None) -> str:
    """One plan in a table's cells."""
    if plan is None:
        return "nothing fits | |"
    left = [(stage.budget_bytes - stage.reserved_bytes) // MIB for stage in plan.forecast.devices]
    chunk = plan.workload.prefill_chunk_tokens or "whole"
    return f"{len(left)} | {' + '.join(map(str, left))} | {chunk}"


def rows(folder: Path) -> Iterator[tuple[str, str, str]]:
    """What each pair is, and its two plans."""
    for name, context, machines in PAIRS:
        path = folder / f"{name}.json"
        path.write_text(json.dumps(MODELS[name]), encoding="utf-8")
        workload = Workload(
            prompt_tokens=context - NEW_TOKENS, new_tokens=NEW_TOKENS, dtype="bfloat16"
        )
        profile = profile_checkpoint(Checkpoint.open(path), workload)
        for machine in machines:
            problem = PlanProblem(fleet=Fleet.parse(machine), workload=workload)
            plans = [solve(profile, problem, leave_room=room) or None for room in (False, True)]
            yield f"{name} | {context} | {machine}", told(plans[0]), told(plans[1])


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        changed = total = 0
        print("| model | context | machine | GPUs | left, MiB | chunk | GPUs | left, MiB | chunk |")
        print("|---|---:|---|---:|---:|---:|---:|---:|---:|")
        for pair, before, after in rows(Path(folder)):
            total, changed = total + 1, changed + (before != after)
            print(f"| {pair} | {before} | {after} |", flush=True)
    print(f"{changed} of {total} differ", file=sys.stderr)


if __name__ == "__main__":
    main()
