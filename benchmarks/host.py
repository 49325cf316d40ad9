"""The host's work for a step on CUDA: launches, copies, waits and CPU time, on the CUDA rig.

Kernels compute nothing there, so that all time is the host's. All ways to run the model are
measured in one process, several times in random order; ratios are to a plain forward pass. Stages
are processes of their own, which write to the same log; CPU time is that of all processes.

    rig=$(.venv-cuda/bin/python tests/cuda_rig/build.py)
    RIG_GPUS=2x400GiB RIG_LOG=/dev/shm/rig.log LD_PRELOAD=$rig LD_LIBRARY_PATH=${rig%/*} \\
        OMP_NUM_THREADS=1 .venv-cuda/bin/python benchmarks/host.py
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from accelerate import dispatch_model
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, PreTrainedModel

import duoka
from duoka.api.load import OpenedModel
from duoka.engine.executor import Executor, outcomes_of, sample_rows
from duoka.engine.open_executor import open_executor
from duoka.engine.request import SamplingParams
from duoka.engine.sampler import SamplingRow
from duoka.forecast.serving import Capacity
from duoka.runtime.call.chunk import Chunk
from duoka.runtime.call.paged_model import PagedModel

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from cuda_rig.hole_checkpoint import hole_checkpoint
from tuning import make_tokenizer

LLAMA_3_8B = LlamaConfig(
    architectures=["LlamaForCausalLM"], hidden_size=4096, intermediate_size=14336,
    num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, vocab_size=128256,
    max_position_embeddings=2**17, dtype="bfloat16",
)  # fmt: skip
ROW = SamplingRow(params=SamplingParams(), seed=0, place=0)
DECODES = ((1, 512), (16, 512), (16, 8192), (64, 512))
PROMPTS = ((1, 512), (4, 512), (16, 512))
PLAIN = duoka.Workload(batch=16, prompt_tokens=512, new_tokens=16, prefill_chunk_tokens=None)
STAGED = duoka.Workload(
    cache="paged", batch=64, prompt_tokens=8000, new_tokens=192, prefill_chunk_tokens=8192,
    pages=16 * 32, page_tokens=256,
)  # fmt: skip
ONE_GPU, TWO_GPUS = "400GiB", "400GiB,400GiB"
LOG = Path(os.environ.get("RIG_LOG", "/dev/null"))
os.environ.setdefault("DUOKA_ATTENTION", "flash")  # there are no numbers to compare
Run = Callable[[], object]


def main() -> None:
    """Print a table of decode steps and prompts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=21)
    repeats = parser.parse_args().repeats
    with hole_checkpoint(LLAMA_3_8B.to_dict()) as folder, torch.no_grad(), ExitStack() as stages:
        make_tokenizer().save_pretrained(folder)
        models = open_models(folder)
        executors = {
            name: stages.enter_context(open_stages(folder, has_graphs="graphs" in name))
            for name in ("engine, 2 stages", "engine, 2 stages, graphs")
        }
        print("| step | | launches | copies | waits | CPU ms | busiest process | ratio |")
        print("|---|---|---:|---:|---:|---:|---:|---:|", flush=True)
        for batch, context in DECODES:
            runs = decode_runs(models, executors, batch, context)
            print_rows(f"decode, {batch} x {context}", runs, repeats)
        for batch, tokens in PROMPTS:
            runs = prompt_runs(models, executors, batch, tokens)
            print_rows(f"prompt, {batch} x {tokens}", runs, repeats)


def open_models(folder: Path) -> dict[str, PreTrainedModel]:
    """Return the model on one GPU and on two, without the engine."""
    with torch.device("cuda:0"):
        plain = AutoModelForCausalLM.from_config(LLAMA_3_8B).eval()
    two_gpus = duoka.plan(folder, TWO_GPUS, PLAIN, use_all=True)
    accelerated = dispatch_model(
        copy.deepcopy(plain),
        {name: torch.device(device).index for name, device in two_gpus.placement.entries},
        skip_keys=plain._skip_keys_device_placement,
    )
    return {
        "plain": plain,
        "duoka.load, 1 GPU": duoka.load(duoka.plan(folder, ONE_GPU, PLAIN)),
        "accelerate, 2 GPUs": accelerated,
        "duoka.load, 2 GPUs": duoka.load(two_gpus),
    }


@contextmanager
def open_stages(folder: Path, *, has_graphs: bool) -> Iterator[Executor]:
    """Start a process of the engine for each of two GPUs."""
    work = replace(STAGED, cuda_graphs=has_graphs)
    plan = duoka.plan(folder, TWO_GPUS, work, use_all=True)
    executor, *_ = open_executor(plan, OpenedModel.open(plan), True, warm_up="first")
    with closing(executor):
        executor.start()
        yield executor


def print_rows(title: str, runs: dict[str, Run], repeats: int) -> None:
    """Print counts and the CPU time of each way, in random order."""
    counts = {name: count(run) for name, run in runs.items()}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    chance = random.Random(0)
    for _ in range(repeats):
        # In any order: a run is slower after one that has left the processor's caches cold.
        for name in chance.sample([*runs], len(runs)):
            begin = cpu_seconds()
            runs[name]()
            spent = [now - then for now, then in zip(cpu_seconds(), begin, strict=True)]
            seconds[name].append((sum(spent), max(spent)))
    # The lower quartile, since other work on the machine only adds time.
    quartiles = {name: sorted(each)[repeats // 4] for name, each in seconds.items()}
    for name, (total, busiest) in quartiles.items():
        launches, copies, waits = (counts[name][word] for word in ("launch", "copy", "wait"))
        print(
            f"| {title} | {name} | {launches} | {copies} | {waits} | {1000 * total:.1f} | "
            f"{1000 * busiest:.1f} | {total / quartiles['plain'][0]:.2f} |",
            flush=True,
        )


def cpu_seconds() -> list[float]:
    """Return the CPU time so far of this process, then of each of its children."""
    children = Path("/proc/self/task").glob("*/children")
    numbers = sorted(int(number) for file in children for number in file.read_text().split())
    # Linux's CPU clock of another process, as clock_getcpuclockid() finds it.
    return [time.process_time(), *(time.clock_gettime(~number << 3 | 2) for number in numbers)]


def count(run: Run) -> Counter[str]:
    """Count the first words of the rig's log during a run, after one to warm up."""
    run()
    begin = LOG.stat().st_size
    run()
    with LOG.open() as log:
        log.seek(begin)
        return Counter(line.split(None, 1)[0] for line in log)


def decode_runs(
    models: dict[str, PreTrainedModel], executors: dict[str, Executor], batch: int, context: int
) -> dict[str, Run]:
    """Return a decode step of each way; all with a greedy choice and its copy to the host."""
    tokens, plain = [[1]] * batch, models["plain"]
    return {
        **{name: model_run(model, batch, context) for name, model in models.items()},
        **{
            name: engine_run(plain, page_tokens, tokens, context)
            for name, page_tokens in (("engine, block tables", 256), ("engine, gather", 16))
        },
        "engine, graphs": engine_run(plain, 256, tokens, context, has_graphs=True),
        **{name: stages_run(each, tokens, context) for name, each in executors.items()},
    }


def model_run(model: PreTrainedModel, batch: int, context: int) -> Run:
    """Return a decode step of a model without the engine."""
    tokens = torch.zeros(batch, 1, dtype=torch.long, device="cuda:0")
    mask = torch.ones(batch, context, dtype=torch.long, device="cuda:0")
    shape = batch, model.config.num_key_value_heads, context - 1, model.config.head_dim

    def past_on(device: torch.device) -> tuple[Tensor, Tensor]:
        key, value = (torch.empty(shape, dtype=model.dtype, device=device) for _ in range(2))
        return key, value

    devices = [layer.self_attn.q_proj.weight.device for layer in model.model.layers]
    past = {device: past_on(device) for device in set(devices)}

    def run() -> object:
        # A cache of its own for each step, so that all steps are equally long.
        cache = DynamicCache(config=model.config)
        for layer, device in zip(cache.layers, devices, strict=True):
            layer.update(*past[device], {})
        outputs = model(tokens, attention_mask=mask, past_key_values=cache)
        return outputs.logits[:, -1].argmax(-1).tolist()

    return run


def prompt_runs(
    models: dict[str, PreTrainedModel], executors: dict[str, Executor], batch: int, tokens: int
) -> dict[str, Run]:
    """Return a step over whole prompts of each way."""
    ids = torch.zeros(batch, tokens, dtype=torch.long, device="cuda:0")

    def run(model: PreTrainedModel) -> object:
        outputs = model(ids, attention_mask=torch.ones_like(ids), logits_to_keep=1)
        return outputs.logits[:, -1].argmax(-1).tolist()

    chunks = [[1] * tokens] * batch
    return {
        **{name: partial(run, model) for name, model in models.items()},
        **{
            name: engine_run(models["plain"], page_tokens, chunks, tokens)
            for name, page_tokens in (("engine, block tables", 256), ("engine, gather", 16))
        },
        "engine, 2 stages": stages_run(executors["engine, 2 stages"], chunks, tokens),
    }


def stages_run(executor: Executor, tokens: list[list[int]], context: int) -> Run:
    """Return a step of the engine's processes over chunks that end at `context` tokens."""
    chunks = chunks_of(tokens, context, executor.capacity.page_tokens)

    def run() -> None:
        executor.submit(chunks)
        result = executor.wait()
        assert result is not None, "nobody woke it"
        assert not isinstance(result, Exception), result
        time.sleep(0.01)  # stages count what they have done after a step's end

    return run


def chunks_of(tokens: list[list[int]], context: int, page_tokens: int) -> list[Chunk]:
    """Return chunks that end at `context` tokens, with pages of their own."""
    number = -(-context // page_tokens)
    return [
        Chunk(at, part, context - len(part), [*range(at * number, (at + 1) * number)], ROW)
        for at, part in enumerate(tokens)
    ]


def engine_run(
    model: PreTrainedModel,
    page_tokens: int,
    tokens: list[list[int]],
    context: int,
    *,
    has_graphs: bool = False,
) -> Run:
    """Return a step of the engine over chunks that end at `context` tokens."""
    capacity = Capacity(
        sequences=len(tokens),
        context_tokens=context,
        pages=len(tokens) * -(-context // page_tokens),
        page_tokens=page_tokens,
        step_tokens=sum(map(len, tokens)),
        graph_tokens=256 if has_graphs else 0,
    )
    chunks = chunks_of(tokens, context, page_tokens)
    # A model of its own, as its attention is set for the whole model.
    paged = PagedModel(copy.deepcopy(model), capacity)
    paged.warm_up("first")
    return lambda: outcomes_of(chunks, sample_rows(chunks, paged.run(chunks)))


if __name__ == "__main__":
    main()
