"""Adapters in files: peft's are read, and nothing of another kind, damaged or hostile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from duoka.errors import CheckpointError, DuokaError
from duoka.runtime.load.adapter import read_adapter

CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "base_model_name_or_path": "org/base",
    "r": 2,
    "lora_alpha": 8,
    "target_modules": "(a+)+b",
    "bias": "none",
}
NAME = "base_model.model.layers.0.q_proj"
TENSORS = {
    f"{NAME}.lora_A.weight": torch.arange(8.0).view(2, 4),
    f"{NAME}.lora_B.weight": torch.arange(6.0).view(3, 2),
}


def write(
    directory: Path,
    tensors: dict[str, Tensor] | None = None,
    *,
    form: str = "safetensors",
    **settings: Any,
) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps({**CONFIG, **settings}))
    file = directory / f"adapter_model.{form}"
    tensors = TENSORS if tensors is None else tensors
    if form == "bin":
        torch.save(tensors, file)
    else:
        save_file(tensors, file)
    return directory


@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_what_peft_writes_is_read(tmp_path: Path, form: str) -> None:
    adapter = read_adapter(write(tmp_path, form=form))
    assert (adapter.base, adapter.common) == ("org/base", (2, 4.0))
    assert list(adapter.layers) == ["layers.0.q_proj"]
    layer = adapter.layers["layers.0.q_proj"]
    assert torch.equal(layer.down, TENSORS[f"{NAME}.lora_A.weight"])
    assert torch.equal(layer.up, TENSORS[f"{NAME}.lora_B.weight"])
    assert not layer.is_embedding


def test_names_of_other_versions_are_read(tmp_path: Path) -> None:
    tensors = {
        "layers.0.k.lora_A.default.weight": torch.ones(2, 4),
        "layers.0.k.lora_B.default.weight": torch.ones(3, 2),
        "embed.lora_embedding_A": torch.ones(2, 9),
        "embed.lora_embedding_B": torch.ones(4, 2),
    }
    adapter = read_adapter(write(tmp_path, tensors))
    assert [layer.is_embedding for _, layer in sorted(adapter.layers.items())] == [True, False]


def test_modules_may_have_ranks_and_scalings_of_their_own(tmp_path: Path) -> None:
    tensors = {
        f"layers.{number}.{name}.lora_{side}.weight": torch.ones(shape)
        for number in range(2)
        for name, rank in (("q", 2), ("k", 3))
        for side, shape in (("A", (rank, 4)), ("B", (4, rank)))
    }
    patterns = {"rank_pattern": {"k": 3}, "alpha_pattern": {"layers.1.k": 6, "^layers.0.q": 1}}
    layers = read_adapter(write(tmp_path, tensors, **patterns)).layers
    assert {name: layer.scaling for name, layer in layers.items()} == {
        "layers.0.q": 0.5,
        "layers.0.k": 8 / 3,
        "layers.1.q": 4,
        "layers.1.k": 2,
    }
    layers = read_adapter(write(tmp_path, tensors, use_rslora=True, **patterns)).layers
    assert layers["layers.1.q"].scaling == pytest.approx(8 / 2**0.5)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"peft_type": "PREFIX_TUNING"}, "other than plain LoRA: peft_type is 'PREFIX_TUNING'"),
        ({"peft_type": None}, "peft_type is 'None'"),
        ({"use_dora": True}, "use_dora is 'True'"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa"),
        ({"r": 4}, r"lora_A \[2, 4\] and lora_B \[3, 2\] for layers.0.q_proj, and its rank is 4"),
        ({"r": "2"}, "says that r is '2'"),
        ({"r": True}, "says that r is 'True'"),
        ({"lora_alpha": None}, "lora_alpha is 'None'"),
        ({"lora_alpha": 1e300}, "lora_alpha is"),
        ({"rank_pattern": {"(a+)+b": 2}}, r"rank_pattern .* has '\(a\+\)\+b' in it"),
    ],
)
def test_other_settings_are_refused(tmp_path: Path, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        read_adapter(write(tmp_path, **settings))


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({}, "contains no tensors"),
        ({f"{NAME}.lora_A.weight": torch.ones(2, 4)}, "only one of lora_A and lora_B"),
        ({f"{NAME}.lora_magnitude_vector": torch.ones(3, 3)}, "'base_model.*magnitude"),
        ({f"{NAME}.lora_A.weight": torch.ones(2)}, "than plain LoRA"),
        ({f"{NAME}.lora_A.weight": torch.ones(2, 4, dtype=torch.int8)}, "than plain LoRA"),
        ({f"{NAME}.weight": torch.ones(2, 4)}, "than plain LoRA"),
    ],
)
def test_other_tensors_are_refused(tmp_path: Path, tensors: dict[str, Tensor], reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        read_adapter(write(tmp_path, tensors))


def test_what_is_no_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no adapter") as raised:
        read_adapter(tmp_path)
    assert "adapter_config.json" in str(raised.value.hint)
    write(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="truncated"):
        read_adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        read_adapter(tmp_path)


def test_a_pickle_that_wants_code_is_refused(tmp_path: Path) -> None:
    write(tmp_path, form="bin")
    torch.save({"x": Path("x")}, tmp_path / "adapter_model.bin")
    with pytest.raises(DuokaError, match="refused: it refers to"):
        read_adapter(tmp_path)


def test_peft_agrees(tmp_path: Path) -> None:
    import peft

    model = torch.nn.Sequential(torch.nn.Linear(4, 3, bias=False), torch.nn.Linear(3, 3))
    wrapped = peft.PeftModel(model, peft.LoraConfig(r=2, lora_alpha=6, target_modules=["0"]))
    torch.nn.init.normal_(wrapped.base_model.model[0].lora_B["default"].weight)
    expected = wrapped.base_model.model[0].get_delta_weight("default")
    wrapped.save_pretrained(tmp_path)
    assert load_file(tmp_path / "adapter_model.safetensors").keys() == {
        "base_model.model.0.lora_A.weight",
        "base_model.model.0.lora_B.weight",
    }
    layer = read_adapter(tmp_path).layers["0"]
    torch.testing.assert_close(layer.scaling * layer.up @ layer.down, expected)
