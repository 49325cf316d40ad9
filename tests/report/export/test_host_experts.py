"""Experts in host memory, in each tool's syntax, read back with the tool's rules."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from expert_plans import base, hosting, model
from exported import assigned, parsed
from transformers import AutoModelForCausalLM

from duoka import Plan, export
from duoka.errors import FormatError, UsageError
from duoka.planner.plan_profile import cached_profile
from duoka.report.export.host_experts import layer_bytes

pytestmark = pytest.mark.usefixtures("single_sequences")

IDS = torch.arange(12).reshape(1, 12)
# common/common.h of llama.cpp in llama-cpp-python 0.3.36.
LLM_FFN_EXPS_REGEX = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"


def foreign(plan: Plan) -> Plan:
    """The same plan, of a model that this machine hasn't traced."""
    placement = replace(plan.placement, fingerprint="f")
    return replace(plan, fingerprint="f", placement=placement)


def in_buffers(options: Mapping[str, str], names: Sequence[str]) -> set[str]:
    """The tensors that llama.cpp's rules place in host memory."""
    patterns = [
        rf"blk\.{number}{LLM_FFN_EXPS_REGEX}"
        for number in range(int(options.get("--n-cpu-moe", 0)))
    ]
    # common/arg.cpp: split at commas, then at the first "=".
    for override in filter(None, options.get("--override-tensor", "").split(",")):
        pattern, _, buffer_type = override.partition("=")
        assert buffer_type == "CPU"
        patterns.append(pattern)
    return {name for name in names if any(re.search(pattern, name) for pattern in patterns)}


def tensor_names(num_layers: int) -> list[str]:
    """The tensors of GLM-4.5's files by the table of the package gguf."""
    gguf = pytest.importorskip("gguf")
    arch = gguf.MODEL_ARCH.GLM4_MOE
    templates = [gguf.TENSOR_NAMES[key] for key in gguf.MODEL_TENSORS[arch]]
    return [
        f"{template.format(bid=number)}.weight"
        for template in templates
        for number in range(num_layers if "{bid}" in template else 1)
    ]


# ── the field of the plan ──


def test_the_field_is_written_only_where_it_says_something() -> None:
    assert "host_experts" not in base(1).to_json()
    hosted = hosting([1, 2])
    assert '"model.layers.2.mlp.experts"' in hosted.to_json()
    assert Plan.from_json(hosted.to_json()) == hosted
    assert Plan.from_json(base(1).to_json()) == base(1)


def test_experts_are_modules_of_the_placement() -> None:
    plan = base(2)
    work = replace(plan.workload, host_experts=("tower.layers.1.mlp.experts",))
    with pytest.raises(FormatError, match="inconsistent"):
        replace(plan, workload=work)


def test_experts_are_found_by_the_names_of_others() -> None:
    hosted = hosting([2])
    sizes = layer_bytes(hosted, cached_profile(hosted))
    experts = model().get_submodule("model.layers.2.mlp.experts")
    num_bytes = 2 * sum(parameter.numel() for parameter in experts.parameters())
    assert sizes == dict.fromkeys([1, 2, 3, 4], num_bytes)


# ── llama.cpp ──


@pytest.mark.parametrize("num_gpus", [1, 2])
@pytest.mark.parametrize(
    ("layers", "option", "value"),
    [
        ([1], "--n-cpu-moe", "2"),  # layer 0 is dense
        ([1, 2, 3, 4], "--n-cpu-moe", "5"),
        ([2, 4], "--override-tensor", rf"blk\.(2|4){LLM_FFN_EXPS_REGEX}=CPU"),
    ],
)
def test_llama_cpp_keeps_just_these_experts(
    layers: list[int], option: str, value: str, num_gpus: int
) -> None:
    hosted = hosting(layers, num_gpus)
    options = parsed(export(hosted, "llama.cpp").text)[2]
    assert options[option] == value
    plain = parsed(export(base(num_gpus), "llama.cpp").text)[2]
    assert {name: options[name] for name in plain} == plain  # layers are split as without
    expected = {
        f"blk.{number}.ffn_{part}_exps.weight"
        for number in layers
        for part in ("gate", "down", "up")
    }
    tensors = tensor_names(12)
    assert "blk.2.ffn_up_shexp.weight" in tensors
    found = in_buffers(options, tensors)
    # The first layer is dense in the model, where the table only has names.
    assert {name for name in found if not name.startswith("blk.0.")} == expected


def test_llama_cpp_is_exact_without_a_profile() -> None:
    options = parsed(export(foreign(hosting([1, 2])), "llama.cpp").text)[2]
    assert options["--override-tensor"] == rf"blk\.(1|2){LLM_FFN_EXPS_REGEX}=CPU"
    options = parsed(export(foreign(hosting([0, 1, 2])), "llama.cpp").text)[2]
    assert options["--n-cpu-moe"] == "3"


@pytest.mark.parametrize("tool", ["sglang", "vllm", "accelerate"])
def test_others_need_the_profile(tool: str) -> None:
    with pytest.raises(UsageError, match="no profile of Glm4MoeForCausalLM") as refused:
        export(foreign(hosting([1, 2])), tool)
    assert "duoka plan" in (refused.value.hint or "")


def test_llama_cpp_tells_what_it_does_with_them() -> None:
    told = " ".join(str(export(hosting([1, 3]), "llama.cpp")).split())
    assert "the experts of 2 layers (1, 3) are in host memory" in told
    assert "--no-op-offload" in told


# ── SGLang ──


def test_sglang_takes_all_experts_on_the_host() -> None:
    hosted = replace(hosting([1, 2, 3, 4]), source="my/model dir")
    options = parsed(export(hosted, "sglang").text)[2]
    kt_options = {name: value for name, value in options.items() if name.startswith("--kt")}
    assert kt_options == {
        "--kt-weight-path": "my/model dir",
        "--kt-method": "BF16",
        "--kt-cpuinfer": "CORES",
        "--kt-threadpool-count": "NUMA_NODES",
        "--kt-num-gpu-experts": "0",
    }
    # Its staging buffer has as many tokens: never -1.
    assert options["--chunked-prefill-size"] == "32"
    assert "sglang-kt" in str(export(hosted, "sglang"))


@pytest.mark.parametrize(("scheme", "method"), [("int8", "AMXINT8"), ("int4", "AMXINT4")])
def test_sglang_takes_converted_experts(scheme: str, method: str) -> None:
    hosted = hosting([1, 2, 3, 4])
    workload = replace(hosted.workload, quantize=scheme)
    done = export(replace(hosted, workload=workload), "sglang")
    options = parsed(done.text)[2]
    assert (options["--kt-weight-path"], options["--kt-method"]) == ("KT_WEIGHTS", method)
    assert "KT_WEIGHTS is a placeholder" in str(done)


def test_sglang_refuses_what_it_can_only_come_near_to() -> None:
    everywhere = [1, 2, 3, 4]
    nf4, half = (
        replace(hosting(everywhere), workload=replace(hosting(everywhere).workload, **change))
        for change in ({"quantize": "nf4"}, {"dtype": "float16"})
    )
    for wrong, why in (
        (hosting([1, 2]), "the plan has those of layer 3, 4 on GPUs"),
        (hosting(everywhere, 2), "starts all CPU threads"),
        (nf4, "no experts in nf4"),
        (half, "no experts in float16"),
    ):
        with pytest.raises(UsageError, match=why) as refused:
            export(wrong, "sglang", cached_profile(base(1)))
        assert "llama.cpp" in (refused.value.hint or "")


# ── vLLM ──


def offloaded(plan: Plan, gib: str) -> set[int]:
    """The layers whose experts vLLM's `UVAOffloader` puts into host memory, rank by rank."""
    sizes = layer_bytes(plan, cached_profile(plan))
    found = set()
    for device in plan.devices:
        taken, limit = 0, int(float(gib) * 1024**3)
        for number, size in sizes.items():
            if plan.placement.device_of(f"model.layers.{number}.mlp.experts") != device:
                continue
            for part in (size * 2 // 3, size // 3):  # w13_weight, w2_weight
                if taken < limit:
                    taken += part
                    found.add(number) if part < size // 2 else None
    return found


def test_vllm_takes_the_first_experts_of_each_gpu() -> None:
    for layers, num_gpus in (([1], 1), ([1, 2, 3], 1), ([1, 2, 3, 4], 1), ([1, 2, 3, 4], 2)):
        hosted = hosting(layers, num_gpus)
        done = export(hosted, "vllm")
        options = parsed(done.text)[2]
        assert options["--cpu-offload-params"] == "routed_experts"
        assert offloaded(hosted, options["--cpu-offload-gb"]) == set(layers)
        assert "over PCIe" in str(done)


def test_vllm_refuses_others() -> None:
    for wrong in (hosting([2]), hosting([1, 3]), hosting([1], 2)):
        with pytest.raises(UsageError, match="of the first experts of each GPU there"):
            export(wrong, "vllm")
    hosted = hosting([1, 2])
    quantized = replace(hosted, workload=replace(hosted.workload, quantize="int8"))
    with pytest.raises(UsageError, match="the size of its own quantized"):
        export(quantized, "vllm")


# ── accelerate ──


def test_accelerate_computes_the_same(tmp_path: Path) -> None:
    """With the real libraries; the processor is the GPU, and the disk the host."""
    whole = model().to(torch.float32)
    whole.save_pretrained(tmp_path)
    hosted = hosting([1, 3])
    device_map = assigned(export(hosted, "accelerate").text)["device_map"]
    assert device_map["model.layers.3.mlp.experts"] == "cpu"
    assert device_map["model.layers.3.mlp.shared_experts"] == 0
    assert device_map["model.layers.2"] == 0
    assert "model.layers.3" not in device_map
    places = {name: "disk" if at == "cpu" else "cpu" for name, at in device_map.items()}
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path, device_map=places, offload_folder=tmp_path / "off", dtype=torch.float32
    )
    assert loaded.get_submodule("model.layers.3.mlp.experts").down_proj.is_meta
    with torch.no_grad():
        torch.testing.assert_close(loaded(IDS).logits, whole(IDS).logits)


def test_accelerate_refuses_what_fails_there() -> None:
    with pytest.raises(UsageError, match="on several GPUs"):
        export(hosting([1], 2), "accelerate")
    coded = replace(base(1).request, trust_remote_code=True)
    with pytest.raises(UsageError, match="no module of all experts"):
        export(replace(hosting([1]), request=coded), "accelerate", names="checkpoint")
