"""What a config alone tells against its model, without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from duoka.checkpoint.architecture import (
    caches_latents,
    reads_block_tables,
    refuse_unbuildable,
)
from duoka.errors import ModelError
from duoka.tools.demo.checkpoint import CONFIG

LLAMA = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({}, "has no model_type"),
        ({"model_type": 3}, "is '3', which is not a valid name"),
        ({**CONFIG, "inner_hidden_size": 1}, "a different"),
        ({**CONFIG, "rmsnorm": False}, "rmsnorm is False"),
    ],
)
def test_what_no_model_is_built_of(config: dict[str, Any], told: str) -> None:
    with pytest.raises(ModelError, match=told) as caught:
        refuse_unbuildable(config)
    assert caught.value.hint or "rmsnorm" in told


def test_models_that_there_are(published_data: Path) -> None:
    for path in sorted((published_data / "configs").glob("*[!n].json")):
        config = json.loads(path.read_text())
        if "model_type" in config:
            refuse_unbuildable(config)
    for config in (
        {**LLAMA, "num_hidden_layers": 0, "max_position_embeddings": 1200.0, "head_dim": None},
        {**LLAMA, "max_position_embeddings": 0},  # there are none
        {"model_type": "chatglm", "transformers_version": "5.0.0"},  # GLM-4-9B, saved anew
        {"model_type": "gpt2", "n_layer": 2},
    ):
        refuse_unbuildable(config)


def test_types_are_known_without_importing_transformers() -> None:
    script = (
        "import sys\n"
        "from duoka.checkpoint.architecture import reads_block_tables, refuse_unbuildable\n"
        "from duoka.errors import ModelError\n"
        f"refuse_unbuildable({LLAMA})\n"
        "try: refuse_unbuildable({'model_type': 'llamma', 'n_layer': 2})\n"
        "except ModelError as error: print(error, error.hint)\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert "model_type 'llamma' is supported neither" in done.stdout
    assert "did you mean 'llama'" in done.stdout


HEADS = {"hidden_size": 4096, "num_attention_heads": 32}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({**HEADS}, True),
        ({**HEADS, "head_dim": 256}, True),
        ({"n_embd": 768, "n_head": 12}, True),
        ({"hidden_size": 4096, "num_attention_heads": 32, "kv_channels": 128}, True),
        ({"text_config": HEADS, "vision_config": {"hidden_size": 1000}}, True),
        ({**HEADS, "attn_logit_softcapping": None}, True),
        ({**HEADS, "attn_logit_softcapping": 50.0}, False),
        ({**HEADS, "model_type": "gemma2"}, False),  # its default is a soft cap
        ({**HEADS, "model_type": "gpt_oss"}, False),
        ({"text_config": {**HEADS, "model_type": "granitemoe_swa"}}, False),
        ({**HEADS, "kv_lora_rank": 512}, False),
        ({**HEADS, "v_head_dim": 128}, False),
        ({**HEADS, "head_dim": 100}, False),
        ({**HEADS, "head_dim": 512}, False),
        ({**HEADS, "head_dim": 256, "global_head_dim": 512}, False),
        ({}, False),
    ],
)
def test_which_caches_are_read_in_place(
    config: dict[str, Any], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reads_block_tables(config) is expected
    monkeypatch.setenv("DUOKA_ATTENTION", "gather")
    assert not reads_block_tables(config)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "glm4_moe_lite", "kv_lora_rank": 512}, True),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, True),
        (
            {
                "model_type": "mistral3",
                "text_config": {"model_type": "mistral4", "kv_lora_rank": 1},
            },
            True,
        ),
        ({"model_type": "deepseek_v3"}, False),
        ({"model_type": "llama", "kv_lora_rank": 512}, False),
        ({"model_type": "of_a_later_version", "kv_lora_rank": 512}, False),
        ({"kv_lora_rank": 512}, False),
    ],
)
def test_which_models_cache_latents(config: dict[str, Any], expected: bool) -> None:
    assert caches_latents(config) is expected


def test_a_transformers_without_the_method_caches_none(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"model_type": "glm4_moe_lite", "kv_lora_rank": 512}
    monkeypatch.setattr(Path, "read_text", lambda self, **options: "class Glm4MoeLiteAttention:")
    assert not caches_latents(config)
    monkeypatch.setattr("duoka.checkpoint.architecture.find_spec", lambda name: None)
    assert not caches_latents(config)
