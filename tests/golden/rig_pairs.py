"""What is counted on the rig, each in a fork with GPUs of its own: see `rig`."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cuda_rig.conftest  # noqa: F401  (imports transformers so that CUDA isn't started)
import tiny
import torch
import tuning
from cuda_rig.forecasting import Case, counted, forecast, run
from cuda_rig.values import values

import duoka
from duoka import Training, Workload

from . import records

_SECONDS = 3600
_FAILED = "Traceback", "it hangs", "it has ended"
ONE, TWO, THREE = "1GiB", "1GiB,1GiB", "1GiB,1GiB,1GiB"
LOG = "rig-log"
_TOLD = ("copy", "free", "host", "launch", "malloc", "stub")


def work(prompt: int, new: int = 0, chunk: int | None = None, **more: Any) -> Workload:
    """A workload in bfloat16."""
    sizes = {"prompt_tokens": prompt, "new_tokens": new, "prefill_chunk_tokens": chunk}
    return Workload(dtype="bfloat16", **{**sizes, **more})


# Model, GPUs, and what it does: forecast and counted.
MEMORY: dict[str, tuple[str, str, Workload]] = {
    "one GPU": ("glm", ONE, work(1333, 18)),
    "two GPUs": ("llama", TWO, work(1333, 9)),
    "a batch on three": ("tied", THREE, work(1100, 6, batch=3)),
    "a prompt in chunks": ("llama", TWO, work(1901, 5, 640, batch=2)),
    "a window": ("window", TWO, work(1333, 9)),
    "experts": ("experts", TWO, work(600, 9)),
    "latent attention": ("latent", TWO, work(600, 9)),
    "bloom": ("bloom", TWO, work(600, 9)),
    "a state": ("mamba2", ONE, work(300, 5)),
    "int8": ("llama", TWO, work(600, 9, quantize="int8")),
    "nf4": ("llama", TWO, work(600, 9, quantize="nf4")),
    "a cache in 8 bit": ("llama", TWO, work(600, 9, cache="int8")),
    "LoRA": ("tied", ONE, work(300, training=Training())),
    "LoRA on two": ("llama", TWO, work(500, training=Training(gradient_checkpointing=True))),
    "every parameter": ("tied", ONE, work(300, training=Training(method="full"))),
    "every parameter, checkpointed": (
        "tied", ONE,
        work(300, training=Training(method="full", gradient_checkpointing=True, micro_batches=3)),
    ),
}  # fmt: skip
LAUNCHES = (
    ("shallow", "1GiB,1GiB"),
    ("llama", "1GiB,1GiB"),
    ("llama", "1GiB"),
    ("tied", "1GiB,1GiB"),
)


def main() -> None:
    """Count everything."""
    found: dict[str, tuple[Callable[[], str], str]] = {}
    for name, (model, gpus, workload) in MEMORY.items():
        case = Case(config=tiny.CONFIGS[model], gpus=gpus, workload=workload)
        found[f"memory: {name}"] = partial(memory, case), gpus
    for family, gpus in LAUNCHES:
        found[f"launches: {family} on {gpus}"] = partial(launches, family, gpus), gpus
    counts = {}
    for name in filter(records.is_wanted, found):
        counts[name] = apart(*found[name])
        records.write(Path(sys.argv[1]), counts)
        if counts[name].startswith(_FAILED):
            sys.exit(f"{name}: {counts[name]}")


def memory(case: Case) -> str:
    """Allocated and reserved bytes: as forecast, and as PyTorch's allocator counts them."""
    plan = case.plan(case.profile())
    run(plan, case.build())
    return "\n".join(
        f"{name}: forecast {told} counted {most}"
        for name, told, most in zip(plan.devices, forecast(plan), counted(plan), strict=True)
    )


def launches(family: str, gpus: str) -> str:
    """Launches and copies of a loaded model's steps, and of an engine's."""
    path = tuning.write_model(family, Path.cwd() / f"rig-{family}-{len(gpus)}")
    workload = Workload(prompt_tokens=64, new_tokens=32, dtype="float32")
    plan = duoka.plan(path, gpus, workload, use_all=True)
    lines = []
    with values(), torch.no_grad():
        model = duoka.load(plan)
        lines.append(f"load: {_counted(0)}")
        first = torch.device(plan.devices[0])
        for tokens, new in ((8, 1), (8, 2), (8, 12), (40, 12)):
            done = Path(LOG).stat().st_size
            given = torch.arange(5, 5 + tokens, device=first)[None]
            model.generate(given, max_new_tokens=new, min_new_tokens=new, do_sample=False)
            lines.append(f"{tokens} tokens, {new} new: {_counted(done)}")
    peaks = [torch.cuda.max_memory_allocated(name) for name in plan.devices]
    return "\n".join([*lines, f"allocated {peaks}"])


def _counted(done: int) -> str:
    """How often each is told of in the rig's log; names of kernels may have lines of their own."""
    lines = Path(LOG).read_text()[done:].splitlines()
    words = Counter(line.partition(" ")[0] for line in lines)
    return " ".join(f"{word}={words[word]}" for word in _TOLD if words[word])


def apart(count: Callable[[], str], gpus: str) -> str:
    """What is counted in a fork, on these GPUs."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_counting, args=(theirs, count, gpus))
    process.start()
    theirs.close()
    try:
        text: str = ours.recv() if ours.poll(_SECONDS) else "it hangs"
    except EOFError:
        text = "it has ended"
    process.kill()
    process.join()
    return text


def _counting(theirs: Any, count: Callable[[], str], gpus: str) -> None:
    for name in [name for name in os.environ if name.startswith("RIG_")]:
        del os.environ[name]
    Path(LOG).write_text("")
    os.environ |= {"RIG_GPUS": gpus, "RIG_LOG": LOG}
    gc.unfreeze()
    assert ctypes.CDLL(None).rig_restart() == 0
    try:
        theirs.send(count())
    except BaseException:
        theirs.send(traceback.format_exc())


if __name__ == "__main__":
    main()
