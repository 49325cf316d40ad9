"""From a plan to one tool's words."""

from __future__ import annotations

from collections.abc import Callable

from duoka.base.text import choose
from duoka.errors import UsageError
from duoka.forecast.profile import Profile
from duoka.planner.plan import Plan
from duoka.planner.plan_profile import CONVENTIONS, Convention, cached_profile

from . import accelerate, deepspeed, llamacpp, sglang, torch_pipelining, vllm
from .text import Export

_EXPORTERS: dict[str, Callable[[Plan, Profile | None], Export]] = {
    "vllm": vllm.export,
    "sglang": sglang.export,
    "llama.cpp": llamacpp.export,
    "torch-pipelining": torch_pipelining.export_torch,
    "torchtitan": torch_pipelining.export_titan,
    "deepspeed": deepspeed.export,
}
TOOLS = (accelerate.NAME, *_EXPORTERS)
_SERVERS = ("vllm", "sglang", "llama.cpp")


def export(
    plan: Plan, tool: str, profile: Profile | None = None, *, names: Convention = "model"
) -> Export:
    """Write a plan in the words of another tool.

    Parameters
    ----------
    plan : Plan
    tool : str
        "accelerate", "vllm", "sglang", "llama.cpp", "torch-pipelining", "torchtitan" or
        "deepspeed".
    profile : Profile, optional
        Of the plan's model, for the bytes of its cache; by default the one in the cache, and
        without any they are left to the tool.

    names : {"model", "checkpoint"}
        Whose names a device map has: those of duoka's and transformers' classes, or those of the
        code that comes with the checkpoint. For "accelerate" alone.

    Raises
    ------
    UsageError
        If the tool is unknown, or can't be told this plan: with what it can't.

    Examples
    --------
    >>> print(export(plan, "vllm"))  # doctest: +SKIP
    """
    refuse_unknown(tool)
    if tool in _SERVERS and plan.workload.training is not None:
        raise UsageError(
            f"{tool} serves models, and the plan is for training one",
            hint="plan without training, or export to torch-pipelining, torchtitan or deepspeed",
        )
    refuse_names(tool, names)
    if tool == accelerate.NAME:
        return accelerate.export(plan, profile, names)
    return _EXPORTERS[tool](plan, profile or cached_profile(plan))


def refuse_names(tool: str, names: Convention) -> None:
    """Refuse the checkpoint's names for a tool that is told none."""
    if choose("names", names, CONVENTIONS) != "model" and tool != accelerate.NAME:
        raise UsageError(
            f"{tool} is told no names of modules that a checkpoint could have",
            hint=f"leave them out, or export to {accelerate.NAME}",
        )


def refuse_unknown(tool: str) -> None:
    """Refuse a tool that there is no export for."""
    if tool not in TOOLS:
        raise UsageError(
            f"there is no export for {tool[:40]!r}", hint=f"known are {', '.join(TOOLS)}"
        )
