"""What a config says, and what none can say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from duoka.checkpoint import config as configs
from duoka.checkpoint.checkpoint import Checkpoint
from duoka.checkpoint.config import is_for_transformers4
from duoka.errors import CheckpointError


def refused(config: dict[str, Any], num_tensors: int | None = None) -> str:
    with pytest.raises(CheckpointError) as caught:
        configs.check_config(config, num_tensors=num_tensors, source="config.json")
    assert caught.value.hint
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "limit"),
    [
        *(("num_hidden_layers", n, 1000) for n in (10**12, -1, 1001)),
        *((key, 10**6, 1000) for key in ("n_layer", "num_layers", "encoder_layers", "depth")),
        *((key, 10**9, 2**26) for key in ("hidden_size", "vocab_size", "n_positions", "n_embd")),
        *((key, 10**9, 2**26) for key in ("max_position_embeddings", "seq_length", "num_experts")),
        *((key, -(10**9), 2**26) for key in ("head_dim", "num_attention_heads", "kv_channels")),
        ("some_number", 10**41, 10**40),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_numbers_beyond_every_model(key: str, value: int, limit: int, nested: bool) -> None:
    config = {"text_config": [{"deep": {key: value}}]} if nested else {key: value}
    shown = value if abs(value) < 10**30 else "a number of more than 30 digits"
    assert refused(config) == (f"config.json: {key} is {shown}; duoka supports 0 to {limit}")


def test_layers_times_experts() -> None:
    assert "1000 layers of 10000 experts exceed the limit of 2000000 modules" in refused(
        {"num_hidden_layers": 1000, "n_routed_experts": 10_000}
    )


def test_more_layers_than_tensors() -> None:
    config = {"num_hidden_layers": 28}
    assert refused(config, 27) == (
        "config.json declares 28 layers, but the weights have only 27 tensors"
    )
    configs.check_config(config, num_tensors=28, source="config.json")


def test_depth() -> None:
    config: dict[str, Any] = {}
    for _ in range(40):
        config = {"text_config": config}
    assert refused(config) == "config.json is nested more than 32 levels deep"


@pytest.mark.parametrize(
    "config",
    [
        {"vision_feature_layer": -2, "pad_token_id": -1, "sliding_window": -1},
        {"model_max_length": 10**30, "num_hidden_layers": "28", "layers": [1, 2, 3]},
        {"max_position_embeddings": 10_485_760, "num_hidden_layers": 0, "dilations": [-1]},
    ],
)
def test_strange_numbers_that_models_have(config: dict[str, Any]) -> None:
    configs.check_config(config, num_tensors=3, source="config.json")


def test_published_configs(published_data: Path) -> None:
    for path in sorted((published_data / "configs").glob("*.json")):
        config = json.loads(path.read_text())
        configs.check_config(config, num_tensors=None, source=path.name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"num_hidden_layers": 1e999}', "1e999 doesn't fit in 64 bits"),
        ('{"a": NaN}', "NaN is not a JSON number"),
        ('{"a": 1, "a": 2}', "the key 'a' occurs twice"),
        ("[" * 100_000, "not valid JSON"),
        ('{"a":' * 100_000, "not valid JSON"),
        ('{"a": ' + "9" * 5000 + "}", "not valid JSON"),
        ('{"a": "' + "x" * 9_000_000 + '"}', "it has more than 8388608 bytes"),
        ('{"a": "\xff"}', "is not UTF-8"),
        ('{"a": [' + "[]," * 1_500_000 + "[]]}", "has 3000003 values"),
    ],
)
def test_hostile_files(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("duoka.checkpoint.headers.MAX_JSON_VALUES", 10**6)
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(tmp_path)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("version", "expected"),
    [("4.30.2", True), (None, True), ("5.1.0", False), ("next", True), (7, False)],
)
def test_by_the_version_that_the_configuration_names(version: object, expected: bool) -> None:
    assert is_for_transformers4({"transformers_version": version}) is expected
