"""ms-swift: ``swift infer`` and ``swift deploy`` for inference, ``swift sft`` for training.

Sources, of ms-swift 4.6.0:

- ``--device_map`` is JSON; ``--max_memory`` is a Python literal, because the keys of JSON are texts
  and accelerate takes numbers (``swift/arguments/base_args/model_args.py``).
- Options: the dataclasses in ``swift/arguments``, and transformers' `TrainingArguments`.
- GLM-4 and its predecessors run in their published code, under its names. They have one class name,
  so ms-swift needs ``--model_type`` unless it knows the name of the directory
  (``swift/model/model_meta.py``, `_get_model_info`): `swift_models.json`.
- One process has all visible GPUs without ``NPROC_PER_NODE`` (``swift/utils/env.py``, `is_mp`).
- A prompt longer than ``--max_length`` is refused, a longer sample skipped
  (``swift/template/base.py``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from duoka.forecast.profile import Profile
from duoka.forecast.workload import Training
from duoka.planner.plan import Plan
from duoka.planner.plan_profile import Convention, map_of

from . import accelerate, common
from .host_experts import refuse_host_experts
from .text import Export, export_error, format_command

NAME = "ms-swift"
_UNKNOWN = "MODEL_TYPE"
_OPTIMIZERS = {"adamw": "adamw_torch", "adamw8bit": "adamw_bnb_8bit"}
# bitsandbytes' own defaults, as duoka quantizes.
_NF4 = {"quant_method": "bnb", "quant_bits": 4, "bnb_4bit_use_double_quant": False}
Options = dict[str, object]


def export(plan: Plan, profile: Profile | None) -> Export:
    """Write the plan as command lines."""
    workload, training = plan.workload, plan.workload.training
    if plan.host_experts:
        refuse_host_experts(plan, NAME, "it has no option for experts")
    if workload.quantize not in ("none", "nf4"):
        why = f"it has no weights in {workload.quantize} as torchao's"
        raise export_error(NAME, why, "plan with --quantize nf4, or export to accelerate")
    options = _model_options(plan, profile)
    if workload.quantize == "nf4":
        options |= {**_NF4, "bnb_4bit_compute_dtype": workload.dtype}
    options["max_length"] = workload.prompt_tokens
    if training is not None:
        commands = ["rlhf" if training.dpo else "sft"]
        options |= _training_options(plan, training)
    else:
        commands = ["infer", "deploy"]
        options |= {"max_new_tokens": workload.new_tokens, "max_batch_size": workload.batch}
    devices = [plan.fleet.device(name) for name in plan.devices]
    environment = common.visible_environment(NAME, devices)
    texts = [(f"--{name}", str(value)) for name, value in options.items()]
    lines = [format_command(environment, ["swift", command], texts) for command in commands]
    return Export(tool=NAME, text="\n\n".join(lines), notes=tuple(_notes(plan)))


def _model_options(plan: Plan, profile: Profile | None) -> Options:
    """Return the options of the model and of its modules' devices."""
    options: Options = {"model": common.model_name(plan)}
    if (revision := common.model_revision(plan)) is not None:
        options["model_revision"] = revision
    if revision is not None and not common.is_on_modelscope(plan):
        options["use_hf"] = True
    if model_type := _find_model(plan).get("type"):
        options["model_type"] = model_type
    names: Convention = "checkpoint" if common.code_option(plan) else "model"
    # The numbers of CUDA are those of the visible GPUs, in their order.
    keys: dict[str, int | str] = {name: number for number, name in enumerate(plan.devices)}
    devices = map_of(plan, names, profile, offloaded_to="cpu")
    device_map = {name: keys.get(device, device) for name, device in devices.items()}
    max_memory = {keys[name]: plan.fleet.device(name).budget_bytes for name in plan.devices}
    return options | {
        "torch_dtype": plan.workload.dtype,
        "device_map": json.dumps(device_map),
        "max_memory": max_memory,
    }


def _find_model(plan: Plan) -> dict[str, str]:
    """Find ms-swift's type and required transformers of a GLM model; empty for other models."""
    models = json.loads((Path(__file__).parent / "swift_models.json").read_text(encoding="utf-8"))
    family = "ChatGLM" if plan.model.startswith("ChatGLM") else plan.model
    family = "GLM-4V" if common.is_glm4v(plan) else family
    for model in models["models"]:
        if model["family"] == family and model["name"] in plan.source.lower():
            return {**model, "version": models["version"]}
    return {}


def _training_options(plan: Plan, training: Training) -> Options:
    """Return the options of training; UsageError if ms-swift can't train so."""
    workload = plan.workload
    if plan.offloaded:
        why = "its trainer rejects offloaded modules"
        raise export_error(NAME, why, "plan with more GPUs, or train with duoka tune")
    if training.lora_targets and common.code_option(plan):
        why = "the published code has other modules than the plan's adapters"
        raise export_error(NAME, why, "plan with adapters of all linear layers")
    options: Options = {
        "dataset": "DATA.jsonl",
        "tuner_type": training.method,
        "bf16": workload.dtype == "bfloat16",
        "fp16": workload.dtype == "float16",
        "per_device_train_batch_size": workload.batch // (2 if training.dpo else 1),
        "gradient_accumulation_steps": training.micro_batches,
        "gradient_checkpointing": training.gradient_checkpointing,
        "optim": _OPTIMIZERS.get(training.optimizer, training.optimizer),
    }
    options |= {"rlhf_type": "dpo"} if training.dpo else {}
    kept_dtype = "float32" if training.master_weights else workload.dtype
    if training.method == "full":
        return options | {"torch_dtype": kept_dtype}
    if training.lora_targets:
        options["target_regex"] = rf"(.*\.)?({'|'.join(training.lora_targets)})"
    return options | {
        "lora_rank": training.lora_rank,
        "lora_alpha": training.lora_alpha or 2 * training.lora_rank,
        "use_rslora": training.rslora,
        "lora_dropout": training.lora_dropout,
        "lora_dtype": kept_dtype,
    }


def _notes(plan: Plan) -> Iterator[str]:
    """Yield the differences between the plan and ms-swift."""
    yield from common.common_notes(plan)
    yield from common.source_note(plan)
    model, workload, training = _find_model(plan), plan.workload, plan.workload.training
    if model.get("type") == _UNKNOWN:
        yield f"NOTE: replace {_UNKNOWN} by chatglm2, chatglm3, chatglm4 or codegeex4."
    elif model:
        needed = f"transformers{model['transformers']}"
        yield (
            f"NOTE: ms-swift {model['version']} requires {needed} for this model: pip install "
            f"'{needed}'"
        )
    if common.code_option(plan):
        yield "NOTE: the checkpoint's own code runs, with all your permissions."
    yield from accelerate.dispatch_notes(plan)
    if training is not None:
        yield (
            "NOTE: DATA.jsonl is a placeholder. ms-swift runs one process, in which one GPU works "
            f"at a time, and pads rows; the plan: {training.schedule}, {training.rows}."
        )
        return
    chunk = workload.prefill_chunk_tokens
    yield (
        f"NOTE: memory is planned for {workload.context_tokens} tokens of {workload.batch} "
        f"sequences; swift deploy doesn't limit a request's max_tokens. ms-swift's KV cache is "
        f"dynamic, in 16 bit; the plan's is {workload.cache}. For swift sft plan with --train."
    )
    if chunk is not None:
        yield (
            f"NOTE: the plan's prefill runs in chunks of {chunk} tokens; ms-swift's is a single "
            "pass, which needs more memory: --prefill-chunk none plans it."
        )
