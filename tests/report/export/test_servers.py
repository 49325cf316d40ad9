"""vLLM, SGLang and llama.cpp: command lines, read back with the tools' documented rules.

`benchmarks/exports.py` asks the functions of vLLM and SGLang themselves.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
from exported import parsed
from fuzzing import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from staged import GIB, WORKLOAD, staged
from tiny import Costs, fleet, made_up

from duoka import export
from duoka.errors import UsageError
from duoka.forecast.workload import Workload
from duoka.hardware.fleet import Fleet
from duoka.planner.request import PlanProblem
from duoka.planner.solve import find_plan
from duoka.report.export import common
from duoka.report.export.common import layer_token_bytes
from duoka.report.export.stages import to_layer_pipeline
from duoka.report.export.vllm import BLOCK_TOKENS, planned_blocks


def partition(text: str, num_layers: int, num_ranks: int) -> list[tuple[int, int]]:
    """The layers of each rank by vLLM's and SGLang's rule for a given partition."""
    counts = [int(count) for count in text.split(",")]
    assert len(counts) == num_ranks
    assert sum(counts) == num_layers
    stops = list(accumulate(counts))
    return list(zip([0, *stops], stops, strict=False))


@pytest.mark.parametrize(
    ("tool", "size", "variable"),
    [
        ("vllm", "--pipeline-parallel-size", "VLLM_PP_LAYER_PARTITION"),
        ("sglang", "--pp-size", "SGLANG_PP_LAYER_PARTITION"),
    ],
)
def test_layers_go_where_the_plan_has_them(tool: str, size: str, variable: str) -> None:
    environment, words, options = parsed(export(staged([20, 12, 8]), tool).text)
    assert environment["CUDA_VISIBLE_DEVICES"] == "0,1,2"
    assert partition(environment[variable], 40, int(options[size])) == [(0, 20), (20, 32), (32, 40)]
    assert "my model" in words


def test_one_gpu_needs_no_partition() -> None:
    environment, _, options = parsed(export(staged([40]), "vllm").text)
    assert set(environment) == {"CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES"}
    assert options == {"--dtype": "bfloat16", "--max-model-len": "8192", "--max-num-seqs": "1"}


def test_detected_gpus_are_named_by_uuid() -> None:
    plan = staged([2, 2])
    devices = tuple(
        replace(device, uuid=f"GPU-{number}") for number, device in enumerate(plan.fleet.devices)
    )
    plan = replace(plan, fleet=Fleet(devices=devices))
    environment, *_ = parsed(export(plan, "vllm").text)
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-0,GPU-1"
    assert "declared" not in str(export(plan, "vllm"))


def test_gpus_are_in_the_order_of_stages() -> None:
    plan = staged([2, 2], gpus="8GiB,24GiB")
    turned = tuple((name, f"cuda:{1 - int(at[-1])}") for name, at in plan.placement.entries)
    plan = replace(
        plan,
        placement=replace(plan.placement, entries=turned),
        forecast=replace(plan.forecast, devices=plan.forecast.devices[::-1]),
    )
    for tool in ("vllm", "sglang", "llama.cpp"):
        assert parsed(export(plan, tool).text)[0]["CUDA_VISIBLE_DEVICES"] == "1,0"


def test_the_cache_holds_the_planned_context() -> None:
    """What is given to a rank over what a block takes there, the least of all ranks."""
    profile = made_up([1 << 20] * 12, Costs(cache=4096))
    workload = Workload(prompt_tokens=1000, new_tokens=24, batch=3, dtype="bfloat16")
    plan = find_plan(
        profile, PlanProblem(fleet=fleet(160, 120, 90), workload=workload, use_all=True)
    )
    pipeline = to_layer_pipeline(plan, "vLLM")
    sizes = layer_token_bytes(plan, profile, pipeline)
    assert sizes == [0, *[4096] * 10, 0]  # the first and the last block keep nothing
    given = int(parsed(export(plan, "vllm", profile).text)[2]["--kv-cache-memory-bytes"])
    blocks = [
        given // (BLOCK_TOKENS * sum(sizes[stage.start : stage.stop])) for stage in pipeline.stages
    ]
    needed = 3 * -(-1024 // BLOCK_TOKENS)
    assert min(blocks) - 1 == needed
    told = " ".join(str(export(plan, "vllm", profile)).split())
    assert "gives all ranks the same number of cache blocks" in told


def test_a_cache_in_pages_is_given_as_blocks_and_steps_as_steps() -> None:
    """A page is as large as a block, and the chunk of a plan for requests is one of all of them."""
    workload = replace(WORKLOAD, cache="paged", pages=100, batch=4, prefill_chunk_tokens=512)
    plan = replace(staged([3, 2]), workload=workload)
    page_bytes = (3 * 16 * 4096, 2 * 16 * 4096)
    with_caches = tuple(
        replace(
            stage, kv_cache_bytes=101 * size, allocated_bytes=stage.allocated_bytes + 101 * size
        )
        for stage, size in zip(plan.forecast.devices, page_bytes, strict=True)
    )
    plan = replace(plan, forecast=replace(plan.forecast, devices=with_caches))
    options = parsed(export(plan, "vllm").text)[2]
    assert options["--kv-cache-memory-bytes"] == str(101 * page_bytes[0])
    assert options["--max-num-batched-tokens"] == "512"
    assert options["--max-num-seqs"] == "4"
    assert planned_blocks(workload) == 101
    options = parsed(export(plan, "sglang").text)[2]
    assert options["--max-total-tokens"] == str(100 * 16)
    assert options["--chunked-prefill-size"] == "512"


def test_blocks_hold_the_batch_or_the_pages() -> None:
    workload = Workload(batch=3, prompt_tokens=90, new_tokens=10, prefill_chunk_tokens=None)
    assert planned_blocks(workload) == 3 * 7 + 1
    served = replace(workload, cache="paged", pages=9)
    assert planned_blocks(served) == 10


@pytest.mark.parametrize(
    ("budget", "expected"),
    [(20, None), (13, "0.61"), (14, "0.66")],
    ids=["empty", "used", "less used"],
)
def test_a_gpu_that_others_use_may_have_less_free(budget: int, expected: str | None) -> None:
    """vLLM refuses to start where less is free than the share that it is told."""
    profile = made_up([1 << 20] * 12, Costs(cache=4096))
    workload = Workload(prompt_tokens=1000, new_tokens=24, dtype="bfloat16")
    gpus = fleet(160, 120)
    plan = find_plan(profile, PlanProblem(fleet=gpus, workload=workload, use_all=True))
    devices = tuple(
        replace(device, budget_bytes=budget * GIB, memory_bytes=21 * GIB) for device in gpus.devices
    )
    plan = replace(plan, fleet=Fleet(devices=devices))
    options = parsed(export(plan, "vllm", profile).text)[2]
    assert options.get("--gpu-memory-utilization") == expected


def test_sglangs_share_covers_weights_and_cache_of_every_rank() -> None:
    profile = made_up([8 << 20] * 12, Costs(cache=4096))
    workload = Workload(prompt_tokens=1000, new_tokens=24, dtype="bfloat16")
    plan = find_plan(profile, PlanProblem(fleet=fleet(140, 100), workload=workload))
    options = parsed(export(plan, "sglang", profile).text)[2]
    sizes = layer_token_bytes(plan, profile, to_layer_pipeline(plan, "SGLang"))
    assert sizes is not None
    for stage in to_layer_pipeline(plan, "SGLang").stages:
        static = stage.forecast.weight_bytes + 1024 * sum(sizes[stage.start : stage.stop])
        assert static <= float(options["--mem-fraction-static"]) * stage.device.budget_bytes
    assert options["--max-total-tokens"] == "1024"
    assert options["--chunked-prefill-size"] == "-1"


def test_without_a_profile_the_cache_is_left_to_the_tool() -> None:
    assert "--kv-cache-memory-bytes" not in export(staged([3, 2]), "vllm").text
    assert "of the smallest" in str(export(staged([3, 2]), "vllm"))
    assert "--mem-fraction-static" not in export(staged([3, 2]), "sglang").text


def test_chunks_and_batches_are_passed_on() -> None:
    workload = replace(WORKLOAD, batch=4, prefill_chunk_tokens=1024)
    plan = replace(staged([3, 2]), workload=workload)
    assert parsed(export(plan, "vllm").text)[2]["--max-num-batched-tokens"] == "4096"
    # SGLang's requests share a chunk, as vLLM's share the tokens of a step.
    assert parsed(export(plan, "sglang").text)[2]["--chunked-prefill-size"] == "4096"
    options = parsed(export(plan, "llama.cpp").text)[2]
    assert (options["--ctx-size"], options["--parallel"]) == (str(4 * 8192), "4")
    assert options["--ubatch-size"] == options["--batch-size"] == "1024"


def test_without_a_chunk_vllms_own_is_told() -> None:
    assert "2048 tokens" in str(export(staged([3, 2]), "vllm"))
    plan = replace(staged([3, 2]), workload=replace(WORKLOAD, prefill_chunk_tokens=1024))
    assert "by default" not in str(export(plan, "vllm"))


@pytest.mark.parametrize("tool", ["vllm", "sglang"])
def test_a_revision_is_given_apart(tool: str) -> None:
    commit = "0123456789abcdef" * 2 + "01234567"
    plan = replace(staged([3, 2]), source=f"zai-org/glm-4-9b@{commit}")
    _, words, options = parsed(export(plan, tool).text)
    assert words[-1] == "zai-org/glm-4-9b"
    assert options["--revision"] == commit
    assert "--revision" not in export(staged([3, 2]), tool).text


@pytest.mark.parametrize(
    ("source", "what"), [("glm/config.json", "config.json, a config"), ("", "a model in memory")]
)
def test_a_plan_without_weights_has_a_placeholder(source: str, what: str) -> None:
    plan = replace(staged([3, 2]), source=source)
    for tool in ("vllm", "sglang"):
        assert parsed(export(plan, tool).text)[1][-1] == "MODEL"
    for tool in ("vllm", "sglang", "accelerate"):
        assert f"from {what}; MODEL is a placeholder for" in " ".join(
            str(export(plan, tool)).split()
        )


def test_an_8_bit_cache_is_called_what_the_tool_calls_it() -> None:
    plan = replace(staged([3, 2]), workload=replace(WORKLOAD, cache="int8"))
    assert parsed(export(plan, "vllm").text)[2]["--kv-cache-dtype"] == "fp8"
    assert parsed(export(plan, "sglang").text)[2]["--kv-cache-dtype"] == "fp8_e4m3"
    assert parsed(export(plan, "llama.cpp").text)[2]["--cache-type-k"] == "q8_0"


def dealt(tensor_split: str, gpu_layers: int, num_layers: int) -> list[int | None]:
    """The device of each layer and of the output by llama.cpp's rule, in its 32-bit floats."""
    running = np.cumsum(np.array([float(part) for part in tensor_split.split(",")], np.float32))
    shares = (running / running[-1]).astype(np.float32)
    first = max(num_layers + 1 - gpu_layers, 0)
    number = min(gpu_layers, num_layers + 1)
    places = np.arange(number, dtype=np.float32) / np.float32(number)
    on_gpus = [int(place) for place in np.searchsorted(shares, places, side="right")]
    return [*[None] * first, *on_gpus]  # None is the processor


# Files of GLM-4.5, DeepSeek-V3 and others have a layer more, which predicts a token further on:
# llama.cpp counts it (`n_layer_all`).
@pytest.mark.parametrize("further", [0, 1])
@settings(max_examples=examples(60))
@given(st.lists(st.integers(1, 40), min_size=2, max_size=8))
def test_llama_cpp_deals_just_the_planned_layers(further: int, counts: list[int]) -> None:
    gpus = ",".join(["64GiB"] * len(counts))
    options = parsed(export(staged(counts, gpus=gpus), "llama.cpp").text)[2]
    num_layers = sum(counts) + further
    at = dealt(options["--tensor-split"], int(options["--n-gpu-layers"]), num_layers)
    expected = [number for number, count in enumerate(counts) for _ in range(count)]
    # The output is on the last one, and the further layer.
    assert at == [*expected, *[len(counts) - 1] * (1 + further)]
    assert options["--device"].split(",") == [f"CUDA{number}" for number in range(len(counts))]


def test_llama_cpp_is_told_where_embeddings_are() -> None:
    told = " ".join(str(export(staged([3, 2]), "llama.cpp")).split())
    # One name, so one place: create_tensor asks the overrides before it looks for the output's.
    assert r"'token_embd\.weight=CUDA0' places it, and a tied head" in told
    assert "quantized file needs less" in told


# Of SGLang 0.5.23, srt/models: whether `forward` takes pp_proxy_tensors, without which
# model_executor/model_runner.py refuses --pp-size. Mistral's inherits it from Llama's. Of vLLM
# 0.33.0: whether the class is `SupportsPP`, without which config/model.py refuses.
FAMILIES = {
    "ChatGLMForCausalLM": (False, True),
    "ChatGLMForConditionalGeneration": (False, True),
    "MistralForCausalLM": (True, True),
    "Qwen2VLForConditionalGeneration": (False, True),
    "Glm4MoeForCausalLM": (True, True),
    "Gemma3nForConditionalGeneration": (False, False),
    "Zamba2ForCausalLM": (True, False),  # transformers' class there: its config has a plan
    "Mamba2ForCausalLM": (False, False),
    "Olmo2ForCausalLM": (False, True),  # transformers' class in vLLM
}


@pytest.mark.parametrize("model", FAMILIES)
def test_stages_are_refused_where_a_class_takes_none(model: str) -> None:
    whole, split = (replace(staged(counts), model=model) for counts in ([5], [3, 2]))
    for tool, option, runs in zip(
        ("sglang", "vllm"), ("--pp-size", "--pipeline-parallel-size"), FAMILIES[model], strict=True
    ):
        assert option not in export(whole, tool).text
        if runs:
            assert f"{option} 2" in export(split, tool).text
        else:
            with pytest.raises(UsageError, match="doesn't support pipelines") as refused:
                export(split, tool)
            assert "plan for one GPU" in (refused.value.hint or "")


@pytest.mark.parametrize("tool", ["sglang", "vllm"])
def test_classes_that_a_tool_has_not_are_run_as_transformers_has_them(tool: str) -> None:
    plan = replace(staged([3, 2]), model="GlmForCausalLM")
    assert "has no own class for GlmForCausalLM" in str(export(plan, tool))
    assert "no own class" not in str(export(staged([3, 2]), tool))


def test_sglang_cuts_no_model_with_embeddings_for_each_layer() -> None:
    """Gemma 4 E2B and E4B: `Gemma4TextModel` raises with more ranks under CUDA graphs."""
    for counts in ([5], [3, 2]):
        plan = replace(staged(counts), model="Gemma4ForCausalLM")
        entries = [("model.embed_tokens_per_layer", "cuda:0"), *plan.placement.entries]
        small = replace(plan, placement=replace(plan.placement, entries=tuple(entries)))
        assert "python -m sglang" in export(plan, "sglang").text
        assert "vllm serve" in export(small, "vllm").text
        if len(counts) == 1:
            assert "python -m sglang" in export(small, "sglang").text
        else:
            with pytest.raises(UsageError, match="doesn't support pipelines"):
                export(small, "sglang")


def test_the_table_of_classes_says_one_thing_of_each() -> None:
    """What it says is held against the tools' sources by `benchmarks/exports.py`."""
    table = json.loads((Path(common.__file__).parent / "pipelines.json").read_text())
    for known in table.values():
        assert not {*known["pipeline"]} & {*known["single"]}
        assert len({*known["pipeline"]}) == len(known["pipeline"]) > 80
        assert re.fullmatch(r"\d+\.\d+\.\d+", known["version"])


@pytest.mark.parametrize("tool", ["vllm", "sglang"])
def test_code_of_a_checkpoint_runs_where_it_is_needed_or_was_allowed(tool: str) -> None:
    plan = staged([5])
    allowed = replace(plan, request=replace(plan.request, trust_remote_code=True))
    for needing in (replace(plan, model="ChatGLMForCausalLM"), allowed):
        assert parsed(export(needing, tool).text)[1][-1] == "--trust-remote-code"
    assert "--trust-remote-code" not in export(plan, tool).text


def test_glm_4v_is_called_what_vllm_calls_it_and_sglang_has_none() -> None:
    plan = replace(staged([3, 2]), model="GLM4VForConditionalGeneration")
    tower = ("model.vision.transformer", "cuda:0")
    with_tower = replace(plan.placement, entries=(tower, *plan.placement.entries))
    plan = replace(plan, placement=with_tower)
    _, words, options = parsed(export(plan, "vllm").text)
    assert options["--hf-overrides"] == '{"architectures": ["GLM4VForCausalLM"]}'
    assert words[-1] == "--trust-remote-code"
    with pytest.raises(UsageError, match="no class for GLM-4V"):
        export(plan, "sglang")
    text = replace(staged([3, 2]), model="ChatGLMForCausalLM")
    assert "--hf-overrides" not in export(text, "vllm").text


def test_models_on_modelscope() -> None:
    """vLLM and SGLang read it by a variable, transformers not at all."""
    made = staged([3, 2], source="modelscope:ZhipuAI/glm-4-9b-chat@v1")
    environment, words, options = parsed(export(made, "vllm").text)
    assert environment["VLLM_USE_MODELSCOPE"] == "True"
    assert (words[2], options["--revision"]) == ("ZhipuAI/glm-4-9b-chat", "v1")
    environment, words, options = parsed(export(made, "sglang").text)
    assert environment["SGLANG_USE_MODELSCOPE"] == "true"
    assert "ZhipuAI/glm-4-9b-chat" in export(made, "sglang").text
    assert options["--revision"] == "v1"
    notes = " ".join(export(made, "accelerate").notes)
    assert (
        "modelscope download --model ZhipuAI/glm-4-9b-chat --revision v1 --local_dir "
        "ZhipuAI/glm-4-9b-chat"
    ) in notes
    assert "'ZhipuAI/glm-4-9b-chat'" in export(made, "accelerate").text
    assert "MODELSCOPE" not in export(staged([3, 2]), "vllm").text
