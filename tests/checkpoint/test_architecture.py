"""What a config alone tells against its model, without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from duoka.checkpoint.architecture import refuse_unbuildable
from duoka.errors import ModelError
from duoka.tools.demo.checkpoint import CONFIG

TOWER = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_heads": 2,
    "intermediate_size": 48,
    "patch_size": 14,
    "image_size": 56,
    "num_positions": 17,
}
LLAMA = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({}, "has no model_type"),
        ({"model_type": 3}, "is '3', which is no name"),
        ({**LLAMA, "hidden_size": "64"}, "hidden_size is '64'; it must be a whole number"),
        ({**LLAMA, "num_hidden_layers": 2.5}, "is 2.5; it must be a whole number"),
        ({**LLAMA, "vocab_size": True}, "is True; it must be a whole number"),
        ({**LLAMA, "num_attention_heads": 0}, "is 0; it must be a whole number, at least 1"),
        ({**LLAMA, "num_hidden_layers": -1}, "is -1; it must be a whole number, at least 0"),
        ({**CONFIG, "vision_config": {}}, "says nothing of hidden_size, num_hidden_layers, num_h"),
        ({**CONFIG, "vision_config": [3]}, r"vision_config is \[3\]; it must be an object"),
        ({**CONFIG, "vision_config": {**TOWER, "patch_size": 0}}, "patch_size is 0; it must be a"),
        ({**CONFIG, "vision_config": {**TOWER, "num_heads": 3}}, "3 attention heads can't share"),
        ({**CONFIG, "vision_config": {**TOWER, "image_size": 15}}, "has 1 patches of 14 a side"),
        ({**CONFIG, "vision_config": {**TOWER, "in_channels": "3"}}, "in_channels is '3'; it must"),
        ({**CONFIG, "vision_config": {**TOWER, "scaling_factor": 0}}, "scaling_factor is 0; feat"),
        ({**CONFIG, "vision_config": TOWER, "boi_token_id": 10**6}, "boi_token_id is 1000000; it"),
        ({**CONFIG, "vision_config": {**TOWER, "num_positions": 16}}, "num_positions is 16; 4 x 4"),
        ({**CONFIG, "inner_hidden_size": 1}, "of the first generation"),
        ({**CONFIG, "rmsnorm": False}, "rmsnorm is False"),
        ({**CONFIG, "multi_query_group_num": 3}, "4 attention heads can't share the keys of 3"),
        (
            {key: CONFIG[key] for key in CONFIG if key not in ("hidden_size", "kv_channels")},
            "says nothing of hidden_size, kv_channels",
        ),
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
        {**CONFIG, "vision_config": TOWER},
        {**CONFIG, "vision_config": None},
    ):
        refuse_unbuildable(config)


def test_types_are_known_without_importing_transformers() -> None:
    script = (
        "import sys\n"
        "from duoka.checkpoint.architecture import refuse_unbuildable\n"
        "from duoka.errors import ModelError\n"
        f"refuse_unbuildable({LLAMA})\n"
        "try: refuse_unbuildable({'model_type': 'llamma', 'n_layer': 2})\n"
        "except ModelError as error: print(error, error.hint)\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert "model_type 'llamma' is neither" in done.stdout
    assert "did you mean 'llama'" in done.stdout
