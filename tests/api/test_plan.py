from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import duoka
from duoka import Checkpoint, Workload
from duoka.errors import (
    ModelError,
    PlacementError,
    UsageError,
)
from duoka.hardware.gpu_generation import GpuGeneration
from duoka.tracing import get_profile

from .conftest import LOAD, TWO, everything, ids

pytestmark = pytest.mark.usefixtures("single_sequences")


def test_a_path_a_checkpoint_a_config_and_a_model_are_planned_alike(
    model: PreTrainedModel, checkpoint: Path, tmp_path: Path
) -> None:
    bare = tmp_path / "llama.json"
    bare.write_text((checkpoint / "config.json").read_text())
    plans = [
        duoka.plan(given, TWO, LOAD, use_all=True)
        for given in (checkpoint, str(checkpoint), Checkpoint.open(checkpoint), bare, model)
    ]
    for plan in plans:
        assert plan.device_map == plans[0].device_map
        assert plan.forecast == plans[0].forecast
        assert plan.workload.dtype == "float32"
        assert plan.model == "LlamaForCausalLM"
    assert [plan.source for plan in plans] == [str(checkpoint)] * 3 + [str(bare), ""]
    assert plans[0].fingerprint == Checkpoint.open(checkpoint).fingerprint
    assert set(plans[0].devices) == {"vgpu:0", "vgpu:1"}


def test_the_model_object_is_not_touched(model: PreTrainedModel) -> None:
    before = everything(model)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    duoka.plan(model, TWO, LOAD, use_all=True)
    assert everything(model) == before
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name])


class Residual(nn.Module):
    """A model of nobody's library: two parts and what is added around one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(512, 8)
        self.inner = nn.Linear(512, 512)
        self.first = nn.Linear(512, 512)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        x = self.first(x)
        return self.out(x + scale * self.inner(x))


@pytest.mark.parametrize("gpu", ["T4", "H100-SXM"])
def test_any_module_on_any_generation(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    plan = duoka.plan(Residual(), gpu, inputs=(torch.randn(4, 512),))
    assert plan.workload.gpu_generation == plan.fleet.gpu_generation
    assert plan.workload.gpu_generation != GpuGeneration()


@pytest.mark.parametrize("as_mapping", [False, True])
def test_any_module_with_inputs(as_mapping: bool) -> None:
    module, x = Residual(), torch.randn(4, 512)
    before = everything(module)
    inputs: Any = {"x": x, "scale": 0.5} if as_mapping else (x,)
    plan = duoka.plan(module, "virtual:2x8MiB", inputs=inputs, use_all=True)
    assert everything(module) == before
    expected = module(**inputs) if as_mapping else module(*inputs)
    names = list(plan.device_map)
    assert set(names) == {"first", "inner", "out"}
    spread = duoka.dispatch(module, plan)
    assert spread is module
    assert {str(p.device) for p in module.parameters()} == {"vgpu:0", "vgpu:1"}
    found = module(**inputs) if as_mapping else module(*inputs)
    assert torch.allclose(found.cpu(), expected)


def test_what_inputs_go_with(model: PreTrainedModel, checkpoint: Path) -> None:
    inputs = (torch.zeros(1, 4, dtype=torch.long),)
    for given, workload in ((checkpoint, None), (model, LOAD)):
        with pytest.raises(UsageError, match="example inputs"):
            duoka.plan(given, TWO, workload, inputs=inputs)
    with pytest.raises(UsageError, match="Residual is not a text generation model") as caught:
        duoka.plan(Residual(), TWO)
    assert "inputs=" in str(caught.value.hint)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_modules_of_any_type(dtype: torch.dtype) -> None:
    module = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)).to(dtype)
    plan = duoka.plan(module, TWO, inputs=(torch.zeros(2, 64, dtype=dtype),))
    assert plan.forecast.devices[0].weight_bytes == dtype.itemsize * 2 * 64 * 64
    assert plan.workload.dtype == ("float16" if dtype == torch.float16 else "auto")
    assert duoka.Plan.from_json(plan.to_json()) == plan


def test_a_module_without_parameters_is_refused() -> None:
    with pytest.raises(ModelError, match="ReLU has no parameters"):
        duoka.plan(nn.ReLU(), TWO, inputs=(torch.zeros(2),))


@pytest.mark.slow
def test_a_spread_model_can_be_planned_again(model: PreTrainedModel) -> None:
    whole = duoka.plan(model, TWO, LOAD, use_all=True)
    spread = duoka.dispatch(copy.deepcopy(model), whole)
    before = everything(spread)
    again = duoka.plan(spread, TWO, LOAD, use_all=True)
    assert again.device_map == whole.device_map
    assert again.forecast == whole.forecast
    assert everything(spread) == before
    with torch.no_grad():
        assert spread(ids().to(whole.devices[0])).logits.shape == (1, 8, 256)


@pytest.mark.slow
def test_an_irregular_model_is_cached_for_its_workload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "mamba.json"
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 16}
    sizes |= {"n_groups": 1, "state_size": 8, "vocab_size": 128, "chunk_size": 16}
    config.write_text(json.dumps({"model_type": "mamba2", **sizes}))
    monkeypatch.setenv("DUOKA_CACHE", str(tmp_path / "cache"))
    traced: list[Workload] = []
    real = get_profile.trace_workload

    def trace_workload(model: Any, subject: Any, workloads: Any) -> Any:
        traced.append(workloads[0])
        return real(model, subject, workloads)

    monkeypatch.setattr(get_profile, "trace_workload", trace_workload)
    plan = duoka.plan(config, TWO, LOAD)
    assert duoka.plan(config, TWO, LOAD) == plan
    longer = Workload(prompt_tokens=150, new_tokens=12)
    assert duoka.plan(config, TWO, longer).workload.prompt_tokens == 150
    assert [load.prompt_tokens for load in traced] == [100, 150]


# Loading.


@pytest.mark.parametrize("fleet", [TWO, "virtual:64MiB"])
def test_an_incomplete_map_by_hand_is_refused(checkpoint: Path, fleet: str) -> None:
    with pytest.raises(PlacementError) as caught:
        duoka.plan(checkpoint, fleet, LOAD, device_map={"model.layers": 0, "model.norm": 0})
    named = {"model.embed_tokens.weight", "lm_head.weight", "model.rotary_emb.inv_freq"}
    assert named < set(caught.value.missing)
    plan = duoka.plan(checkpoint, fleet, LOAD, device_map=caught.value.completed)
    assert plan.devices == ("vgpu:0",)


def test_a_map_by_hand_for_any_module() -> None:
    module, inputs = Residual(), (torch.randn(4, 512),)
    device_map: dict[str, object] = {"": 1, "out.weight": 0, "out.bias": "vgpu:0"}
    plan = duoka.plan(module, "virtual:2x8MiB", inputs=inputs, device_map=device_map)
    assert plan.device_map == {"first": "vgpu:1", "inner": "vgpu:1", "out": "vgpu:0"}
    # What "inner" makes is added to what came into it.
    with pytest.raises(PlacementError) as caught:
        duoka.plan(module, "virtual:2x8MiB", inputs=inputs, device_map={**device_map, "inner": 0})
    assert set(caught.value.split) == {"first", "inner"}


def test_arguments_that_do_not_exist(checkpoint: Path) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'devicemap'"):
        duoka.plan(checkpoint, TWO, LOAD, devicemap={"": 0})  # type: ignore[call-arg]
    with pytest.raises(duoka.errors.PlacementError, match="nonsense:0 is not in the fleet"):
        duoka.plan(checkpoint, TWO, LOAD, device_map="nonsense")


# Remote code.


def test_remote_code_runs_only_when_asked_for(remote: Path) -> None:
    with pytest.raises(duoka.errors.ModelError, match="pebble"):
        duoka.plan(remote, TWO, LOAD)
    plan = duoka.plan(Checkpoint.open(remote, trust_remote_code=True), TWO, LOAD)
    assert plan.model == "PebbleForCausalLM"
    again = duoka.plan(remote, TWO, LOAD, trust_remote_code=True)
    assert again.request.trust_remote_code
    assert again == plan


def test_a_model_that_was_planned_before_is_planned_without_torch(
    checkpoint: Path, tmp_path: Path
) -> None:
    code = f"""
import json, sys
import duoka
workload = duoka.Workload(prompt_tokens=100, new_tokens=12)
plan = duoka.plan({str(checkpoint)!r}, {TWO!r}, workload)
copies = duoka.plan_replicas({str(checkpoint)!r}, {TWO!r}, workload, number=2)
heavy = [name for name in ("torch", "transformers", "accelerate") if name in sys.modules]
print(json.dumps([plan.devices, len(copies.plans), heavy]))
"""
    plan = duoka.plan(checkpoint, TWO, LOAD)  # now the cache has its profile
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert json.loads(done.stdout) == [[*plan.devices], 2, []]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"fleet": 5}, "fleet can't be int"),
        ({"fleet": None}, "fleet can't be NoneType"),
        ({"workload": {}}, "workload can't be dict"),
        ({"constraints": None}, "constraints can't be NoneType"),
        ({"largest": "x"}, "largest 'x' is unknown"),
    ],
)
def test_arguments_of_another_kind_are_refused(wrong: dict[str, Any], message: str) -> None:
    arguments = {"model": "nowhere", "fleet": TWO, **wrong}
    with pytest.raises(duoka.errors.UsageError, match=message):
        duoka.plan(**arguments)
    if "largest" not in wrong:
        with pytest.raises(duoka.errors.UsageError, match=message):
            duoka.plan_replicas(**arguments)
