"""Whether GPUs fetch experts from host memory, and how many of each layer they keep.

With experts chosen evenly, a byte of GPU memory saves as many fetched bytes in one layer as in any
other. So every layer gets a cache of the same size, as large as all GPUs together have room for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from duoka.forecast.costs import Costs
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


def first_cache(profile: Profile, problem: PlanProblem) -> int:
    """Return the requested size of each layer's cache in bytes, or the smallest."""
    size = problem.constraints.expert_cache
    if size is None:
        return _LEAST
    layers = sum(len(block.experts) for block in profile.blocks)
    return max(size * len(problem.fleet.devices) // layers, _LEAST)


def cache_sizes(hosted: Sequence[Costs], problem: PlanProblem) -> Iterator[int]:
    """Yield the sizes to try for each layer's cache in bytes, the largest first.

    `hosted` are the costs with all experts on the host and the first size, 0 without caches.
    """
    workload = hosted[0].workload
    if workload.expert_cache_bytes == _LEAST:
        least_bytes = min(int(costs.lower_bound_bytes[0, -1]) for costs in hosted)
        room = int(_SHARE * (problem.fleet.budget_bytes - least_bytes))
        layers = len(hosted[0].profile.host_experts)
        yield from (max(room // layers // divisor, _LEAST) for divisor in (1, 2, 4))
    yield workload.expert_cache_bytes
