"""The engine beside the same model one stage after the other, and beside transformers.

    python benchmarks/engine.py [--hidden 256 1024 2048] [--rounds 7] [--only stages] [--json FILE]

A Llama is cut into two stages of one thread each, on a CPU. `inline` is one process with one
thread, in which the stages work one after the other; `staged` a process for each: answers of 17
tokens to so many requests at once, and to twice as many; and a prompt in 8 pieces. Then one stage
and one thread: decoding of 16 requests with 1,024 tokens of context beside transformers'
`generate_batch`, and of one beside `generate`. `unequal` gives the second stage half of a core
(its first core has a neighbour that never rests): layers cut evenly, and as duoka plans them for
a GPU of half the speed. Rounds alternate, and ratios are of medians.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.generation.streamers import BaseStreamer

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from tuning import make_tokenizer

import duoka
from duoka.engine import Engine, SamplingParams
from duoka.planner.plan import Plan
from duoka.runtime.call.chunk import Chunk

VOCABULARY, PROMPT = 1000, 16
NEW_TOKENS = 16
LONG_ANSWER = 48  # the first requests still answer when the last one begins
PIECE = 64
PARTS = ("stages", "prompts", "transformers", "unequal")
MEASURED: list[dict[str, Any]] = []
# A core of this kind of machine, by `duoka bench --calibrate`; the ratio alone matters here.
CORE = {
    "memory_bytes_per_second": 10e9,
    "flops_per_second": 60e9,
    "float32_flops_per_second": 60e9,
    "launch_seconds": 15e-6,
}


def parse() -> argparse.Namespace:
    """The sizes that are measured."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 1024, 2048])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--context", type=int, default=1024, help="beside `generate_batch`")
    parser.add_argument("--only", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def write_model(directory: Path, hidden: int, layers: int) -> None:
    """A Llama of some size, with random weights."""
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 256),
        vocab_size=VOCABULARY,
        bos_token_id=1,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)


def plan_for(
    directory: Path,
    sequences: int,
    *,
    stages: int = 2,
    context: int = 512,
    new_tokens: int = NEW_TOKENS + 1,
    half_speed: bool = False,
) -> Plan:
    """Equal stages, each of them on the CPU; or one for a second GPU of half the first's speed."""
    work = duoka.Workload(
        batch=sequences,
        prompt_tokens=context,
        new_tokens=new_tokens,
        dtype="float32",
        prefill_chunk_tokens=PIECE,
    )
    fleet = duoka.Fleet.parse(f"virtual:{stages}x16GiB")
    if half_speed:
        slow = {
            name: value * 2 if name == "launch_seconds" else value / 2
            for name, value in CORE.items()
        }
        first, second = fleet.devices
        fleet = replace(fleet, devices=(replace(first, **CORE), replace(second, **slow)))
    objective = "throughput" if half_speed else "auto"
    plan = duoka.plan(directory, fleet, work, use_all=True, objective=objective)
    path = directory / "plan.json"
    path.write_text(plan.to_json().replace("vgpu:", "cpu:"))
    return Plan.load(path)


def open_engine(plan: Plan, processes: bool | None = None) -> Engine:
    """An engine that is warm for what comes after a first round; all sizes would take minutes."""
    return Engine(plan, processes=processes, warm_up="largest")


def decode(engine: Engine, requests: int) -> float:
    """Tokens a second of answers to so many requests at once."""
    ended: list[float] = []
    texts = [[number + 2] * PROMPT for number in range(requests)]
    params = SamplingParams(max_new_tokens=NEW_TOKENS + 1, min_new_tokens=NEW_TOKENS + 1)
    # From the first token of the last prompt on, all are answering.
    streams = [engine.submit(text, params) for text in texts]
    begin = time.perf_counter()
    for stream in streams:
        stream.result()
        ended.append(time.perf_counter())
    return requests * (NEW_TOKENS + 1) / (ended[-1] - begin)


def prefill(engine: Engine, seed: int) -> float:
    """Tokens a second of a prompt of eight pieces."""
    text = [(seed * 31 + place * place) % VOCABULARY for place in range(8 * PIECE)]
    begin = time.perf_counter()
    engine.submit(text, SamplingParams(max_new_tokens=1)).result()
    return len(text) / (time.perf_counter() - begin)


def compare(title: str, ways: dict[str, Callable[[int], float]], rounds: int) -> None:
    """Measure ways by turns, the first of which is the measure of all, and print."""
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for seed in range(-1, rounds):
        for name, way in ways.items():
            speed = way(seed)
            if seed >= 0:
                speeds[name].append(speed)
    tell(title, speeds)


def tell(title: str, speeds: dict[str, list[float]]) -> None:
    """Medians, and their ratios to the first."""
    MEASURED.append({"case": title, "tokens_per_second": speeds})
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    base = next(iter(medians.values()))
    for name, speed in medians.items():
        print(f"  {title:22} {name:24} {speed:9.1f} tokens/s {speed / base:6.2f}", flush=True)


def measure_stages(directory: Path, rounds: int, batch: int) -> None:
    """Two stages at work at the same time, beside one after the other."""
    plan = plan_for(directory, 2 * batch)
    with open_engine(plan, False) as inline, open_engine(plan, True) as staged:
        ways: dict[str, Callable[[int], float]] = {
            "inline": lambda _: decode(inline, batch),
            "staged, twice as many": lambda _: decode(staged, 2 * batch),
            "staged, as many": lambda _: decode(staged, batch),
        }
        compare(f"{batch} at once", ways, rounds)


@contextmanager
def half_a_core() -> Iterator[None]:
    """The second stage's worker on the second core, with a neighbour that never rests."""
    tasks = Path(f"/proc/{os.getpid()}/task").iterdir()
    workers = [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
    for pid in [os.getpid(), *workers]:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        core = int(pid in workers and b"RANK=1" in variables)
        for task in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(task.name), {core})
    neighbour = subprocess.Popen(["taskset", "-c", "1", sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        neighbour.kill()
        neighbour.wait()
        os.sched_setaffinity(0, range(os.cpu_count() or 1))


def measure_unequal(directory: Path, rounds: int, batch: int) -> None:
    """Stages on cores of 2:1 speed: layers cut evenly, and as duoka cuts them."""
    plans = {
        "cut evenly": plan_for(directory, 2 * batch),
        "duoka's cut": plan_for(directory, 2 * batch, half_speed=True),
    }
    for name, plan in plans.items():
        layers = [on for module, on in plan.placement.entries if ".layers." in module]
        print(f"  {name}: {layers.count('cpu:0')} and {layers.count('cpu:1')} layers", flush=True)
    # One engine at a time: idle workers would share the pinned cores, and they wake in turns.
    speeds: dict[str, list[float]] = {name: [] for name in plans}
    for _ in range(rounds):
        for name, plan in plans.items():
            with open_engine(plan, True) as engine:
                decode(engine, 2 * batch)
                with half_a_core():
                    speeds[name].append(decode(engine, 2 * batch))
    tell(f"2:1, {2 * batch} at once", speeds)


def measure_prompts(directory: Path, rounds: int) -> None:
    """A prompt in 8 pieces, on two stages."""
    plan = plan_for(directory, 1)
    with open_engine(plan, False) as inline, open_engine(plan, True) as staged:
        ways: dict[str, Callable[[int], float]] = {
            "inline": lambda seed: prefill(inline, seed),
            "staged": lambda seed: prefill(staged, seed),
        }
        compare("a prompt in 8 pieces", ways, rounds)


class Clock(BaseStreamer):
    """When the prompt and each token came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """A prompt or a token."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """All is there."""


Times = Callable[[list[list[int]]], list[float]]


def transformers_times(model: Any, batch: int, context: int) -> Times:
    """When transformers took each step of all requests."""
    config = GenerationConfig(max_new_tokens=LONG_ANSWER, do_sample=False, pad_token_id=0)
    # As many pages as the requests need, and steps as large as ours: by default it fills the
    # host's memory first, and computes the scores of all tokens at once.
    pages = ContinuousBatchingConfig(
        page_size=16, num_blocks=batch * (context + 64) // 16, max_batch_tokens=batch * PIECE
    )

    def times(prompts: list[list[int]]) -> list[float]:
        if batch == 1:
            ids, clock = torch.tensor(prompts), Clock()
            mask = torch.ones_like(ids)
            model.generate(ids, attention_mask=mask, generation_config=config, streamer=clock)
            return clock.times[1:]
        outputs = model.generate_batch(
            prompts,
            generation_config=config,
            continuous_batching_config=pages,
            record_timestamps=True,
        )
        moments = [output.timestamps for output in outputs.values()]
        first, last = max(one[0] for one in moments), min(one[-1] for one in moments)
        return [moment for moment in moments[0] if first <= moment <= last]

    return times


def engine_times(engine: Engine, batch: int) -> Times:
    """When the engine began each step of all requests."""
    submit = engine._executor.submit
    begun: list[float] = []

    def note(chunks: Sequence[Chunk]) -> None:
        if len(chunks) == batch and all(len(chunk.tokens) == 1 for chunk in chunks):
            begun.append(time.perf_counter())
        submit(chunks)

    engine._executor.submit = note  # type: ignore[method-assign]
    params = SamplingParams(max_new_tokens=LONG_ANSWER, min_new_tokens=LONG_ANSWER)

    def times(prompts: list[list[int]]) -> list[float]:
        begun.clear()
        engine.generate(prompts, params)
        return begun

    return times


def measure_transformers(directory: Path, rounds: int, batch: int, context: int) -> None:
    """Decoding on one device, beside transformers: tokens a second while all answer.

    That is by the median time from one step of all requests to the next one.
    """
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    plan = plan_for(directory, batch, stages=1, context=context, new_tokens=LONG_ANSWER)
    with open_engine(plan) as engine:

        def speed(times: Times, seed: int) -> float:
            rng = random.Random(seed)  # others each time, whose pages aren't there yet
            prompts = [rng.choices(range(VOCABULARY), k=context) for _ in range(batch)]
            steps = [after - before for before, after in pairwise(times(prompts))]
            return batch / statistics.median(steps)

        theirs, ours = transformers_times(model, batch, context), engine_times(engine, batch)
        ways: dict[str, Callable[[int], float]] = {
            "generate" if batch == 1 else "generate_batch": lambda seed: speed(theirs, seed),
            "the engine": lambda seed: speed(ours, seed),
        }
        compare(f"{batch} x {context}", ways, rounds)


def main() -> None:
    """Measure, and print."""
    options = parse()
    torch.set_num_threads(1)
    for hidden in options.hidden:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory)
            write_model(path, hidden, options.layers)
            print(f"hidden {hidden}, {options.layers} layers", flush=True)
            measured = len(MEASURED)
            for batch in options.batch:
                if "stages" in options.only:
                    measure_stages(path, options.rounds, batch)
            if "prompts" in options.only:
                measure_prompts(path, options.rounds)
            if "transformers" in options.only:
                measure_transformers(path, options.rounds, 16, options.context)
                measure_transformers(path, options.rounds, 1, 128)
            if "unequal" in options.only:
                measure_unequal(path, options.rounds, max(options.batch))
            for case in MEASURED[measured:]:
                case["hidden"] = hidden
    if options.json:
        options.json.write_text(json.dumps(MEASURED))


if __name__ == "__main__":
    main()
