"""Training in stages beside one stage at a time.

    python benchmarks/pipeline.py [--hidden 512] [--schedule 1f1b] [--slow 2]

Two processes with one thread each are the stages; a step is eight micro-batches, and AdamW. The
naive way is what a device map does: the same model and batches in one thread, one stage after the
other. Rounds of all ways alternate, and ratios are of medians. With `--slow 2` the second stage's
layers take twice as long, as on an older card: then an even cut stands beside the one that
`duoka.plan` makes for two cards whose speeds differ so.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import duoka
from duoka import Placement, Training, Workload
from duoka.stages.channels import ProcessChannel
from duoka.stages.execute import StagePipeline
from duoka.stages.interceptor import BlockInterceptor
from duoka.stages.rendezvous import Rendezvous
from duoka.stages.route import find_route
from duoka.stages.schedule import busy_shares, order_passes
from duoka.workers.group import WorkerGroup
from duoka.workers.worker import end_with_parent

MICRO_BATCHES = 8
ROUNDS = 7
CPU = torch.device("cpu")
VOCABULARY = 1000


def parse() -> argparse.Namespace:
    """The sizes that are measured."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--slow", type=float, default=1.0)
    return parser.parse_args()


def planned_cut(options: argparse.Namespace) -> int:
    """How many layers duoka puts on the first of two cards, the second of which is slower."""
    work = Workload(
        prompt_tokens=options.tokens,
        new_tokens=0,
        dtype="float32",
        prefill_chunk_tokens=None,
        training=Training(method="full", micro_batches=MICRO_BATCHES, schedule=options.schedule),
    )
    cards = f"Fast:64GiB,50GB/s,1TFLOPs+Slow:64GiB,{50 / options.slow}GB/s,{1 / options.slow}TFLOPs"
    with torch.device("meta"):
        model = make_model(options)
    plan = duoka.plan(model, cards, work, use_all=True, objective="throughput")
    first = [name for name, device in plan.placement.entries if device == "cuda:0"]
    return sum("layers." in name for name in first)


def make_model(options: argparse.Namespace) -> LlamaForCausalLM:
    """A Llama of some size."""
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=options.hidden,
            intermediate_size=3 * options.hidden,
            num_hidden_layers=options.layers,
            num_attention_heads=8,
            vocab_size=VOCABULARY,
            use_cache=False,
        )
    )


class Stage:
    """One process: its rank's stage of every cut, and the whole model for the naive way."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.rank = dist.get_rank()
        self.options = options
        self.model = make_model(options)
        self.ids = torch.randint(0, VOCABULARY, (MICRO_BATCHES, 1, options.tokens))
        self.training = Training(
            method="full", micro_batches=MICRO_BATCHES, schedule=options.schedule
        )

    def loss(self, number: int) -> torch.Tensor:
        """The loss of a micro-batch."""
        loss: torch.Tensor = self.model(input_ids=self.ids[number], labels=self.ids[number]).loss
        return loss

    def naive(self) -> Callable[[], None]:
        """One stage at a time, in the first process; the other one waits."""
        optimizer = torch.optim.AdamW(self.model.parameters())

        def run() -> None:
            for number in range(MICRO_BATCHES):
                self.loss(number).backward()
            optimizer.step()
            optimizer.zero_grad()

        return run if self.rank == 0 else lambda: None

    def pipelined(self, cut: int) -> Callable[[], None]:
        """Both stages at once, cut before a layer."""
        layers = [f"model.layers.{number}" for number in range(self.options.layers)]
        first = ["model.embed_tokens", "model.rotary_emb", *layers[:cut]]
        second = [*layers[cut:], "model.norm", "lm_head"]
        placement = Placement(
            entries=tuple((n, "cuda:0") for n in first) + tuple((n, "cuda:1") for n in second)
        )
        ids = self.ids[0]
        route = find_route(
            self.model, placement, lambda m, d: m(input_ids=ids.to(d), labels=ids.to(d))
        )
        passes = order_passes(route.devices, self.training)
        if self.rank == 0:
            share = busy_shares(route.devices, passes)["cuda:0"]
            print(f"cut before layer {cut}: equal stages would be busy {share:.0%} of a step")
        modules = [self.model.get_submodule(name) for name in (first, second)[self.rank]]
        optimizer = torch.optim.AdamW([p for module in modules for p in module.parameters()])

        def run() -> None:
            interceptor = BlockInterceptor(self.model, placement)
            channel = ProcessChannel([0, 1], CPU)
            StagePipeline(interceptor, channel, [CPU, CPU], local=[self.rank]).run(
                [route] * MICRO_BATCHES,
                [timed.step for timed in passes],
                lambda number, device: self.loss(number),
            )
            channel.flush()
            optimizer.step()
            optimizer.zero_grad()

        return run

    def slow_down(self, factor: float) -> None:
        """Let the second process's layers take longer, as if its card were slower."""
        layers: Any = self.model.model.layers
        hidden = torch.randn(1, self.options.tokens, self.options.hidden, requires_grad=True)
        rotary = self.model.model.rotary_emb(hidden, torch.arange(self.options.tokens)[None])
        begin = time.perf_counter()
        for _ in range(20):
            layers[0](hidden, position_embeddings=rotary).sum().backward()
        self.model.zero_grad()
        seconds = (time.perf_counter() - begin) / 20 / 3  # forward; backward is two of these

        def longer(module: Any, args: Any, output: torch.Tensor) -> None:
            time.sleep((factor - 1) * seconds)
            if output.requires_grad:
                output.register_hook(lambda gradient: time.sleep((factor - 1) * 2 * seconds))

        for layer in layers:
            layer.register_forward_hook(longer)


def work() -> None:
    """One process of the measurement."""
    end_with_parent()
    options = parse()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    stage = Stage(options)
    middle = options.layers // 2
    ways: dict[str, Callable[[], None]] = {}
    if options.slow == 1:
        ways["one stage at a time"] = stage.naive()
        ways["pipelined"] = stage.pipelined(middle)
    else:
        if stage.rank == 1:
            stage.slow_down(options.slow)
        ways["cut evenly"] = stage.pipelined(middle)
        ways["cut by duoka's plan"] = stage.pipelined(planned_cut(options))
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(ROUNDS + 1):
        for name, run in ways.items():
            dist.barrier()
            begin = time.perf_counter()
            run()
            dist.barrier()
            if number:  # the first round warms up
                seconds[name].append(time.perf_counter() - begin)
    if stage.rank == 0:
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        slower, faster = medians
        for name, value in medians.items():
            print(f"{name}: {value * 1000:.0f} ms a step")
        print(f"ratio {medians[slower] / medians[faster]:.2f}", flush=True)


def main() -> None:
    """Start the two processes."""
    sys.path.insert(0, str(Path(__file__).parent))
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    os.environ["OMP_NUM_THREADS"] = "1"
    rendezvous = Rendezvous()
    with WorkerGroup("pipeline", 2, sys.argv[1:], environment=rendezvous.environment) as workers:
        if workers.wait():
            raise SystemExit("a stage failed")


if __name__ == "__main__":
    main() if "RANK" not in os.environ else work()
