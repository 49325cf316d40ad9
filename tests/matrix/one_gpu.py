"""One virtual GPU: a model computes the same as on the CPU."""

from __future__ import annotations

import families
import torch
from families import Family

from duoka import virtual

WITHOUT_NUMBERS = (
    "glm",
    "gemma2",
    "gpt2",
    "mixtral",
    "gpt_oss",
    "deepseek_v3",
    "mamba2",
    "bart",
    "t5",
)


def check(family: Family) -> None:
    """Compare logits, tokens, loss and gradients, and the memory of a call without numbers."""
    virtual.set_gpus([None])
    model = family.model().to("vgpu:0")
    assert {parameter.device for parameter in model.parameters()} == {torch.device("vgpu:0")}
    assert families.differences(family.results, families.measure(model, "vgpu:0")) == []
    if family.name in WITHOUT_NUMBERS:
        check_memory(family)


def check_memory(family: Family) -> None:
    """Compare the peaks of a call with those of a call whose tensors have no numbers."""
    peaks = []
    for data in ("cpu", "meta"):
        with virtual.gpus([None], data=data) as world, torch.no_grad():
            model = family.model().to(torch.bfloat16).to("vgpu:0")
            batch = {key: value.to("vgpu:0") for key, value in families.inputs(model).items()}
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])
            batch["attention_mask"][0, :3] = 0
            model(**batch, use_cache=True)
            peaks.append((world.max_memory_allocated(0), world.max_memory_reserved(0)))
            del model
    assert peaks[0] == peaks[1]
