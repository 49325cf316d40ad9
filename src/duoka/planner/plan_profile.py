"""The profile of a plan's model, and its checkpoint's names."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, get_args

from duoka.errors import UsageError
from duoka.forecast.profile import Profile
from duoka.forecast.profile_cache import find_profile

from .device_map import published_names
from .plan import Plan

Convention = Literal["model", "checkpoint"]
CONVENTIONS: tuple[Convention, ...] = get_args(Convention)
"""Whose names of modules are written."""


def cached_profile(plan: Plan) -> Profile | None:
    """Return the cached profile of a plan's model."""
    # What was traced for one workload alone is kept under the workload as it was asked for.
    requested = replace(plan.request.workload, dtype=plan.workload.dtype)
    return find_profile(plan.fingerprint, plan.workload) or find_profile(
        plan.fingerprint, requested
    )


def needed_profile(plan: Plan, what_for: str) -> Profile:
    """Return the cached profile; raise UsageError without any."""
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
    """Map each module of a plan to its device, in either convention of names.

    Offloaded modules are where they compute, or on a device of their own.
    """
    devices = plan.device_map
    if offloaded_to is not None:
        devices |= dict.fromkeys(plan.offloaded, offloaded_to)
    if convention == "model":
        return devices
    profile = profile or needed_profile(plan, "with the checkpoint's names")
    names = published_names(profile.outline)
    return {names.get(module, module): device for module, device in devices.items()}
