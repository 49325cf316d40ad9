"""The engine's tokens per second beside the forecast's, on virtual GPUs that were calibrated.

    python benchmarks/engine_forecast.py [--rounds 3] [--processor-seconds]

`duoka plan --serve` says how fast so many requests are answered when each has half a context. Here
they are: prompts of that length, whose pages are there already, so that all answer from the first
step on; of which the time of 17 tokens less that of one is taken, in this process and, for two
GPUs, in a process for each. Calibrations and measurements alternate, since other work on the
machine slows down both, and what is told are medians, with the least and the largest ratio of a
round. With `--processor-seconds` both are timed by what this process gets of the processor, which
depends less on other work; processes of their own are left out then.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
from engine import NEW_TOKENS, VOCABULARY, write_model

import duoka
from duoka.engine import Engine, SamplingParams
from duoka.hardware import calibration
from duoka.hardware.fleet import Fleet
from duoka.tools.bench import calibrate as calibrating
from duoka.tools.bench.calibrate import calibrate

CONTEXT, LOADS = 256, (1, 16)


def calibrated(fleet: Fleet) -> Fleet:
    """The fleet as fast as it is now."""
    measured = calibrate(fleet).calibration
    devices = [calibration.with_figures(gpu, measured.gpus[0]) for gpu in fleet.devices]
    links = calibration.with_links(fleet.links, {name: name for name in fleet.names}, measured)
    return replace(fleet, devices=tuple(devices), links=links)


def plan_for(model: Path, fleet: Fleet, pages: int | None) -> duoka.Plan:
    """A plan for serving that uses all of a fleet; with as many pages as fit it tells speeds."""
    work = duoka.Workload(
        cache="paged",
        batch=max(LOADS),
        prompt_tokens=CONTEXT - NEW_TOKENS - 1,
        new_tokens=NEW_TOKENS + 1,
        dtype="float32",
        prefill_chunk_tokens=64,
        pages=pages,
    )
    return duoka.plan(model, fleet, work, use_all=True)


def decode(engine: Engine, requests: int, rng: random.Random) -> float:
    """Tokens a second of so many requests."""
    # A whole number of pages, and one token more.
    texts = [[rng.randrange(VOCABULARY) for _ in range(CONTEXT // 2 - 15)] for _ in range(requests)]
    seconds = []
    for number in (1, 1, NEW_TOKENS + 1):
        params = SamplingParams(max_new_tokens=number, min_new_tokens=number)
        begin = calibrating.time.perf_counter()
        engine.generate(texts, params)
        seconds.append(calibrating.time.perf_counter() - begin)
    return requests * NEW_TOKENS / max(seconds[2] - seconds[1], 1e-9)


def rounds(model: Path, gpus: int, number: int) -> Iterator[tuple[int, str, float, float]]:
    """Each load, how it was answered, the forecast's speed and the measured one."""
    rng = random.Random(0)
    fleet = Fleet.parse(f"virtual:{gpus}x2GiB")
    ways = {"inline": False}
    if gpus > 1 and calibrating.time is time:
        ways["processes"] = True
    for way, processes in ways.items():
        few = plan_for(model, fleet, max(LOADS) * CONTEXT // 16)  # the rest is for calibrating
        with Engine(few, processes=processes) as engine:
            for requests in LOADS:
                decode(engine, requests, rng)
            for _ in range(number):
                plan = plan_for(model, calibrated(fleet), None)
                for load in plan.forecast.serving_speeds:
                    if load.requests not in LOADS:
                        continue
                    expected = (
                        load.tokens_per_second if processes else load.serial_tokens_per_second
                    )
                    yield load.requests, way, expected, decode(engine, load.requests, rng)


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--processor-seconds", action="store_true")
    options = parser.parse_args()
    if options.processor_seconds:
        calibrating.time = SimpleNamespace(perf_counter=time.process_time)
    torch.set_num_threads(1)
    for hidden in options.hidden:
        with tempfile.TemporaryDirectory() as directory:
            write_model(Path(directory), hidden, 8)
            for gpus in options.gpus:
                rows: dict[tuple[int, str], list[tuple[float, float]]] = {}
                for requests, way, *speeds in rounds(Path(directory), gpus, options.rounds):
                    rows.setdefault((requests, way), []).append((speeds[0], speeds[1]))
                for (requests, way), pairs in rows.items():
                    expected, measured = map(statistics.median, zip(*pairs, strict=True))
                    ratios = [measured / expected for expected, measured in pairs]
                    print(
                        f"hidden {hidden}, {gpus} GPUs {way:9}, {requests:2} at once: "
                        f"forecast {expected:8.1f}, measured {measured:8.1f} tokens/s, "
                        f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
