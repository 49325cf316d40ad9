"""Experts on the host: the share of the memory bandwidth that the CPU's kernels reach.

A layer with the sizes of GLM-4.5-Air's experts is computed for one token at a time, as in decoding;
each token reads the weights of its 8 experts. Many layers are computed in turn, so that no weight
is in the caches.

    python benchmarks/host_experts.py [--layers 6]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from duoka.models.quantization import num_bytes
from duoka.models.quantization.experts import linear
from duoka.models.quantization.stacked import ExpertStack, Unquantized, quantize_stack

EXPERTS, TOP_K = 32, 8
SHAPES = ((2816, 4096), (4096, 1408))
READ_BYTES = 2**30


def main() -> None:
    """Print the bytes per second of each scheme, and their share of the memory bandwidth."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=6)
    layers = parser.parse_args().layers
    buffer = torch.ones(READ_BYTES // 4)
    bandwidth = READ_BYTES / _best(buffer.sum)
    print(f"memory: {bandwidth / 1e9:.1f} GB/s with {torch.get_num_threads()} threads")
    for scheme in ("none", "int8", "int4"):
        stacks = [[_stack(scheme, *shape) for shape in SHAPES] for _ in range(layers)]
        read = sum(num_bytes(stack) for pair in stacks for stack in pair) * TOP_K / EXPERTS
        rate = read / _best(lambda stacks=stacks: _token(stacks))  # type: ignore[misc]
        print(f"{scheme:5} {rate / 1e9:5.1f} GB/s, {rate / bandwidth:.2f} of the memory")


def _stack(scheme: str, rows: int, columns: int) -> ExpertStack:
    """Return the random weights of one projection of a layer."""
    weights = torch.empty(EXPERTS, rows, columns, dtype=torch.bfloat16).uniform_(-0.03, 0.03)
    if scheme != "none":
        return quantize_stack(weights, scheme)  # type: ignore[arg-type]
    stack = ExpertStack.empty(weights, weights.device, Unquantized, is_transposed=False)
    stack.tensors["weight"].copy_(weights)
    return stack


def _token(stacks: list[list[ExpertStack]]) -> None:
    """Compute the projections of one token in all layers, each with experts of its own."""
    hidden = torch.randn(1, SHAPES[0][1], dtype=torch.bfloat16)
    with torch.no_grad():
        for up, down in stacks:
            experts = torch.randperm(EXPERTS)[:TOP_K][None]
            states = linear(hidden, up, experts)
            linear(states[:, : SHAPES[1][1]].contiguous(), down, experts)


def _best(call: Callable[[], object]) -> float:
    """Return the fewest seconds of ten calls."""
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


if __name__ == "__main__":
    main()
