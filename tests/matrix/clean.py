"""The check: duoka's own placements are clean, and the models are left as they were."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import families
import torch
import towers
import transformers
from families import Family
from packaging.version import Version
from transformers import PreTrainedModel

import duoka
from duoka import Placement, Workload
from duoka.runtime.dispatch.dispatch import without_data
from duoka.tracing import TraceSpec, trace_call

LEFT_OUT = {
    "cpmant": "its loss meets labels that nobody moves: modeling_cpmant.py has no `.to` there",
    "nllb-moe": "the steps give its decoder an output of the encoder that lacks router logits",
    "jetmoe": "it reads values that only real numbers have, so tracing doesn't find its blocks",
}
IMAGES_LEFT_OUT = {"glm5_next": "as jetmoe"}
if Version(transformers.__version__) < Version("5.23"):
    IMAGES_LEFT_OUT["aria"] = "as jetmoe"
WORK = Workload(prompt_tokens=12, new_tokens=4, prefill_chunk_tokens=None)


def splits(model: PreTrainedModel, inputs: dict[str, Any]) -> Iterator[Placement]:
    """Two stages of duoka's blocks, and three."""
    profile = trace_call(without_data(model), TraceSpec(fingerprint="test"), inputs)
    blocks = profile.blocks
    for bounds in ((1 / 2,), (1 / 3, 2 / 3)):
        stages = [
            sum(index >= each * len(blocks) for each in bounds) for index in range(len(blocks))
        ]
        for index, block in enumerate(blocks):
            if block.tied_to is not None and block.modules:
                stages[index] = stages[block.tied_to]
        yield Placement(
            entries=tuple(
                (module, f"cuda:{stage}")
                for block, stage in zip(blocks, stages, strict=True)
                for module in block.modules
            )
        )


def state(model: PreTrainedModel) -> dict[str, Any]:
    """Everything about a model that a check could have left changed."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        "objects": {name: id(tensor) for name, tensor in tensors.items()},
        "devices": {name: tensor.device for name, tensor in tensors.items()},
        "gradients": {name: tensor.grad for name, tensor in tensors.items()},
        "attributes": {name: sorted(vars(module)) for name, module in model.named_modules()},
        "classes": {name: type(module) for name, module in model.named_modules()},
        "training": model.training,
    }


def is_clean(model: PreTrainedModel, inputs: dict[str, Any], use: dict[str, Any]) -> None:
    before, numbers = state(model), {n: t.clone() for n, t in model.state_dict().items()}
    labels = inputs.get("decoder_input_ids", inputs.get("input_ids"))
    training = {**inputs, "labels": labels}
    training.pop("decoder_input_ids", None)
    uses = (use, {"inputs": training, "train": True})
    for placement, each in zip(splits(model, inputs), uses, strict=True):
        report = duoka.check(model, placement, **each)
        assert report.stop is None
        assert report.faults == ()
        assert report.ok
    assert state(model) == before
    assert all(torch.equal(value, numbers[name]) for name, value in model.state_dict().items())


def check(family: Family) -> None:
    """Check a language model, for generation in two stages and for training in three."""
    model = family.model()
    is_clean(model, families.inputs(model), {"workload": WORK})


def check_images(name: str) -> None:
    """Check a model that reads images, for one call and for training."""
    model = towers.build(name)
    inputs = towers.image_inputs(model, [(100, 80)], batch=2, prompt_tokens=16)
    is_clean(model, inputs, {"inputs": inputs})
