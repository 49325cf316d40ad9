"""ms-swift: its command lines, read as a shell and its argument classes read them.

`benchmarks/exports.py` asks ms-swift itself.
"""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tuning
from accelerate.utils import get_max_memory
from accelerate.utils.modeling import check_device_map
from exported import parsed
from staged import placed, renamed, staged
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from duoka import Plan, export, plan
from duoka.checkpoint.checkpoint import Checkpoint
from duoka.errors import UsageError
from duoka.forecast.workload import Training, Workload

pytestmark = pytest.mark.usefixtures("single_sequences")

COMMIT = "0123456789abcdef" * 2 + "01234567"


def commands(plan: Plan) -> dict[str, tuple[dict[str, str], dict[str, str]]]:
    """Environment and options of each command by its name."""
    read = [parsed(text) for text in export(plan, "swift").text.split("\n\n")]
    assert all(words[0] == "swift" for _, words, _ in read)
    return {words[1]: (environment, options) for environment, words, options in read}


def device_map(options: dict[str, str]) -> dict[str, Any]:
    """As `ModelArguments._init_device_map` reads it."""
    read: dict[str, Any] = json.loads(options["--device_map"])
    return read


def test_inference_is_infer_and_deploy() -> None:
    both = commands(staged([3, 2]))
    assert [*both] == ["infer", "deploy"]
    environment, options = both["infer"]
    assert (environment, options) == both["deploy"]
    assert environment == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "0,1"}
    assert device_map(options) == {
        "model.embed_tokens": 0,
        "model.rotary_emb": 0,
        **{f"model.layers.{number}": int(number >= 3) for number in range(5)},
        "model.norm": 1,
        "lm_head": 1,
    }
    del options["--device_map"], options["--max_memory"]
    assert options == {
        "--model": "my model",
        "--torch_dtype": "bfloat16",
        "--max_length": "7936",
        "--max_new_tokens": "256",
        "--max_batch_size": "1",
    }


def test_numbers_are_those_of_the_visible_gpus() -> None:
    """A plan of the third and fourth GPU: CUDA then counts from 0."""
    made = renamed(staged([3, 2]), {f"cuda:{number}": f"cuda:{number + 2}" for number in range(4)})
    environment, options = commands(made)["infer"]
    assert environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert set(device_map(options).values()) == {0, 1}
    # `ModelArguments._init_max_memory` reads it so; keys of JSON would be texts.
    max_memory = ast.literal_eval(options["--max_memory"])
    assert get_max_memory(max_memory) == {0: 24 * 2**30, 1: 12 * 2**30}


@pytest.mark.parametrize(
    ("source", "place"),
    [
        ("chatglm3-6b-tiny", "published_data"),
        ("glm-4-9b-tiny", "published_data"),
        ("glm-4v-9b-tiny", "shared_data"),
    ],
)
def test_the_map_has_the_names_of_the_published_code(
    source: str, place: str, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(place) / "reference" / source
    made = plan(path, "virtual:3x640MiB", Workload(prompt_tokens=100, new_tokens=28), use_all=True)
    _, options = commands(made)["infer"]
    names = device_map(options)
    assert set(names.values()) == {0, 1, 2}
    tensors = Checkpoint.open(path).tensors or {}
    assert all(any(f"{name}.".startswith(f"{each}.") for each in names) for name in tensors)
    assert all(name.startswith("transformer.") for name in [*names, *tensors])


@pytest.mark.parametrize("family", ["llama", "tied"])
def test_the_map_fits_the_class_of_transformers(family: str, tmp_path: Path) -> None:
    path = tuning.write_model(family, tmp_path / family)
    made = plan(path, "virtual:2x64MiB", Workload(prompt_tokens=8, new_tokens=4), use_all=True)
    _, options = commands(made)["infer"]
    check_device_map(AutoModelForCausalLM.from_pretrained(path), device_map(options))
    assert "--model_type" not in options


@pytest.mark.parametrize(
    ("source", "model_type", "version"),
    [
        ("zai-org/chatglm2-6b", "chatglm2", "<4.42"),
        ("THUDM/chatglm3-6b-128k", "chatglm3", "<4.42"),
        ("modelscope:ZhipuAI/glm-4-9b-chat-1m", "chatglm4", ">=4.42"),
        ("/models/GLM-4-9B-Chat", "chatglm4", ">=4.42"),
        ("/models/codegeex4-all-9b", "codegeex4", "<4.42"),
        ("/models/mine", "MODEL_TYPE", None),
    ],
)
def test_the_type_and_the_version_of_transformers(
    source: str, model_type: str, version: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("duoka.report.export.swift.map_of", lambda plan, *names, **to: {})
    made = replace(staged([3]), model="ChatGLMForConditionalGeneration", source=source)
    made = replace(made, source=f"{source}@{COMMIT}" if source.startswith("zai-org") else source)
    assert commands(made)["infer"][1]["--model_type"] == model_type
    told = notes(made)
    if version is None:
        assert "replace MODEL_TYPE by chatglm2, chatglm3, chatglm4 or codegeex4" in told
    else:
        assert f"ms-swift 4.6.0 requires transformers{version} for this model" in told
    assert "the checkpoint's own code runs" in told


def test_glm4v_has_its_own_type_and_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("duoka.report.export.swift.map_of", lambda plan, *names, **to: {})
    made = replace(staged([3]), model="GLM4VForConditionalGeneration", source="/models/x-glm-4v-9b")
    tower = ("model.vision", made.devices[0])
    entries = (*made.placement.entries, tower)
    made = replace(made, placement=replace(made.placement, entries=entries))
    assert commands(made)["infer"][1]["--model_type"] == "chatglm4v"
    assert "transformers>=4.42,<4.45" in str(export(made, "swift"))


def test_classes_of_transformers_have_their_versions() -> None:
    made = replace(staged([3]), model="Glm4ForCausalLM")
    assert "requires transformers>=4.51 for this model" in str(export(made, "swift"))
    assert "requires transformers" not in str(export(staged([3]), "swift"))


def test_a_class_of_two_types_is_named() -> None:
    """ms-swift can't choose between its types of `GlmForCausalLM` for a name it doesn't know."""
    made = replace(staged([3]), model="GlmForCausalLM", source="/models/glm-4-9b-chat-hf")
    assert commands(made)["infer"][1]["--model_type"] == "glm_edge"
    assert "--model_type" not in commands(staged([3]))["infer"][1]


def test_hubs_and_revisions() -> None:
    on_hub = replace(staged([3]), source=f"meta/llama@{COMMIT}")
    options = commands(on_hub)["infer"][1]
    named = {"--model": "meta/llama", "--model_revision": COMMIT, "--use_hf": "True"}
    assert named.items() <= options.items()
    options = commands(replace(staged([3]), source="modelscope:LLM/llama@v1"))["infer"][1]
    assert {"--model": "LLM/llama", "--model_revision": "v1"}.items() <= options.items()
    assert "--use_hf" not in options
    options = commands(replace(staged([3]), source="modelscope:LLM/llama"))["infer"][1]
    assert options["--model"] == "LLM/llama"
    assert "--model_revision" not in options


def notes(plan: Plan) -> str:
    return " ".join(export(plan, "swift").notes)


def training_plan(training: Training, **workload: Any) -> Plan:
    made = staged([3, 2])
    changed = replace(made.workload, training=training, new_tokens=0, **workload)
    return replace(made, workload=changed)


def test_lora_is_sft() -> None:
    training = Training(
        lora_rank=16, lora_dropout=0.1, gradient_checkpointing=True, micro_batches=4
    )
    both = commands(training_plan(training, batch=2, prompt_tokens=2048))
    assert [*both] == ["sft"]
    options = both["sft"][1]
    del options["--device_map"], options["--max_memory"]
    assert options == {
        "--model": "my model",
        "--torch_dtype": "bfloat16",
        "--max_length": "2048",
        "--dataset": "DATA.jsonl",
        "--tuner_type": "lora",
        "--bf16": "True",
        "--fp16": "False",
        "--per_device_train_batch_size": "2",
        "--gradient_accumulation_steps": "4",
        "--gradient_checkpointing": "True",
        "--optim": "adamw_torch",
        "--lora_rank": "16",
        "--lora_alpha": "32",
        "--use_rslora": "False",
        "--lora_dropout": "0.1",
        "--lora_dtype": "bfloat16",
    }


def test_preferences_are_rlhf() -> None:
    """ms-swift counts pairs, too."""
    both = commands(training_plan(Training(dpo=True, micro_batches=4), batch=4))
    assert [*both] == ["rlhf"]
    options = both["rlhf"][1]
    assert (options["--rlhf_type"], options["--tuner_type"]) == ("dpo", "lora")
    assert options["--per_device_train_batch_size"] == "2"
    assert options["--gradient_accumulation_steps"] == "4"


def test_full_training_with_master_weights() -> None:
    training = Training(method="full", master_weights=True, optimizer="adamw8bit")
    options = commands(training_plan(training))["sft"][1]
    expected = {
        "--torch_dtype": "float32",
        "--bf16": "True",
        "--tuner_type": "full",
        "--optim": "adamw_bnb_8bit",
        "--gradient_checkpointing": "False",
    }
    assert expected.items() <= options.items()
    assert not any("lora" in name for name in options)


def test_targets_are_one_expression() -> None:
    training = Training(lora_targets=("q_proj", "v_proj"), master_weights=True)
    options = commands(training_plan(training))["sft"][1]
    assert (
        commands(training_plan(replace(training, rslora=True)))["sft"][1]["--use_rslora"] == "True"
    )
    assert options["--target_regex"] == r"(.*\.)?(q_proj|v_proj)"
    assert (options["--torch_dtype"], options["--lora_dtype"]) == ("bfloat16", "float32")


def test_nf4_is_what_bitsandbytes_makes() -> None:
    made = training_plan(Training(), quantize="nf4")
    options = commands(made)["sft"][1]
    assert (options["--quant_method"], options["--quant_bits"]) == ("bnb", "4")
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    assert "--bnb_4bit_quant_type" not in options  # nf4 is ms-swift's default
    assert options["--bnb_4bit_use_double_quant"] == str(config.bnb_4bit_use_double_quant)
    assert options["--bnb_4bit_compute_dtype"] == "bfloat16"


def test_what_ms_swift_does_otherwise_is_told() -> None:
    made = staged([3, 2])
    assert "swift deploy doesn't limit a request's max_tokens" in notes(made)
    assert "chunks" not in notes(made)
    chunked = replace(made.workload, prefill_chunk_tokens=512, cache="int8")
    told = notes(replace(made, workload=chunked))
    assert "the plan's prefill runs in chunks of 512 tokens" in told
    assert "the plan's is int8" in told
    told = notes(training_plan(Training(rows="packed", schedule="1f1b")))
    assert "one GPU works at a time, and pads rows; the plan: 1f1b, packed" in told


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_other_weights_are_refused(scheme: str) -> None:
    made = staged([3])
    made = replace(made, workload=replace(made.workload, quantize=scheme))
    with pytest.raises(UsageError, match=f"it has no weights in {scheme}") as caught:
        export(made, "swift")
    assert caught.value.hint == "plan with --quantize nf4, or export to accelerate"


def test_offloaded_modules() -> None:
    made = replace(staged([3]), offloaded=("model.layers.2",))
    assert device_map(commands(made)["infer"][1])["model.layers.2"] == "cpu"
    training = replace(training_plan(Training()), offloaded=("model.layers.2",))
    with pytest.raises(UsageError, match="its trainer rejects offloaded modules"):
        export(training, "swift")


def test_targets_of_the_published_code_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made = training_plan(Training(lora_targets=("q_proj",)))
    monkeypatch.setattr("duoka.report.export.swift.map_of", lambda plan, *names, **to: {})
    with pytest.raises(UsageError, match="other modules than the plan's adapters"):
        export(replace(made, model="ChatGLMForConditionalGeneration"), "swift")


def test_modules_of_one_gpu_in_several_places() -> None:
    """Hooks move inputs anywhere: the stages need not be whole."""
    made = placed(staged([3, 2]), lm_head="cuda:0")
    assert device_map(commands(made)["infer"][1])["lm_head"] == 0
