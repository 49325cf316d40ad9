"""The engine's stages at work at the same time, beside one after the other.

    python benchmarks/engine.py [--hidden 256 1024 2048] [--rounds 7]

A Llama is cut into two stages of one thread each, on a CPU. `inline` is one process with one
thread, in which the stages work one after the other; `staged` a process for each. Rounds alternate,
and ratios are of medians of tokens a second: answers of 16 tokens to 16 requests at once, by the
one; to 16 (8 in each step) and to 32 (16 in each step) by the other; and a prompt in 8 pieces.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

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


def plan_for(directory: Path, sequences: int) -> Plan:
    """Two equal stages, each of them on the CPU."""
    work = duoka.Workload(
        batch=sequences,
        prompt_tokens=8 * PIECE,
        new_tokens=NEW_TOKENS + 1,
        dtype="float32",
        prefill_chunk_tokens=PIECE,
    )
    plan = duoka.plan(directory, "virtual:2x16GiB", work, use_all=True)
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


def measure(directory: Path, rounds: int, batch: int) -> None:
    """Measure one model at one batch, and print."""
    plan = plan_for(directory, 2 * batch)
    found: dict[str, list[float]] = {}
    with Engine(plan, processes=False) as inline, Engine(plan, processes=True) as staged:
        ways: dict[str, Callable[[int], float]] = {
            "inline": lambda _: decode(inline, batch),
            "staged, twice as many": lambda _: decode(staged, 2 * batch),
            "staged, as many": lambda _: decode(staged, batch),
            "inline, a prompt in 8 pieces": lambda seed: prefill(inline, seed),
            "staged, a prompt in 8 pieces": lambda seed: prefill(staged, seed),
        }
        for seed in range(-1, rounds):
            for name, way in ways.items():
                speed = way(seed)
                if seed >= 0:
                    found.setdefault(name, []).append(speed)
    medians = {name: statistics.median(speeds) for name, speeds in found.items()}
    for name, speed in medians.items():
        base = medians["inline, a prompt in 8 pieces" if "prompt" in name else "inline"]
        print(f"  {batch:3} requests  {name:30} {speed:8.1f} tokens/s  {speed / base:5.2f}")


def main() -> None:
    """Measure, and print."""
    options = parse()
    torch.set_num_threads(1)
    for hidden in options.hidden:
        with tempfile.TemporaryDirectory() as directory:
            write_model(Path(directory), hidden, options.layers)
            print(f"hidden {hidden}, {options.layers} layers", flush=True)
            for batch in options.batch:
                measure(Path(directory), options.rounds, batch)


if __name__ == "__main__":
    main()
