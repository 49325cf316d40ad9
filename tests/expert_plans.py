"""Plans of a small GLM-4.5 with experts in host memory."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from families import families
from transformers import PreTrainedModel

from duoka import Plan, Workload, plan

NUM_LAYERS = 5
NAMES = {"architectures": ["Glm4MoeForCausalLM"]}
WORKLOAD = Workload(prompt_tokens=24, new_tokens=8, dtype="bfloat16", prefill_chunk_tokens=None)


@functools.cache
def model() -> PreTrainedModel:
    """GLM-4.5 in small: the first of its layers is dense."""
    ((model_class, config),) = families(["glm4_moe"]).values()
    config.num_hidden_layers = NUM_LAYERS
    torch.manual_seed(0)
    return model_class(config).eval()


@functools.cache
def base(num_gpus: int) -> Plan:
    """Of the checkpoint, since profiles of models in memory aren't kept."""
    with tempfile.TemporaryDirectory() as directory:
        model().config.save_pretrained(directory)
        config = Path(directory) / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | NAMES))
        return plan(config, f"virtual:{num_gpus}x64MiB", WORKLOAD, use_all=True)


def hosting(layers: Sequence[int], num_gpus: int = 1) -> Plan:
    names = tuple(f"model.layers.{number}.mlp.experts" for number in layers)
    plan = base(num_gpus)
    return replace(plan, workload=replace(plan.workload, host_experts=names))
