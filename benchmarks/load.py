"""How long a load takes beside transformers' `from_pretrained` and a raw read, dense and MoE.

    python benchmarks/load.py [--directory DIR] [--gib 2] [--rounds 3] [--warm] [--json FILE]

Two checkpoints of random bfloat16 weights are written to DIR, by default a temporary one, and
removed afterwards: a dense one (Llama's form) and a mixture of experts (Qwen3-MoE's form, each
expert's matrices apart, as they are published). Then, in turns, each in a process of its own:

- raw: the files are read into one buffer, and nothing else;
- transformers: `AutoModelForCausalLM.from_pretrained`;
- duoka: the model is built and its weights loaded, without planning and proof.

Each runs cold (the files out of the page cache as far as the system lets them be) and warm, with
`--warm` warm only. What
is mapped is read by the first forward pass only, so that pass is timed too, and "in all" is both.
"CPU" is what the process computed in both, all threads, and depends less on what else runs. "own"
is the peak of memory that can't be given back, less what the process held before.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

GIB = 2**30
SHARD_BYTES = GIB // 2
SHAPES: dict[str, dict[str, Any]] = {
    "dense": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
        "torch_dtype": "bfloat16",
    },
    "moe": {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 1024,
        "head_dim": 64,
        "intermediate_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "num_experts": 64,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 512,
        "vocab_size": 32000,
        "torch_dtype": "bfloat16",
    },
}
# Bytes of one layer of each, about; the rest is the embedding and the head.
LAYER_BYTES = {"dense": 119 * 2**20, "moe": 198 * 2**20}
WAYS = ("raw", "transformers", "duoka")


def write_checkpoint(folder: Path, kind: str, gib: float) -> None:
    """Random weights under the published names, a shard at a time."""
    import torch
    from safetensors.torch import save_file

    from duoka import models
    from duoka.models.conversion import published_tensors

    config = {**SHAPES[kind], "num_hidden_layers": max(1, round(gib * GIB / LAYER_BYTES[kind]))}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    shard: dict[str, torch.Tensor] = {}
    weight_map: dict[str, str] = {}

    def flush() -> None:
        name = f"model-{len(set(weight_map.values())) + 1:05}.safetensors"
        save_file(shard, folder / name)
        weight_map.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, tensor in published_tensors(models.build(config, dtype=torch.bfloat16)).items():
        made = torch.empty(tensor.shape, dtype=torch.bfloat16)
        shard[name] = made.normal_(std=0.02, generator=generator)
        if sum(item.nbytes for item in shard.values()) > SHARD_BYTES:
            flush()
    flush()
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def forget(folder: Path) -> None:
    """Ask the system to drop the files from its page cache."""
    for file in folder.rglob("*.safetensors"):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# ── one way, in a process of its own ──


@contextmanager
def measured(result: dict[str, Any]) -> Iterator[None]:
    """Sample this process's own memory, and keep what its peak is above the start."""
    done = threading.Event()
    before = peak = own_bytes()

    def sample() -> None:
        nonlocal peak
        while not done.wait(0.02):
            peak = max(peak, own_bytes())

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        yield
    finally:
        done.set()
        sampler.join()
    result["own_gib"] = (peak - before) / GIB


def own_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def read_raw(folder: Path) -> None:
    buffer = bytearray(16 * 2**20)
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass


def with_transformers(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


def with_duoka(folder: Path) -> Any:
    import torch

    from duoka import Checkpoint, models
    from duoka.planner.placement import Placement
    from duoka.runtime.load import load_weights

    checkpoint = Checkpoint.open(folder)
    model = models.build(checkpoint.config, dtype=torch.bfloat16)
    load_weights(model, checkpoint, Placement(entries=(("", "cpu"),)))
    return model


def run(way: str, folder: Path) -> dict[str, Any]:
    """Load once."""
    import torch
    import transformers.models.llama.modeling_llama
    import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: F401

    import duoka.runtime.load  # noqa: F401  (importing isn't loading)

    torch.manual_seed(0)
    result: dict[str, Any] = {"first_pass_seconds": 0.0}
    with measured(result), torch.inference_mode():
        start, computed = time.perf_counter(), time.process_time()
        if way == "raw":
            read_raw(folder)
            result["load_seconds"] = time.perf_counter() - start
            result["cpu_seconds"] = time.process_time() - computed
            return result
        model = with_transformers(folder) if way == "transformers" else with_duoka(folder)
        result["load_seconds"] = time.perf_counter() - start
        start = time.perf_counter()
        logits = model(torch.tensor([list(range(100, 164))])).logits
        result["first_pass_seconds"] = time.perf_counter() - start
        result["cpu_seconds"] = time.process_time() - computed
    result["sum"] = logits.double().sum().item()
    return result


# ── all of them, in turns ──


def measure(way: str, folder: Path, *, cold: bool) -> Any:
    if cold:
        forget(folder)
    command = [sys.executable, __file__, "--way", way, "--directory", str(folder)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def compare(folder: Path, rounds: int, states: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {f"{way} {state}": [] for state in states for way in WAYS}
    # A disk of a virtual machine is kept in memory outside of it, too: nobody's read is the first.
    measure(WAYS[0], folder, cold=True)
    for _ in range(rounds):
        for way in WAYS:
            for state in states:
                made = measure(way, folder, cold=state == "cold")
                found[f"{way} {state}"].append(made)
    return found


def show(kind: str, gib: float, found: dict[str, Any]) -> Iterator[str]:
    yield f"\n{kind}, {gib:.2f} GiB (medians)\n"
    yield "| way | load s | pass s | in all s | against raw | CPU s | own GiB | own / weights |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|"
    sums = set()
    for name, runs in found.items():
        load, first, computed, own = (
            statistics.median(each[key] for each in runs)
            for key in ("load_seconds", "first_pass_seconds", "cpu_seconds", "own_gib")
        )
        state = name.rpartition(" ")[2]
        raw = statistics.median(each["load_seconds"] for each in found[f"raw {state}"])
        sums |= {each["sum"] for each in runs if "sum" in each}
        yield (
            f"| {name} | {load:.2f} | {first:.2f} | {load + first:.2f} "
            f"| {(load + first) / raw:.2f} | {computed:.2f} | {own:.2f} | {own / gib:.2f} |"
        )
    yield f"\nthe same logits of all: {'yes' if len(sums) == 1 else 'NO'}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm", action="store_true", help="leave the files in the page cache")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        print(json.dumps(run(options.way, options.directory)))
        return
    directory = Path(tempfile.mkdtemp(dir=options.directory))
    results = {}
    try:
        for kind in SHAPES:
            folder = directory / kind
            write_checkpoint(folder, kind, options.gib)
            gib = sum(file.stat().st_size for file in folder.glob("*.safetensors")) / GIB
            states = ("warm",) if options.warm else ("cold", "warm")
            results[kind] = compare(folder, options.rounds, states)
            print("\n".join(show(kind, gib, results[kind])), flush=True)
            shutil.rmtree(folder)
    finally:
        shutil.rmtree(directory)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
