"""Whether GPUs fetch experts from host memory, and how many of each layer they keep.

With experts chosen evenly, a byte of GPU memory saves as many fetched bytes in one layer as in any
other. So every layer gets a cache of the same size, as large as all GPUs together have room for.
"""

from __future__ import annotations

from collections.abc import Iterator

from duoka.forecast.profile import Profile
from duoka.hardware.device import Device

from .request import PlanProblem

_SHARE = 0.85
"""Share of the free memory for caches: stages are cut between layers, so some memory is left."""
_LEAST = 1
"""A cache has room for the experts of one token at least."""


def fetches(problem: PlanProblem, host: Device) -> bool:
    """Return True if GPUs fetch experts in host memory, instead of the CPU computing them.

    A token needs the same experts either way: what reads them faster is chosen.
    """
    if problem.constraints.host_experts != "auto":
        return problem.constraints.host_experts == "fetch"
    bandwidth = host.memory_bytes_per_second
    rates = [device.host_bytes_per_second for device in problem.fleet.devices]
    return bandwidth is not None and all(rate is not None and rate > bandwidth for rate in rates)


def cache_sizes(hosted: Profile, problem: PlanProblem, least_bytes: int) -> Iterator[int]:
    """Yield the sizes to try for the cache of each layer, in bytes, the largest first.

    `least_bytes` is the memory that all stages need together with the smallest caches.
    """
    layers = sum(hosted.kinds[block.kind].expert_bytes > 0 for block in hosted.blocks)
    fleet, size = problem.fleet, problem.constraints.expert_cache
    if size is not None:
        yield max(size * len(fleet.devices) // layers, _LEAST)
        return
    room = int(_SHARE * (fleet.budget_bytes - least_bytes)) // layers
    for divisor in (1, 2, 4):
        if room // divisor > _LEAST:
            yield room // divisor
    yield _LEAST
