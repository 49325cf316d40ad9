"""Experts in host memory: the layers of a plan that have them, and the tools without such a place.

llama.cpp, SGLang with KTransformers, vLLM and accelerate have options for them (see their modules).
The stages of torch.distributed.pipelining, torchtitan and DeepSpeed are modules of one device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from duoka.base.text import is_within
from duoka.forecast.profile import Profile
from duoka.forecast.tensor_names import layer_of
from duoka.planner.plan import Plan
from duoka.planner.plan_profile import needed_profile

from .text import export_error

OTHER_TOOLS = "export to llama.cpp, which takes any layers, or load the plan with duoka"


def refuse_host_experts(plan: Plan, tool: str, why: str) -> None:
    """Raise UsageError if a plan has experts in host memory."""
    if plan.host_experts:
        experts = f"the experts of {len(plan.host_experts)} layers are in host memory"
        raise export_error(tool, f"{experts}; {why}", OTHER_TOOLS)


def host_layers(plan: Plan) -> list[int]:
    """Return the numbers of the layers whose experts are in host memory, in ascending order."""
    return sorted(layer[1] for name in plan.host_experts if (layer := layer_of(name)) is not None)


def layer_bytes(plan: Plan, profile: Profile | None) -> dict[int, int]:
    """Return the bytes of the experts of each layer that has experts, by layer number.

    The experts of a layer have the name of a host expert with the number of the layer. Raises
    UsageError without a profile.
    """
    profile = profile or needed_profile(plan, "to find the layers with experts")
    patterns = {pattern for name in plan.host_experts if (pattern := _split_number(name))}
    sizes: Counter[int] = Counter()
    for tensor in (tensor for block in profile.outline.blocks for tensor in block.tensors):
        for layers, part in patterns:
            layer = layer_of(tensor.name)
            if layer is None or layer[0] != layers:
                continue
            if is_within(tensor.name, f"{layers}.{layer[1]}.{part}"):
                sizes[layer[1]] += tensor.num_bytes
    return dict(sorted(sizes.items()))


def format_layers(numbers: Iterable[int]) -> str:
    """Format layer numbers for a message, the first few only."""
    texts = [str(number) for number in numbers]
    return ", ".join(texts if len(texts) <= 6 else [*texts[:5], "…", texts[-1]])


def _split_number(name: str) -> tuple[str, str] | None:
    """Split "model.layers.5.mlp.experts" into "model.layers" and "mlp.experts"."""
    layer = layer_of(name)
    return layer and (layer[0], name.removeprefix(f"{layer[0]}.{layer[1]}."))
