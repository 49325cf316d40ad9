"""Checkpoints that were published quantized: loaded as planned, or refused with nothing left."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import published
import pytest
import torch
from closeness import HALF_TOLERANCE, close
from published import LLAMA
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiers import only
from torchao.quantization import Int8WeightOnlyConfig
from transformers import (
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    TorchAoConfig,
)

import duoka
from duoka import Checkpoint, Placement, Workload, virtual
from duoka.errors import LoadError
from duoka.models.from_checkpoint import build_model
from duoka.planner.resolve import workload_for
from duoka.runtime.load import load_published, refuse_unloadable

WORK = Workload(prompt_tokens=20, new_tokens=4)
IDS = torch.arange(1, 21).reshape(1, 20)
SETTINGS: dict[str, Callable[[], Any]] = {
    "nf4": lambda: BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    ),
    "int8": lambda: BitsAndBytesConfig(load_in_8bit=True),
    "torchao": lambda: TorchAoConfig(Int8WeightOnlyConfig()),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain")
    known = {name: value for name, value in LLAMA.items() if name not in ("model_type", "dtype")}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**known)).to(torch.bfloat16).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def made(
    plain: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, PreTrainedModel]]:
    """What transformers makes of the plain model, and the directories that it writes it to."""
    found = {}
    for name, settings in SETTINGS.items():
        path = tmp_path_factory.mktemp(name)
        model = LlamaForCausalLM.from_pretrained(
            plain, quantization_config=settings(), device_map={"": "cpu"}
        )
        model.save_pretrained(path)
        found[name] = path, model
    return found


@pytest.fixture(scope="module")
def torchao(made: dict[str, tuple[Path, PreTrainedModel]]) -> Path:
    return made["torchao"][0]


def load_on(path: Path, device: str, **others: Any) -> PreTrainedModel:
    """Load what lies in a directory, past the front door."""
    checkpoint = Checkpoint.open(path)
    model = build_model(checkpoint, workload_for(checkpoint, WORK))
    placement = Placement(entries=(("", device),))
    return load_published(checkpoint, model, placement, dtype=torch.bfloat16, **others)


@pytest.mark.parametrize("name", only(["nf4"], ["nf4", "int8"]))
@pytest.mark.filterwarnings("ignore:MatMul8bitLt:UserWarning")
def test_it_computes_what_transformers_computes(
    made: dict[str, tuple[Path, PreTrainedModel]], name: str
) -> None:
    path, right = made[name]
    plan = duoka.plan(path, "virtual:64MiB", WORK, device_map={"": "cpu"})
    model = duoka.load(plan)
    with torch.no_grad():
        assert close(model(IDS).logits, right(IDS).logits, HALF_TOLERANCE)


@pytest.mark.slow
def test_what_pytorch_runs_runs_on_virtual_gpus(torchao: Path) -> None:
    told: list[tuple[int, int]] = []
    plan = duoka.plan(torchao, "virtual:2x64MiB", WORK, use_all=True)
    model = duoka.load(plan, progress=lambda done, total: told.append((done, total)))
    size = Checkpoint.open(torchao).weight_bytes
    assert told == sorted(told)
    assert told[-1] == (size, size)
    assert {str(each.device) for each in model.parameters()} == {"vgpu:0", "vgpu:1"}
    with torch.no_grad():
        right = load_on(torchao, "cpu")(IDS).logits
        torch.testing.assert_close(model(IDS.to("vgpu:0")).logits.cpu(), right)


@pytest.mark.parametrize(
    ("method", "device", "said"),
    [
        ("compressed-tensors", "cpu", "compressed-tensors weights to 16 bit on first use"),
        ("gptq", "cpu", "needs gptqmodel, which isn't installed"),
        ("bitsandbytes", "vgpu:0", "can't be loaded on vgpu:0"),
        ("fp8", "vgpu:1", "can't be loaded on vgpu:1"),
    ],
)
def test_what_can_not_run_here_says_why(method: str, device: str, said: str) -> None:
    config = {**LLAMA, "quantization_config": {"quant_method": method}}
    with pytest.raises(LoadError, match=said) as caught:
        refuse_unloadable(config, Placement(entries=(("", device),)))
    assert caught.value.hint
    refuse_unloadable(LLAMA, Placement(entries=(("", device),)))  # nothing is quantized


def test_nothing_is_proved_or_read_for_what_can_not_run(
    made: dict[str, tuple[Path, PreTrainedModel]], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = duoka.plan(made["nf4"][0], "virtual:64MiB", WORK)
    monkeypatch.delattr("duoka.checker.prove")
    with pytest.raises(LoadError, match="bitsandbytes checkpoint can't be loaded on vgpu:0"):
        duoka.load(plan)


@pytest.mark.parametrize("stated", [{}, {"quant_type": "int8"}, {"quant_type": {"default": {}}}])
def test_settings_that_nobody_can_read_are_refused(stated: dict[str, Any]) -> None:
    config = {**LLAMA, "quantization_config": {"quant_method": "torchao", **stated}}
    with pytest.raises(LoadError, match="can't run this torchao checkpoint here"):
        refuse_unloadable(config, Placement(entries=(("", "cpu"),)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs FP8")
def test_what_would_be_unpacked_is_refused(tmp_path: Path) -> None:
    path = published.write(tmp_path, "fp8")
    config = json.loads((path / "config.json").read_text())
    with pytest.raises(LoadError, match="to 16 bit on this machine"):
        refuse_unloadable(config, Placement(entries=(("", "cpu"),)))
    with pytest.raises(
        LoadError, match=r"21 weights were dequantized: model\.layers\.0\.mlp\.down_"
    ):
        load_on(path, "cpu")


def test_what_the_files_lack_is_named_and_nothing_is_left(torchao: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((torchao / "config.json").read_bytes())
    checkpoint = Checkpoint.open(torchao)
    model = build_model(checkpoint, workload_for(checkpoint, WORK))
    kept = load_file(torchao / "model.safetensors")
    del kept["model.norm.weight"]
    with safe_open(torchao / "model.safetensors", "pt") as file:
        save_file(kept, tmp_path / "model.safetensors", metadata=file.metadata())
    with virtual.gpus([None], data="cpu") as world:
        with pytest.raises(LoadError, match=r"1 tensors of the model weren't .*: model\.norm\.we"):
            load_published(
                Checkpoint.open(tmp_path), model, Placement(entries=(("", "vgpu:0"),)),
                dtype=torch.bfloat16,
            )  # fmt: skip
        assert world.memory_reserved(0) == 0


def test_too_little_memory_is_told(torchao: Path) -> None:
    with virtual.gpus([3 * 2**20], data="cpu") as world:
        with pytest.raises(LoadError, match="the weights don't fit: vgpu out of memory"):
            load_on(torchao, "vgpu:0")
        assert world.memory_reserved(0) == 0


def test_an_interrupt_leaves_nothing_behind(torchao: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with virtual.gpus([None], data="cpu") as world:
        with pytest.raises(KeyboardInterrupt):
            load_on(torchao, "vgpu:0", progress=stop)
        assert world.memory_reserved(0) == 0
