"""GGUF files beside plans: their weights on each device, and files that are refused."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from expert_plans import NUM_LAYERS, base, hosting, model
from exported import parsed
from fuzzing import examples
from staged import staged

from duoka import Plan, export
from duoka.base.units import format_bytes
from duoka.errors import DuokaError, FormatError, UsageError
from duoka.report.export.gguf_file import architecture_of, read_gguf, weight_bytes
from duoka.report.export.stages import to_layer_pipeline

pytestmark = pytest.mark.usefixtures("single_sequences")

gguf = pytest.importorskip("gguf")
ARCH = "glm4moe"


@functools.cache
def named_tensors() -> dict[str, int]:
    """The numbers of weights of the model's tensors under the names that conversion gives them."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GLM4_MOE, NUM_LAYERS)
    found = {}
    for name, tensor in model().state_dict().items():
        parts = [(name, tensor.numel())]
        if name.endswith("experts.gate_up_proj"):  # stacked by transformers
            start = name.removesuffix("gate_up_proj")
            half = tensor.numel() // 2
            parts = [(f"{start}gate_proj", half), (f"{start}up_proj", half)]
        for part, number in parts:
            native = part.replace(".gate.e_score_correction_bias", ".gate.e_score_correction.bias")
            new = names.get_name(native, try_suffixes=(".weight", ".bias"))
            found[new if new.endswith((".weight", ".bias")) else f"{new}.weight"] = number
    return found


def write(
    path: Path,
    tensors: Mapping[str, int] | None = None,
    *,
    architecture: str = ARCH,
    num_layers: int = NUM_LAYERS,
    further: int = 0,
    part_tensors: int = 0,
) -> Path:
    """A file with tensors of 16 bits."""
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=part_tensors)
    writer.add_block_count(num_layers + further)
    writer.add_token_list(["中", "", "a"])
    writer.add_token_types([1, 2, 1])
    if further:
        writer.add_uint32(f"{architecture}.nextn_predict_layers", further)
    for name, number in (named_tensors() if tensors is None else tensors).items():
        writer.add_tensor(name, np.zeros(number, np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def told(plan: Plan, file: Path) -> str:
    return " ".join(re.sub("\n# *", " ", str(export(plan, "llama.cpp", gguf=file))).split())


def expected_bytes(plan: Plan, hosted: set[int], *, tied: bool = False) -> Counter[str]:
    """Two bytes of each weight, by the modules of the model."""
    sizes: Counter[str] = Counter()
    for name, tensor in model().state_dict().items():
        layer = re.match(r"model\.layers\.(\d+)\.mlp\.experts\.", name)
        is_hosted = layer is not None and int(layer[1]) in hosted
        device = plan.placement.device_of(name)
        assert device is not None
        if tied and name == "lm_head.weight":
            continue
        place = "host" if is_hosted or name.startswith("model.embed") else device
        sizes[place] += 2 * tensor.numel()
        if tied and name.startswith("model.embed"):
            sizes[plan.devices[-1]] += 2 * tensor.numel()
    return sizes


@pytest.mark.parametrize("num_gpus", [1, 2])
@pytest.mark.parametrize(
    ("layers", "expected"), [([], None), ([1, 2], "3"), ([2, 4], None), ([1, 2, 3, 4], "5")]
)
def test_weights_are_where_the_plan_has_them(
    layers: list[int], expected: str | None, num_gpus: int, tmp_path: Path
) -> None:
    plan = hosting(layers, num_gpus)
    path = write(tmp_path / "glm.gguf")
    file = read_gguf(path)
    sizes = weight_bytes(file, plan, to_layer_pipeline(plan, "llama.cpp"))
    assert Counter(sizes) == expected_bytes(plan, set(layers))
    assert [*sizes] == [*plan.devices, "host"]
    text = told(plan, path)
    for number, (name, size) in enumerate([*sizes.items()][:-1]):
        assert f"CUDA{number} ({name}): {format_bytes(size)} of weights in the file" in text
    assert f"Host: {format_bytes(sizes['host'])} of weights in the file." in text
    assert "MODEL.gguf" not in text
    options = parsed(export(plan, "llama.cpp", gguf=path).text)[2]
    assert options["--model"] == str(path)
    assert options.get("--n-cpu-moe") == expected


def test_a_tied_head_is_copied_and_further_layers_are_left_out(tmp_path: Path) -> None:
    plan = base(2)
    tensors = {name: size for name, size in named_tensors().items() if name != "output.weight"}
    further = {
        f"blk.{NUM_LAYERS}.ffn_up_exps.weight": 4096,
        f"blk.{NUM_LAYERS}.nextn.enorm.weight": 8,
    }
    file = read_gguf(write(tmp_path / "a.gguf", tensors | further, further=1))
    assert (file.num_layers, file.expert_layers) == (NUM_LAYERS, [1, 2, 3, 4])
    sizes = weight_bytes(file, plan, to_layer_pipeline(plan, "llama.cpp"))
    assert Counter(sizes) == expected_bytes(plan, set(), tied=True)


def test_the_layers_of_the_file_decide_what_comes_first(tmp_path: Path) -> None:
    """Without a profile, the file says that layer 0 has no experts."""
    plan = hosting([1, 2])
    placement = replace(plan.placement, fingerprint="f")
    plan = replace(plan, fingerprint="f", placement=placement)
    options = parsed(export(plan, "llama.cpp", gguf=write(tmp_path / "a.gguf")).text)[2]
    assert options["--n-cpu-moe"] == "3"


def test_the_parts_of_a_file_are_one(tmp_path: Path) -> None:
    whole = read_gguf(write(tmp_path / "whole.gguf"))
    write(tmp_path / "glm.gguf", part_tensors=20)
    parts = sorted(tmp_path.glob("glm-*.gguf"))
    assert len(parts) > 2
    assert read_gguf(parts[0]).tensors == whole.tensors
    assert told(hosting([1]), parts[0])
    with pytest.raises(FormatError, match=r"is not the first of the \d+ parts") as refused:
        read_gguf(parts[1])
    assert refused.value.hint == f"give the first part, whose name ends with {parts[0].name[3:]}"
    parts[1].unlink()
    with pytest.raises(FormatError, match=rf"{parts[1].name} can't be read: No such file"):
        read_gguf(parts[0])


def test_weights_that_exceed_a_gpu_are_refused(tmp_path: Path) -> None:
    plan = hosting([1], 2)
    path = write(tmp_path / "a.gguf")
    sizes = weight_bytes(read_gguf(path), plan, to_layer_pipeline(plan, "llama.cpp"))
    first, second = plan.fleet.devices
    for change, is_refused in ((0, False), (-1, True)):
        budget = sizes[second.name] + change
        stages = tuple(
            replace(stage, budget_bytes=budget, reserved_bytes=budget)
            if stage.device == second.name
            else stage
            for stage in plan.forecast.devices
        )
        small = replace(
            plan,
            fleet=replace(plan.fleet, devices=(first, replace(second, budget_bytes=budget))),
            forecast=replace(plan.forecast, devices=stages),
        )
        if not is_refused:
            assert "0 B of the budget are left" in told(small, path)
            continue
        with pytest.raises(
            UsageError, match=f"of weights for {second.name}, whose budget"
        ) as refused:
            export(small, "llama.cpp", gguf=path)
        assert "fewer bits" in (refused.value.hint or "")


def test_another_model_is_refused(tmp_path: Path) -> None:
    without = {name: size for name, size in named_tensors().items() if "blk.2." not in name}
    cases: dict[str, dict[str, Any]] = {
        "its architecture is qwen3moe; that of .* is glm4moe": {"architecture": "qwen3moe"},
        "it has 6 layers; the plan has 5": {"num_layers": 6},
        "it has no experts in layer 2": {"tensors": without},
    }
    for number, (why, changes) in enumerate(cases.items()):
        path = write(tmp_path / f"{number}.gguf", **changes)
        with pytest.raises(FormatError, match=f"has another model: {why}") as refused:
            export(hosting([2]), "llama.cpp", gguf=path)
        assert refused.value.hint


def test_the_architecture_of_a_class() -> None:
    """By llama.cpp's converter; that of a class without one isn't compared."""
    for name, architecture in (
        ("Glm4MoeForCausalLM", "glm4moe"),
        ("Glm4MoeLiteForCausalLM", "deepseek2"),
        ("ChatGLMForCausalLM", "chatglm"),
        ("MixtralForCausalLM", "llama"),
        ("SomeForCausalLM", None),
    ):
        assert architecture_of(replace(staged([2]), model=name)) == architecture


def test_an_unknown_class_is_told(tmp_path: Path) -> None:
    text = told(replace(base(1), model="SomeForCausalLM"), write(tmp_path / "a.gguf"))
    assert "NOTE: SomeForCausalLM is not compared with the file's model, glm4moe" in text


def test_what_is_no_whole_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf")
    content = path.read_bytes()
    for kept in (0, 3, 4, 8, 30, 200, 3000, len(content) // 2, len(content) - 64):
        path.write_bytes(content[:kept])
        wanted = "is truncated or damaged" if kept >= 4 else "is not a GGUF file"
        with pytest.raises(FormatError, match=wanted) as refused:
            read_gguf(path)
        assert refused.value.hint
    for wrong, why in (
        (b"PK" + content, "is not a GGUF file: it begins with"),
        (
            content.replace(b"glm4moe.block_count", b"glm4moe.clock_count"),
            "has glm4moe.block_count = None",
        ),
    ):
        path.write_bytes(wrong)
        with pytest.raises(FormatError, match=why):
            read_gguf(path)
    with pytest.raises(FormatError, match="can't be read: No such file"):
        read_gguf(tmp_path / "none.gguf")
    with pytest.raises(FormatError, match="can't be read: Is a directory"):
        read_gguf(tmp_path)


def test_damaged_files_raise_errors_of_duoka_only(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", {"output.weight": 64})
    content = path.read_bytes()
    random = np.random.default_rng(0)
    num_refused = 0
    for _ in range(examples(300)):
        damaged = bytearray(content)
        for place in random.integers(4, len(content), 3):
            damaged[place] = random.integers(256)
        path.write_bytes(damaged)
        try:
            read_gguf(path)
        except DuokaError:
            num_refused += 1
    assert num_refused


def test_only_llama_cpp_reads_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="vllm doesn't read GGUF files"):
        export(base(1), "vllm", gguf=tmp_path / "a.gguf")


def test_the_package_is_optional(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", {"output.weight": 64})
    monkeypatch.setattr("duoka.base.requirements.find_spec", lambda _: None)
    with pytest.raises(UsageError, match="GGUF files need gguf, which isn't installed") as refused:
        export(base(1), "llama.cpp", gguf=path)
    assert refused.value.hint == 'pip install "duoka[gguf]"'
