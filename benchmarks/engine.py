"""The engine beside the same model one stage after the other, and beside transformers.

    python benchmarks/engine.py [--hidden 256 1024 2048] [--rounds 7]

A Llama is cut into two stages of one thread each, on a CPU. `inline` is one process with one
thread, in which the stages work one after the other; `staged` a process for each: answers of 17
tokens to so many requests at once, and to twice as many; and a prompt in 8 pieces. Then one stage
and one thread: decoding of 16 requests with 1,024 tokens of context beside transformers'
`generate_batch`, and of one beside `generate`. Rounds alternate, and ratios are of medians.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from tuning import make_tokenizer

import duoka
from duoka.engine import Engine, SamplingParams
from duoka.planner.plan import Plan

VOCABULARY, PROMPT = 1000, 16
NEW_TOKENS = 16
PIECE = 64


def parse() -> argparse.Namespace:
    """The sizes that are measured."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 1024, 2048])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
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


def plan_for(directory: Path, sequences: int, *, stages: int = 2, context: int = 512) -> Plan:
    """Equal stages, each of them on the CPU."""
    work = duoka.Workload(
        batch=sequences,
        prompt_tokens=context,
        new_tokens=NEW_TOKENS + 1,
        dtype="float32",
        prefill_chunk_tokens=PIECE,
    )
    plan = duoka.plan(directory, f"virtual:{stages}x16GiB", work, use_all=True)
    path = directory / "plan.json"
    path.write_text(plan.to_json().replace("vgpu:", "cpu:"))
    return Plan.load(path)


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
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    base = next(iter(medians.values()))
    for name, speed in medians.items():
        print(f"  {title:22} {name:24} {speed:9.1f} tokens/s {speed / base:6.2f}", flush=True)


def measure_stages(directory: Path, rounds: int, batch: int) -> None:
    """Two stages at work at the same time, beside one after the other."""
    plan = plan_for(directory, 2 * batch)
    with Engine(plan, processes=False) as inline, Engine(plan, processes=True) as staged:
        ways: dict[str, Callable[[int], float]] = {
            "inline": lambda _: decode(inline, batch),
            "staged, twice as many": lambda _: decode(staged, 2 * batch),
            "staged, as many": lambda _: decode(staged, batch),
        }
        compare(f"{batch} at once", ways, rounds)


def measure_prompts(directory: Path, rounds: int) -> None:
    """A prompt in 8 pieces, on two stages."""
    plan = plan_for(directory, 1)
    with Engine(plan, processes=False) as inline, Engine(plan, processes=True) as staged:
        ways: dict[str, Callable[[int], float]] = {
            "inline": lambda seed: prefill(inline, seed),
            "staged": lambda seed: prefill(staged, seed),
        }
        compare("a prompt in 8 pieces", ways, rounds)


def measure_transformers(directory: Path, rounds: int, batch: int, context: int) -> None:
    """Decoding on one device, beside transformers: the time of 16 tokens more than one."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    plan = plan_for(directory, batch, stages=1, context=context)

    def texts(seed: int) -> list[list[int]]:
        rng = random.Random(seed)
        return [[rng.randrange(VOCABULARY) for _ in range(context)] for _ in range(batch)]

    def transformers(prompts: list[list[int]], number: int) -> None:
        config = GenerationConfig(
            max_new_tokens=number, min_new_tokens=number, do_sample=False, pad_token_id=0
        )
        if batch == 1:
            ids = torch.tensor(prompts)
            model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        else:
            model.generate_batch(prompts, generation_config=config)

    with Engine(plan) as engine:

        def ours(prompts: list[list[int]], number: int) -> None:
            params = SamplingParams(max_new_tokens=number, min_new_tokens=number)
            engine.generate(prompts, params)

        def speed(run: Callable[[list[list[int]], int], None], seed: int) -> float:
            seconds = []
            for number, turn in ((1, 0), (NEW_TOKENS + 1, 1)):
                prompts = texts(2 * seed + turn)  # others, whose pages aren't there yet
                begin = time.perf_counter()
                run(prompts, number)
                seconds.append(time.perf_counter() - begin)
            return batch * NEW_TOKENS / (seconds[1] - seconds[0])

        name = "generate" if batch == 1 else "generate_batch"
        ways: dict[str, Callable[[int], float]] = {
            name: lambda seed: speed(transformers, seed),
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
            for batch in options.batch:
                measure_stages(path, options.rounds, batch)
            measure_prompts(path, options.rounds)
            if hidden == options.hidden[0]:
                measure_transformers(path, options.rounds, 16, 1024)
                measure_transformers(path, options.rounds, 1, 128)


if __name__ == "__main__":
    main()
