"""Tokens per second with experts on the host, beside accelerate's offload, on a machine's CPU.

The GPU is a virtual one that computes on the CPU, so absolute speeds are those of the CPU; the
ratios tell how much less is read and copied. accelerate copies every layer's weights for each
token, duoka's host reads the chosen experts alone.

    python benchmarks/host_experts.py [--layers 8] [--tokens 16]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

import duoka
from duoka import virtual
from duoka.planner.constraints import Constraints

PROMPT_TOKENS = 16
READ_BYTES = 2**30


def main() -> None:
    """Print the speeds as a table, and the share of the memory bandwidth that experts reach."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=16)
    arguments = parser.parse_args()
    virtual.set_gpus([2**34])
    bandwidth = _bandwidth()
    print(f"memory: {bandwidth / 1e9:.1f} GB/s with {torch.get_num_threads()} threads")
    with tempfile.TemporaryDirectory() as directory:
        path = _write(Path(directory), arguments.layers)
        for scheme in ("none", "int8", "int4"):
            plan, model = _load(path, scheme)
            seconds = _time(model, arguments.tokens)
            size = plan.forecast.expert_bytes * 8 / 64  # 8 of 64 experts for each token
            print(
                f"duoka, {scheme:5} {1 / seconds:6.2f} tokens/s; experts read at least at "
                f"{size / seconds / 1e9:.1f} GB/s, {size / seconds / bandwidth:.2f} of the memory"
            )
            del model
        seconds = _time(_offload(path), arguments.tokens)
        print(f"accelerate's offload, 16 bit {1 / seconds:6.2f} tokens/s")


def _bandwidth() -> float:
    """Return the bytes per second at which all threads read a large buffer, the best of five."""
    buffer = torch.ones(READ_BYTES // 4)
    return READ_BYTES / min(_seconds(buffer.sum) for _ in range(5))


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _write(path: Path, layers: int) -> Path:
    """Write a checkpoint of random weights: 300 million parameters for each layer."""
    config = AutoConfig.for_model(
        "qwen3_moe", hidden_size=2048, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=4, head_dim=128, num_experts=64, num_experts_per_tok=8,
        moe_intermediate_size=768, vocab_size=8192, dtype="bfloat16",
        architectures=["Qwen3MoeForCausalLM"],
    )  # fmt: skip
    (path / "config.json").write_text(json.dumps(config.to_dict()))
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).state_dict()
    for number, (name, tensor) in enumerate(shapes.items()):
        values = torch.empty(tensor.shape, dtype=torch.bfloat16).uniform_(-0.03, 0.03)
        if "experts" not in name:
            save_file({name: values}, path / f"part-{number}.safetensors")
            continue
        parts = {}
        for expert, weight in enumerate(values):
            halves = weight.chunk(2) if "gate_up" in name else [weight]
            kinds = ("gate_proj", "up_proj") if "gate_up" in name else ("down_proj",)
            for kind, half in zip(kinds, halves, strict=True):
                prefix = name.rpartition(".")[0]
                parts[f"{prefix}.{expert}.{kind}.weight"] = half.contiguous()
        save_file(parts, path / f"part-{number}.safetensors")
    _write_index(path)
    return path


def _write_index(path: Path) -> None:
    """Write the index of a checkpoint with several files."""
    from safetensors import safe_open

    names = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            names |= dict.fromkeys(tensors.keys(), file.name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def _load(path: Path, scheme: str) -> tuple[duoka.Plan, torch.nn.Module]:
    """Load the model with all experts on the host."""
    work = duoka.Workload(prompt_tokens=PROMPT_TOKENS, new_tokens=64, quantize=scheme)  # type: ignore[arg-type]
    fleet = duoka.Fleet.parse("virtual:16GiB").with_host("20GiB,20GB/s")
    plan = duoka.plan(path, fleet, work, constraints=Constraints(experts="host"))
    return plan, duoka.load(plan)


def _offload(path: Path) -> torch.nn.Module:
    """Load the model with transformers, and let accelerate copy its weights for each call."""
    from accelerate import cpu_offload

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    return cpu_offload(model, execution_device=torch.device("vgpu:0"))


def _time(model: torch.nn.Module, tokens: int) -> float:
    """Return the seconds of a token, from two generations of different length."""
    prompt = torch.arange(PROMPT_TOKENS)[None].to("vgpu:0")

    def generate(number: int) -> float:
        sizes = {"max_new_tokens": number, "min_new_tokens": number}
        return _seconds(lambda: model.generate(prompt, do_sample=False, **sizes))  # type: ignore[operator]

    with torch.no_grad():
        generate(2)
        return (generate(tokens + 1) - generate(1)) / tokens


if __name__ == "__main__":
    main()
