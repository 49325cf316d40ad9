"""Models in the form that their weights will have: the forecast is what virtual GPUs measure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import published
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from tiers import only
from transformers import PreTrainedModel

import duoka
from duoka import Checkpoint, Placement, Plan, Workload, models, virtual
from duoka.errors import LoadError, ModelError, UsageError
from duoka.forecast import profile_cache
from duoka.forecast.workload import Quantization
from duoka.models.conversion import published_tensors
from duoka.models.from_checkpoint import build_model
from duoka.models.quantization import ExpertStack, num_bytes, parts
from duoka.planner.constraints import Constraints
from duoka.planner.request import PlanProblem
from duoka.planner.solve import find_plan
from duoka.runtime.call.stepper import Stepper
from duoka.runtime.dispatch.dispatch import dispatch

pytestmark = pytest.mark.usefixtures("single_sequences")
_SMALL = {"num_hidden_layers": 3, "max_position_embeddings": 512}
WORK = Workload(prompt_tokens=300, new_tokens=6, prefill_chunk_tokens=None)


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A checkpoint with weights of zeros."""
    path = tmp_path_factory.mktemp("glm")
    config = {**tiny.CONFIGS["glm"], "dtype": "bfloat16", **_SMALL}
    plain = published_tensors(models.build(config, dtype=torch.bfloat16))
    tensors = {name: torch.zeros(each.shape, dtype=each.dtype) for name, each in plain.items()}
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return Checkpoint.open(path)


def measured(plan: Plan, checkpoint: Checkpoint) -> Iterator[tuple[int, int]]:
    index = {name: f"vgpu:{number}" for number, name in enumerate(plan.devices)}
    entries = tuple((module, index[name]) for module, name in plan.placement.entries)
    model = build_model(checkpoint, plan.workload)
    with virtual.gpus([None] * len(index), data="meta") as world, torch.no_grad():
        dispatch(model, Placement(entries=entries), empty=True)
        stepper = Stepper(model, plan.workload.batch, torch.device("vgpu:0"))
        stepper.run(plan.workload, decode_steps=plan.workload.new_tokens - 1)
        for number in range(len(index)):
            yield world.max_memory_allocated(number), world.max_memory_reserved(number)


@pytest.mark.parametrize("quantize", only(["nf4"], ["int4", "nf4"]))
def test_the_forecast_of_a_quantized_model_is_measured(
    glm: Checkpoint, quantize: Quantization
) -> None:
    work = replace(WORK, quantize=quantize)
    plan = duoka.plan(glm, "virtual:2x64MiB", work, use_all=True)
    forecast = [(each.allocated_bytes, each.reserved_bytes) for each in plan.forecast.devices]
    assert forecast == list(measured(plan, glm))
    plain = duoka.plan(glm, "virtual:2x64MiB", WORK)
    weights = sum(each.weight_bytes for each in plan.forecast.devices)
    assert weights < sum(each.weight_bytes for each in plain.forecast.devices)
    assert any(f"quantized to {quantize}" in reason.text for reason in plan.why)
    profile = profile_cache.find_profile(glm.fingerprint, plan.workload)
    assert profile is not None
    assert not any(block.streams for block in profile.blocks)


@pytest.mark.parametrize(("budget", "chosen"), [("32MiB", "none"), ("7MiB", "int8")])
def test_auto_is_the_first_that_fits(glm: Checkpoint, budget: str, chosen: str) -> None:
    work = Workload(prompt_tokens=40, new_tokens=6, quantize="auto")
    plan = duoka.plan(glm, f"virtual:{budget}", work)
    assert plan.workload.quantize == chosen
    assert plan.request.workload.quantize == "auto"
    assert (chosen == "none") == (not any("they don't fit" in reason.text for reason in plan.why))
    profile = profile_cache.find_profile(glm.fingerprint, plan.workload)
    assert profile is not None
    asked = PlanProblem(fleet=duoka.Fleet.parse(f"virtual:{budget}"), workload=plan.workload)
    assert find_plan(profile, asked).forecast == plan.forecast


def test_a_model_that_is_there_already_is_not_quantized() -> None:
    model = models.build(tiny.CONFIGS["glm"], dtype=torch.bfloat16)
    with pytest.raises(UsageError, match="applies to checkpoints"):
        duoka.plan(model, "virtual:1GiB", Workload(quantize="int8"))


def generate(model: PreTrainedModel) -> torch.Tensor:
    tokens = torch.arange(1, 21, device="vgpu:0")[None]
    return model.generate(tokens, max_new_tokens=3, min_new_tokens=3, do_sample=False)


def write_published(path: Path, name: str) -> Path:
    if name == "mxfp4":
        return published.write_mxfp4(path)
    return published.write(path, name)


@pytest.mark.parametrize(
    "name", only(["fp8 experts"], ["fp8 experts", "gptq", "gptq experts 64", "nf4", "mxfp4"])
)
def test_the_forecast_of_a_published_one_is_measured(tmp_path: Path, name: str) -> None:
    checkpoint = Checkpoint.open(write_published(tmp_path, name))
    plan = duoka.plan(checkpoint, "virtual:2x64MiB", WORK, use_all=True)
    forecast = [(each.allocated_bytes, each.reserved_bytes) for each in plan.forecast.devices]
    assert forecast == list(measured(plan, checkpoint))


@pytest.mark.parametrize("name", only(["gptq experts"], [*published.FORMATS, "mxfp4"]))
def test_the_plan_of_a_published_one_counts_what_is_loaded(tmp_path: Path, name: str) -> None:
    plan = duoka.plan(write_published(tmp_path, name), "virtual:2x64MiB", WORK, use_all=True)
    model = duoka.load(plan)
    tensors = (*model.parameters(), *model.buffers())
    for forecast in plan.forecast.devices:
        held = [
            part
            for tensor in tensors
            if str(tensor.device) == forecast.device
            for part in parts(tensor).values()
        ]
        assert sum(-(-part.nbytes // 512) * 512 for part in held) == forecast.weight_bytes > 0
    assert generate(model).shape == (1, 23)


@pytest.mark.parametrize("name", only(["awq"], ["awq", "awq experts"]))
def test_the_plan_of_a_published_one_is_that_of_its_scheme(tmp_path: Path, name: str) -> None:
    stored = published.write(tmp_path / "stored", name, tmp_path / "plain")
    plan = duoka.plan(stored, "virtual:64MiB", WORK)
    work = replace(WORK, quantize="int4", dtype=plan.workload.dtype)
    assert plan.forecast == duoka.plan(tmp_path / "plain", "virtual:64MiB", work).forecast
    with pytest.raises(UsageError, match="already quantized"):
        duoka.plan(stored, "virtual:64MiB", replace(WORK, quantize="int8"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [("awq experts", "Int4Rows"), ("fp8 experts", "ScaledWeight"), ("mxfp4", "Mxfp4Weight")],
)
def test_experts_of_a_published_one_stay_on_the_host(tmp_path: Path, name: str, kind: str) -> None:
    fleet = duoka.Fleet.parse("virtual:64MiB").with_host("1GiB,30GB/s")
    stored = write_published(tmp_path, name)
    plan = duoka.plan(stored, fleet, WORK, constraints=Constraints(experts="host"))
    model = duoka.load(plan)
    stacks = [weight for weight in model.parameters() if isinstance(weight, ExpertStack)]
    assert {(weight.device.type, weight.weight_class.__name__) for weight in stacks} == {
        ("cpu", kind)
    }
    assert generate(model).shape == (1, 23)
    # The biases of gpt_oss stay with them.
    assert 0 <= plan.forecast.expert_bytes - sum(map(num_bytes, stacks)) < 2**15


def test_a_published_model_needs_its_headers(tmp_path: Path) -> None:
    config = published.write(tmp_path, "gptq") / "config.json"
    with pytest.raises(ModelError, match="the sizes of"):
        duoka.plan(config, "virtual:1GiB", WORK)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("gptq", "scales"),
        ("awq", "qzeros"),
        ("pack", "weight_scale"),
        ("nf4", "weight.nested_absmax"),
        ("fp8 experts", "weight"),
        ("mxfp4", "_scales"),
    ],
)
def test_a_missing_part_of_a_weight_is_named(tmp_path: Path, name: str, part: str) -> None:
    path = write_published(tmp_path, name)
    tensors = load_file(path / "model.safetensors")
    lacking = next(key for key in tensors if key.endswith(f"_proj{'.' * (name != 'mxfp4')}{part}"))
    del tensors[lacking]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ModelError, match="which is a part of a quantized weight") as caught:
        duoka.plan(path, "virtual:64MiB", WORK)
    assert f" {lacking}," in str(caught.value)


@pytest.mark.parametrize(
    ("name", "part"), [("fp8", "weight_scale_inv"), ("float", "weight_scale"), ("int8", "SCB")]
)
def test_numbers_without_scales_are_refused(tmp_path: Path, name: str, part: str) -> None:
    path = published.write(tmp_path, name)
    tensors = load_file(path / "model.safetensors")
    del tensors[f"model.layers.0.self_attn.q_proj.{part}"]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(
        LoadError, match=r"1 tensors can't be converted .*layers\.0.*q_proj\.weight"
    ):
        duoka.plan(path, "virtual:64MiB", WORK)


def test_a_published_one_has_its_type_and_stays_on_gpus(tmp_path: Path) -> None:
    path = published.write(tmp_path, "awq")
    with pytest.raises(UsageError, match=r"\(awq\) for float16; it can't compute"):
        duoka.plan(path, "virtual:64MiB", replace(WORK, dtype="float32"))
    with pytest.raises(UsageError, match="such weights can't be offloaded"):
        duoka.plan(path, "virtual:64MiB", WORK, constraints=Constraints(offload=True))


def test_tensors_of_another_model_are_refused(tmp_path: Path) -> None:
    path = published.write(tmp_path, "awq")
    text = (path / "config.json").read_text()
    (path / "config.json").write_text(
        text.replace('"num_hidden_layers": 3', '"num_hidden_layers": 2')
    )
    with pytest.raises(LoadError, match="don't belong to"):
        duoka.plan(path, "virtual:1GiB", WORK)
