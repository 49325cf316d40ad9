"""A checkpoint with code for transformers 4: `heron`, and the same with a cache in one tensor."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from duoka import Checkpoint

SOURCES = Path(__file__).parent / "heron"
CONFIG = {
    "model_type": "heron",
    "torch_dtype": "float32",
    "transformers_version": "4.30.2",
    "eos_token_id": 2,
    "auto_map": {
        "AutoConfig": "configuration_heron.HeronConfig",
        "AutoModelForCausalLM": "modeling_heron.HeronForCausalLM",
    },
}

MakeHeron = Callable[..., Checkpoint]


@pytest.fixture
def heron(tmp_path: Path) -> MakeHeron:
    """Makes the checkpoint, with weights; what is given goes into its configuration."""

    def made(**settings: object) -> Checkpoint:
        directory = tmp_path / "heron-7b"
        shutil.copytree(SOURCES, directory, ignore=shutil.ignore_patterns("__pycache__"))
        (directory / "config.json").write_text(json.dumps(CONFIG | settings))
        checkpoint = Checkpoint.open(directory, trust_remote_code=True)
        from duoka import Workload
        from duoka.models.from_checkpoint import build_model

        torch.manual_seed(3)
        shapes = build_model(checkpoint, Workload(dtype="float32")).state_dict()
        weights = {
            name: value if not value.is_meta else torch.randn(value.shape) * 0.2
            for name, value in shapes.items()
        }
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
        return Checkpoint.open(directory, trust_remote_code=True)

    return made
