"""What dispatch costs: plain, duoka and accelerate, interleaved in one run.

    python benchmarks/dispatch.py [--rounds N] [--json FILE]

A GLM with 40 layers (as GLM-4-9B has), scaled down so that one decode step takes about 13 ms on
one CPU thread, runs as four stages. All four are the CPU, so nothing is copied, and what is
measured is the machinery alone: every mover and every hook of accelerate is active. Decoding uses
a cache. The three take turns token by token, and what counts is the CPU time of the one thread, so
a busy machine slows all of them alike.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, GlmConfig, GlmForCausalLM

from duoka import virtual
from duoka.models.cache_argument import CACHE
from duoka.planner.placement import Placement
from duoka.runtime.dispatch.dispatch import dispatch
from duoka.runtime.dispatch.movers import Frame, Frames, Mover

NUM_LAYERS = 40
NUM_STAGES = 4
PROMPT_TOKENS = 32


def make_model() -> GlmForCausalLM:
    torch.manual_seed(0)
    config = GlmConfig(
        vocab_size=1024,
        hidden_size=160,
        intermediate_size=416,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=20,
        pad_token_id=0,
    )
    return GlmForCausalLM(config).eval()


def stages() -> Placement:
    names = ["model.embed_tokens", "model.rotary_emb"]
    names += [f"model.layers.{index}" for index in range(NUM_LAYERS)]
    return Placement(entries=tuple((name, "cpu") for name in [*names, "model.norm", "lm_head"]))


def with_accelerate(model: nn.Module) -> nn.Module:
    from accelerate import dispatch_model
    from accelerate.hooks import AlignDevicesHook, attach_align_device_hook_on_blocks

    del dispatch_model  # leaves out its hooks when there is one device; these are the ones it adds
    devices = {name: "cpu" for name, _ in stages().entries}
    attach_align_device_hook_on_blocks(
        model,
        execution_device=devices,
        offload=dict.fromkeys(devices, False),
        skip_keys=CACHE,
    )
    assert any(isinstance(getattr(m, "_hf_hook", None), AlignDevicesHook) for m in model.modules())
    return model


class Decoder:
    """One model in the middle of an answer."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.restart()

    def restart(self) -> None:
        self.cache = DynamicCache(config=self.model.config)
        ids = torch.arange(PROMPT_TOKENS).unsqueeze(0)
        self.logits = self.model(ids, **{CACHE: self.cache}, use_cache=True).logits

    def step(self) -> float:
        token = self.logits[:, -1:].argmax(-1)
        start = time.thread_time()
        self.logits = self.model(token, **{CACHE: self.cache}, use_cache=True).logits
        return time.thread_time() - start


def interleaved(decoders: dict[str, Decoder], rounds: int, tokens: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in decoders}
    names = list(decoders)
    for number in range(rounds):
        for decoder in decoders.values():
            decoder.restart()
        for token in range(tokens):
            # Every order in turn: who runs after whom matters for the processor's caches.
            shift = (number + token) % len(names)
            for name in names[shift:] + names[:shift]:
                seconds[name].append(decoders[name].step())
    return seconds


def spread(values: list[float]) -> dict[str, float]:
    quarters = statistics.quantiles(values, n=4)
    return {"median": quarters[1], "lower_quartile": quarters[0], "upper_quartile": quarters[2]}


def paired_ratio(seconds: dict[str, list[float]], name: str) -> dict[str, float]:
    """Of steps that ran one after another, so that both saw the same machine."""
    pairs = zip(seconds[name], seconds["plain"], strict=True)
    return spread([mine / plain for mine, plain in pairs])


def repeated(action: Callable[[], Any], number: int = 2000) -> float:
    times = []
    for _ in range(15):
        start = time.perf_counter()
        for _ in range(number):
            action()
        times.append((time.perf_counter() - start) / number)
    return min(times)


def micro() -> Iterator[tuple[str, float]]:
    """Seconds of one mover call, and of one move."""
    hidden, mask = torch.zeros(1, 1, 160), torch.zeros(1, 1, 1, 64)
    kwargs = {
        "attention_mask": mask,
        "position_embeddings": (torch.zeros(1, 1, 20), torch.zeros(1, 1, 20)),
        "position_ids": torch.zeros(1, 1, dtype=torch.long),
        CACHE: DynamicCache(),
        "use_cache": True,
    }
    frames = Frames()
    frames.stack.append(Frame())
    here = Mover(torch.device("cpu"), frames)
    yield "mover, nothing to move", repeated(lambda: here.bring((hidden,), kwargs))
    away = Mover(torch.device("meta"), frames)
    yield "mover, all of it moved before", repeated(lambda: away.bring((hidden,), kwargs))
    meta = torch.device("meta")

    def first_move() -> None:
        Frame().carried(hidden, meta, ("meta", False))

    yield "first move of a tensor", repeated(first_move)
    yield "of which torch's own .to", repeated(lambda: hidden.to(meta))
    virtual.set_gpus([None, None])
    there, gpu = hidden.to("vgpu:0"), torch.device("vgpu", 1)

    def first_virtual_move() -> None:
        Frame().carried(there, gpu, (str(gpu), False))

    yield "first move between virtual GPUs", repeated(first_virtual_move, number=200)
    yield "of which torch's own .to (virtual)", repeated(lambda: there.to(gpu), number=200)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    plain = make_model()
    with torch.no_grad():
        decoders = {
            "plain": Decoder(plain),
            "duoka": Decoder(dispatch(copy.deepcopy(plain), stages(), has_movers=True)),
            "accelerate": Decoder(with_accelerate(copy.deepcopy(plain))),
        }
        interleaved(decoders, 1, 10)  # warm up
        seconds = interleaved(decoders, options.rounds, options.tokens)
        parts = dict(micro())
    report = {
        "seconds_per_token": {name: spread(values) for name, values in seconds.items()},
        "ratio_to_plain": {name: paired_ratio(seconds, name) for name in ("duoka", "accelerate")},
        "microseconds": {name: value * 1e6 for name, value in parts.items()},
        "hooks": {name: count_hooks(decoder.model) for name, decoder in decoders.items()},
        "torch": torch.__version__,
    }
    show(report)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))


def count_hooks(model: nn.Module) -> int:
    hooks = sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())
    movers = sum(hasattr(m, "_duoka_mover") for m in model.modules())
    return hooks + movers + sum(hasattr(m, "_hf_hook") for m in model.modules())


def show(report: dict[str, Any]) -> None:
    for name, value in report["seconds_per_token"].items():
        low, mid, high = (
            value[key] * 1e3 for key in ("lower_quartile", "median", "upper_quartile")
        )
        hooks = report["hooks"][name]
        print(
            f"{name:12} {mid:7.2f} ms a token  (quartiles {low:.2f} to {high:.2f}), {hooks} hooks"
        )
    for name, value in report["ratio_to_plain"].items():
        low, mid, high = (value[key] for key in ("lower_quartile", "median", "upper_quartile"))
        print(f"{name:12} {100 * (mid - 1):+7.1f} % against plain  ({low:.3f} to {high:.3f})")
    for name, value in report["microseconds"].items():
        print(f"{name:36} {value:6.2f} µs")


if __name__ == "__main__":
    main()
