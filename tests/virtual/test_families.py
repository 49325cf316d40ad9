"""Families of transformers on one virtual GPU: the same numbers as on the CPU."""

from __future__ import annotations

import families
import pytest
import torch

from duoka import virtual

UNBUILT = {name for names in families.UNBUILT.values() for name in names}
SLOW = [name for name in families.all_names() if name not in UNBUILT and name not in families.FAST]


def check(name: str) -> None:
    virtual.set_gpus([None])
    model = families.build(name).to("vgpu:0")
    assert {parameter.device for parameter in model.parameters()} == {torch.device("vgpu:0")}
    found = families.measure(model, "vgpu:0")
    assert families.differences(families.on_the_cpu(name), found) == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", families.sample(families.FAST))
def test_family(name: str) -> None:
    check(name)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", families.sample(SLOW))
def test_other_family(name: str) -> None:
    check(name)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", ["glm", "gemma2", "gpt2", "mixtral", "gpt_oss", "deepseek_v3", "mamba2", "bart", "t5"]
)
def test_memory_is_the_same_without_numbers(name: str) -> None:
    peaks = []
    for data in ("cpu", "meta"):
        with virtual.gpus([None], data=data) as world, torch.no_grad():
            model = families.build(name).to(torch.bfloat16).to("vgpu:0")
            batch = {key: value.to("vgpu:0") for key, value in families.inputs(model).items()}
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])
            batch["attention_mask"][0, :3] = 0
            model(**batch, use_cache=True)
            peaks.append((world.max_memory_allocated(0), world.max_memory_reserved(0)))
            del model
    assert peaks[0] == peaks[1]
