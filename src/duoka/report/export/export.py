"""Select and run the exporter of a tool."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from duoka.base.text import choose
from duoka.errors import InfeasibleError, UsageError
from duoka.forecast.profile import Profile
from duoka.planner.plan import Plan
from duoka.planner.plan_profile import CONVENTIONS, Convention, cached_profile

from . import accelerate, llamacpp, sglang, swift, vllm
from .gguf_file import check_gguf, read_gguf
from .stages import Pins, pipeline_pins, to_layer_pipeline
from .text import Export

_EXPORTERS: dict[str, Callable[[Plan, Profile | None], Export]] = {
    "vllm": vllm.export,
    "sglang": sglang.export,
    "llama.cpp": llamacpp.export,
    "swift": swift.export,
}
TOOLS = (accelerate.NAME, *_EXPORTERS)
_SERVERS = ("vllm", "sglang", "llama.cpp")


def export(
    plan: Plan,
    tool: str,
    profile: Profile | None = None,
    *,
    names: Convention = "model",
    gguf: str | os.PathLike[str] | None = None,
) -> Export:
    """Write a plan in the syntax of another tool.

    Parameters
    ----------
    plan : Plan
        The plan to write.
    tool : str
        "accelerate", "vllm", "sglang", "llama.cpp" or "swift".
    profile : Profile, optional
        Profile of the plan's model, for the size of the KV cache; by default the cached profile.
        Without a profile the tool chooses the size.
    names : {"model", "checkpoint"}
        Names in the device map: those of the classes of duoka and transformers, or those of the
        checkpoint's own code. Only for "accelerate".
    gguf : path, optional
        GGUF file of the plan's model, the first part of a split file. The command names the file,
        and the notes give the bytes of its weights on each GPU and on the host. Only for
        "llama.cpp"; needs ``duoka[gguf]``.

    Raises
    ------
    UsageError
        If the tool is unknown or can't express the plan; the message says what it can't express.
        Also if the weights of the GGUF file exceed the budget of a GPU.
    FormatError
        If the GGUF file can't be read, is damaged or incomplete, or has another model.

    Examples
    --------
    >>> print(export(plan, "vllm"))  # doctest: +SKIP
    """
    refuse_tool(tool, names, gguf)
    if tool in _SERVERS and plan.workload.training is not None:
        hint = "plan without training, or export to swift"
        raise UsageError(f"{tool} is for inference, and the plan is for training", hint=hint)
    if tool == accelerate.NAME:
        return accelerate.export(plan, profile, names)
    profile = profile or cached_profile(plan)
    if gguf is not None:
        return llamacpp.export(plan, profile, read_gguf(Path(gguf)))
    return _EXPORTERS[tool](plan, profile)


def plan_for_tool(plan: Plan, tool: str, plan_again: Callable[[Pins], Plan]) -> Plan:
    """Return the plan if the tool can express it, otherwise the best plan of whole layers.

    `plan_again` plans with additional pins. If no plan of whole layers fits, the plan itself is
    returned, and its export is refused.
    """
    if tool not in _SERVERS or plan.offloaded:
        return plan
    try:
        to_layer_pipeline(plan, tool)
    except UsageError:
        sign = -1 if plan.objective in ("latency", "throughput") else 1  # seconds: less is better
        plans = []
        for pins in pipeline_pins(plan):
            with suppress(InfeasibleError, UsageError):
                candidate = plan_again(pins)
                to_layer_pipeline(candidate, tool)
                plans.append(candidate)
        return max(plans, key=lambda candidate: sign * candidate.value, default=plan)
    return plan


def refuse_tool(tool: str, names: Convention, gguf: str | os.PathLike[str] | None = None) -> None:
    """Refuse an unknown tool, and checkpoint names or a GGUF file for a tool without them."""
    choose("the tool", tool, TOOLS)
    if choose("names", names, CONVENTIONS) != "model" and tool != accelerate.NAME:
        hint = f"omit them, or export to {accelerate.NAME}"
        raise UsageError(f"{tool} has no option for module names", hint=hint)
    if gguf is not None:
        if tool != llamacpp.NAME:
            hint = f"omit the file, or export to {llamacpp.NAME}"
            raise UsageError(f"{tool} doesn't read GGUF files, such as {gguf}", hint=hint)
        check_gguf(Path(gguf))
