"""The engine's answers beside transformers' `generate`, for every family of the sweep.

    python benchmarks/engine_equality.py [NAME ...] [--part 1/2] [--whole] [--gpu 1GiB]
                                         [--json FILE]

A family's tiny model answers 40 random prompts of 1 to 600 tokens that arrive at random times, on
1, 2 and 3 virtual GPUs; with a process for each GPU where it can be cut so, once with all answers
in one group and once with a group for each stage. Greedy tokens and their log-probabilities are
held against `generate` of the whole model on the CPU, one prompt at a time; ten of the prompts are
asked again with a seed, and their tokens held against those of the first run.

Where a token differs, so much is the other one less likely (in logits, on the CPU): an engine
rounds otherwise than `generate`, so a gap of 1e-5 is a tie.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import families
import fork_server
import transformers
from tuning import make_tokenizer

import duoka
from duoka.engine import Completion, Engine, SamplingParams

PROMPTS, SEEDED, LONGEST, NEW_TOKENS = 40, 10, 600, 8
WORK = duoka.Workload(
    batch=PROMPTS + SEEDED,
    prompt_tokens=LONGEST,
    new_tokens=NEW_TOKENS,
    dtype="float32",
    prefill_chunk_tokens=64,
)
GREEDY = SamplingParams(max_new_tokens=NEW_TOKENS, logprobs=0)
MOST_POSITIONS = 1024
POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length")
END = 2


class Answers(NamedTuple):
    """Of greedy prompts, and of those with a seed."""

    greedy: list[Completion]
    seeded: list[list[int]]


def prompts_of(name: str) -> list[list[int]]:
    """Random tokens of random lengths."""
    rng = random.Random(name)
    words = range(3, families.VOCABULARY)
    return [rng.choices(words, k=rng.randint(1, LONGEST)) for _ in range(PROMPTS)]


def generate(model: Any, prompt: Sequence[int]) -> tuple[list[int], torch.Tensor]:
    """New tokens, and the logits of each, [tokens, vocabulary]."""
    ids = torch.tensor([prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    logits = torch.cat(output.logits).float()
    return output.sequences[0, -len(logits) :].tolist(), logits


def ask(engine: Engine, prompts: list[list[int]], seed: int) -> Answers:
    """Ask for all in a random order, at random times."""
    rng = random.Random(seed)
    wanted = [(index, GREEDY) for index in range(PROMPTS)]
    wanted += [
        (index, SamplingParams(max_new_tokens=NEW_TOKENS, temperature=1.0, seed=index))
        for index in range(SEEDED)
    ]
    rng.shuffle(wanted)
    streams = {}
    for index, params in wanted:
        streams[index, params.temperature] = engine.submit(prompts[index], params)
        time.sleep(rng.expovariate(100))
    results = {key: stream.result() for key, stream in streams.items()}
    greedy = [results[index, GREEDY.temperature] for index in range(PROMPTS)]
    return Answers(greedy, [tokens(results[index, 1.0]) for index in range(SEEDED)])


def tokens(completion: Completion) -> list[int]:
    """The ids of an answer."""
    return [choice.token for choice in completion.tokens]


def runs(
    path: Path, model: Any, prompts: list[list[int]], options: argparse.Namespace
) -> Iterator[tuple[str, Answers]]:
    """A family's answers in each form."""
    is_whole = options.whole or model.config.is_encoder_decoder
    work = replace(WORK, prefill_chunk_tokens=None) if is_whole else WORK
    for number in (1, 2, 3):
        plan = duoka.plan(path, f"virtual:{number}x{options.gpu}", work, use_all=True)
        with Engine(plan, warm_up="largest") as engine:
            title = f"{len(plan.devices)} GPU{'s' * (len(plan.devices) > 1)}"
            apart = engine._executor.num_steps > 1
            for groups in ("one group", "groups") if apart else ("",):
                if groups:  # instead of what the forecast says of this model's size
                    engine._scheduler._is_grouped = lambda _, grouped=groups == "groups": grouped
                yield f"{title} {groups}".strip(), ask(engine, prompts, seed=number)


def differs(completion: Completion, expected: tuple[list[int], torch.Tensor]) -> tuple[str, float]:
    """What differs, if anything, and log-probabilities up to there by how much."""
    worst = 0.0
    for choice, token, row in zip(completion.tokens, *expected, strict=False):
        if choice.token != token:
            return f"gap {float(row[token] - row[choice.token]):.1e}", worst
        assert choice.logprob is not None, "they are asked for"
        exact = float(torch.log_softmax(row, dim=-1)[token])
        worst = max(worst, abs(exact - choice.logprob))
    number, ends = len(expected[0]), END in expected[0]  # which is no token of an answer
    as_long = len(completion.tokens) in (number, number - ends)
    return "" if as_long else f"{len(completion.tokens)} tokens, not {number}", worst


def compare(
    name: str, directory: Path, options: argparse.Namespace
) -> tuple[str, list[str], float]:
    """How a family is run, what differs, and log-probabilities by how much."""
    built: Any = families.build(name)
    built.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    # Not all that a model has is saved: the positions of some are computed anew.
    model: Any = type(built).from_pretrained(directory, dtype=torch.float32).eval()
    prompts = prompts_of(name)
    with torch.inference_mode():
        expected = [generate(model, prompt) for prompt in prompts]
    problems, worst, forms = [], 0.0, {}
    for form, answers in runs(directory, model, prompts, options):
        forms[form] = answers
        first = next(iter(forms.values()))
        for index, (completion, reference) in enumerate(zip(answers.greedy, expected, strict=True)):
            problem, distance = differs(completion, reference)
            problems += [f"{form}: prompt {index}: {problem}"] * bool(problem)
            worst = max(worst, distance)
        for index, (one, other) in enumerate(zip(first.seeded, answers.seeded, strict=True)):
            problems += [f"{form}: prompt {index} with a seed"] * (one != other)
    return ", ".join(forms), problems, worst


def main() -> None:
    """Compare, and print a line for each family."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--part", default="1/1", help="such as 2/3: each third, from the second on")
    parser.add_argument("--whole", action="store_true", help="read prompts whole")
    parser.add_argument("--gpu", default="1GiB", help="the memory of each")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    unbuilt = {name for names in families.UNBUILT.values() for name in names}
    names = options.names or sorted(set(families.all_names()) - unbuilt)
    families._SIZES.update(dict.fromkeys(POSITIONS, MOST_POSITIONS))
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as forks:
        sys.executable = str(fork_server.forking_python(Path(forks) / "forks", os.getpid()))
        for name in names[part - 1 :: parts]:
            begin = time.perf_counter()
            with tempfile.TemporaryDirectory() as directory:
                try:
                    forms, problems, worst = compare(name, Path(directory), options)
                except Exception as error:  # the next one can be run all the same
                    traceback.print_exc()
                    print(f"{name}: NOT RUN: {type(error).__name__}: {error}", flush=True)
                    continue
            seconds = time.perf_counter() - begin
            print(
                f"{name}: {forms}; log-probabilities within {worst:.1e}; {seconds:.0f} s",
                flush=True,
            )
            rows.append(
                {"family": name, "forms": forms, "problems": problems, "logprob_error": worst}
            )
            for problem in problems:
                print(f"    {problem}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
