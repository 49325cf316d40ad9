"""How long a plan takes from a profile that is there, and the whole command from the cache.

    python benchmarks/plan_time.py [CONFIG] [--layers 40 80 160] [--plain] [--json FILE]

CONFIG is a published `config.json`, by default the sizes of GLM-4-9B-chat; models of 40, 80 and 160
layers are made of it, traced once, and planned on 2, 4 and 8 GPUs that all differ, at a short and a
long context: with memory to spare, with little, and where it doesn't fit. The budgets are shares of
what the model needs. Told is the best of several runs, in seconds of the processor, so that a busy
machine doesn't count; the contexts of 128K fit in chunks of the prompt only. Last is the whole of
`duoka plan` as a person waits for it, with the profile in the cache. With `--plain` the allocator's
model is the one in Python, as on machines without a C compiler.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from planner_models import MODELS

from duoka.checkpoint.checkpoint import Checkpoint
from duoka.forecast import device_memory
from duoka.forecast.costs import Costs
from duoka.forecast.profile import Profile
from duoka.forecast.workload import Workload
from duoka.hardware.fleet import Fleet
from duoka.planner.request import PlanProblem
from duoka.planner.solve import solve

LAYERS = (40, 80, 160)
SHARES = {
    2: (1.0, 0.5),
    4: (1.0, 0.9, 0.6, 0.4),
    8: (1.0, 0.95, 0.9, 0.8, 0.7, 0.5, 0.4, 0.3),
}
CONTEXTS = (8192, 131_072)
# Budgets, in parts of the least that one device for everything would need in small chunks.
ROOM = {"roomy": 1.6, "tight": 1.2, "short": 0.9}
ROUNDS = 3
ENOUGH_SECONDS = 2.0


def profile_of(config: dict[str, Any], num_layers: int, directory: Path) -> tuple[Profile, Path]:
    from duoka.tracing.get_profile import profile_checkpoint

    folder = directory / f"layers-{num_layers}"
    folder.mkdir()
    values = dict(config)
    values["num_layers" if "num_layers" in values else "num_hidden_layers"] = num_layers
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return profile_checkpoint(Checkpoint.open(folder), Workload()), folder


def fleet_of(profile: Profile, workload: Workload, num_devices: int, room: float) -> Fleet:
    chunked = Workload(
        prompt_tokens=workload.prompt_tokens, dtype=workload.dtype, prefill_chunk_tokens=512
    )
    needed = int(Costs(profile, chunked).lower_bound_bytes[0, -1])
    shares = SHARES[num_devices]
    sizes = [round(share * room * needed / sum(shares) / 2**20) for share in shares]
    return Fleet.parse("virtual:" + ",".join(f"{size}MiB" for size in sizes))


def time_plans(profile: Profile, num_layers: int) -> Iterator[dict[str, Any]]:
    for num_devices in SHARES:
        for context in CONTEXTS:
            workload = Workload(prompt_tokens=context - 256, dtype="bfloat16")
            for room, factor in ROOM.items():
                fleet = fleet_of(profile, workload, num_devices, factor)
                seconds: list[float] = []
                while len(seconds) < ROUNDS and sum(seconds) < ENOUGH_SECONDS:
                    start = time.process_time()
                    plan = solve(profile, PlanProblem(fleet=fleet, workload=workload)) or None
                    seconds.append(time.process_time() - start)
                chunk = None if plan is None else plan.workload.prefill_chunk_tokens
                yield {
                    "layers": num_layers,
                    "gpus": num_devices,
                    "context": context,
                    "room": room,
                    "used": None if plan is None else len(plan.devices),
                    "chunk": "none" if plan is None else chunk or "whole",
                    "ms": 1e3 * min(seconds),
                }


def time_command(folder: Path) -> float:
    """Seconds of the whole command, the best of several, as a person waits for it."""
    program = "from duoka.cli import main; main()"
    command = [sys.executable, "-c", program, "plan", str(folder), "--gpus", "virtual:24GiB,16GiB"]
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        subprocess.run([*command, "--context", "8K"], check=True, capture_output=True)
        best = min(best, time.perf_counter() - start)
    return best


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path, nargs="?")
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.plain:
        device_memory.CompiledMemory = None
    config = MODELS["glm-4-9b-chat"]
    if options.config:
        config = json.loads(options.config.read_text(encoding="utf-8"))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        os.environ["DUOKA_CACHE"] = f"{name}/cache"
        print(
            "| layers | GPUs | context | room | used | chunk | ms |\n|---|---|---|---|---|---|---|"
        )
        for num_layers in options.layers:
            profile, folder = profile_of(config, num_layers, Path(name))
            for row in time_plans(profile, num_layers):
                rows.append(row)
                cells = [*list(row.values())[:-1], round(row["ms"])]
                print("|", " | ".join(map(str, cells)), "|", flush=True)
            if num_layers == options.layers[0] and not options.plain:
                rows.append({"command": f"{num_layers} layers", "s": time_command(folder)})
                print(f"\nduoka plan, {num_layers} layers: {rows[-1]['s']:.2f} s\n", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
