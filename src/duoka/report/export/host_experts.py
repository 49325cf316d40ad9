"""Experts in host memory: the layers of a plan that have them, and the tools without such a place.

llama.cpp, SGLang with KTransformers, vLLM and accelerate have options for them (see their modules).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import NoReturn

from duoka.base.text import is_within
from duoka.forecast.profile import Profile
from duoka.forecast.tensor_names import layer_of
from duoka.planner.plan import Plan
from duoka.planner.plan_profile import needed_profile

from .text import export_error


def refuse_host_experts(plan: Plan, tool: str, why: str) -> NoReturn:
    """Raise UsageError for a plan with experts in host memory."""
    experts = f"the experts of {len(plan.host_experts)} layers are in host memory"
    hint = "export to llama.cpp, which takes any layers, or load the plan with duoka"
    raise export_error(tool, f"{experts}; {why}", hint)


def host_layers(plan: Plan) -> list[int]:
    """Return the numbers of the layers whose experts are in host memory, in ascending order."""
    return sorted(layer[1] for name in plan.host_experts if (layer := layer_of(name)) is not None)


def layer_bytes(plan: Plan, profile: Profile | None) -> dict[int, int]:
    """Return the bytes of the experts of each layer that has experts, by layer number.

    The experts of a layer have the name of a host expert with the number of the layer. Raises
    UsageError without a profile.
    """
    profile = profile or needed_profile(plan, "to find the layers with experts")
    patterns = {_without_number(name) for name in plan.host_experts}
    sizes: Counter[int] = Counter()
    for tensor in (tensor for block in profile.outline.blocks for tensor in block.tensors):
        layer = layer_of(tensor.name)
        if layer and any(is_within(_without_number(tensor.name), name) for name in patterns):
            sizes[layer[1]] += tensor.num_bytes
    return dict(sorted(sizes.items()))


def format_layers(numbers: Iterable[int]) -> str:
    """Format layer numbers for a message, the first few only."""
    texts = [str(number) for number in numbers]
    return ", ".join(texts if len(texts) <= 6 else [*texts[:5], "…", texts[-1]])


def _without_number(name: str) -> str:
    """Replace the number in "model.layers.5.mlp.experts" by "N"."""
    return re.sub(r"\.\d+\.", ".N.", name, count=1)
