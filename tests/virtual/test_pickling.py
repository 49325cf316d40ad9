"""State dicts and tensors in files, and back."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from duoka import virtual
from duoka.errors import VirtualDeviceError

pytestmark = pytest.mark.usefixtures("world")


def test_a_state_dict_comes_back_to_its_device(tmp_path: Path) -> None:
    model = nn.Linear(3, 2).to("vgpu:1")
    torch.save(model.state_dict(), tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=True)
    assert loaded["weight"].device == torch.device("vgpu:1")
    assert torch.equal(loaded["weight"].cpu(), model.weight.detach().cpu())
    for place in ("cpu", {"vgpu:1": "cpu"}):
        moved = torch.load(tmp_path / "model.pt", weights_only=True, map_location=place)
        assert moved["bias"].device == torch.device("cpu")
    with pytest.raises(VirtualDeviceError, match="can't read into the memory of vgpu:0"):
        torch.load(tmp_path / "model.pt", weights_only=True, map_location="vgpu:0")
    model.load_state_dict(loaded)


def test_a_cpu_state_dict_loads_into_a_virtual_model() -> None:
    model, other = nn.Linear(3, 2).to("vgpu:1"), nn.Linear(3, 2)
    model.load_state_dict(other.state_dict())
    assert torch.equal(model.weight.cpu(), other.weight)
    assert model.weight.device == torch.device("vgpu:1")
    model.load_state_dict(nn.Linear(3, 2).to("vgpu:0").state_dict(), assign=True)
    assert model.weight.device == torch.device("vgpu:0")


def test_parameters_and_ties_survive(tmp_path: Path) -> None:
    parameter = nn.Parameter(torch.ones(2, device="vgpu:0"))
    torch.save({"a": parameter, "b": parameter}, tmp_path / "tied.pt")
    loaded = torch.load(tmp_path / "tied.pt", weights_only=True)
    assert loaded["a"] is loaded["b"]
    assert isinstance(loaded["a"], nn.Parameter)
    assert loaded["a"].device == torch.device("vgpu:0")


def test_optimizer_state_survives(tmp_path: Path) -> None:
    model = nn.Linear(3, 2).to("vgpu:0")
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3, device="vgpu:0")).sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    loaded = torch.load(tmp_path / "optimizer.pt", weights_only=True)
    torch.optim.AdamW(model.parameters()).load_state_dict(loaded)


def test_plain_pickle() -> None:
    x = torch.tensor([1.0, 2.0], device="vgpu:1")
    copy = pickle.loads(pickle.dumps(x))
    assert copy.device == torch.device("vgpu:1")
    assert copy.tolist() == [1, 2]


def test_safetensors(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(3, 2)).to("vgpu:0")
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    loaded = load_file(tmp_path / "model.safetensors")
    assert torch.equal(loaded["0.weight"], model[0].weight.detach().cpu())
    model[1].weight = model[0].weight
    save_model(model, str(tmp_path / "tied.safetensors"))
    assert len(load_file(tmp_path / "tied.safetensors")) == 3


@pytest.mark.parametrize("tied", [False, True])
def test_save_pretrained(tmp_path: Path, tied: bool) -> None:
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, tie_word_embeddings=tied,
    )  # fmt: skip
    virtual.set_gpus([None, None])  # transformers loads in worker threads
    model = LlamaForCausalLM(config).to("vgpu:1")
    model.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    for (name, here), there in zip(
        model.state_dict().items(), loaded.state_dict().values(), strict=True
    ):
        assert torch.equal(here.cpu(), there), name
    placed = LlamaForCausalLM.from_pretrained(tmp_path, device_map={"": "vgpu:0"})
    assert {parameter.device for parameter in placed.parameters()} == {torch.device("vgpu:0")}
    assert (placed.lm_head.weight is placed.model.embed_tokens.weight) == tied


def test_meta_data_can_not_be_saved() -> None:
    with virtual.gpus([None], data="meta"):
        x = torch.rand(3, device="vgpu:0")
    with pytest.raises(VirtualDeviceError, match="no values to save"):
        pickle.dumps(x)
