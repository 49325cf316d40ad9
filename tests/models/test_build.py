from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from duoka.errors import ModelError
from duoka.models import RemoteCode, build, meta

TINY: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    "gemma": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "gptj": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    "falcon_mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    "t5": {"d_model": 32, "d_ff": 48, "num_layers": 2, "num_heads": 4, "d_kv": 8},
    "marian": {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "pad_token_id": 1},
    "deepseek_v3": {"hidden_size": 32, "num_hidden_layers": 2, "first_k_dense_replace": 1},
}


def config_of(model_type: str) -> dict[str, Any]:
    return {"model_type": model_type, "vocab_size": 128, **TINY[model_type]}


@pytest.mark.parametrize("model_type", TINY)
def test_parameters_on_meta_and_buffers_as_transformers_makes_them(model_type: str) -> None:
    model = build(config_of(model_type), dtype=torch.bfloat16)
    assert all(parameter.is_meta for parameter in model.parameters())
    expected = type(model)._from_config(model.config, dtype=torch.bfloat16)
    buffers = dict(expected.named_buffers())
    assert dict(model.named_buffers()).keys() == buffers.keys()
    for name, buffer in model.named_buffers():
        assert buffer.dtype == buffers[name].dtype, name
        assert torch.equal(buffer, buffers[name]), name
    assert [name for name, _ in model.named_parameters()] == [
        name for name, _ in expected.named_parameters()
    ]


def test_ties_are_kept() -> None:
    model = build({**config_of("gemma"), "tie_word_embeddings": True})
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_full_size_takes_no_memory(published_data: Path) -> None:
    config = json.loads((published_data / "configs" / "glm-4-9b-chat.json").read_text())
    model = build(config)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert sum(parameter.numel() for parameter in model.parameters()) == 9_399_951_360
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert not model.training


def test_a_named_architecture_is_built_and_a_body_gets_its_head() -> None:
    named = build({**config_of("llama"), "architectures": ["LlamaForSequenceClassification"]})
    assert type(named) is transformers.LlamaForSequenceClassification
    body = build({**config_of("llama"), "architectures": ["LlamaModel"]})
    assert type(body) is transformers.LlamaForCausalLM
    assert type(build(config_of("t5"))) is transformers.T5ForConditionalGeneration
    assert type(build(config_of("marian"))) is transformers.MarianMTModel


def test_another_familys_architecture_is_not_believed() -> None:
    model = build({**config_of("llama"), "architectures": ["GPT2LMHeadModel", "os", "nn"]})
    assert type(model) is transformers.LlamaForCausalLM


def test_attention() -> None:
    stated = {**config_of("llama"), "attn_implementation": "flash_attention_2"}
    assert build(stated).config._attn_implementation == "sdpa"


def test_a_composite_configuration_is_not_taken_for_its_text_part() -> None:
    text = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 8}
    config = {"model_type": "llama4", "text_config": {**text, "intermediate_size_mlp": 48}}
    model = build({**config, "vision_config": {"num_hidden_layers": 1}})
    assert type(model) is transformers.Llama4ForConditionalGeneration


def test_a_type_that_borrows_another_familys_class() -> None:
    text = {"model_type": "qwen2", "hidden_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    config = {"model_type": "pp_chart2table", "text_config": {**text, **heads}}
    model = build({**config, "vision_config": {"num_hidden_layers": 1}})
    assert type(model) is transformers.GotOcr2ForConditionalGeneration
    assert not isinstance(model.config, transformers.GotOcr2Config)


def test_infinities_as_transformers_writes_them() -> None:
    limits = [0.0, {"__float__": "Infinity"}]
    config = {"model_type": "mamba2", "hidden_size": 32, "num_hidden_layers": 1, "num_heads": 8}
    model = build({**config, "head_dim": 8, "time_step_limit": limits})
    assert list(model.config.time_step_limit) == [0.0, float("inf")]
    assert limits == [0.0, {"__float__": "Infinity"}], "the caller's own stays as it is"


def test_modules_kept_in_32_bit() -> None:
    model = build(config_of("t5"), dtype=torch.float16)
    kept = model.encoder.block[0].layer[1].DenseReluDense.wo.weight
    assert kept.is_meta
    assert kept.dtype == torch.float32
    assert model.shared.weight.dtype == torch.float16


def test_unknown_model_type_names_the_nearest() -> None:
    with pytest.raises(ModelError, match="'chatgml'") as caught:
        build({"model_type": "chatgml"})
    assert "'chatglm'" in (caught.value.hint or "")
    assert caught.value.exit_code == 5


@pytest.mark.parametrize("model_type", [None, 3, ["llama"]])
def test_model_type_must_be_a_name(model_type: object) -> None:
    with pytest.raises(ModelError, match="model_type"):
        build({"model_type": model_type})


def test_invalid_values_are_reported() -> None:
    with pytest.raises(ModelError, match="hidden_size"):
        build({"model_type": "llama", "hidden_size": "large"})


REMOTE_CODE = """
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

class PebbleConfig(PretrainedConfig):
    model_type = "pebble"
    def __init__(self, width=8, **kwargs):
        self.width = width
        super().__init__(**kwargs)

class PebbleModel(PreTrainedModel):
    config_class = PebbleConfig
    def __init__(self, config):
        super().__init__(config)
        self.lift = nn.Linear(config.width, config.width)
        table = torch.empty(4, config.width)
        table[:] = torch.arange(4.0)[:, None]
        self.register_buffer("table", table, persistent=False)
        self.post_init()
    def _init_weights(self, module):
        pass
"""


@pytest.mark.parametrize("config", [{"architectures": -1}, {"architectures": [3, None, "os"]}])
def test_architectures_that_are_none(config: dict[str, Any]) -> None:
    sizes = {"num_hidden_layers": 1, "hidden_size": 64, "vocab_size": 100}
    try:
        built = build({"model_type": "llama", **sizes, **config})
    except ModelError as refusal:  # older transformers check the type
        told = str(refusal)
    else:
        told = type(built).__name__
    assert told == "LlamaForCausalLM" or "'architectures'" in told


def test_a_mask_larger_than_the_memory() -> None:
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100, "n_positions": 200_000}
    with pytest.raises(ModelError, match=r"a tensor of \d{11,} bytes was requested"):
        build({"model_type": "openai-gpt", **sizes})


@pytest.mark.parametrize("auto_map", ["AutoModel", ["AutoModel"], 3, {"AutoModel": 3}])
def test_an_auto_map_that_is_none(auto_map: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="names no code"):
        build(
            {"model_type": "x", "auto_map": auto_map}, code=RemoteCode(tmp_path, {}, legacy=False)
        )


@pytest.mark.parametrize("model_type", ["x" * 101, "a b", "", 3, "\x1b[2J"])
def test_a_model_type_that_is_no_name(model_type: Any) -> None:
    with pytest.raises(ModelError, match="which is not a valid name"):
        build({"model_type": model_type})


def test_a_config_without_a_model_type() -> None:
    with pytest.raises(ModelError, match="has no model_type") as caught:
        build({"hidden_size": 8})
    assert caught.value.hint is not None


@pytest.mark.parametrize("legacy", [False, True])
def test_remote_code_only_when_asked_for(tmp_path: Path, *, legacy: bool) -> None:
    code = RemoteCode(tmp_path, {"code_pebble.py": REMOTE_CODE.encode()}, legacy=legacy)
    references = {"AutoConfig": "code_pebble.PebbleConfig", "AutoModel": "code_pebble.PebbleModel"}
    config = {"model_type": "pebble", "width": 6, "auto_map": references}
    with pytest.raises(ModelError, match="pebble") as caught:
        build(config)
    assert "--trust-remote-code" in (caught.value.hint or "")
    model = build(config, code=code)
    assert model.lift.weight.is_meta
    assert torch.equal(model.table, torch.arange(4.0)[:, None].expand(4, 6))
    with pytest.raises(ModelError, match="auto_map"):
        build({"model_type": "pebble"}, code=code)


def test_a_known_type_with_code_of_its_own(tmp_path: Path, reference: Any) -> None:
    references = {"AutoConfig": "code_pebble.PebbleConfig", "AutoModel": "code_pebble.PebbleModel"}
    config = {**reference.config, "auto_map": references}
    assert type(build(config)).__name__ == "ChatGLMForCausalLM"
    code = RemoteCode(tmp_path, {"code_pebble.py": REMOTE_CODE.encode()}, legacy=True)
    assert type(build(config, code=code)).__name__ == "PebbleModel"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.large = nn.Parameter(torch.zeros(1 << 13, 1 << 13))
        self.mask = nn.Buffer(torch.ones(1 << 13, 1 << 13).tril(), persistent=False)
        self.constant = torch.ones(3) / 2


def test_construct_any_module() -> None:
    module = meta.construct(Block)
    assert module.weight.is_meta
    assert module.large.is_meta
    assert module.mask[1, :3].tolist() == [1, 1, 0]
    assert module.constant.tolist() == [0.5, 0.5, 0.5]
    assert not nn.Linear(2, 2).weight.is_meta


def test_construct_reports_the_constructors_own_error() -> None:
    def fail() -> nn.Module:
        raise LookupError("no such size")

    with pytest.raises(LookupError, match="no such size"):
        meta.construct(fail)


@pytest.mark.slow
def test_importing_registers_nothing() -> None:
    script = (
        "import duoka.models\n"
        "from transformers.models.auto.configuration_auto import CONFIG_MAPPING\n"
        "raise SystemExit('chatglm' in CONFIG_MAPPING)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
