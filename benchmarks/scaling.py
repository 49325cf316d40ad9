"""The speed of a training step over the number of pipeline stages, on a machine with few cores.

    python benchmarks/scaling.py [--stages 1 2 4 8] [--micro-batches 8 16] [--json FILE]

Each stage is a process of duoka's pipeline runtime. A layer's computation is a sleep of constant
length, twice as long in backward, so that stages don't compete for cores. What is measured is the
schedule (1F1B) with everything that duoka adds to it: messages between processes, the interceptor,
waiting. What isn't: the transfer time of large activations, and the slowdown of small matrix
products. Ideal is the schedule's own simulation, where passes take 1 and 2 units and nothing else
takes time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from fork_server import forking_python

from duoka import Placement, Training
from duoka.stages.channels import ProcessChannel
from duoka.stages.execute import StagePipeline
from duoka.stages.interceptor import BlockInterceptor
from duoka.stages.rendezvous import Rendezvous
from duoka.stages.route import Route, find_route
from duoka.stages.schedule import busy_shares, order_passes
from duoka.workers.group import WorkerGroup
from duoka.workers.worker import end_with_parent

LAYERS, TOKENS, VOCABULARY = 8, 16, 100
CPU = torch.device("cpu")


def parse() -> argparse.Namespace:
    """Parse the options, which the workers get too."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--forward-ms", type=float, default=30.0, help="of a layer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def make_model(forward_seconds: float) -> LlamaForCausalLM:
    """Build a tiny Llama whose layers take a constant time."""
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=LAYERS,
            num_attention_heads=2,
            vocab_size=VOCABULARY,
            use_cache=False,
        )
    )

    def wait(module: Any, arguments: Any, output: torch.Tensor) -> None:
        time.sleep(forward_seconds)
        if output.requires_grad:
            output.register_hook(lambda gradient: time.sleep(2 * forward_seconds))

    for layer in model.model.layers:
        layer.register_forward_hook(wait)
    return model


def place(num_stages: int) -> Placement:
    """Place the layers evenly."""
    last = num_stages - 1
    layers = [(f"model.layers.{at}", at * num_stages // LAYERS) for at in range(LAYERS)]
    modules = [("model.embed_tokens", 0), ("model.rotary_emb", 0), *layers]
    modules += [("model.norm", last), ("lm_head", last)]
    return Placement(entries=tuple((name, f"cuda:{stage}") for name, stage in modules))


def make_step(
    model: LlamaForCausalLM, placement: Placement, training: Training
) -> tuple[Callable[[], None], float]:
    """Return one training step of this process, and the ideal busy share of a stage."""
    rank, num_stages = dist.get_rank(), dist.get_world_size()
    ids = torch.randint(0, VOCABULARY, (1, TOKENS))
    # The modules' devices are read from the placement; the tensors stay on the CPU.
    route: Route = find_route(
        model, placement, lambda module, to: module(input_ids=ids.to(to), labels=ids.to(to))
    )
    passes = order_passes(route.devices, training)
    share = statistics.mean(busy_shares(route.devices, passes).values())

    def step() -> None:
        interceptor = BlockInterceptor(model, placement)
        channel = ProcessChannel([*range(num_stages)], CPU)
        StagePipeline(interceptor, channel, [CPU] * num_stages, local=[rank]).run(
            [route] * training.micro_batches,
            [timed.step for timed in passes],
            lambda number, device: model(input_ids=ids, labels=ids).loss,
        )
        channel.flush()
        model.zero_grad()

    return step, share


def work() -> None:
    """Measure as one stage; the first one prints a row for each number of micro-batches."""
    end_with_parent()
    options = parse()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    num_stages = dist.get_world_size()
    model = make_model(options.forward_ms / 1000)
    placement = place(num_stages)
    for micro_batches in options.micro_batches:
        training = Training(method="full", micro_batches=micro_batches, schedule="1f1b")
        step, share = make_step(model, placement, training)
        seconds = []
        for number in range(options.rounds + 1):
            dist.barrier()
            begin = time.perf_counter()
            step()
            dist.barrier()
            if number:  # the first round warms up
                seconds.append(time.perf_counter() - begin)
        if dist.get_rank() == 0:
            row = {
                "stages": num_stages,
                "micro_batches": micro_batches,
                "ideal_speedup": share * num_stages,
                "computed_seconds": 3 * LAYERS * micro_batches * options.forward_ms / 1000,
                "seconds": seconds,
            }
            with Path(os.environ["SCALING_ROWS"]).open("a") as rows:
                rows.write(json.dumps(row) + "\n")
            median = statistics.median(seconds)
            print(
                f"{num_stages} stages, {micro_batches} micro-batches: {1000 * median:.0f} ms a "
                f"step; {row['computed_seconds'] / median:.2f} times one stage without overhead "
                f"(ideal {row['ideal_speedup']:.2f})",
                flush=True,
            )


def main() -> None:
    """Start the processes of each number of stages."""
    options = parse()
    sys.path.insert(0, str(Path(__file__).parent))
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as directory:
        rows = Path(directory) / "rows"
        os.environ["SCALING_ROWS"] = str(rows)
        sys.executable = str(forking_python(Path(directory) / "forks", os.getpid()))
        for number in options.stages:
            rendezvous = Rendezvous()
            with WorkerGroup(
                "scaling", number, sys.argv[1:], environment=rendezvous.environment
            ) as workers:
                if workers.wait():
                    raise SystemExit("a stage failed")
        if options.json:
            found = [json.loads(line) for line in rows.read_text().splitlines()]
            options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main() if "RANK" not in os.environ else work()
