"""Random requests: after each the model has reserved and allocated what CUDA's allocator has.

DUOKA_PROGRAMS says how many histories, DUOKA_STEPS how many steps each has.
"""

from __future__ import annotations

import os
import random

import pytest
import torch

from duoka.forecast.allocator import Allocation, CachingAllocator, OutOfCapacity

MIB = 2**20
HISTORIES = int(os.environ.get("DUOKA_PROGRAMS", "40"))
STEPS = int(os.environ.get("DUOKA_STEPS", "300"))
SETTINGS = ("expandable_segments:False", "expandable_segments:True")
Live = list[tuple[int, Allocation]]


def request(draw: random.Random, memory: int) -> int:
    """Some bytes: of few sizes, so that what is free is taken again, or of any."""
    few = [512, 4096, MIB // 3, MIB, MIB + 512, 3 * MIB, 7 * MIB, 10 * MIB, 17 * MIB, 33 * MIB]
    sizes = (draw.choice(few), draw.randint(1, MIB), draw.randint(1, max(MIB, memory // 3)))
    return draw.choices(sizes, (4, 2, 3))[0]


def step(draw: random.Random, model: CachingAllocator, live: Live, memory: int) -> str:
    """Do one step on both; what it was."""
    kind = draw.choices(("malloc", "free", "empty"), (10, 9, 0.2))[0]
    if kind == "empty":
        model.empty_cache()
        torch.cuda.empty_cache()
    elif kind == "free" and live:
        address, allocation = live.pop(draw.randrange(len(live)))
        torch.cuda.caching_allocator_delete(address)
        model.free(allocation)
    elif kind == "malloc":
        size = request(draw, memory)
        try:
            address = torch.cuda.caching_allocator_alloc(size)
        except torch.OutOfMemoryError:
            with pytest.raises(OutOfCapacity):
                model.malloc(size)
            return f"{size} refused"
        live.append((address, model.malloc(size)))
        return f"{size}"
    return kind


def history(seed: int, model: CachingAllocator, memory: int) -> None:
    draw, live = random.Random(seed), Live()
    model.reset_peak()
    torch.cuda.reset_peak_memory_stats()
    done = []
    for _ in range(STEPS):
        done.append(step(draw, model, live, memory))
        found = (
            torch.cuda.memory_allocated(), torch.cuda.memory_reserved(),
            torch.cuda.max_memory_reserved(),
        )  # fmt: skip
        told = model.allocated_bytes, model.reserved_bytes, model.max_reserved_bytes
        assert told == found, (seed, len(done), done[-5:])
    for address, allocation in live:
        torch.cuda.caching_allocator_delete(address)
        model.free(allocation)
    model.empty_cache()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == model.reserved_bytes == 0


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(
    "gib",
    [
        pytest.param(gib, marks=pytest.mark.cuda_rig(gpus=f"{int(1024 * gib)}MiB"))
        for gib in (0.125, 0.375, 4)
    ],
)
def test_random_requests(gib: float, setting: str) -> None:
    torch._C._accelerator_setAllocatorSettings(setting)
    memory = int(gib * 1024) * MIB
    # One model for all, since PyTorch keeps the addresses of segments that it couldn't map.
    model = CachingAllocator(memory, expandable=setting.endswith("True"))
    for seed in range(HISTORIES):
        history(seed, model, memory)
