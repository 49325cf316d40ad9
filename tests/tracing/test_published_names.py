"""The names of a model's tensors, and maps of many families by them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from tiers import only
from torch import nn

import duoka
from duoka import Checkpoint, Workload, models
from duoka.errors import PlacementError
from duoka.forecast.tensor_names import NamedTensor, Outline
from duoka.planner.device_map import judge
from duoka.runtime.dispatch.place_tensors import tensor_names
from duoka.tools.demo.checkpoint import CONFIG
from duoka.tracing import get_profile
from duoka.tracing.blocks import ModuleGroup, find_containers
from duoka.tracing.published_names import by_block, name_tensors

LOAD = Workload(prompt_tokens=7, new_tokens=3)


def named(config: dict[str, Any], published: set[str] | None = None) -> dict[str, NamedTensor]:
    model = models.build(config, dtype=torch.float16)
    return {tensor.name: tensor for tensor in name_tensors(model, published)}


def test_a_fused_tensor_is_the_source_of_three() -> None:
    found = named(CONFIG)
    model = models.build(CONFIG, dtype=torch.float16)
    assert list(found) == [name for name, _ in tensor_names(model)]
    for part in "qkv":
        tensor = found[f"model.layers.2.self_attn.{part}_proj.weight"]
        fused = "transformer.encoder.layers.2.self_attention.query_key_value.weight"
        assert tensor.published == (fused,)
    assert found["lm_head.weight"].published == ("transformer.output_layer.weight",)
    assert (
        found["lm_head.weight"].num_bytes == CONFIG["padded_vocab_size"] * CONFIG["hidden_size"] * 2
    )


@pytest.mark.parametrize("has_index", [False, True])
def test_frequencies_that_files_hold_and_the_model_computes(has_index: bool) -> None:
    config_only = named(CONFIG)
    published = {name for tensor in config_only.values() for name in tensor.published}
    found = (
        named(CONFIG, published - {"transformer.rotary_pos_emb.inv_freq"})
        if has_index
        else (config_only)
    )
    assert found == config_only
    for name in ("inv_freq", "original_inv_freq"):
        source = "transformer.rotary_pos_emb.inv_freq"
        assert found[f"model.rotary_emb.{name}"].published == (source,)


def test_frequencies_of_each_layer_belong_to_none() -> None:
    config = {**families.families(["llama"])["llama"][1].to_dict(), "num_hidden_layers": 3}
    own = {name for name, tensor in named(config).items() if "inv_freq" not in name}
    old = {f"model.layers.{n}.self_attn.rotary_emb.inv_freq" for n in range(3)}
    assert all(not tensor.published for tensor in named(config, own | old).values())


def test_stacked_experts_come_from_each() -> None:
    config = families.families(["mixtral"])["mixtral"][1].to_dict()
    tensor = named(config)["model.layers.1.mlp.experts.down_proj"]
    assert set(tensor.published) == {
        f"model.layers.1.block_sparse_moe.experts.{n}.w2.weight" for n in range(4)
    }


def test_names_that_fit_nothing_leave_the_models_own() -> None:
    found = named(CONFIG, {"a", "b.c"})
    assert all(not tensor.published for tensor in found.values() if "inv_freq" not in tensor.name)
    plain = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    names = [tensor.name for tensor in name_tensors(plain, None)]
    assert names == [name for name, _ in tensor_names(plain)]


def test_a_tied_tensor_has_each_of_its_names() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    model["b"].weight = model["a"].weight
    model["c"] = model["a"]
    found = name_tensors(model, None)
    told = [(tensor.name, tensor.num_bytes, tensor.tied_to) for tensor in found]
    assert told == [
        ("a.weight", 36, ""),
        ("a.bias", 12, ""),
        ("b.weight", 0, "a.weight"),
        ("b.bias", 12, ""),
        ("c.weight", 0, "a.weight"),
        ("c.bias", 0, "a.bias"),
    ]
    # "c" is "a" under another name, and so in its block.
    blocks = by_block(found, [("a",), ("b",)])
    assert [[tensor.name for tensor in block] for block in blocks] == [
        ["a.weight", "a.bias", "c.weight", "c.bias"],
        ["b.weight", "b.bias"],
    ]


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x))


def test_containers_that_are_called_and_begin_late() -> None:
    model = nn.ModuleDict({"first": Pair(), "layers": nn.ModuleList([Pair(), Pair()])})
    entries = [
        f"{name}.{part}" for name in ("first", "layers.0", "layers.1") for part in ("one", "two")
    ]
    groups = [ModuleGroup(names=(entry,), owners=(entry,)) for entry in entries]
    assert find_containers(model, groups) == [(), (), (2,), (2,), (4,), (4,)]
    whole = [*groups[:2], ModuleGroup(names=("layers.0",), owners=()), *groups[4:]]
    assert find_containers(model, whole) == [(), (), (), (3,), (3,)]


# Families.

FAMILIES = ("llama", "gpt2", "opt", "bloom", "mixtral", "gpt_oss", "recurrent_gemma", "jamba")


def outline_of(name: str, directory: Path) -> Outline:
    config = families.families([name])[name][1].to_dict()
    path = directory / f"{name}.json"
    path.write_text(json.dumps({**config, "model_type": name}, default=str))
    return get_profile.profile_checkpoint(Checkpoint.open(path), LOAD).outline


def spelled(outline: Outline) -> Iterator[tuple[str, bool]]:
    """Each tensor's first published name, and whether it has any."""
    for block in outline.blocks:
        for tensor in block.tensors:
            yield from ((name, True) for name in tensor.published or ())
            if not tensor.published and not tensor.tied_to:
                yield tensor.name, False


@pytest.mark.parametrize("name", only(FAMILIES[:2], FAMILIES))
def test_maps_of_families(name: str, tmp_path: Path) -> None:
    outline = outline_of(name, tmp_path)
    model = models.build(json.loads((tmp_path / f"{name}.json").read_text()))
    tensors = [tensor.name for block in outline.blocks for tensor in block.tensors]
    assert sorted(tensors) == sorted(name for name, _ in tensor_names(model))
    entries = judge({"": 1}, outline).placed
    # Every published tensor by itself, in whatever names: the same map.
    assert judge({tensor: 1 for tensor, _ in spelled(outline)}, outline).placed == entries
    duoka.Placement(entries=entries).check(tensors)
    for half in (1, 2):
        some = {module: 0 for module, _ in entries[half::2]}
        with pytest.raises(PlacementError) as caught:
            judge(some, outline)
        assert caught.value.completed is not None
        completed = judge(caught.value.completed, outline).placed
        assert [module for module, _ in completed] == [module for module, _ in entries]


@pytest.mark.slow
@pytest.mark.parametrize("name", only(["gpt2"], ["gpt2", "mixtral", "bloom"]))
def test_a_map_spreads_a_family_as_one_device_computes(name: str) -> None:
    model = families.build(name)
    workload = Workload(batch=2, prompt_tokens=7, new_tokens=6)
    whole = duoka.dispatch(model, duoka.plan(model, "virtual:3x1GiB", workload, device_map=0))
    expected = families.measure(whole, "vgpu:0")
    profile = get_profile.profile_module(model, workload, None)
    at: list[int] = []
    for index, block in enumerate(profile.blocks):
        at.append(index * 2 % 3 if block.tied_to is None else at[block.tied_to])
    device_map = {m: n for b, n in zip(profile.blocks, at, strict=True) for m in b.modules}
    plan = duoka.plan(model, "virtual:3x1GiB", workload, device_map=device_map)
    assert replace(plan.placement, fingerprint="").device_map == {
        module: f"vgpu:{number}" for module, number in device_map.items()
    }
    spread = duoka.dispatch(model, plan)
    found = families.measure(spread, plan.devices[0])
    assert not families.differences(expected, found)
