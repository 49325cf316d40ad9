"""Decode speed with experts in host memory, beside accelerate's offload of the same model.

A Qwen3-MoE of 2.5 B parameters with random weights in bfloat16. duoka keeps the experts on the
host: the CPU computes them, or the GPU fetches them to caches of a fifth of each layer's. With
accelerate's `cpu_offload` every layer's weights are copied to the GPU for each token. There is no
GPU here: a virtual GPU computes on the CPU, and for accelerate a copy in memory takes the place of
one over PCIe.

    python benchmarks/expert_offload.py [--tokens 8]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import cpu_offload
from transformers import AutoConfig, AutoModelForCausalLM

import duoka
from duoka.models.quantization.expert_cache import COUNTS
from duoka.planner.constraints import Constraints

SIZES: dict[str, Any] = {
    "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "head_dim": 64,
    "num_key_value_heads": 4, "vocab_size": 8192, "num_experts": 64, "num_experts_per_tok": 8,
    "moe_intermediate_size": 512, "intermediate_size": 2048,
    "architectures": ["Qwen3MoeForCausalLM"],
}  # fmt: skip
PROMPT = torch.arange(4)[None]
GPU = "virtual:8GiB"


class Copies(dict[str, torch.Tensor]):
    """Weights of which every use is a copy."""

    def __getitem__(self, name: str) -> torch.Tensor:
        return super().__getitem__(name).clone()


def decode(model: Any, ids: torch.Tensor, tokens: int) -> float:
    """Return the tokens per second after the first."""
    seconds = []
    for count in (1, 1 + tokens):
        start = time.perf_counter()
        with torch.no_grad():
            model.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False)
        seconds.append(time.perf_counter() - start)
    return tokens / (seconds[1] - seconds[0])


def with_duoka(directory: Path, scheme: Any, way: Any, tokens: int) -> float:
    """Return the tokens per second of a plan with all experts on the host."""
    work = duoka.Workload(prompt_tokens=16, new_tokens=64, dtype="bfloat16", quantize=scheme)
    cache = 2**30 if way == "fetch" else None
    constraints = Constraints(experts="host", host_experts=way, expert_cache=cache)
    fleet = duoka.Fleet.parse(GPU).with_host("16GiB,20GB/s")
    plan = duoka.plan(directory, fleet, work, constraints=constraints)
    return decode(duoka.load(plan), PROMPT.to(plan.placement.devices[0]), tokens)


def main() -> None:
    """Print the tokens per second of each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8)
    tokens = parser.parse_args().tokens
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        torch.manual_seed(0)
        config = AutoConfig.for_model("qwen3_moe", **SIZES)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        print(f"{sum(map(torch.numel, model.parameters())) / 1e9:.2f} B parameters")
        model.save_pretrained(directory)
        copies = Copies(model.state_dict())
        cpu_offload(model, execution_device=torch.device("cpu"), state_dict=copies)
        print(f"accelerate, cpu_offload, bfloat16: {decode(model, PROMPT, tokens):.2f} tokens/s")
        del model, copies
        for scheme, way in (
            ("none", "compute"), ("int8", "compute"), ("int4", "compute"), ("none", "fetch"),
        ):  # fmt: skip
            COUNTS.clear()
            rate = with_duoka(directory, scheme, way, tokens)
            hits = f", {COUNTS['hits'] / COUNTS.total():.0%} in the caches" if COUNTS else ""
            print(f"duoka, {way}, {scheme}: {rate:.2f} tokens/s{hits}")


if __name__ == "__main__":
    main()
