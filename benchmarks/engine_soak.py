"""Random requests on virtual GPUs that have the engine's forecast to the byte, and nothing more.

    python benchmarks/engine_soak.py --requests 100000

Prompts of random lengths come and go, are cancelled, share beginnings, and are answered by random
parameters. It ends with 1 where a request failed, memory ran short, a page was lost, or a device
took more than was forecast.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import duoka
from duoka import virtual
from duoka.engine import Engine, SamplingParams
from duoka.runtime import devices

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import tuning


def squeezed(plan: duoka.Plan) -> duoka.Plan:
    """The plan on devices whose budgets are what is forecast to be reserved."""
    budgets = {stage.device: stage.reserved_bytes for stage in plan.forecast.devices}
    fleet = {device.name: device for device in plan.fleet.devices}
    return plan.moved(
        {name: replace(fleet[name], budget_bytes=size) for name, size in budgets.items()}
    )


def prompts(rng: random.Random, number: int, longest: int) -> Iterator[tuple[int, list[int]]]:
    """Prompts, a third of which begin as an earlier one did."""
    known: list[list[int]] = [[1]]
    for at in range(number):
        prompt = [rng.randrange(256) for _ in range(rng.randint(1, longest))]
        if rng.random() < 0.3:
            prompt = [*rng.choice(known), *prompt][:longest]
        known = [*known[-20:], prompt]
        yield at, prompt


def params_of(rng: random.Random) -> SamplingParams:
    """Any of the ways to choose tokens."""
    return SamplingParams(
        max_new_tokens=rng.choice([1, 2, 5, 12]),
        temperature=rng.choice([0.0, 0.7, 1.5]),
        top_p=rng.choice([0.5, 1.0]),
        logprobs=rng.choice([None, 0, 20]),
        repetition_penalty=rng.choice([1.0, 1.3]),
        seed=rng.randrange(2**31),
    )


def soak(plan: duoka.Plan, number: int, seed: int) -> list[str]:
    """What went wrong."""
    rng, faults = random.Random(seed), list[str]()
    started = time.monotonic()
    with Engine(plan, processes=False) as engine:
        print(f"started in {time.monotonic() - started:.1f} s", flush=True)
        waiting: list[Any] = []
        for at, prompt in prompts(rng, number, plan.workload.prompt_tokens):
            waiting.append(engine.submit(prompt, params_of(rng)))
            if rng.random() < 0.05:
                rng.choice(waiting).cancel()
            if len(waiting) > 3 * plan.workload.batch:
                faults += failure_of(waiting.pop(0))
            if at and at % 1000 == 0:
                print(f"{at} after {time.monotonic() - started:.0f} s", flush=True)
        for stream in waiting:
            faults += failure_of(stream)
        if engine.num_free_pages != engine.capacity.pages:
            faults.append(f"{engine.capacity.pages - engine.num_free_pages} pages are lost")
        return [*faults, *memory_faults(plan)]


def failure_of(stream: Any) -> list[str]:
    """Why a request has failed, if it has."""
    try:
        stream.result()
    except Exception as error:
        return [f"a request failed: {error}"]
    return []


def memory_faults(plan: duoka.Plan) -> Iterator[str]:
    """What devices took beyond their forecast."""
    gpus = {str(gpu.device): gpu for gpu in virtual.active_world().gpus}
    for stage in plan.forecast.devices:
        peaks = devices.peak_bytes(stage.device)
        assert peaks is not None
        print(
            f"{stage.device}: allocated {peaks.allocated_bytes} of {stage.allocated_bytes}, "
            f"reserved {peaks.reserved_bytes} of {stage.reserved_bytes}"
        )
        if gpus[stage.device].allocator.is_pressed:
            yield f"{stage.device} ran short"
        if peaks.allocated_bytes > stage.allocated_bytes:
            yield f"{stage.device} allocated more than was forecast"


def main() -> int:
    """Plan, squeeze, and ask."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--model", default="shallow", choices=sorted(tuning.CONFIGS))
    parser.add_argument("--sequences", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    choice = parser.parse_args()
    work = duoka.Workload(
        cache="paged",
        batch=choice.sequences,
        prompt_tokens=100,
        new_tokens=28,
        dtype="float32",
        prefill_chunk_tokens=48,
        pages=40,
    )
    with tempfile.TemporaryDirectory() as directory:
        model = tuning.write_model(choice.model, Path(directory) / choice.model)
        plan = duoka.plan(model, f"virtual:{choice.gpus}x128MiB", work, use_all=True)
        faults = soak(squeezed(plan), choice.requests, choice.seed)
    print("\n".join(faults) or f"{choice.requests} requests, nothing went wrong")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
