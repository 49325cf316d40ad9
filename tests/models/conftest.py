"""Reference models: what the original code computes, in the original file format."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor


@dataclass(frozen=True)
class Reference:
    directory: Path
    config: dict[str, Any]
    weights: dict[str, Tensor]
    values: dict[str, Tensor]
    numbers: dict[str, Any]


@pytest.fixture(params=["chatglm3-6b", "chatglm3-6b-128k", "glm-4-9b"])
def reference(request: pytest.FixtureRequest, shared_data: Path) -> Reference:
    directory = shared_data / "reference" / f"{request.param}-tiny"
    return Reference(
        directory=directory,
        config=json.loads((directory / "config.json").read_text()),
        weights=load_file(directory / "model.safetensors"),
        values=load_file(directory / "reference.safetensors"),
        numbers=json.loads((directory / "reference.json").read_text()),
    )
