"""Random requests on virtual GPUs that have the engine's forecast to the byte, and nothing more.

    python benchmarks/engine_soak.py --requests 100000
    python benchmarks/engine_soak.py --requests 5000 --processes

Prompts of random lengths come and go, are cancelled, share beginnings, and are answered by random
parameters, some of them in a form. It ends with 1 where a request failed, a step ran out of memory,
a page was lost, a device took more than was forecast, or the host's memory grew.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import duoka
from duoka import virtual
from duoka.engine import Engine, Grammar, SamplingParams
from duoka.runtime.call.chunk import Chunk

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import tuning

# Of the requests so many have gone before the host's memory is looked at, in hundredths; and it may
# grow by so much from there on: by what random lengths and the allocator's arenas make of it.
_WARM_HUNDREDTHS = 20
_GROWTH_BYTES = 16 * 2**20
_FORMS = ("yes|no", "[a-f ]{2,8}", "[0-9]{1,3}")


class CountingEngine(Engine):
    """An engine that counts the steps which ran out of memory, since it goes on after them."""

    num_short = 0

    def _retry(self, chunks: Sequence[Chunk], error: Exception) -> None:
        self.num_short += isinstance(error, torch.OutOfMemoryError)
        super()._retry(chunks, error)


def squeezed(plan: duoka.Plan) -> duoka.Plan:
    """The plan on devices whose budgets are what is forecast to be reserved."""
    budgets = {stage.device: stage.reserved_bytes for stage in plan.forecast.devices}
    fleet = {device.name: device for device in plan.fleet.devices}
    return plan.move_to(
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


def params_of(rng: random.Random, grammars: Sequence[Grammar]) -> SamplingParams:
    """Any of the ways to choose tokens."""
    return SamplingParams(
        max_new_tokens=rng.choice([1, 2, 5, 12]),
        temperature=rng.choice([0.0, 0.7, 1.5]),
        top_p=rng.choice([0.5, 1.0]),
        top_k=rng.choice([0, 20]),
        min_p=rng.choice([0.0, 0.01]),
        logprobs=rng.choice([None, 0, 20]),
        repetition_penalty=rng.choice([1.0, 1.3]),
        frequency_penalty=rng.choice([0.0, 0.5]),
        logit_bias=rng.choice([{}, {65: 2.0}]),
        stop=rng.choice([(), ("a",)]),
        grammar=rng.choice(grammars) if grammars and rng.random() < 0.05 else None,
        seed=rng.randrange(2**31),
    )


def soak(engine: CountingEngine, plan: duoka.Plan, number: int, seed: int) -> Iterator[str]:
    """What goes wrong."""
    rng, started = random.Random(seed), time.monotonic()
    grammars = [Grammar.regex(form) for form in _FORMS] if find_spec("llguidance") else []
    waiting: list[Any] = []
    warm_bytes = 0
    for at, prompt in prompts(rng, number, plan.workload.prompt_tokens):
        waiting.append(engine.submit(prompt, params_of(rng, grammars)))
        if rng.random() < 0.05:
            rng.choice(waiting).cancel()
        if len(waiting) > 3 * plan.workload.batch:
            yield from failure_of(waiting.pop(0))
        if at and at % 1000 == 0:
            seconds = time.monotonic() - started
            host = f"the host {host_bytes() / 2**20:.1f} MiB"
            print(f"{at} after {seconds:.0f} s, {host}", flush=True)
        if at == number * _WARM_HUNDREDTHS // 100:
            warm_bytes = host_bytes()
    grown = host_bytes() - warm_bytes
    for stream in waiting:
        yield from failure_of(stream)
    print(f"{time.monotonic() - started:.0f} s, the host's memory grew by {grown / 2**20:.1f} MiB")
    if grown > _GROWTH_BYTES:
        yield f"the host's memory grew by {grown} bytes"
    if engine.load().free_pages != engine.capacity.pages:
        yield f"{engine.capacity.pages - engine.load().free_pages} pages are lost"
    if engine.num_short:
        yield f"{engine.num_short} steps ran out of memory"


def failure_of(stream: Any) -> list[str]:
    """Why a request has failed, if it has."""
    try:
        stream.result()
    except Exception as error:
        return [f"a request failed: {error}"]
    return []


def host_bytes() -> int:
    """The memory of this process and those that it started, without what is shared."""
    tasks = Path("/proc/self/task").glob("*/children")
    children = [child for task in tasks for child in task.read_text().split()]
    return sum(map(_anonymous_bytes, ["self", *children]))


def _anonymous_bytes(process: str) -> int:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)


def memory_faults(engine: Engine, plan: duoka.Plan, *, processes: bool) -> Iterator[str]:
    """What devices took beyond their forecast; the engine has been closed if it had processes."""
    peaks = {device.device: device for device in engine.peaks()}
    gpus = {} if processes else {str(gpu.device): gpu for gpu in virtual.active_world().gpus}
    for stage in plan.forecast.devices:
        peak = peaks[stage.device]
        print(
            f"{stage.device}: allocated {peak.allocated_bytes} of {stage.allocated_bytes}, "
            f"reserved {peak.reserved_bytes} of {stage.reserved_bytes}"
        )
        if stage.device in gpus and gpus[stage.device].allocator.is_pressed:
            yield f"{stage.device} ran short"
        # A stage's process has the step's token ids as well, which only the first stage reads.
        spare = 8 * plan.workload.prompt_tokens + 512 if processes else 0
        if peak.allocated_bytes > stage.allocated_bytes + spare:
            yield f"{stage.device} allocated more than was forecast"
        if peak.reserved_bytes > stage.reserved_bytes:
            yield f"{stage.device} reserved more than was forecast"


def parse() -> argparse.Namespace:
    """What is asked, and how much of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--processes", action="store_true", help="one for each GPU")
    parser.add_argument("--model", default="shallow", choices=sorted(tuning.CONFIGS))
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--pages", type=int, default=72)
    parser.add_argument("--chunk", type=int, default=80, help="tokens of a prompt read at once")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> int:
    """Plan, squeeze, and ask."""
    choice = parse()
    work = duoka.Workload(
        cache="paged",
        batch=choice.sequences,
        prompt_tokens=100,
        new_tokens=28,
        dtype="float32",
        prefill_chunk_tokens=choice.chunk,
        pages=choice.pages,
    )
    with tempfile.TemporaryDirectory() as directory:
        model = tuning.write_model(choice.model, Path(directory) / choice.model)
        plan = duoka.plan(model, f"virtual:{choice.gpus}x128MiB", work, use_all=True)
        plan = squeezed(plan)
        with CountingEngine(plan, processes=choice.processes) as engine:
            faults = list(soak(engine, plan, choice.requests, choice.seed))
            if not choice.processes:
                faults += memory_faults(engine, plan, processes=False)
        if choice.processes:
            faults += memory_faults(engine, plan, processes=True)
    print("\n".join(faults) or f"{choice.requests} requests, nothing went wrong")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
