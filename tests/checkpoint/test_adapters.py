"""LoRA targets: both names of a ChatGLM's modules, and wrong ones refused by the files alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from duoka.checkpoint.adapters import native_targets
from duoka.checkpoint.checkpoint import Checkpoint
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
