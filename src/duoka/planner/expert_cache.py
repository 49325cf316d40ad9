"""Experts that GPUs fetch from host memory: when they do, and how many of each layer they keep.

With experts chosen evenly, a byte of GPU memory saves as many fetched bytes in one layer as in any
other; texts that choose some experts more often gain from every cache. So all layers have caches of
the same size, as large as all GPUs together have room for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from duoka.forecast.costs import Costs
from duoka.forecast.profile import Profile
from duoka.hardware.device import Device

from .request import PlanProblem
from .room import room_bytes

_SHARES = 0.95, 0.8, 0.6, 0.3
"""Shares of the free memory for caches to try: stages are cut between layers, so some is left."""
_BITS = 4
"""Significant bits of a size: each size takes a trace."""
_LEAST = 1
"""A cache has room for the experts of one token at least."""


def fetch_choices(problem: PlanProblem, host: Device) -> tuple[bool, ...]:
    """Return True for GPUs that fetch experts, False for a CPU that computes them, by preference.

    A token needs the same experts either way: what reads them faster is preferred. Only caches
    need memory, so the CPU may compute where they don't fit.
    """
    if problem.workload.training is not None:
        return (False,)
    if problem.constraints.host_experts != "auto":
        return (problem.constraints.host_experts == "fetch",)
    bandwidth = host.memory_bytes_per_second
    rates = [device.host_bytes_per_second for device in problem.fleet.devices]
    if bandwidth is None or any(rate is None or rate <= bandwidth for rate in rates):
        return (False,)
    return True, False


def first_cache_bytes(profile: Profile, problem: PlanProblem) -> int:
    """Return the requested size of each layer's cache in bytes, or the smallest."""
    size = problem.constraints.expert_cache
    if size is None:
        return _LEAST
    layers = sum(len(block.experts) for block in profile.blocks)
    return max(size * len(problem.fleet.devices) // layers, _LEAST)


def caches_to_try(hosted: Sequence[Costs], problem: PlanProblem) -> Iterator[int]:
    """Yield the sizes to try for each layer's cache in bytes, the largest first.

    `hosted` are the costs with all experts on the host and the first size, 0 without caches.
    """
    workload, sizes = hosted[0].workload, []
    if workload.expert_cache_bytes and problem.constraints.expert_cache is None:
        least_bytes = min(int(costs.lower_bound_bytes[0, -1]) for costs in hosted)
        budgets = [device.budget_bytes for device in problem.fleet.devices]
        room = sum(budgets) - sum(map(room_bytes, budgets)) - least_bytes
        if workload.is_paged and workload.pages is None:
            room //= 2  # the other half is for pages
        layers = len(hosted[0].profile.host_experts)
        sizes = [_rounded(int(share * room) // layers) for share in _SHARES]
    yield from dict.fromkeys([*sizes, workload.expert_cache_bytes])


def _rounded(size: int) -> int:
    """Round down to a few significant bits."""
    unit = 1 << max(0, size.bit_length() - _BITS)
    return max(size // unit * unit, _LEAST)
