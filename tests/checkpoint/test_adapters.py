"""LoRA targets: both names of a ChatGLM's modules, and wrong ones refused by the files alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from duoka.checkpoint.adapters import native_targets
from duoka.checkpoint.checkpoint import Checkpoint
from duoka.errors import UsageError
from duoka.tools.demo.checkpoint import CONFIG


@pytest.mark.parametrize(
    ("target", "native"),
    [
        ("query_key_value", ("q_proj", "k_proj", "v_proj")),
        ("k_proj", ("k_proj",)),
        ("mlp.dense_4h_to_h", ("mlp.down_proj",)),
        ("transformer.encoder.layers.3.self_attention.dense", ("layers.3.self_attn.o_proj",)),
        ("transformer.output_layer", ("lm_head",)),
        ("transformer.embedding.word_embeddings", ("embed_tokens",)),
    ],
)
def test_targets_in_both_names(tmp_path: Path, target: str, native: tuple[str, ...]) -> None:
    assert native_targets(opened(tmp_path, CONFIG), [target]) == native


@pytest.mark.parametrize(
    ("target", "native"),
    [
        ("query_key_value", ("q_proj", "k_proj", "v_proj", "query_key_value")),
        ("o_proj", ("o_proj",)),
        ("fc1", ("fc1",)),
        ("mlp.fc1", ("mlp.fc1",)),
        ("mlp.dense_4h_to_h", ("mlp.down_proj",)),
        ("attention.dense", ("attention.dense",)),
        (
            "transformer.vision.transformer.layers.3.mlp.fc2",
            ("vision.transformer.layers.3.mlp.fc2",),
        ),
    ],
)
def test_targets_in_a_tower(tmp_path: Path, target: str, native: tuple[str, ...]) -> None:
    checkpoint = opened(tmp_path, {**CONFIG, "vision_config": {"hidden_size": 8}})
    assert native_targets(checkpoint, [target]) == native


def test_what_the_family_has_not_is_refused(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path, CONFIG)
    with pytest.raises(UsageError, match="'qkv'") as caught:
        native_targets(checkpoint, ["q_proj", "qkv"])
    assert "query_key_value" in str(caught.value.hint)
    with pytest.raises(UsageError, match="did you mean 'q_proj'"):
        native_targets(checkpoint, ["q_prj"])


def test_what_the_index_has_not_is_refused(tmp_path: Path) -> None:
    names = ["embed_tokens.weight", "layers.0.self_attn.q_proj.qweight", "layers.0.experts.0"]
    checkpoint = opened(tmp_path, {"model_type": "llama", "hidden_size": 8}, names)
    known = ["q_proj", "model.layers.0.self_attn.q_proj", "lm_head"]
    assert native_targets(checkpoint, known) == tuple(known)
    with pytest.raises(UsageError, match="did you mean 'q_proj'") as caught:
        native_targets(checkpoint, ["q_prj"])
    assert "embed_tokens, experts, lm_head, q_proj" in str(caught.value.hint)


def test_names_that_transformers_changes_are_left_to_the_model(tmp_path: Path) -> None:
    names = ["model.layers.0.block_sparse_moe.experts.0.w1.weight"]
    checkpoint = opened(tmp_path, {"model_type": "mixtral", "hidden_size": 8}, names)
    assert native_targets(checkpoint, ["gate_up_proj"]) == ("gate_up_proj",)


def test_a_config_alone_knows_no_modules(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path, {"model_type": "llama", "hidden_size": 8})
    assert native_targets(checkpoint, ["anything"]) == ("anything",)


def opened(
    directory: Path, config: dict[str, object], names: list[str] | None = None
) -> Checkpoint:
    (directory / "config.json").write_text(json.dumps(config))
    if names is not None:
        index = {"weight_map": dict.fromkeys(names, "model-1.safetensors")}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return Checkpoint.open(directory)
