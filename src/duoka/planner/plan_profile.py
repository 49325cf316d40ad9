"""The cached profile of a plan's model, and device maps with the checkpoint's names."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, get_args

from duoka.errors import UsageError
from duoka.forecast.hosting import hosting
from duoka.forecast.profile import Profile
from duoka.forecast.profile_cache import find_profile

from .device_map import published_names
from .plan import Plan

Convention = Literal["model", "checkpoint"]
CONVENTIONS: tuple[Convention, ...] = get_args(Convention)
"""Conventions of module names: the model's own, or those of its published checkpoint."""


def cached_profile(plan: Plan) -> Profile | None:
    """Return the cached profile of a plan's model; None if the cache has none."""
    # A profile that is valid for one workload only is cached under the requested workload.
    requested = replace(plan.request.workload, dtype=plan.workload.dtype)
    profile = find_profile(plan.fingerprint, plan.workload) or find_profile(
        plan.fingerprint, requested
    )
    if profile is None or not plan.host_experts:
        return profile
    on_gpus = find_profile(plan.fingerprint, replace(plan.workload, host_experts=()))
    names = frozenset(plan.host_experts)
    blocks = [at for at, block in enumerate(profile.blocks) if names.intersection(block.experts)]
    return profile if on_gpus is None else hosting(on_gpus, blocks, profile)


def needed_profile(plan: Plan, what_for: str) -> Profile:
    """Return the cached profile of a plan's model; raise UsageError if the cache has none.

    `what_for` completes the error's message.
    """
    profile = cached_profile(plan)
    if profile is None:
        raise UsageError(
            f"there is no profile of {plan.model} in the cache {what_for}",
            hint="plan the model on this machine (duoka plan MODEL …), which traces it",
        )
    return profile


def map_of(
    plan: Plan,
    convention: Convention,
    profile: Profile | None = None,
    *,
    offloaded_to: str | None = None,
) -> dict[str, str]:
    """Map each module of a plan to its device, with names of a convention.

    An offloaded module has the device where it computes, or `offloaded_to` if given.
    """
    devices = plan.device_map
    if offloaded_to is not None:
        devices |= dict.fromkeys(plan.offloaded, offloaded_to)
    if convention == "model":
        return devices
    profile = profile or needed_profile(plan, "with the checkpoint's names")
    names = published_names(profile.outline)
    return {names.get(module, module): device for module, device in devices.items()}
