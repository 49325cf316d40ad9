"""Weights on their devices: equal to transformers' own loading, complete or not at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from closeness import close
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

from duoka import virtual
from duoka.checkpoint.checkpoint import Checkpoint
from duoka.errors import LoadError
from duoka.models import build
from duoka.planner.placement import Placement
from duoka.runtime.dispatch.dispatch import dispatch
from duoka.runtime.dispatch.place_tensors import tensor_names
from duoka.runtime.load import load_weights
from duoka.runtime.load.fill import copy_in_chunks

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**SIZES),
    "gpt2": lambda: GPT2Config(vocab_size=64, n_embd=32, n_layer=3, n_head=4, n_positions=32),
    "mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=4),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **SIZES, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
}


@pytest.fixture(autouse=True)
def _gpus() -> None:
    virtual.set_gpus([None, None])


def make(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[family]())


def write(
    family: str, path: Path, *, form: str = "safetensors", max_shard_size: str = "1GB"
) -> Path:
    make(family).save_pretrained(path, max_shard_size=max_shard_size)
    if form == "bin":
        to_bin(path)
    return path


def to_bin(path: Path) -> None:
    """Turn safetensors into the pickles of 2023."""
    names: dict[str, str] = {}
    for number, file in enumerate(sorted(path.glob("*.safetensors")), start=1):
        target = f"pytorch_model-{number:05}.bin" if len(names) or _sharded(path) else None
        state = load_file(file)
        torch.save(state, path / (target or "pytorch_model.bin"))
        names |= dict.fromkeys(state, target or "")
        file.unlink()
    index = path / "model.safetensors.index.json"
    if index.exists():
        index.unlink()
        content = {"metadata": {}, "weight_map": names}
        (path / "pytorch_model.bin.index.json").write_text(json.dumps(content))


def _sharded(path: Path) -> bool:
    return (path / "model.safetensors.index.json").exists()


def halves(model: nn.Module) -> Placement:
    """The first parts on one device and the rest on another; a tied head with the first."""
    core = next(child for _, child in model.named_children())
    name = next(name for name, _ in model.named_children())
    layers = next(n for n, child in core.named_children() if isinstance(child, nn.ModuleList))
    count = len(core.get_submodule(layers))
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    return Placement(
        entries=(
            ("", "vgpu:1"),
            *((f"{name}.{layers}.{i}", f"vgpu:{2 * i // count}") for i in range(count)),
            *((f"{name}.{n}", "vgpu:0") for n in ("embed_tokens", "wte") if hasattr(core, n)),
            *((("lm_head", "vgpu:0"),) if tied else ()),
        )
    )


def load(path: Path, **options: Any) -> PreTrainedModel:
    checkpoint = Checkpoint.open(path)
    model = build(checkpoint.config)
    load_weights(model, checkpoint, halves(model), **options)
    return model


def assert_equal_to_transformers(model: PreTrainedModel, path: Path) -> None:
    expected = dict(tensor_names(type(model).from_pretrained(path)))
    loaded = dict(tensor_names(model))
    assert loaded.keys() == expected.keys()
    for name, tensor in loaded.items():
        assert tensor.dtype == expected[name].dtype, name
        assert torch.equal(tensor.cpu(), expected[name]), name


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("form", ["safetensors", "bin"])
@pytest.mark.parametrize("max_shard_size", ["1GB", "20KB"], ids=["one file", "sharded"])
def test_the_same_as_transformers(
    family: str, form: str, max_shard_size: str, tmp_path: Path
) -> None:
    path = write(family, tmp_path, form=form, max_shard_size=max_shard_size)
    assert (len(Checkpoint.open(path).files) > 1) == (max_shard_size == "20KB")
    model = load(path)
    assert_equal_to_transformers(model, path)
    spread = halves(model)
    for name, tensor in tensor_names(model):
        assert str(tensor.device) == spread.device_of(name), name
    assert not model.training


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("most_bytes", [100, 3000])
def test_tensors_that_are_read_in_parts(
    family: str, most_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("duoka.runtime.load.fill.STRETCH_BYTES", most_bytes)
    path = write(family, tmp_path, max_shard_size="20KB")
    assert_equal_to_transformers(load(path), path)


@pytest.mark.parametrize("family", CONFIGS)
def test_what_lies_on_one_device_alone(family: str, tmp_path: Path) -> None:
    path, calls = write(family, tmp_path, max_shard_size="20KB"), []
    whole, device = dict(tensor_names(load(path))), torch.device("vgpu:1")
    part = load(path, only=device, progress=lambda done, total: calls.append((done, total)))
    tensors = dict(tensor_names(part))
    assert {tensor.device.type for tensor in tensors.values()} == {"vgpu", "meta"}
    for name, tensor in tensors.items():
        assert tensor.is_meta == (whole[name].device != device), name
        assert tensor.is_meta or torch.equal(tensor.cpu(), whole[name].cpu())
    bytes_there = sum(p.nbytes for p in part.parameters() if not p.is_meta)
    assert calls[-1] == (bytes_there, bytes_there)


def test_ties_hold(tmp_path: Path) -> None:
    model = load(write("gpt2", tmp_path))
    assert model.lm_head.weight is model.transformer.wte.weight


@pytest.mark.parametrize("name", ["chatglm3-6b-tiny", "chatglm3-6b-128k-tiny", "glm-4-9b-tiny"])
def test_published_chatglm_files_give_their_reference(name: str, published_data: Path) -> None:
    path = published_data / "reference" / name
    reference = load_file(path / "reference.safetensors")
    model = load(path)
    dispatch(model, halves(model))
    with torch.no_grad():
        logits = model(reference["input_ids"].to("vgpu:0")).logits.cpu()
    assert close(logits, reference["logits"])
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_moe", "gpt2"])
@pytest.mark.parametrize("data", ["cpu", "meta"])
def test_no_second_copy_on_the_devices(family: str, data: str, tmp_path: Path) -> None:
    path = write(family, tmp_path)
    world = virtual.set_gpus([None, None], data=data)
    model = load(path)
    for index in (0, 1):
        tensors = {id(t): t for _, t in tensor_names(model) if t.device.index == index}
        rounded = sum(-(-t.nbytes // 512) * 512 for t in tensors.values())
        assert world.max_memory_allocated(index) == world.memory_allocated(index) == rounded


def test_types_are_converted_and_32_bit_buffers_kept(tmp_path: Path) -> None:
    path = write("llama", tmp_path)
    checkpoint = Checkpoint.open(path)
    model = build(checkpoint.config, dtype=torch.bfloat16)
    load_weights(model, checkpoint, halves(model))
    expected = dict(make("llama").named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.cpu(), expected[name].bfloat16()), name
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_progress_counts_every_byte_once(tmp_path: Path) -> None:
    path, calls = write("mixtral", tmp_path, max_shard_size="20KB"), []
    load(path, progress=lambda done, total: calls.append((done, total)))
    total = Checkpoint.open(path).weight_bytes
    assert calls[0] == (0, total)
    assert calls[-1] == (total, total)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_the_generation_config_comes_along(tmp_path: Path) -> None:
    path = write("llama", tmp_path)
    (path / "generation_config.json").write_text('{"eos_token_id": [5, 7], "temperature": 0.8}')
    generation = load(path).generation_config
    assert generation.eos_token_id == [5, 7]
    assert generation.temperature == 0.8


@pytest.mark.parametrize("text", ['{"validate": 3}', '{"dtype": {}}', '{"self": 1}'])
def test_a_generation_config_that_is_none(text: str, tmp_path: Path) -> None:
    path = write("llama", tmp_path)
    (path / "generation_config.json").write_text(text)
    assert_refused(path, r"generation_config\.json is not valid")


# ── complete or not at all ──


def change(path: Path, edit: Callable[[dict[str, Tensor]], None]) -> None:
    file = path / "model.safetensors"
    state = load_file(file)
    edit(state)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, file)


def assert_refused(path: Path, match: str, error: type[Exception] = LoadError) -> None:
    """Loading fails, the model is as it was built, and nothing is held while the error lives."""
    checkpoint = Checkpoint.open(path)
    model = build(checkpoint.config)
    before = [(name, id(tensor)) for name, tensor in tensor_names(model)]
    world = virtual.set_gpus([None, None])
    with pytest.raises(error, match=match) as caught:
        load_weights(model, checkpoint, halves(model))
    assert [(name, id(tensor)) for name, tensor in tensor_names(model)] == before
    assert all(parameter.is_meta for parameter in model.parameters())
    assert [world.memory_reserved(index) for index in (0, 1)] == [0, 0]
    del caught


def test_missing_and_unexpected_tensors_are_all_named(tmp_path: Path) -> None:
    path = write("llama", tmp_path)

    def edit(state: dict[str, Tensor]) -> None:
        del state["model.norm.weight"], state["lm_head.weight"]
        state["model.extra"] = torch.zeros(1)

    change(path, edit)
    assert_refused(
        path, r"2 tensors .* missing .*: model\.norm\.weight, lm_head\.weight; 1 .*: model\.extra"
    )


def test_another_shape_is_named(tmp_path: Path) -> None:
    path = write("llama", tmp_path)
    change(path, lambda state: state.update({"model.norm.weight": torch.zeros(31)}))
    assert_refused(path, r"1 tensors .* shape: model\.norm\.weight \(\[31\] .* \[32\]")


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_numbers_that_need_scales_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    path = write("llama", tmp_path)
    change(path, lambda state: state.update({"model.norm.weight": torch.ones(32).to(dtype)}))
    assert_refused(path, rf"model\.norm\.weight \(torch\.float32 from {dtype}\)")


@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_a_file_cut_short_after_it_was_opened(form: str, tmp_path: Path) -> None:
    path = write("llama", tmp_path, form=form)
    checkpoint = Checkpoint.open(path)
    model = build(checkpoint.config)
    file = checkpoint.files[0]
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(LoadError, match=rf"{file.name} has changed since"):
        load_weights(model, checkpoint, halves(model))
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_a_file_cut_short_while_it_is_read(form: str, tmp_path: Path) -> None:
    path = write("llama", tmp_path, form=form)
    file = Checkpoint.open(path).files[0]

    def cut(done: int, total: int) -> None:
        if done > total // 2:
            os.truncate(file, 4096)

    with pytest.raises(LoadError, match=r"has changed since .* and has 4096"):
        load(path, progress=cut)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ([torch.zeros(1)], "contains list, not a dict"),
        ({"epoch": 3, "model": {}}, "2 entries that are not tensors: 'epoch', 'model'"),
    ],
    ids=["list", "trainer state"],
)
def test_a_pickle_with_something_else(content: Any, match: str, tmp_path: Path) -> None:
    path = write("llama", tmp_path, form="bin")
    torch.save(content, path / "pytorch_model.bin")
    assert_refused(path, match)


def test_a_pickle_of_the_old_format(tmp_path: Path) -> None:
    path = write("llama", tmp_path, form="bin")
    file = path / "pytorch_model.bin"
    state = torch.load(file, weights_only=True)
    torch.save(state, file, _use_new_zipfile_serialization=False)
    assert_equal_to_transformers(load(path), path)


def test_too_little_memory(tmp_path: Path) -> None:
    path = write("llama", tmp_path)
    checkpoint = Checkpoint.open(path)
    model = build(checkpoint.config)
    world = virtual.set_gpus([2**21, 2**10])
    with pytest.raises(LoadError, match="don't fit") as caught:
        load_weights(model, checkpoint, halves(model))
    assert [world.memory_reserved(index) for index in (0, 1)] == [0, 0]
    del caught


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, ValueError])
def test_an_interrupt_leaves_nothing(interrupt: type[BaseException], tmp_path: Path) -> None:
    path = write("mixtral", tmp_path)
    checkpoint = Checkpoint.open(path)
    model = build(checkpoint.config)
    world = virtual.set_gpus([None, None])
    parameter = weakref.ref(next(model.parameters()))

    def progress(done: int, total: int) -> None:
        if done > total // 2:
            raise interrupt

    with pytest.raises(interrupt) as caught:
        load_weights(model, checkpoint, halves(model), progress=progress)
    assert next(model.parameters()) is parameter()
    assert {buffer.device.type for buffer in model.buffers()} == {"cpu"}
    assert [world.memory_reserved(index) for index in (0, 1)] == [0, 0]
    del caught
    load_weights(model, checkpoint, halves(model))  # and it can be tried again
    assert_equal_to_transformers(model, path)


def test_a_checkpoint_without_weights(tmp_path: Path) -> None:
    path = write("llama", tmp_path)
    (path / "model.safetensors").unlink()
    assert_refused(path, "has no weight files")


# ── host memory ──

_MEASURE = """
import sys, torch
from pathlib import Path
from duoka import virtual
from duoka.checkpoint.checkpoint import Checkpoint
from duoka.runtime.load import load_weights
from duoka.models import build
from duoka.planner.placement import Placement

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) // 1024

checkpoint = Checkpoint.open(sys.argv[1])
virtual.set_gpus([None, None], data="meta")
before, peak = anonymous(), 0
def progress(done, total):
    global peak
    peak = max(peak, anonymous())
model = build(checkpoint.config)
placement = Placement(entries=(("", "vgpu:0"), ("lm_head", "vgpu:1")))
load_weights(model, checkpoint, placement, progress=progress)
print(peak - before, anonymous() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_the_host_holds_no_copy(form: str, tmp_path: Path) -> None:
    config = MixtralConfig(
        **{**SIZES, "hidden_size": 512, "intermediate_size": 2048}, num_local_experts=8
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    if form == "bin":
        to_bin(tmp_path)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) > 250 * 2**20
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(tmp_path)], capture_output=True, text=True, check=True
    )
    peak_mib, after_mib = map(int, done.stdout.split())
    assert peak_mib < 100
    assert after_mib < 100


# ── copying in chunks ──


def cases() -> Iterable[Any]:
    base = torch.arange(24.0).reshape(4, 6)
    yield pytest.param(torch.empty(4, 6), base, id="as it is")
    yield pytest.param(torch.empty(4, 6, dtype=torch.bfloat16), base, id="another type")
    yield pytest.param(torch.empty(6, 4), base.T, id="transposed")
    yield pytest.param(torch.empty(4, 12)[:, 3:9], base, id="into columns")
    yield pytest.param(torch.empty(1, 24, dtype=torch.half), base.reshape(1, 24), id="one row")
    yield pytest.param(torch.empty((), dtype=torch.half), torch.tensor(2.0), id="scalar")


@pytest.mark.parametrize(("target", "source"), list(cases()))
@pytest.mark.parametrize("chunk_bytes", [1, 40, 2**20])
def test_chunks(
    target: Tensor, source: Tensor, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("duoka.runtime.load.fill._CHUNK_BYTES", chunk_bytes)
    target.zero_()
    copy_in_chunks(target, source)
    assert torch.equal(target, source.to(target.dtype))
