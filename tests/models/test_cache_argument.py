"""The cache by either of its names, and what no class of ours knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from duoka.models.build import build
from duoka.models.cache_argument import CACHE, takes_cache
from duoka.models.remote_code import RemoteCode

CHATGLM = {
    "model_type": "chatglm", "num_layers": 2, "hidden_size": 32, "num_attention_heads": 2,
    "kv_channels": 16, "multi_query_attention": True, "multi_query_group_num": 1,
    "ffn_hidden_size": 48, "padded_vocab_size": 100, "seq_length": 131072, "rope_ratio": 500,
}  # fmt: skip
UNKNOWN = ("layer_past", "past_key_value", "cache_params", "attn_mask", "head_mask",
           "attention_bias", "alibi", "mems", "is_causal", "sliding_window", "softcap",
           "s_aux")  # fmt: skip
CODE = """
from torch import nn

class Layer(nn.Module):
    def forward(self, x, past_key_values=None, **kwargs):
        return x if past_key_values is None else x + past_key_values

class Model(Layer):
    def forward(self, x, past_key_values=None, **kwargs):
        return super().forward(x, past_key_values=past_key_values)

    def prepare_inputs_for_generation(self, ids, past_key_values=None, **kwargs):
        return past_key_values
"""


def scaled() -> Any:
    """ChatGLM3-6B-128K's kind: queries are scaled."""
    torch.manual_seed(0)
    model: Any = build(CHATGLM)
    for tensor in model.to_empty(device="cpu").parameters():
        torch.nn.init.normal_(tensor, std=0.3)
    return model


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@torch.no_grad()
def test_a_chatglm_goes_on_by_either_name(name: str) -> None:
    model = scaled()
    ids = torch.arange(3, 19)[None]
    first = model(ids[:, :-1], use_cache=True)
    rest = model(ids[:, -1:], **{name: first[CACHE]})
    torch.testing.assert_close(rest.logits[:, -1], model(ids).logits[:, -1])


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known_is_refused(name: str) -> None:
    model = scaled()
    ids, given = torch.ones((1, 4), dtype=torch.long), torch.ones(1)
    for part in (model, model.model):
        with pytest.raises(TypeError, match=f"unknown argument '{name}'"):
            part(ids, **{name: given})
        part(ids, **{name: None}, use_cache=False)


def test_both_names_at_once_are_refused() -> None:
    called = takes_cache(lambda cache=None: cache)
    assert (
        called(past_key_values=1) == called(cache=1) == called(cache=1, past_key_values=None) == 1
    )
    with pytest.raises(TypeError, match="got both"):
        called(cache=1, past_key_values=2)


@pytest.mark.parametrize("name", [CACHE, "past_key_values"])
def test_a_checkpoints_code_is_called_by_either_name(name: str, tmp_path: Path) -> None:
    code = RemoteCode(tmp_path, {"code.py": CODE.encode()}, legacy=False)
    model = code.import_class("code.Model")()
    assert model(1, **{name: 2}) == 3
    assert model.prepare_inputs_for_generation(1, **{name: 2}) == 2
