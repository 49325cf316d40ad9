"""Checkpoints as ``save_pretrained`` writes them, put together again by the recipe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from closeness import close
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from duoka.errors import LoadError
from duoka.models import build
from duoka.models.conversion import Recipe, initialize_derived, plan_tensors, published_tensors

DENSE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = {"moe_intermediate_size": 24, "num_experts_per_tok": 2, **DENSE, **HEADS}
TINY: dict[str, dict[str, Any]] = {
    "llama": {**DENSE, **HEADS},
    "qwen2": {**DENSE, **HEADS, "tie_word_embeddings": True},
    "gemma": {**DENSE, **HEADS},
    "glm": {**DENSE, **HEADS, "pad_token_id": 0},
    "phi3": {**DENSE, **HEADS, "pad_token_id": 0},
    "mixtral": {**DENSE, **HEADS, "num_local_experts": 4},
    "qwen2_moe": {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {**EXPERTS, "num_experts": 4},
    "glm4_moe": {**EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1},
    "deepseek_v3": {
        **EXPERTS,
        "n_routed_experts": 16,
        "first_k_dense_replace": 1,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
        "n_group": 4,
        "topk_group": 2,
    },
    "granitemoe": {**DENSE, **HEADS, "num_local_experts": 4},
    "jamba": {**DENSE, **HEADS, "num_experts": 4, "mamba_dt_rank": 4, "mamba_d_state": 4},
    "gpt_oss": {**DENSE, **HEADS, "num_local_experts": 4},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gpt_neox": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    | {"num_attention_heads": 4},
    "gptj": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "falcon": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    "opt": {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"word_embed_proj_dim": 32},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    "t5": {"d_model": 32, "d_ff": 48, "num_layers": 2, "num_heads": 4, "d_kv": 8},
    "bart": {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 48}
    | {"decoder_ffn_dim": 48, "encoder_attention_heads": 4, "decoder_attention_heads": 4},
    "marian": {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "pad_token_id": 1},
}


def real_model(model_type: str) -> PreTrainedModel:
    torch.manual_seed(7)
    config = {"model_type": model_type, "vocab_size": 128, **TINY[model_type]}
    built = build(config, dtype=torch.float32)
    model: PreTrainedModel = type(built)._from_config(built.config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():  # zeros and ones would hide a wrong place
            parameter.normal_()
    return model


def assemble(model: PreTrainedModel, recipe: Recipe, tensors: Mapping[str, Tensor]) -> None:
    """Do what a loader does, on the CPU."""
    places = {
        name: nn.Parameter(torch.full_like(value, torch.nan, device="cpu"))
        for name, value in model.named_parameters()
    }
    canonical = {id(value): name for name, value in model.named_parameters()}
    for module in model.modules():
        for leaf, value in list(module._parameters.items()):
            if value is not None:
                module._parameters[leaf] = places[canonical[id(value)]]
    targets = {**dict(model.named_buffers()), **places}
    for piece in recipe.pieces:
        part = tensors[piece.source][piece.source_slices]
        with torch.no_grad():
            piece.place(targets[piece.target]).copy_(piece.orient(part))
    for custom in recipe.customs:
        values = custom.convert({name: tensors[name] for name in custom.sources})
        assert set(values) == set(custom.targets)
        for name, value in values.items():
            targets[name].data.copy_(value)
    initialize_derived(model, recipe)


@pytest.mark.parametrize("model_type", TINY)
def test_saved_and_put_together_again(model_type: str, tmp_path: Path) -> None:
    expected = real_model(model_type)
    expected.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    model = build(expected.config.to_dict(), dtype=torch.float32)
    recipe = plan_tensors(model, {name: value.shape for name, value in saved.items()})
    assert recipe.missing == recipe.unexpected == recipe.mismatched == ()
    assert recipe.customs == ()
    assert plan_tensors(model, list(saved)) == recipe, "names alone suffice"
    assemble(model, recipe, saved)
    for name, value in expected.state_dict().items():
        if name not in recipe.derived:
            assert torch.equal(model.state_dict()[name], value), name
    assert not any(parameter.isnan().any() for parameter in model.parameters())
    tied = [name for name, _ in model.named_parameters()]
    assert tied == [name for name, _ in expected.named_parameters()]


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "glm4_moe"])
def test_published_tensors_are_what_is_saved(model_type: str, tmp_path: Path) -> None:
    expected = real_model(model_type)
    expected.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    published = published_tensors(build(expected.config.to_dict()))
    assert {name: value.shape for name, value in published.items()} == {
        name: value.shape for name, value in saved.items()
    }


def test_experts_are_separate_in_the_file_and_stacked_in_the_model(tmp_path: Path) -> None:
    expected = real_model("mixtral")
    expected.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        model = build(expected.config.to_dict())
        recipe = plan_tensors(model, list(file.keys()))
        pieces = [
            p for p in recipe.pieces if p.target.endswith("layers.1.mlp.experts.gate_up_proj")
        ]
        assert len(pieces) == 8  # gate and up of four experts
        assert all(
            piece.source_box == tuple((0, extent) for extent in piece.source_shape)
            and "experts." in piece.source
            for piece in pieces
        )
        lazy = file.get_slice(pieces[0].source)
        assert torch.equal(
            pieces[0].orient(lazy[pieces[0].source_slices]),
            file.get_tensor(pieces[0].source)[None],
        )


def test_reference_models(reference: Any) -> None:
    model = build(reference.config)
    shapes = {name: value.shape for name, value in reference.weights.items()}
    recipe = plan_tensors(model, shapes)
    assert recipe.missing == recipe.unexpected == recipe.mismatched == recipe.customs == ()
    assert recipe.ignored == ("transformer.rotary_pos_emb.inv_freq",)
    assert plan_tensors(model, list(shapes)) == recipe
    assemble(model, recipe, reference.weights)
    with torch.no_grad():
        logits = model(reference.values["input_ids"]).logits
    assert close(logits, reference.values["logits"])


def test_query_key_value_are_row_slices(reference: Any) -> None:
    recipe = plan_tensors(build(reference.config), list(reference.weights))
    source = "transformer.encoder.layers.2.self_attention.query_key_value.bias"
    boxes = {p.target.split(".")[-2]: p.source_box for p in recipe.pieces if p.source == source}
    assert boxes == {"q_proj": ((0, 64),), "k_proj": ((64, 96),), "v_proj": ((96, 128),)}


def test_what_is_missing_unexpected_and_mismatched_is_listed(reference: Any) -> None:
    model = build(reference.config)
    shapes: dict[str, Any] = {name: value.shape for name, value in reference.weights.items()}
    del shapes["transformer.output_layer.weight"]
    shapes["transformer.encoder.final_layernorm.weight"] = (63,)
    shapes["transformer.prefix_encoder.weight"] = (4,)
    recipe = plan_tensors(model, shapes)
    assert recipe.missing == ("lm_head.weight",)
    assert recipe.unexpected == ("transformer.prefix_encoder.weight",)
    assert recipe.mismatched == (("model.norm.weight", (63,), (64,)),)


def test_tensors_that_cannot_be_split_are_an_error(reference: Any) -> None:
    shapes: dict[str, Any] = {name: value.shape for name, value in reference.weights.items()}
    name = "transformer.encoder.layers.1.self_attention.query_key_value.weight"
    shapes[name] = (127, 64)
    with pytest.raises(LoadError, match=name):
        plan_tensors(build(reference.config), shapes)


def test_prefix_of_the_body_is_added_and_removed() -> None:
    model = build({"model_type": "llama", "vocab_size": 128, **TINY["llama"]})
    body = [name.removeprefix("model.") for name in model.state_dict() if "lm_head" not in name]
    recipe = plan_tensors(model, body)
    assert recipe.missing == ("lm_head.weight",)
    assert recipe.unexpected == ()
    bare = transformers.LlamaModel(model.config)
    recipe = plan_tensors(bare, [f"model.{name}" for name in body])
    assert recipe.missing == recipe.unexpected == ()


def test_a_tied_tensor_is_taken_once_under_any_of_its_names() -> None:
    model = build({"model_type": "qwen2", "vocab_size": 128, **TINY["qwen2"]})
    names = [name for name in model.state_dict() if name != "lm_head.weight"]
    plain = plan_tensors(model, names)
    both = plan_tensors(model, [*names, "lm_head.weight"])
    assert both.pieces == plain.pieces
    assert [piece.source for piece in both.duplicates] == ["lm_head.weight"]
    only_head = [name for name in model.state_dict() if name != "model.embed_tokens.weight"]
    recipe = plan_tensors(model, only_head)
    assert recipe.missing == ()
    taken = {piece.target: piece.source for piece in recipe.pieces}
    assert taken["model.embed_tokens.weight"] == "lm_head.weight"


def test_old_files_hold_frequencies_for_each_layer() -> None:
    model = build({"model_type": "llama", "vocab_size": 128, **TINY["llama"]})
    old = "model.layers.0.self_attn.rotary_emb.inv_freq"
    recipe = plan_tensors(model, [*model.state_dict(), old])
    assert recipe.ignored == (old,)
    assert recipe.unexpected == ()


def test_any_module_by_its_own_names() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    recipe = plan_tensors(module, [*module.state_dict(), "2.weight"])
    assert recipe.unexpected == ("2.weight",)
    assert {piece.target for piece in recipe.pieces} == set(module.state_dict())


def test_single_elements_that_move_need_a_whole_conversion() -> None:
    """transformers' rotary permutation can't be said in boxes; the recipe still has it."""
    from transformers.conversion_mapping import register_checkpoint_conversion_mapping
    from transformers.core_model_loading import Interleave, WeightConverter

    class Woven(transformers.LlamaForCausalLM):
        pass

    register_checkpoint_conversion_mapping(
        "Woven", [WeightConverter("woven.weight", "q_proj.weight", [Interleave(0)])], overwrite=True
    )
    config = transformers.LlamaConfig(vocab_size=128, **TINY["llama"])
    model = Woven(config)
    state = {k.replace("q_proj", "woven"): v.clone() for k, v in model.state_dict().items()}
    recipe = plan_tensors(model, {name: value.shape for name, value in state.items()})
    assert recipe.missing == recipe.unexpected == ()
    assert [c.targets for c in recipe.customs] == [
        (f"model.layers.{i}.self_attn.q_proj.weight",) for i in range(2)
    ]
    source = state["model.layers.0.self_attn.woven.weight"]
    (value,) = recipe.customs[0].convert({recipe.customs[0].sources[0]: source}).values()
    assert torch.equal(value, source.reshape(16, 2, 32).transpose(0, 1).reshape(32, 32))
