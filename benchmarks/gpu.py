"""What only a machine with a CUDA GPU can show, in one script.

    python benchmarks/gpu.py [--shared DIR] [--size 9b|small] [--json FILE]

- The tiny reference models on ``cuda:0``, and over ``cuda:0`` and ``cpu`` as two devices: logits
  and greedy tokens against what the original code computed.
- A model of GLM-4-9B's shape with random weights in the published file format: written to disk
  (18 GiB), planned, loaded, prefilled, decoded; forecast beside the peaks that ``torch.cuda``
  counted.
- What dispatch costs on it, beside plain and accelerate, in turns.
- The calibration (`duoka bench --calibrate`), which is kept; how long it took; and what a plan made
  with it says of seconds, beside those measured.
- The engine on it: tokens a second of 1, 16 and 64 requests beside transformers', a long prompt in
  pieces, memory beside its forecast (`gpu_engine.py`).
- Ten pairs of a model and a workload, forecast and measured, allocated and reserved; several stages
  on one card, each under a cap of its own budget (`gpu_pairs.py`).

`duoka selftest` is the short form of it, for any machine's GPUs.

Without a CUDA GPU it says so and ends well. ``--rehearse`` runs all of it on virtual GPUs, small.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu_engine
import gpu_pairs
import torch
from safetensors.torch import load_file
from torch import nn

import duoka
from duoka.base.serialization import to_dict
from duoka.hardware.device import Device
from duoka.models.cache_argument import CACHE
from duoka.planner.placement import Placement
from duoka.runtime import devices
from duoka.runtime.call.stepper import Stepper
from duoka.runtime.dispatch.dispatch import dispatch, undispatch
from duoka.tools.bench.calibrate import calibrate
from duoka.tools.selftest.checkpoint import write_random_weights

REFERENCES = ("chatglm3-6b-tiny", "chatglm3-6b-128k-tiny", "glm-4-9b-tiny")
# The published shape of GLM-4-9B; the small one has the same parts.
SHAPES: dict[str, dict[str, int]] = {
    "9b": {
        "hidden_size": 4096,
        "ffn_hidden_size": 13696,
        "num_layers": 40,
        "num_attention_heads": 32,
        "kv_channels": 128,
        "padded_vocab_size": 151552,
    },
    "small": {
        "hidden_size": 128,
        "ffn_hidden_size": 256,
        "num_layers": 4,
        "num_attention_heads": 4,
        "kv_channels": 32,
        "padded_vocab_size": 512,
    },
}
GIB = 2**30


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    parser.add_argument("--shared", type=Path, default=default, help="where reference/ lies")
    parser.add_argument("--size", choices=SHAPES, default="9b")
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--work", type=Path, help="where 18 GiB may be written; a temporary place")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rehearse", action="store_true", help="on virtual GPUs")
    options = parser.parse_args()
    if not options.rehearse and not torch.cuda.is_available():
        print("torch sees no CUDA GPU here; nothing was measured (--rehearse runs on virtual GPUs)")
        return
    report = run(options)
    print("\n".join(table(report)))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))
    if not all(row["ok"] for row in report["references"]):
        sys.exit(1)


def run(options: argparse.Namespace) -> dict[str, Any]:
    pair = ("vgpu:0", "vgpu:1") if options.rehearse else ("cuda:0", "cpu")
    report: dict[str, Any] = {"torch": torch.__version__, "devices": describe(pair)}
    report["references"] = list(references(options.shared, pair))
    report["calibration"] = calibrated(pair[0])
    report["pairs"] = list(gpu_pairs.pairs(pair[0], small=options.rehearse))
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        started = time.perf_counter()
        write_checkpoint(Path(folder), "small" if options.rehearse else options.size)
        report["write_seconds"] = time.perf_counter() - started
        report |= large(Path(folder), pair[0], options)
        devices.give_back()
        one = fleet_of(pair[:1])
        report["engine"] = gpu_engine.measure(Path(folder), one, small=options.rehearse)
    return report


def calibrated(device: str) -> dict[str, Any]:
    """Measure what planning takes from a GPU; on a virtual one it is kept nowhere."""
    real = device.startswith("cuda")
    fleet = duoka.Fleet.detect() if real else duoka.Fleet.parse("virtual:1GiB")
    fleet = replace(fleet, devices=(fleet.device(device),), links=())
    started = time.perf_counter()
    found = calibrate(fleet)
    return {"seconds": time.perf_counter() - started, **to_dict(found.calibration)}


def describe(names: tuple[str, ...]) -> list[str]:
    return [torch.cuda.get_device_name(name) if name.startswith("cuda") else name for name in names]


def fleet_of(names: tuple[str, ...]) -> duoka.Fleet:
    """Free memory for GPUs, and as much for the CPU as for the first of them."""
    if not names[0].startswith("cuda"):
        return duoka.Fleet(devices=tuple(Device(name=name, budget_bytes=GIB) for name in names))
    first = duoka.Fleet.detect().device(names[0])
    others = (Device(name=name, budget_bytes=first.budget_bytes) for name in names[1:])
    return duoka.Fleet(devices=(first, *others))


# ── the reference models ──


def references(shared: Path, pair: tuple[str, str]) -> Iterator[dict[str, Any]]:
    for name in REFERENCES:
        path = shared / "reference" / name
        if not path.is_dir():
            print(f"{path} isn't there: left out")
            continue
        expected = load_file(path / "reference.safetensors")
        for names in ((pair[0],), pair):
            yield {"model": name, "devices": list(names)} | reference(path, expected, names)


def reference(
    path: Path, expected: dict[str, torch.Tensor], names: tuple[str, ...]
) -> dict[str, Any]:
    workload = duoka.Workload(prompt_tokens=64, new_tokens=32, dtype="float32")
    plan = duoka.plan(path, fleet_of(names), workload, use_all=len(names) > 1)
    assert set(plan.devices) == set(names), "the plan doesn't use them all"
    model = duoka.load(plan)
    ids = expected["input_ids"].to(model.device)
    with torch.no_grad():
        difference = (model(ids).logits.cpu() - expected["logits"]).abs().max().item()
    wanted = expected["greedy.new_ids"]
    answer = model.generate(ids, max_new_tokens=wanted.shape[-1], do_sample=False, eos_token_id=[])
    same = torch.equal(answer[:, ids.shape[1] :].cpu().flatten(), wanted.flatten())
    return {"largest_difference": difference, "greedy": same, "ok": same and difference < 1e-4}


# ── a large model ──


def write_checkpoint(folder: Path, size: str) -> None:
    """Random weights under the published names."""
    config = {
        "model_type": "chatglm",
        "architectures": ["ChatGLMModel"],
        **SHAPES[size],
        "multi_query_group_num": 2,
        "layernorm_epsilon": 1.5625e-07,
        "add_qkv_bias": True,
        "rope_ratio": 500,
        "seq_length": 131072,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    write_random_weights(folder, config)


def large(path: Path, device: str, options: argparse.Namespace) -> dict[str, Any]:
    workload = duoka.Workload(
        prompt_tokens=options.prompt_tokens,
        new_tokens=options.new_tokens,
        prefill_chunk_tokens=None,
    )
    seconds: dict[str, float] = {}
    with timed(seconds, "plan"):
        plan = duoka.plan(path, fleet_of((device,)), workload)
    devices.materialise(plan.fleet)
    before = torch.get_device_module(device).memory_reserved(device)
    with timed(seconds, "load"):
        model = duoka.load(plan)
        devices.synchronize(device)
    devices.reset_peaks(device)
    steps = decode(model, device, workload, seconds)
    peaks = devices.peak_bytes(device)
    forecast, expected = plan.forecast.devices[0], plan.forecast.seconds
    assert peaks is not None
    return {
        "forecast_seconds": None if expected is None else to_dict(expected),
        "seconds": seconds,
        "decode_seconds": statistics.median(steps),
        "weight_bytes": forecast.weight_bytes,
        "anonymous_host_bytes": anonymous_bytes(),
        "reserved_before_bytes": before,
        "allocated_bytes": [forecast.allocated_bytes, peaks.allocated_bytes],
        "reserved_bytes": [forecast.reserved_bytes, peaks.reserved_bytes],
        "dispatch": dispatch_cost(model, plan.placement, device),
    }


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - start


def decode(
    model: nn.Module, device: str, workload: duoka.Workload, seconds: dict[str, float]
) -> list[float]:
    """Run a workload's steps; returns the seconds of each decode step."""
    steps = []
    with torch.no_grad():
        stepper = Stepper(model, workload.batch, torch.device(device))
        with timed(seconds, "prefill"):
            stepper.step(workload.prompt_tokens)
            devices.synchronize(device)
        for _ in range(workload.new_tokens - 1):
            step: dict[str, float] = {}
            with timed(step, "step"):
                stepper.step(1)
                devices.synchronize(device)
            steps.append(step["step"])
    return steps


def anonymous_bytes() -> int | None:
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    lines = (line.split() for line in status.read_text().splitlines())
    return next(int(line[1]) * 1024 for line in lines if line[0] == "RssAnon:")


# ── what dispatch costs ──


def dispatch_cost(model: nn.Module, placement: Placement, device: str) -> dict[str, float]:
    """Median seconds of a decode step: plain, with movers on every block, with accelerate's hooks.

    One model serves all three in turns, so that a card which holds it once is enough.
    """
    undispatch(model)
    ways: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "plain": (lambda: None, lambda: None),
        "duoka": (
            lambda: dispatch(model, placement, has_movers=True),
            lambda: undispatch(model),
        ),
        "accelerate": (
            lambda: add_accelerate(model, placement),
            lambda: remove_accelerate(model),
        ),
    }
    workload = duoka.Workload(prompt_tokens=64, new_tokens=48)
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(5):
        for name, (begin, end) in ways.items():
            begin()
            found[name] += decode(model, device, workload, {})[8:]
            end()
    return {name: statistics.median(steps) for name, steps in found.items()}


def add_accelerate(model: nn.Module, placement: Placement) -> None:
    from accelerate.hooks import attach_align_device_hook_on_blocks

    where = placement.device_map
    attach_align_device_hook_on_blocks(
        model,
        execution_device=where,
        offload=dict.fromkeys(where, False),
        skip_keys=CACHE,
    )


def remove_accelerate(model: nn.Module) -> None:
    from accelerate.hooks import remove_hook_from_submodules

    remove_hook_from_submodules(model)


def table(report: dict[str, Any]) -> Iterator[str]:
    yield f"torch {report['torch']} on {', '.join(report['devices'])}"
    for row in report["references"]:
        verdict = "ok" if row["ok"] else "WRONG"
        where = " + ".join(row["devices"])
        yield f"{row['model']:22} {where:16} {row['largest_difference']:.1e}  {verdict}"
    seconds = report["seconds"]
    speed = report["weight_bytes"] / GIB / seconds["load"]
    yield (
        f"load {seconds['load']:.1f} s with the proof ({speed:.2f} GiB/s), prefill "
        f"{seconds['prefill'] * 1e3:.0f} ms, decode {report['decode_seconds'] * 1e3:.2f} ms a token"
    )
    for kind in ("allocated", "reserved"):
        forecast, measured = report[f"{kind}_bytes"]
        yield (
            f"{kind:10} forecast {forecast / GIB:7.3f} GiB, measured {measured / GIB:7.3f} GiB "
            f"({100 * (forecast / measured - 1):+.2f} %)"
        )
    expected = report["forecast_seconds"]
    if expected is not None:
        first, token = expected["first_token_seconds"], expected["token_seconds"]
        yield f"forecast: prefill {first * 1e3:.0f} ms, decode {token * 1e3:.2f} ms a token"
    yield f"calibrated in {report['calibration']['seconds']:.1f} s: {report['calibration']['gpus']}"
    yield from gpu_engine.table(report["engine"])
    yield from gpu_pairs.table(report["pairs"])
    cost = report["dispatch"]
    for name, value in cost.items():
        ratio = 100 * (value / cost["plain"] - 1)
        yield f"{name:10} {value * 1e3:7.2f} ms a token ({ratio:+.1f} %)"


if __name__ == "__main__":
    main()
