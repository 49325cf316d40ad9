"""transformers and accelerate: the ``device_map`` that ``from_pretrained`` takes.

Sources: huggingface.co/docs/accelerate, "Big Model Inference" (`device_map`, `max_memory`);
huggingface.co/docs/transformers, "torchao" and "bitsandbytes" (`quantization_config`).

Experts in host memory are modules on "cpu", which accelerate 1.15.0 copies to the first GPU of the
map for each call (``accelerate/big_modeling.py``, `dispatch_model`; ``accelerate/hooks.py``,
`AlignDevicesHook`). The output stays there, so that a layer with shared experts on another GPU
fails. A module on a GPU moves all its submodules, so that the map can't name a layer and its
experts: it names the modules beside the experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from duoka.base.text import containing, is_within
from duoka.forecast.profile import Profile
from duoka.planner.plan import Plan
from duoka.planner.plan_profile import Convention, map_of, needed_profile

from . import common
from .host_experts import refuse_host_experts
from .text import Export, export_error

NAME = "accelerate"


def export(plan: Plan, profile: Profile | None, names: Convention = "model") -> Export:
    """Write the plan as a Python program."""
    devices = _with_host_experts(plan, profile, names)
    device_map: dict[int | str, int | str] = {name: _device_key(at) for name, at in devices.items()}
    max_memory: dict[int | str, int | str] = {
        _device_key(device.name): device.budget_bytes
        for device in plan.fleet.devices
        if device.name in plan.devices
    }
    is_code = plan.request.trust_remote_code or names == "checkpoint"
    if is_code and not common.code_option(plan):
        why = "the checkpoint has no code of its own, and so no other names"
        raise export_error(NAME, why, "omit --names")
    # Code written for transformers 4 only knows `torch_dtype`, which transformers 5 accepts too.
    dtype = "torch_dtype" if is_code else "dtype"
    arguments = [repr(common.model_name(plan)), f"{dtype}=torch.{plan.workload.dtype}"]
    arguments.append("device_map=device_map")
    revision = common.model_revision(plan)
    if revision is not None:
        arguments.append(f"revision={revision!r}")
    if is_code:
        arguments.append("trust_remote_code=True")
    imports, quantizing = _quantization_code(plan)
    if quantizing:
        arguments.append(f"quantization_config={quantizing}")
    import_lines = "\n".join(["import torch", *imports])
    argument_lines = "\n".join(f"    {argument}," for argument in arguments)
    text = f"""\
device_map = {_format_dict(device_map)}
max_memory = {_format_dict(max_memory)}

{import_lines}
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(
{argument_lines}
)"""
    return Export(tool=NAME, text=text, notes=tuple(_notes(plan, names)))


def _with_host_experts(plan: Plan, profile: Profile | None, names: Convention) -> dict[str, str]:
    """Return the device of each module; modules around host experts are replaced by their parts."""
    devices = map_of(plan, names, profile, offloaded_to="cpu")
    if not plan.host_experts:
        return devices
    if len(plan.devices) > 1:
        refuse_host_experts(plan, NAME, "on several GPUs it computes them on the wrong one")
    if names == "checkpoint":
        refuse_host_experts(plan, NAME, "the checkpoint's code has no module of all experts")
    outline = (profile or needed_profile(plan, "to find the modules beside experts")).outline
    tensors = [tensor.name for block in outline.blocks for tensor in block.tensors]
    placed: dict[str, str] = {}
    for module, device in devices.items():
        hosted = [name for name in plan.host_experts if is_within(name, module)]
        inside = [name for name in tensors if is_within(name, module)] if hosted else [module]
        for tensor in inside:
            # The longest prefix first: the last one that is not around experts is placed.
            prefixes = [name for name in (tensor, *containing(tensor)) if is_within(name, module)]
            around = {name for name in prefixes for expert in hosted if is_within(expert, name)}
            name = [name for name in prefixes if name in hosted or name not in around][-1]
            placed[name] = "cpu" if name in hosted else device
    return placed


def _quantization_code(plan: Plan) -> tuple[list[str], str]:
    """Return the import lines and the expression of the quantization config; [], "" if none."""
    scheme = plan.workload.quantize
    if scheme == "none":
        return [], ""
    if scheme == "nf4":
        dtype = f"bnb_4bit_compute_dtype=torch.{plan.workload.dtype}"
        return (
            ["from transformers import BitsAndBytesConfig"],
            f'BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", {dtype})',
        )
    name = f"{scheme.capitalize()}WeightOnlyConfig"
    settings = 'int4_packing_format="tile_packed_to_4d"' if scheme == "int4" else ""
    return (
        [f"from torchao.quantization import {name}", "from transformers import TorchAoConfig"],
        f"TorchAoConfig({name}({settings}))",
    )


def _device_key(name: str) -> int | str:
    """Return a GPU's index, as accelerate names it; other devices by name."""
    kind, _, number = name.partition(":")
    return int(number) if kind in ("cuda", "vgpu") and number else name


def _format_dict(values: Mapping[int | str, int | str]) -> str:
    """Format a dict as Python source, one entry per line."""
    return "\n".join(["{", *(f"    {key!r}: {value!r}," for key, value in values.items()), "}"])


def _notes(plan: Plan, names: Convention) -> Iterator[str]:
    """Yield the differences between the plan and accelerate."""
    yield from common.common_notes(plan)
    yield from common.source_note(plan)
    if common.is_on_modelscope(plan):
        name, revision = common.model_name(plan), common.model_revision(plan) or "master"
        yield (
            "NOTE: transformers doesn't read ModelScope; download the model to the directory that "
            f"is named here: modelscope download --model {name} --revision {revision} --local_dir "
            f"{name}"
        )
    if names == "checkpoint":
        yield (
            "NOTE: the names are those of the checkpoint's own code, which runs; the memory was "
            "forecast for the class of duoka or transformers. The code needs the transformers "
            "version it was written for (transformers_version in config.json)."
        )
    elif plan.model.startswith("ChatGLM"):
        yield (
            f"NOTE: transformers 5 has no {plan.model}; duoka provides it. Load the plan with "
            "duoka.load, or use this map with a checkpoint in transformers' format."
        )
    yield from dispatch_notes(plan)
    if plan.host_experts:
        yield (
            "NOTE: accelerate copies all experts of a layer from host memory to the GPU for every "
            "step, which needs GPU memory for them and takes much longer than the plan's forecast."
        )
    if plan.workload.training is not None:
        yield "NOTE: transformers' Trainer rejects models with a device_map in most modes."
    if plan.workload.quantize != "none":
        yield (
            "NOTE: transformers chooses which weights are quantized; the plan lists those that "
            "duoka leaves unquantized."
        )


def dispatch_notes(plan: Plan) -> Iterator[str]:
    """Yield the differences between the plan and the hooks that accelerate adds for a map."""
    yield (
        'max_memory applies only to device_map="auto" or "balanced"; with an explicit map it is '
        "not used."
    )
    if len(plan.devices) > 1:
        yield (
            "NOTE: accelerate moves the inputs of every module instead of every stage, and "
            "gathers the output on the first GPU, which also needs memory for the logits."
        )
    if plan.offloaded:
        yield (
            "NOTE: accelerate copies offloaded modules to a GPU of its own choice, module by "
            "module; memory and time will differ."
        )
