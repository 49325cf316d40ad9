"""The host's work for a step on CUDA: launches, copies, waits and CPU time, on the CUDA rig.

Kernels compute nothing there, so that all time is the host's. All ways to run the model are
measured in one process, several times in turn; ratios are to a plain forward pass.

    rig=$(.venv-cuda/bin/python tests/cuda_rig/build.py)
    RIG_GPUS=400GiB RIG_LOG=/dev/shm/rig.log LD_PRELOAD=$rig LD_LIBRARY_PATH=${rig%/*} \\
        OMP_NUM_THREADS=1 .venv-cuda/bin/python benchmarks/host.py
"""

from __future__ import annotations

import argparse
import copy
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, PreTrainedModel

from duoka.engine.executor import outcomes_of
from duoka.engine.request import SamplingParams
from duoka.engine.sampler import SamplingRow
from duoka.forecast.serving import Capacity
from duoka.runtime.call.chunk import Chunk
from duoka.runtime.call.paged_model import PagedModel

LLAMA_3_8B = LlamaConfig(
    hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, vocab_size=128256, max_position_embeddings=2**17, dtype="bfloat16",
)  # fmt: skip
ROW = SamplingRow(params=SamplingParams(), seed=0, place=0)
DECODES = ((1, 512), (16, 512), (16, 8192), (64, 512))
PROMPTS = ((1, 512), (4, 512), (16, 512))
LOG = Path(os.environ.get("RIG_LOG", "/dev/null"))
os.environ.setdefault("DUOKA_ATTENTION", "flash")  # there are no numbers to compare
Run = Callable[[], object]


def main() -> None:
    """Print a table for decode steps, and one for prompts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    model = AutoModelForCausalLM.from_config(LLAMA_3_8B).to("cuda:0").eval()
    with torch.no_grad():
        for batch, context in DECODES:
            print_table(f"decode, {batch} x {context}", decode_runs(model, batch, context), repeats)
        for batch, tokens in PROMPTS:
            print_table(f"prompt, {batch} x {tokens}", prompt_runs(model, batch, tokens), repeats)


def print_table(title: str, runs: dict[str, Run], repeats: int) -> None:
    """Print counts and the median CPU time of each way, which run in turn."""
    counts = {name: count(run) for name, run in runs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            begin = time.process_time()
            run()
            seconds[name].append(time.process_time() - begin)
    print(f"\n{title}\n{'':28}launches  copies  waits   CPU ms  ratio")
    (plain, *_) = medians = [sorted(each)[repeats // 2] for each in seconds.values()]
    for name, median in zip(runs, medians, strict=True):
        launches, copies, waits = (counts[name][word] for word in ("launch", "copy", "wait"))
        print(
            f"{name:28}{launches:8}{copies:8}{waits:7}{1000 * median:9.1f}{median / plain:7.2f}",
            flush=True,
        )


def count(run: Run) -> Counter[str]:
    """Count the first words of the rig's log during a run, after one to warm up."""
    run()
    begin = LOG.stat().st_size
    run()
    with LOG.open() as log:
        log.seek(begin)
        return Counter(line.split(None, 1)[0] for line in log)


def decode_runs(model: PreTrainedModel, batch: int, context: int) -> dict[str, Run]:
    """Return a decode step of each way; all with a greedy choice and its copy to the host."""
    tokens = torch.zeros(batch, 1, dtype=torch.long, device="cuda:0")
    mask = torch.ones(batch, context, dtype=torch.long, device="cuda:0")
    heads, head_dim = model.config.num_key_value_heads, model.config.head_dim

    def plain() -> object:
        # A cache of its own for each step, so that all steps are equally long.
        cache = DynamicCache(config=model.config)
        for layer in cache.layers:
            layer.update(*past, {})
        outputs = model(tokens, attention_mask=mask, past_key_values=cache)
        return outputs.logits[:, -1].argmax(-1).tolist()

    past = [
        torch.empty(batch, heads, context - 1, head_dim, dtype=model.dtype, device="cuda:0")
        for _ in range(2)
    ]
    return {
        "plain": plain,
        **{
            name: engine_run(model, page_tokens, [[1]] * batch, context)
            for name, page_tokens in (("engine, block tables", 256), ("engine, gather", 16))
        },
        "engine, graphs": engine_run(model, 256, [[1]] * batch, context, has_graphs=True),
    }


def prompt_runs(model: PreTrainedModel, batch: int, tokens: int) -> dict[str, Run]:
    """Return a step over whole prompts of each way."""
    ids = torch.zeros(batch, tokens, dtype=torch.long, device="cuda:0")

    def plain() -> object:
        outputs = model(ids, attention_mask=torch.ones_like(ids), logits_to_keep=1)
        return outputs.logits[:, -1].argmax(-1).tolist()

    chunks = [[1] * tokens] * batch
    return {
        "plain": plain,
        **{
            name: engine_run(model, page_tokens, chunks, tokens)
            for name, page_tokens in (("engine, block tables", 256), ("engine, gather", 16))
        },
    }


def engine_run(
    model: PreTrainedModel,
    page_tokens: int,
    tokens: list[list[int]],
    context: int,
    *,
    has_graphs: bool = False,
) -> Run:
    """Return a step of the engine over chunks that end at `context` tokens."""
    per_sequence = -(-context // page_tokens)
    capacity = Capacity(
        sequences=len(tokens),
        context_tokens=context,
        pages=len(tokens) * per_sequence,
        page_tokens=page_tokens,
        step_tokens=sum(map(len, tokens)),
        has_graphs=has_graphs,
    )
    pages = [range(at * per_sequence, (at + 1) * per_sequence) for at in range(len(tokens))]
    chunks = [
        Chunk(at, part, context - len(part), list(pages[at]), ROW) for at, part in enumerate(tokens)
    ]

    # A model of its own, as its attention is set for the whole model.
    paged = PagedModel(copy.deepcopy(model), capacity)
    paged.warm_up("first")
    return lambda: outcomes_of(chunks, paged.run(chunks))


if __name__ == "__main__":
    main()
