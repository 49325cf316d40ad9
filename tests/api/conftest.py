from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from duoka import Workload

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "dtype": "float32",
}


LOAD = Workload(prompt_tokens=100, new_tokens=12)


TWO = "virtual:2x64MiB"


@pytest.fixture(autouse=True)
def _own_cache(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A cache of this directory's own, so that other tests' profiles don't answer.

    Those of one sequence alone (`single_sequences`) have another one.
    """
    name = "single" if "single_sequences" in request.fixturenames else "all"
    monkeypatch.setenv("DUOKA_CACHE", str(tmp_path_factory.getbasetemp() / "api-cache" / name))


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    torch.manual_seed(0)
    fields = {name: CONFIG[name] for name in CONFIG.keys() - {"model_type", "dtype"}}
    made: PreTrainedModel = AutoModelForCausalLM.from_config(LlamaConfig(**fields))
    return made.eval()


@pytest.fixture(scope="module")
def checkpoint(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    model.save_pretrained(path)
    return path


# Planning.


def everything(model: nn.Module) -> list[Any]:
    """All that a model object is, by identity where there is identity."""
    found: list[Any] = []
    for name, module in model.named_modules():
        found += [name, type(module), sorted(vars(module)), len(module._forward_pre_hooks)]
        found += [len(module._forward_hooks), module.training]
        for table in (module._parameters, module._buffers):
            for key, tensor in table.items():
                if tensor is not None:
                    found += [key, id(tensor), tensor.device, tensor.dtype, tensor._version]
    return found


def ids() -> torch.Tensor:
    return torch.arange(1, 9).reshape(1, 8)


REMOTE = """
from transformers import LlamaConfig, LlamaForCausalLM

class PebbleConfig(LlamaConfig):
    model_type = "pebble"

class PebbleForCausalLM(LlamaForCausalLM):
    config_class = PebbleConfig
"""


@pytest.fixture
def remote(tmp_path: Path) -> Path:
    code = {"AutoConfig": "pebble.PebbleConfig", "AutoModelForCausalLM": "pebble.PebbleForCausalLM"}
    config = {**CONFIG, "model_type": "pebble", "auto_map": code}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "pebble.py").write_text(REMOTE)
    return tmp_path
