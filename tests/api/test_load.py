from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import duoka
from duoka import Checkpoint, Placement, virtual
from duoka.api import load as api_load
from duoka.errors import (
    CheckpointError,
    FormatError,
    LoadError,
    PlacementError,
    ProofError,
)
from duoka.runtime import devices

from .conftest import LOAD, REMOTE, TWO, everything, ids

pytestmark = pytest.mark.usefixtures("single_sequences")


@pytest.fixture
def plan(checkpoint: Path) -> duoka.Plan:
    return duoka.plan(checkpoint, TWO, LOAD, use_all=True)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The times that weights were read."""
    found: list[str] = []
    real = api_load.loader.load_weights

    def load_weights(*args: Any, **kwargs: Any) -> Any:
        found.append("read")
        return real(*args, **kwargs)

    monkeypatch.setattr(api_load.loader, "load_weights", load_weights)
    return found


def test_a_loaded_model_computes_what_the_original_does(
    model: PreTrainedModel, plan: duoka.Plan, reads: list[str]
) -> None:
    told: list[tuple[int, int]] = []
    loaded = duoka.load(plan, progress=lambda done, total: told.append((done, total)))
    assert reads == ["read"]
    assert told[-1][0] == told[-1][1] > 0
    assert {str(p.device) for p in loaded.parameters()} == {"vgpu:0", "vgpu:1"}
    with torch.no_grad():
        expected = model(ids()).logits
        found = loaded(ids().to(plan.devices[0])).logits.cpu()
    assert torch.allclose(found, expected, atol=1e-5)
    assert not loaded.training
    for name, parameter in loaded.named_parameters():
        assert str(parameter.device) == plan.placement.device_of(name)


def test_a_saved_plan_loads(plan: duoka.Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    loaded = duoka.load(duoka.Plan.load(tmp_path / "plan.json"))
    tokens = loaded.generate(ids().to(plan.devices[0]), max_new_tokens=3, do_sample=False)
    assert tokens.shape == (1, 11)


def copied(plan: duoka.Plan, directory: Path) -> duoka.Plan:
    """The plan for a copy of its checkpoint."""
    for file in Path(plan.source).iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    return replace(plan, source=str(directory))


def test_a_changed_checkpoint_is_refused(
    plan: duoka.Plan, tmp_path: Path, reads: list[str]
) -> None:
    moved = copied(plan, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    with pytest.raises(FormatError, match="or has changed; different"):
        duoka.load(moved)
    assert reads == []


def test_missing_weights_are_refused(plan: duoka.Plan, tmp_path: Path, reads: list[str]) -> None:
    moved = copied(plan, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no weight files"):
        duoka.load(moved)
    assert reads == []


@pytest.mark.slow
def test_a_plan_for_an_object_cannot_be_loaded(model: PreTrainedModel) -> None:
    plan = duoka.plan(model, TWO, LOAD)
    with pytest.raises(CheckpointError, match="given as an object") as caught:
        duoka.load(plan)
    assert "dispatch" in str(caught.value.hint)


def test_nothing_is_read_for_a_plan_that_fails_the_proof(
    plan: duoka.Plan, reads: list[str]
) -> None:
    devices = tuple(replace(d, budget_bytes=2**20) for d in plan.fleet.devices)
    tight = replace(plan, fleet=replace(plan.fleet, devices=devices))
    with pytest.raises(ProofError):
        duoka.load(tight)
    assert reads == []


def test_a_tensor_that_is_not_there_leaves_nothing_loaded(plan: duoka.Plan, tmp_path: Path) -> None:
    moved = copied(plan, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    fingerprint = Checkpoint.open(tmp_path).fingerprint
    placement = replace(plan.placement, fingerprint=fingerprint)
    moved = replace(moved, fingerprint=fingerprint, placement=placement)
    virtual.set_gpus([64 * 2**20] * 2)
    with pytest.raises(LoadError, match=r"model\.norm\.weight"):
        duoka.load(moved)
    assert [virtual.active_world().memory_allocated(index) for index in (0, 1)] == [0, 0]


# Spreading.


@pytest.mark.slow
def test_dispatch_takes_a_mapping_a_placement_or_a_plan(model: PreTrainedModel) -> None:
    plan = duoka.plan(model, TWO, LOAD, use_all=True)
    with torch.no_grad():
        expected = model(ids()).logits
    for given in (plan, plan.placement, plan.device_map):
        spread = duoka.dispatch(copy.deepcopy(model), given)
        assert {str(p.device) for p in spread.parameters()} == {"vgpu:0", "vgpu:1"}
        with torch.no_grad():
            found = spread(ids().to(plan.devices[0])).logits.cpu()
        assert torch.allclose(found, expected, atol=1e-5)


def test_an_incomplete_map_moves_nothing(model: PreTrainedModel) -> None:
    before = everything(model)
    with pytest.raises(PlacementError) as caught:
        duoka.dispatch(model, {"model.layers": "cpu"})
    assert "lm_head.weight" in caught.value.missing
    with pytest.raises(PlacementError):
        duoka.dispatch(model, Placement(entries=(("model", "cpu"), ("nothing", "cpu"))))
    assert everything(model) == before


# Tokenizers.


@pytest.mark.slow
def test_the_tokenizer_of_a_directory_and_of_a_plan(shared_data: Path, tmp_path: Path) -> None:
    source = shared_data / "tokenizers" / "chatglm3-6b"
    for file in source.iterdir():
        shutil.copy(file, tmp_path)
    config = shared_data / "configs" / "chatglm3-6b.json"
    (tmp_path / "config.json").write_bytes(config.read_bytes())
    plan = duoka.plan(tmp_path, "24GiB", LOAD)
    for tokenizer in (duoka.tokenizer(tmp_path), duoka.tokenizer(plan)):
        chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
        assert chat["input_ids"][:3] == [64790, 64792, 64795]


def test_a_checkpoint_without_a_tokenizer(checkpoint: Path) -> None:
    with pytest.raises(duoka.errors.CheckpointError, match="has no tokenizer") as refused:
        duoka.tokenizer(checkpoint)
    assert refused.value.hint


# Maps by hand.


@pytest.mark.parametrize("second", ["vgpu:1", "cpu"])
def test_a_map_by_hand_is_loaded(model: PreTrainedModel, checkpoint: Path, second: str) -> None:
    device_map = {"": "vgpu:0", "model.layers.1": second, "lm_head": second}
    plan = duoka.plan(checkpoint, TWO, LOAD, device_map=device_map)
    assert list(plan.device_map.values()) == ["vgpu:0"] * 3 + [second] + ["vgpu:0"] * 2 + [second]
    loaded = duoka.load(plan)
    with torch.no_grad():
        expected = model(ids()).logits
        found = loaded(ids().to("vgpu:0")).logits
    assert str(found.device) == "vgpu:0"
    assert torch.allclose(found.cpu(), expected, atol=1e-5)


@pytest.mark.parametrize(("outputs", "last"), [("return", "vgpu:0"), ("stay", "vgpu:1")])
def test_outputs_return_or_stay(checkpoint: Path, outputs: Any, last: str) -> None:
    plan = duoka.plan(checkpoint, TWO, LOAD, use_all=True)
    loaded = duoka.load(plan, outputs=outputs)
    assert str(loaded(ids().to("vgpu:0")).logits.device) == last
    spread = duoka.dispatch(loaded, plan, outputs=outputs)
    assert str(spread(ids().to("vgpu:0")).logits.device) == last


def test_unknown_outputs_are_refused_before_anything_is_moved(model: PreTrainedModel) -> None:
    with pytest.raises(duoka.errors.UsageError, match="outputs 'last' is unknown"):
        duoka.dispatch(model, {"": "cpu"}, outputs="last")  # type: ignore[arg-type]


def test_a_loaded_plan_runs_remote_code_only_when_asked_for(
    remote: Path, model: PreTrainedModel
) -> None:
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(state, remote / "model.safetensors")
    trusted = Checkpoint.open(remote, trust_remote_code=True)
    plan = duoka.plan(trusted, TWO, LOAD)
    with pytest.raises(duoka.errors.ModelError, match="that code isn't allowed to run"):
        duoka.load(plan)
    loaded = duoka.load(plan, trust_remote_code=True)
    assert type(loaded).__name__ == "PebbleForCausalLM"
    (remote / "pebble.py").write_text(REMOTE + "# changed\n")
    with pytest.raises(duoka.errors.FormatError, match="or has changed; different"):
        duoka.load(plan, trust_remote_code=True)


def test_generate_takes_what_is_forecast(tmp_path: Path) -> None:
    # A vocabulary that is large beside the layers: choosing a token takes most.
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=100_000,
        eos_token_id=None,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    workload = duoka.Workload(batch=16, prompt_tokens=20, new_tokens=6, dtype="float32")
    plan = duoka.plan(tmp_path, "virtual:1GiB", workload)
    loaded = duoka.load(plan)
    prompts = torch.full((16, 20), 2, device="vgpu:0")
    sampling: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 0, "top_p": 0.9}
    loaded.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=6, **sampling)
    (forecast,), measured = plan.forecast.devices, devices.peak_bytes("vgpu:0")
    assert measured is not None
    assert forecast.reserved_bytes == measured.reserved_bytes
    # The token ids of the prompts are not counted.
    assert 0 <= measured.allocated_bytes - forecast.allocated_bytes < 20_000
