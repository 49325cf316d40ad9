"""The files that are made from facts and seeds are the published ones, where those are at hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from chatglm_files import FACTS, MODELS, Normals
from safetensors.numpy import load_file


def test_normals_are_those_of_pytorch() -> None:
    # torch.randn(16) after torch.manual_seed(12)
    expected = [
        *(-0.13201, -0.12544, 0.34431, -0.45191, -0.88876, -0.35265, -1.33727, 0.52231),
        *(-1.11181, -0.71707, 1.04261, -1.25097, -0.51067, -0.38429, -0.48987, 0.53057),
    ]
    assert np.allclose(Normals(12).draw((16,)), expected, atol=1e-5)


def test_everything_is_as_published(shared_data: Path, published_data: Path) -> None:
    files = [path for path in published_data.rglob("*.json") if path.name != "reference.json"]
    assert len(files) == len(FACTS["configs"]) + 3 + 2 + len(list(MODELS.glob("*-tiny")))
    for path in files:
        original = shared_data / path.relative_to(published_data)
        if not original.exists():
            pytest.skip(f"{original} is not there")
        assert json.loads(path.read_text()) == json.loads(original.read_text()), path


def test_weights_of_the_tiny_models_are_those_of_the_reference(
    shared_data: Path, published_data: Path
) -> None:
    for path in published_data.rglob("model.safetensors"):
        original = shared_data / path.relative_to(published_data)
        if not original.exists():
            pytest.skip(f"{original} is not there")
        weights, expected = load_file(path), load_file(original)
        assert list(weights) == list(expected)
        for name, values in expected.items():
            assert np.allclose(weights[name], values, rtol=3e-7, atol=3e-7), name
