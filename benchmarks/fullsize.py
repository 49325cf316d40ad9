"""A full-size ChatGLM3-6B on a machine without a GPU: planned, loaded on virtual GPUs, and run.

    python benchmarks/fullsize.py [--directory DIR] [--gpus virtual:2x8GiB] [--json FILE]

A checkpoint of ChatGLM3-6B's size and format (12.5 GB, random bfloat16 weights, under the
published names, in shards) is written to DIR, by default a temporary one, and removed afterwards.
Then, each in a process of its own and with the files out of the page cache as far as the system
lets them be:

- the files are read, and nothing else;
- transformers' `from_pretrained` loads them, and generates 8 tokens;
- duoka plans, proves and loads them onto virtual GPUs, and generates 8 tokens.

The weights are random, so the tokens mean nothing; those of the two ways are compared. Memory is
sampled: "own" is what can't be given back (anonymous memory), "mapped" is pages of files.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

import duoka
from duoka import models
from duoka.models import chatglm
from duoka.tools.demo.checkpoint import CONFIG, write_frame

GIB = 2**30
SHARD_BYTES = 2 * GIB
NEW_TOKENS = 8
PROMPT = list(range(1000, 1064))
CHATGLM3_6B = {
    **CONFIG,
    "ffn_hidden_size": 13696,
    "hidden_size": 4096,
    "kv_channels": 128,
    "num_attention_heads": 32,
    "num_layers": 28,
    "padded_vocab_size": 65024,
    "seq_length": 8192,
    "torch_dtype": "bfloat16",
}


def make(directory: Path) -> None:
    """Write the checkpoint, one shard in memory at a time."""
    write_frame(directory, CHATGLM3_6B)
    with torch.device("meta"):
        model = models.build(CHATGLM3_6B, dtype=torch.bfloat16)
    published = revert_weight_conversion(model, dict(model.state_dict()))
    generator = torch.Generator().manual_seed(0)
    shards: list[dict[str, torch.Tensor]] = [{}]
    for name, tensor in published.items():
        if sum(t.numel() * 2 for t in shards[-1].values()) + tensor.numel() * 2 > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = tensor
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file({n: random_weight(t, n, generator) for n, t in shard.items()}, directory / file)
        weight_map.update(dict.fromkeys(shard, file))
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def random_weight(like: torch.Tensor, name: str, generator: torch.Generator) -> torch.Tensor:
    if "norm" in name:
        return torch.ones(like.shape, dtype=torch.bfloat16)
    return torch.empty(like.shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)


def forget(directory: Path) -> None:
    """Ask the system to drop the files from its page cache."""
    for file in directory.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def measured(result: dict[str, Any]) -> Iterator[None]:
    """Sample this process's memory, and keep its peaks."""
    done = threading.Event()
    peaks = {"RssAnon": 0, "RssFile": 0}

    def sample() -> None:
        while not done.wait(0.05):
            for line in Path("/proc/self/status").read_text().splitlines():
                name, _, value = line.partition(":")
                if name in peaks:
                    peaks[name] = max(peaks[name], int(value.split()[0]) * 1024)

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        yield
    finally:
        done.set()
        sampler.join()
    result |= {"own_gib": peaks["RssAnon"] / GIB, "mapped_gib": peaks["RssFile"] / GIB}


def read_raw(directory: Path, gpus: str) -> dict[str, Any]:
    result: dict[str, Any] = {}
    buffer = bytearray(16 * 2**20)
    with measured(result):
        start = time.perf_counter()
        for file in sorted(directory.glob("*.safetensors")):
            with file.open("rb", buffering=0) as opened:
                while opened.readinto(buffer):
                    pass
        result["load_seconds"] = time.perf_counter() - start
    return result


def with_transformers(directory: Path, gpus: str) -> dict[str, Any]:
    chatglm.register()
    result: dict[str, Any] = {}
    with measured(result):
        start = time.perf_counter()
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
        result["load_seconds"] = time.perf_counter() - start
        generate(model.eval(), result)
    return result


def with_duoka(directory: Path, gpus: str) -> dict[str, Any]:
    result: dict[str, Any] = {}
    with measured(result):
        start = time.perf_counter()
        workload = duoka.Workload(prompt_tokens=len(PROMPT), new_tokens=NEW_TOKENS)
        plan = duoka.plan(directory, gpus, workload)
        planned = time.perf_counter()
        model = duoka.load(plan)
        result["plan_seconds"] = planned - start
        result["load_seconds"] = time.perf_counter() - planned
        generate(model, result)
    result["devices"] = {
        device.device: {
            "forecast_gib": device.allocated_bytes / GIB,
            "measured_gib": duoka.runtime.devices.peak_bytes(device.device).allocated_bytes / GIB,
        }
        for device in plan.forecast.devices
    }
    return result


def generate(model: Any, result: dict[str, Any]) -> None:
    start = time.perf_counter()
    with torch.inference_mode():
        ids = torch.tensor([PROMPT], device=model.device)
        out = model.generate(ids, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS)
    result["generate_seconds"] = time.perf_counter() - start
    result["tokens"] = out[0, len(PROMPT) :].tolist()


WAYS = {"raw": read_raw, "transformers": with_transformers, "duoka": with_duoka}


def measure(way: str, directory: Path, gpus: str) -> dict[str, Any]:
    """Run one way in a process of its own."""
    forget(directory)
    command = [sys.executable, __file__, "--way", way, "--directory", str(directory)]
    done = subprocess.run([*command, "--gpus", gpus], check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def show(results: dict[str, dict[str, Any]]) -> None:
    print("| way | load s | against raw | generate s | own GiB | mapped GiB |")
    print("|---|---:|---:|---:|---:|---:|")
    for way, result in results.items():
        generated = result.get("generate_seconds")
        print(
            f"| {way} | {result['load_seconds']:.1f} "
            f"| {result['load_seconds'] / results['raw']['load_seconds']:.2f} "
            f"| {'' if generated is None else f'{generated:.1f}'} "
            f"| {result['own_gib']:.2f} | {result['mapped_gib']:.2f} |"
        )
    print(f"\nduoka planned in {results['duoka']['plan_seconds']:.1f} s; forecast and measured:")
    for name, sizes in results["duoka"]["devices"].items():
        print(f"{name}: {sizes['forecast_gib']:.3f} and {sizes['measured_gib']:.3f} GiB")
    same = results["duoka"]["tokens"] == results["transformers"]["tokens"]
    print(f"the same {NEW_TOKENS} tokens as transformers': {'yes' if same else 'NO'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--gpus", default="virtual:2x8GiB")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        print(json.dumps(WAYS[options.way](options.directory, options.gpus)))
        return
    directory = Path(tempfile.mkdtemp(dir=options.directory))
    try:
        start = time.perf_counter()
        make(directory)
        num_bytes = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
        print(f"{num_bytes / 1e9:.2f} GB written in {time.perf_counter() - start:.0f} s\n")
        results = {way: measure(way, directory, options.gpus) for way in WAYS}
    finally:
        shutil.rmtree(directory)
    show(results)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
