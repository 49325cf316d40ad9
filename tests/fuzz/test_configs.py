"""Configs as an attacker writes them: a model, or one error, soon and in little memory."""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from fuzzing import JSON, damaged, damaged_text, fuzz
from hypothesis import given
from hypothesis import strategies as st

from duoka import models
from duoka.checkpoint.checkpoint import Checkpoint
from duoka.errors import CheckpointError, DuokaError, ModelError
from duoka.tools.demo.checkpoint import CONFIG

_CONFIGS = [
    {**CONFIG, "num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 96},
    {**tiny.CONFIGS["llama"], "torch_dtype": "bfloat16", "rope_scaling": None, "auto_map": {}},
    {**tiny.CONFIGS["experts"], "architectures": ["MixtralForCausalLM"]},
    {**tiny.CONFIGS["bloom"], "num_hidden_layers": 2},
]
_NUMBERS = st.sampled_from([0, -1, 10**3, 2**20, 2**26, 2**31, 10**12, 10**50, True, "28", 2.5])


@st.composite
def numbered(draw: st.DrawFn, config: dict[str, Any]) -> dict[str, Any]:
    """A config with another number in it."""
    key = draw(st.sampled_from(sorted(config)))
    return {**config, key: draw(_NUMBERS)}


TEXTS = st.one_of(
    st.sampled_from(_CONFIGS).flatmap(numbered).map(json.dumps),
    st.sampled_from(_CONFIGS).flatmap(damaged).map(json.dumps),
    st.sampled_from(_CONFIGS).flatmap(lambda config: damaged_text(json.dumps(config))),
    JSON.map(json.dumps),
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("config") / "config.json"


def look_at(error: DuokaError) -> None:
    assert len(str(error)) < 5000


@fuzz(60)
@given(text=TEXTS)
def test_configs(file: Path, text: str) -> None:
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    try:
        checkpoint = Checkpoint.open(file)
        checkpoint.default_dtype, checkpoint.max_context_tokens  # noqa: B018
        models.build(checkpoint.config, dtype=torch.bfloat16)
    except (CheckpointError, ModelError) as error:
        look_at(error)
    finally:
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown < 2**21, f"{grown} KiB for {text}"
        assert time.process_time() - start < 60, text
