from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from closeness import close
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

from duoka.errors import ModelError
from duoka.models import build, chatglm
from duoka.models.cache_argument import CACHE

TOLERANCE = 1e-5
NAMES = ["chatglm2-6b", "chatglm2-6b-32k", "chatglm3-6b", "chatglm3-6b-128k", "glm-4-9b-chat"]


@pytest.fixture
def model(reference: Any) -> PreTrainedModel:
    chatglm.register()
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        reference.directory, dtype=torch.float32
    )
    return loaded


def published_config(published_data: Path, name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((published_data / "configs" / f"{name}.json").read_text())
    return content


def assert_close(got: Tensor, expected: Tensor) -> None:
    assert close(got, expected, TOLERANCE)


@torch.no_grad()
def test_logits_are_those_of_the_original_code(model: PreTrainedModel, reference: Any) -> None:
    values = reference.values
    assert_close(model(values["input_ids"]).logits, values["logits"])
    last = model(values["long.input_ids"], logits_to_keep=4).logits
    assert_close(last, values["long.last_logits"])


@torch.no_grad()
def test_left_padded_batch(model: PreTrainedModel, reference: Any) -> None:
    values = reference.values
    mask = values["padded.attention_mask"]
    logits = model(
        values["padded.input_ids"], attention_mask=mask, position_ids=values["padded.position_ids"]
    ).logits
    # What a padding token "answers" depends on how a kernel treats a row that sees nothing.
    assert_close(logits[mask.bool()], values["padded.logits"][mask.bool()])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_greedy_decoding(model: PreTrainedModel, reference: Any, attention: str) -> None:
    values = reference.values
    model.set_attn_implementation(attention)
    expected = values["greedy.new_ids"]
    prompt = values["input_ids"]
    out = model.generate(
        prompt, max_new_tokens=expected.shape[1], do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert torch.equal(out[:, prompt.shape[1] :], expected)


@torch.no_grad()
def test_decoding_with_a_cache_equals_one_long_prefill(
    model: PreTrainedModel, reference: Any
) -> None:
    ids = reference.values["long.input_ids"]
    first = model(ids[:, :-4], logits_to_keep=1)
    rest = model(ids[:, -4:], **{CACHE: first[CACHE]}).logits
    assert_close(rest, reference.values["long.last_logits"])


def test_loss_and_gradients(model: PreTrainedModel, reference: Any) -> None:
    loss = model(reference.values["input_ids"], labels=reference.values["train.labels"]).loss
    assert loss.item() == pytest.approx(reference.numbers["train.loss"], rel=TOLERANCE)
    loss.backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.data = parameter.grad
    gradients = published_state(model)
    expected = reference.numbers["train.grad_norm"]
    assert set(gradients) == set(expected)
    for name, norm in expected.items():
        assert gradients[name].norm().item() == pytest.approx(norm, rel=TOLERANCE, abs=TOLERANCE), (
            name
        )


def published_state(model: PreTrainedModel) -> dict[str, Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    state: dict[str, Tensor] = revert_weight_conversion(model, model.state_dict())
    return state


def test_save_pretrained_writes_the_published_names(
    model: PreTrainedModel, reference: Any, tmp_path: Path
) -> None:
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    published = dict(reference.weights)
    del published["transformer.rotary_pos_emb.inv_freq"]
    assert set(saved) == set(published)
    assert all(torch.equal(saved[name], published[name]) for name in saved)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is type(model)
    assert again.config.rope_parameters == model.config.rope_parameters
    assert again.config.query_length_scaling == model.config.query_length_scaling
    for name, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


def test_sharded_bin_files_load(reference: Any, tmp_path: Path) -> None:
    chatglm.register()
    names = sorted(reference.weights)
    shards = {"one.bin": names[::2], "two.bin": names[1::2]}
    for file, held in shards.items():
        torch.save({name: reference.weights[name] for name in held}, tmp_path / file)
    index = {"weight_map": {name: file for file, held in shards.items() for name in held}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, **index}))
    (tmp_path / "config.json").write_text(json.dumps(reference.config))
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert_close(model(reference.values["input_ids"]).logits, reference.values["logits"])


def test_the_body_alone_loads(reference: Any) -> None:
    chatglm.register()
    body, report = AutoModel.from_pretrained(reference.directory, output_loading_info=True)
    assert type(body) is chatglm.ChatGLMModel
    assert not report["missing_keys"]
    assert report["unexpected_keys"] <= {"lm_head.weight"}


def test_casting_leaves_rotary_frequencies_in_32_bit(
    model: PreTrainedModel, reference: Any
) -> None:
    exact = model.model.rotary_emb.inv_freq.clone()
    for cast in (nn.Module.half, nn.Module.bfloat16, nn.Module.double, nn.Module.float):
        cast(model)
        frequencies = model.model.rotary_emb.inv_freq
        assert frequencies.dtype == torch.float32
        assert torch.equal(frequencies, exact)
    half = AutoModelForCausalLM.from_pretrained(reference.directory, dtype=torch.float16)
    assert torch.equal(half.model.rotary_emb.inv_freq, exact)
    assert torch.equal(half.model.rotary_emb.original_inv_freq, exact)


@pytest.mark.parametrize("name", ["chatglm2-6b", "chatglm2-6b-32k"])
def test_frequencies_survive_meta_and_to_empty(published_data: Path, name: str) -> None:
    rotary = build(published_config(published_data, name)).model.rotary_emb
    exact = rotary.inv_freq.clone()
    rotary.to_empty(device="cpu")
    assert torch.equal(rotary.inv_freq, exact)
    rotary.to("meta").half()
    assert rotary.inv_freq.is_meta
    assert rotary.inv_freq.dtype == torch.float32
    rotary.to_empty(device="cpu")
    assert torch.equal(rotary.inv_freq, exact)
    assert torch.equal(rotary.original_inv_freq, exact)


def test_an_auto_map_raises_no_question(reference: Any, tmp_path: Path) -> None:
    chatglm.register()
    auto_map = {
        "AutoConfig": "configuration_chatglm.ChatGLMConfig",
        "AutoModelForCausalLM": "modeling_chatglm.ChatGLMForConditionalGeneration",
    }
    (tmp_path / "config.json").write_text(json.dumps({**reference.config, "auto_map": auto_map}))
    (tmp_path / "model.safetensors").symlink_to(reference.directory / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(model) is chatglm.ChatGLMForCausalLM
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert type(again) is chatglm.ChatGLMForCausalLM


@pytest.mark.parametrize("name", NAMES)
def test_published_configurations(published_data: Path, name: str) -> None:
    config = published_config(published_data, name)
    model = build(config)
    parsed = model.config
    assert parsed.num_hidden_layers == config["num_layers"]
    assert parsed.vocab_size == config["padded_vocab_size"]
    assert parsed.max_position_embeddings == config["seq_length"]
    assert parsed.query_length_scaling == (name == "chatglm3-6b-128k")
    assert parsed.rope_parameters["rope_type"] == ("linear" if name.endswith("32k") else "default")


@pytest.mark.parametrize(
    ("name", "data"), [("chatglm3-6b", "chatglm3-6b"), ("glm-4-9b-chat", "glm-4-9b-chat")]
)
def test_state_dict_and_index_key_by_key_and_byte_by_byte(
    published_data: Path, name: str, data: str
) -> None:
    model = build(published_config(published_data, name))
    built = published_state(model)
    listed = json.loads((published_data / "state_dicts" / f"{data}.json").read_text())
    # Follows from the configuration; the files hold it, a model doesn't need it.
    extra = {"transformer.rotary_pos_emb.inv_freq"}
    assert {key: list(value.shape) for key, value in built.items()} == {
        key: shape for key, shape in listed["shapes"].items() if key not in extra
    }
    assert sum(value.numel() for value in built.values()) == listed["parameters"]
    (path,) = (published_data / "indices").glob(f"{data}.*")
    index = json.loads(path.read_text())
    assert set(built) == set(index["weight_map"]) - extra
    total = sum(value.numel() * value.element_size() for value in built.values())
    frequencies = sum(
        math.prod(listed["shapes"].get(key, [32])) * 2 for key in extra & set(index["weight_map"])
    )
    assert total + frequencies == index["metadata"]["total_size"]


def test_one_million_tokens(published_data: Path) -> None:
    config = published_config(published_data, "glm-4-9b-chat")
    config |= {"multi_query_group_num": 4, "rope_ratio": 10_000, "seq_length": 1_048_576}
    built = published_state(build(config))
    listed = json.loads((published_data / "state_dicts" / "glm-4-9b-chat-1m.json").read_text())
    shapes = {key: shape for key, shape in listed["shapes"].items() if "inv_freq" not in key}
    assert {key: list(value.shape) for key, value in built.items()} == shapes


def test_chatglm2_32k_divides_positions(published_data: Path) -> None:
    plain = build(published_config(published_data, "chatglm2-6b")).model.rotary_emb.inv_freq
    scaled = build(published_config(published_data, "chatglm2-6b-32k")).model.rotary_emb.inv_freq
    assert torch.equal(scaled, plain / 16)


def test_query_length_scale_starts_past_position_1983() -> None:
    scale = chatglm.query_length_scale(torch.arange(2400))
    assert torch.equal(scale[:1984], torch.ones(1984))
    assert (scale[1984:] > 1).all()
    assert scale[2300].item() == pytest.approx(math.log(2365) / math.log(2048))


def test_query_length_scaling_can_be_stated(reference: Any) -> None:
    for stated in (True, False):
        model = build({**reference.config, "query_length_scaling": stated})
        scaled = isinstance(model.model.layers[0].self_attn, chatglm.ChatGLMAttention)
        assert scaled is stated


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"position_encoding_2d": True}, "different"),
        ({"rmsnorm": False}, "rmsnorm"),
        ({"multi_query_attention": False}, "multi_query_attention"),
        ({"add_bias_linear": True}, "add_bias_linear"),
    ],
)
def test_other_architectures_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        build({"model_type": "chatglm", **given})


def test_outputs_can_be_recorded(model: PreTrainedModel, reference: Any) -> None:
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(
            reference.values["input_ids"], output_hidden_states=True, output_attentions=True
        )
    layers = model.config.num_hidden_layers
    assert len(out.hidden_states) == layers + 1
    assert len(out.attentions) == layers
