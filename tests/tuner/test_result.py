"""What training leaves: loaded by peft, transformers and duoka, and equal to what was trained."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from closeness import close
from safetensors.torch import load_file, save_file
from saving import files_of_at_most
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    Qwen3Config,
)

from duoka import Checkpoint, models
from duoka.errors import LoadError, MachineError, UsageError
from duoka.forecast.workload import Training
from duoka.models import chatglm, initialize_adapters, make_trainable
from duoka.models.lora import LoraAdapter, LowRank, adapter_of, native_form, put_adapter
from duoka.planner.placement import Placement
from duoka.runtime.load import load_weights
from duoka.runtime.load.adapter import read_adapter
from duoka.tuner.checkpoints import SavedParameters, TrainingCheckpoints
from duoka.tuner.result import describe_for_vllm, write_adapter, write_merged

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**SIZES),
    "tied": lambda: Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True),
    "gpt2": lambda: GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32),
    "mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=4),
}
TARGETS = {
    "chatglm": ("q_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"),
    "llama": ("q_proj", "down_proj"),
    "tied": ("q_proj", "down_proj"),
    "gpt2": ("c_attn", "c_proj"),
    "mixtral": ("q_proj", "o_proj"),
}


@pytest.fixture
def tiny(published_data: Path) -> Path:
    return published_data / "reference" / "chatglm3-6b-tiny"


@pytest.fixture(params=["chatglm", *CONFIGS])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def base(family: str, tiny: Path, tmp_path: Path) -> Checkpoint:
    if family == "chatglm":
        return Checkpoint.open(tiny)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[family]())
    model.save_pretrained(tmp_path / "base")
    return Checkpoint.open(tmp_path / "base")


def load(directory: Path) -> nn.Module:
    """As duoka loads it, on the processor."""
    checkpoint = Checkpoint.open(directory)
    model = models.build(checkpoint.config, dtype=torch.float32)
    load_weights(model, checkpoint, Placement(entries=(("", "cpu"),)))
    return model


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        output: Tensor = model.eval()(torch.arange(3, 13)[None]).logits
    return output


def trained_adapter(base: Checkpoint, targets: tuple[str, ...]) -> LoraAdapter:
    """An adapter with random numbers, on every module that is called so."""
    model = models.build(base.config)
    torch.manual_seed(5)
    layers = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if name.rpartition(".")[2] in targets and weight is not None:
            # GPT-2 keeps its weights transposed.
            rows, columns = weight.shape if isinstance(module, nn.Linear) else weight.shape[::-1]
            down, up = torch.randn(3, columns), torch.randn(rows, 3)
            layers[name] = LowRank(down=down, up=up, scaling=0.125)
    assert layers
    return LoraAdapter(layers=layers)


def beside(base: Checkpoint, adapter: LoraAdapter) -> Tensor:
    """The logits of the published model with the adapter beside its weights."""
    model = load(base.path)
    before = logits(model)
    put_adapter(model, adapter)
    after = logits(model)
    assert not close(after, before, 0.01)
    return after


# ── adapters ──


@pytest.mark.filterwarnings("ignore:.*fan_in_fan_out", "ignore:.*is_gradient_checkpointing")
def test_peft_loads_an_adapter_over_transformers_own_model(
    family: str, base: Checkpoint, tmp_path: Path
) -> None:
    adapter = trained_adapter(base, TARGETS[family])
    write_adapter(tmp_path / "adapter", adapter, base)
    chatglm.register()
    plain = AutoModelForCausalLM.from_pretrained(base.path, dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(plain, str(tmp_path / "adapter"))
    assert isinstance(loaded, peft.PeftModelForCausalLM)
    assert close(logits(loaded), beside(base, adapter))
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert sorted(config["target_modules"]) == sorted(TARGETS[family])
    assert (config["r"], config["lora_alpha"]) == (3, 0.375)
    assert config["base_model_name_or_path"] == base.name
    # On some layers alone it names each module.
    name, layer = next(iter(adapter.layers.items()))
    write_adapter(tmp_path / "one", LoraAdapter(layers={name: layer}), base)
    config = json.loads((tmp_path / "one" / "adapter_config.json").read_text())
    assert config["target_modules"] == [name]


def test_an_adapter_has_the_published_names_where_they_are_asked_for(
    tiny: Path, tmp_path: Path
) -> None:
    base = Checkpoint.open(tiny)
    adapter = trained_adapter(base, TARGETS["chatglm"])
    write_adapter(tmp_path / "adapter", adapter, base, names="original")
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    modules = {name.partition(".lora_")[0] for name in stored}
    prefix = "base_model.model.transformer.encoder.layers"
    leaves = (
        *("self_attention.query_key_value", "self_attention.dense"),
        *("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
    )
    numbers = {int(name.split(".")[5]) for name in stored}
    assert modules == {f"{prefix}.{number}.{leaf}" for number in numbers for leaf in leaves}
    assert {f"{name.removeprefix('base_model.model.')}.weight" for name in modules} <= set(
        base.tensors or ()
    )
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    names = {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"}
    assert set(config["target_modules"]) == names
    # The largest rank, of q_proj and v_proj together, is what vLLM has to allow.
    assert (config["r"], config["lora_alpha"]) == (6, 0.75)
    assert config["rank_pattern"] == dict.fromkeys(names - {"query_key_value"}, 3)
    assert config["alpha_pattern"] == dict.fromkeys(names - {"query_key_value"}, 0.375)
    assert describe_for_vllm(tmp_path / "adapter") is None
    # Read again it is the same one.
    model = load(tiny)
    put_adapter(model, native_form(read_adapter(tmp_path / "adapter"), base.config))
    assert close(logits(model), beside(base, adapter))


@pytest.mark.parametrize(
    ("rank", "sentence"),
    [
        (5, None),
        (8, "its rank is 24: serve it with vllm serve --enable-lora --max-lora-rank 32"),
        (64, "its rank is 192: serve it with vllm serve --enable-lora --max-lora-rank 256"),
        (200, "vLLM can't serve it: its rank is 600, and at most 512 are allowed"),
    ],
)
def test_the_rank_that_vllm_must_allow(
    rank: int, sentence: str | None, tiny: Path, tmp_path: Path
) -> None:
    base = Checkpoint.open(tiny)
    adapter = trained_adapter(base, ("q_proj", "k_proj", "v_proj"))
    layers = {
        name: replace(
            layer, down=torch.randn(rank, layer.down.shape[1]), up=torch.randn(len(layer.up), rank)
        )
        for name, layer in adapter.layers.items()
    }
    adapter = LoraAdapter(layers=layers)
    write_adapter(tmp_path / "adapter", adapter, base, names="original")
    assert describe_for_vllm(tmp_path / "adapter") == sentence
    write_adapter(tmp_path / "native", adapter, base)
    assert json.loads((tmp_path / "native" / "adapter_config.json").read_text())["r"] == rank


def test_a_merged_model_has_no_rank(tmp_path: Path) -> None:
    assert describe_for_vllm(tmp_path) is None


def test_layers_of_one_name_with_several_ranks_are_named_each(tiny: Path, tmp_path: Path) -> None:
    base = Checkpoint.open(tiny)
    adapter = trained_adapter(base, ("o_proj",))
    (first, layer), *others = adapter.layers.items()
    smaller = replace(layer, down=layer.down[:1], up=layer.up[:, :1])
    write_adapter(tmp_path / "adapter", LoraAdapter(layers={first: smaller, **dict(others)}), base)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["rank_pattern"]) == (3, {first: 1})
    assert read_adapter(tmp_path / "adapter").layers[first].rank == 1


def test_peft_takes_the_published_names_for_the_published_modules(
    tiny: Path, tmp_path: Path
) -> None:
    """The published code doesn't run any more; its fused matrix alone stands for it."""
    base = Checkpoint.open(tiny)
    adapter = trained_adapter(base, ("q_proj", "v_proj"))
    write_adapter(tmp_path / "adapter", adapter, base, names="original")
    root: Any = nn.Module()
    name = "transformer.encoder.layers.1.self_attention.query_key_value"
    stored = load_file(tiny / "model.safetensors")[f"{name}.weight"]
    for number in range(base.config["num_layers"]):
        around = name.replace("1", str(number)).rpartition(".")[0]
        inner = root
        for part in around.split("."):
            if not hasattr(inner, part):
                inner.add_module(part, nn.Module())
            inner = getattr(inner, part)
        inner.query_key_value = nn.Linear(stored.shape[1], stored.shape[0])
    settings = peft.PeftConfig.from_pretrained(str(tmp_path / "adapter"))
    settings.task_type = None
    loaded = peft.PeftModel.from_pretrained(root, str(tmp_path / "adapter"), config=settings)
    delta = loaded.get_submodule(f"base_model.model.{name}").get_delta_weight("default")
    query = adapter.layers["model.layers.1.self_attn.q_proj"]
    value = adapter.layers["model.layers.1.self_attn.v_proj"]
    products = [layer.scaling * layer.up @ layer.down for layer in (query, value)]
    assert close(delta[: len(products[0])], products[0])
    assert close(delta[-len(products[1]) :], products[1])
    assert not delta[len(products[0]) : -len(products[1])].any()


@pytest.mark.filterwarnings("ignore:.*fan_in_fan_out", "ignore:.*is_gradient_checkpointing")
@pytest.mark.filterwarnings("ignore:.*_pattern keys did not match")
def test_what_a_run_has_saved_is_its_result(family: str, base: Checkpoint, tmp_path: Path) -> None:
    """All layers that adapters are for by default, for mixtral experts and routers too."""
    training = Training(lora_alpha=4)
    model: Any = load(base.path)
    make_trainable(model, training, torch.float32)
    initialize_adapters(model, seed=0)
    learning = {name: value for name, value in model.named_parameters() if value.requires_grad}
    for name, value in learning.items():
        if "lora_B" in name:
            nn.init.normal_(value, std=0.2)
    path = TrainingCheckpoints(tmp_path / "run", {}).save(1, learning, None, {})

    without_data = models.build(base.config)
    make_trainable(without_data, training, torch.float32)
    adapter = adapter_of(without_data, SavedParameters(path), base="org/base")
    write_adapter(tmp_path / "adapter", adapter, base)
    chatglm.register()
    plain = AutoModelForCausalLM.from_pretrained(base.path, dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(plain, str(tmp_path / "adapter"))
    assert close(logits(loaded), logits(model))
    assert loaded.peft_config["default"].base_model_name_or_path == "org/base"
    write_merged(tmp_path / "merged", base, adapter=adapter)
    assert close(logits(load(tmp_path / "merged")), logits(model))


# ── merged ──


def test_a_merged_checkpoint_computes_what_base_and_adapter_do(
    family: str, base: Checkpoint, tmp_path: Path
) -> None:
    adapter = trained_adapter(base, TARGETS[family])
    expected = beside(base, adapter)
    write_merged(tmp_path / "merged", base, adapter=adapter)
    merged = Checkpoint.open(tmp_path / "merged")
    assert set(merged.tensors or ()) == set(base.tensors or ())
    assert merged.config == base.config
    assert close(logits(load(merged.path)), expected)
    chatglm.register()
    plain = AutoModelForCausalLM.from_pretrained(merged.path, dtype=torch.float32)
    assert close(logits(plain), expected)


def test_trained_parameters_take_the_place_of_the_published(
    family: str, base: Checkpoint, tmp_path: Path
) -> None:
    model = load(base.path)
    torch.manual_seed(3)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    write_merged(tmp_path / "merged", base, parameters=dict(model.named_parameters()))
    stored = load_file(tmp_path / "merged" / "model.safetensors")
    original = load_file(base.path / "model.safetensors")
    assert {name: (value.shape, value.dtype) for name, value in stored.items()} == {
        name: (value.shape, value.dtype) for name, value in original.items()
    }
    again = load(tmp_path / "merged")
    assert all(
        torch.equal(value, again.get_parameter(name)) for name, value in model.named_parameters()
    )


def test_both_copies_of_a_tied_tensor_are_written(tmp_path: Path) -> None:
    """An adapter on one of them can't be merged, as it would be added to one alone."""
    AutoModelForCausalLM.from_config(CONFIGS["tied"]()).save_pretrained(tmp_path / "base")
    file = tmp_path / "base" / "model.safetensors"
    stored = load_file(file)
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
    save_file(stored, file, {"format": "pt"})
    base = Checkpoint.open(tmp_path / "base")
    value = torch.randn(64, 32)
    write_merged(tmp_path / "merged", base, parameters={"model.embed_tokens.weight": value})
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert torch.equal(merged["lm_head.weight"], value)
    assert torch.equal(merged["model.embed_tokens.weight"], value)
    layer = LowRank(down=torch.ones(1, 64), up=torch.ones(32, 1), scaling=1, is_embedding=True)
    adapter = LoraAdapter(layers={"model.embed_tokens": layer})
    with pytest.raises(UsageError, match=r"can't be merged: .* are one tensor"):
        write_merged(tmp_path / "refused", base, adapter=adapter)


def test_everything_else_is_copied(tiny: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(tiny, base)
    (base / "generation_config.json").write_text('{"eos_token_id": 2}')
    (base / "modeling_chatglm.py").write_text("# theirs\n")
    (base / "model.safetensors.index.json").write_text('{"weight_map": {"x": "gone.safetensors"}}')
    (base / "notes.md").write_text("not of the checkpoint")
    checkpoint = Checkpoint.open(base)
    adapter = trained_adapter(checkpoint, ("down_proj",))
    write_merged(tmp_path / "merged", checkpoint, adapter=adapter)
    copied = {"config.json", "generation_config.json", "modeling_chatglm.py", "reference.json"}
    names = {path.name for path in (tmp_path / "merged").iterdir()}
    assert names == {*copied, "model.safetensors"}
    for name in copied:
        assert (tmp_path / "merged" / name).read_bytes() == (base / name).read_bytes()
    before, after = (load_file(path / "model.safetensors") for path in (base, tmp_path / "merged"))
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if "dense_4h_to_h" in name}


def test_others_may_read_it_as_the_umask_says(tiny: Path, tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        write_merged(tmp_path / "merged", Checkpoint.open(tiny))
    finally:
        os.umask(before)
    for file in (tmp_path / "merged").iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o644, file.name


def test_large_checkpoints_are_sharded(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("duoka.tuner.result._SHARD_BYTES", 200_000)
    base = Checkpoint.open(tiny)
    adapter = trained_adapter(base, TARGETS["chatglm"])
    write_merged(tmp_path / "merged", base, adapter=adapter)
    merged = Checkpoint.open(tmp_path / "merged")
    assert len(merged.files) > 2
    assert set(merged.tensors or ()) == set(base.tensors or ())
    index = json.loads((tmp_path / "merged" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == base.weight_bytes
    assert close(logits(load(merged.path)), beside(base, adapter))


def test_published_pickles_become_safetensors(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    shutil.copy(tiny / "config.json", tmp_path / "base")
    weights = {name: v.half() for name, v in load_file(tiny / "model.safetensors").items()}
    torch.save(weights, tmp_path / "base" / "pytorch_model.bin")
    base = Checkpoint.open(tmp_path / "base")
    write_merged(tmp_path / "merged", base, adapter=trained_adapter(base, ("o_proj",)))
    stored = load_file(tmp_path / "merged" / "model.safetensors")
    assert stored.keys() == weights.keys()
    assert {value.dtype for value in stored.values()} == {torch.float16}


# ── what is refused ──


def test_what_is_no_tensor_of_the_checkpoint_is_refused(tiny: Path, tmp_path: Path) -> None:
    base = Checkpoint.open(tiny)
    with pytest.raises(LoadError, match=r"1 of the trained parameters .*: model.none.weight"):
        write_merged(tmp_path / "m", base, parameters={"model.none.weight": torch.ones(2)})
    layer = LowRank(down=torch.ones(1, 7), up=torch.ones(5, 1), scaling=1)
    other = LoraAdapter(layers={"model.layers.0.mlp.down_proj": layer}, base="other")
    with pytest.raises(LoadError, match="doesn't match this model"):
        write_merged(tmp_path / "m", base, adapter=other)
    assert list(tmp_path.iterdir()) == []


def test_a_quantized_checkpoint_is_refused(tiny: Path, tmp_path: Path) -> None:
    config = json.loads((tiny / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="published quantized"):
        write_merged(tmp_path / "merged", Checkpoint.open(tmp_path))


def test_a_full_disk_leaves_nothing(tiny: Path, tmp_path: Path) -> None:
    base = Checkpoint.open(tiny)
    adapter = trained_adapter(base, ("o_proj",))
    with files_of_at_most(2000), pytest.raises(MachineError, match="can't be written"):
        write_adapter(tmp_path / "adapter", adapter, base)
    with files_of_at_most(30_000), pytest.raises(MachineError, match="can't be written"):
        write_merged(tmp_path / "merged", base, adapter=adapter)
    assert list(tmp_path.iterdir()) == []
