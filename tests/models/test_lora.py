"""Adapters: the same in both forms of the ChatGLM family, put into models, taken out of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import chatglm_files
import pytest
import torch
from closeness import close
from torch import Tensor, nn

from duoka import Placement, models, virtual
from duoka.errors import LoadError
from duoka.forecast.workload import Training
from duoka.models import initialize_adapters, make_trainable
from duoka.models.lora import (
    LoraAdapter,
    LowRank,
    adapter_of,
    fill_adapter,
    native_form,
    published_form,
    put_adapter,
)
from duoka.runtime.dispatch.dispatch import dispatch

CHATGLM: dict[str, Any] = {
    **chatglm_files.config("chatglm3-6b"),
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "kv_channels": 8,
    "multi_query_group_num": 2,
    "padded_vocab_size": 64,
}
ROWS = {"q_proj": 32, "k_proj": 16, "v_proj": 16}
LAYER = "model.layers.0"
PUBLISHED_LAYER = "transformer.encoder.layers.0"
FUSED = f"{PUBLISHED_LAYER}.self_attention.query_key_value"


def low_rank(inputs: int, outputs: int, rank: int = 2, scaling: float = 2.0) -> LowRank:
    return LowRank(down=torch.randn(rank, inputs), up=torch.randn(outputs, rank), scaling=scaling)


def product(layer: LowRank) -> Tensor:
    return layer.scaling * layer.up @ layer.down


def small_model() -> nn.Module:
    """A ChatGLM with random weights."""
    model = models.build(CHATGLM, dtype=torch.float32)
    model.to_empty(device="cpu")
    torch.manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(torch.arange(8)[None]).logits


def test_a_fused_adapter_splits_exactly() -> None:
    fused = LoraAdapter(layers={FUSED: low_rank(32, 64, rank=3)}, base="zai-org/chatglm3-6b")
    native = native_form(fused, CHATGLM)
    assert native.base == "zai-org/chatglm3-6b"
    assert list(native.layers) == [f"{LAYER}.self_attn.{part}" for part in ROWS]
    assert [len(layer.up) for layer in native.layers.values()] == list(ROWS.values())
    assert all(layer.down is fused.layers[FUSED].down for layer in native.layers.values())
    joined = torch.cat([layer.up for layer in native.layers.values()])
    assert torch.equal(joined, fused.layers[FUSED].up)


@pytest.mark.parametrize(
    "parts",
    [
        {"q_proj": (2, 2.0), "k_proj": (2, 2.0), "v_proj": (2, 2.0)},
        {"q_proj": (2, 2.0), "v_proj": (3, 0.5)},
        {"k_proj": (1, 1.0)},
    ],
)
def test_three_adapters_are_one_of_the_sum_of_their_ranks(
    parts: dict[str, tuple[int, float]],
) -> None:
    native = LoraAdapter(
        layers={
            f"{LAYER}.self_attn.{part}": low_rank(32, ROWS[part], rank, scaling)
            for part, (rank, scaling) in parts.items()
        }
    )
    published = published_form(native, CHATGLM)
    assert list(published.layers) == [FUSED]
    assert published.layers[FUSED].rank == sum(rank for rank, _ in parts.values())
    products = [
        product(native.layers[f"{LAYER}.self_attn.{part}"]) if part in parts else zeros
        for part, zeros in ((part, torch.zeros(rows, 32)) for part, rows in ROWS.items())
    ]
    assert close(product(published.layers[FUSED]), torch.cat(products))
    # Split again they have their own ranks: a run can go on with them.
    again = native_form(published, CHATGLM)
    assert {name: layer.rank for name, layer in again.layers.items()} == {
        f"{LAYER}.self_attn.{part}": rank for part, (rank, _) in parts.items()
    }
    for name, layer in again.layers.items():
        assert torch.equal(layer.down, native.layers[name].down)
        assert close(product(layer), product(native.layers[name]))


NAMES = {
    f"{LAYER}.self_attn.o_proj": f"{PUBLISHED_LAYER}.self_attention.dense",
    f"{LAYER}.mlp.gate_up_proj": f"{PUBLISHED_LAYER}.mlp.dense_h_to_4h",
    f"{LAYER}.mlp.down_proj": f"{PUBLISHED_LAYER}.mlp.dense_4h_to_h",
    "model.embed_tokens": "transformer.embedding.word_embeddings",
    "lm_head": "transformer.output_layer",
    "model.vision.transformer.layers.3.attention.query_key_value": (
        "transformer.vision.transformer.layers.3.attention.query_key_value"
    ),
    "model.vision.linear_proj.dense_h_to_4h": "transformer.vision.linear_proj.dense_h_to_4h",
}


def test_an_adapter_before_its_first_step_has_all_parts() -> None:
    fused = LowRank(down=torch.randn(3, 32), up=torch.zeros(64, 3), scaling=1.0)
    native = native_form(LoraAdapter(layers={FUSED: fused}), CHATGLM)
    assert [layer.rank for layer in native.layers.values()] == [3, 3, 3]


def test_other_modules_change_their_names_only() -> None:
    native = LoraAdapter(layers={name: low_rank(4, 4) for name in NAMES})
    published = published_form(native, CHATGLM)
    assert list(published.layers) == list(NAMES.values())
    assert native_form(published, CHATGLM) == native
    assert native_form(native, CHATGLM) == native
    other = {"model_type": "llama"}
    assert published_form(native, other) is native
    assert native_form(native, other) is native


def test_a_fused_adapter_of_another_size_is_refused() -> None:
    with pytest.raises(LoadError, match="has 60 rows, and 64 are needed"):
        native_form(LoraAdapter(layers={FUSED: low_rank(32, 60)}), CHATGLM)


def test_what_is_put_into_a_model_is_what_is_added_to_its_weights() -> None:
    layers = {
        f"{LAYER}.self_attn.q_proj": low_rank(32, 32),
        "model.layers.1.mlp.down_proj": low_rank(48, 32, rank=4, scaling=0.25),
        "model.embed_tokens": replace(low_rank(64, 32), is_embedding=True),
    }
    added, beside = small_model(), small_model()
    for name, layer in layers.items():
        delta = product(layer).T if layer.is_embedding else product(layer)
        added.get_submodule(name).weight.data += delta
    put_adapter(beside, LoraAdapter(layers=layers))
    assert close(logits(beside), logits(added))
    assert not close(logits(beside), logits(small_model()))
    learning = [name for name, value in beside.named_parameters() if value.requires_grad]
    assert not [name for name in learning if "lora" in name]


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        ({"model.layers.7.self_attn.q_proj": low_rank(32, 32)}, "called model.layers.7"),
        ({"model.norm": low_rank(32, 32)}, "called model.norm can have an adapter"),
        ({f"{LAYER}.mlp.down_proj": low_rank(40, 32)}, "from 40 to 32 at .* from 48 to 32"),
    ],
)
def test_an_adapter_of_another_model_is_refused(layers: Mapping[str, LowRank], reason: str) -> None:
    model = small_model()
    before = list(model.state_dict())
    good = {f"{LAYER}.self_attn.o_proj": low_rank(32, 32)}
    with pytest.raises(LoadError, match=reason) as raised:
        put_adapter(model, LoraAdapter(layers={**good, **layers}, base="theirs"))
    assert raised.value.hint == "it was made for theirs"
    assert list(model.state_dict()) == before


def test_it_lies_beside_the_weights_on_their_devices() -> None:
    layers = {
        f"model.layers.{number}.self_attn.{part}": low_rank(32, rows)
        for number in range(2)
        for part, rows in ROWS.items()
    }
    alone, spread = small_model(), small_model()
    with virtual.gpus([2**26, 2**26]):
        entries = (("", "vgpu:1"), ("model.embed_tokens", "vgpu:0"), ("model.layers.0", "vgpu:0"))
        dispatch(spread, Placement(entries=entries))
        for model in (alone, spread):
            put_adapter(model, LoraAdapter(layers=layers))
        places = {
            str(parameter.device)
            for name, parameter in spread.named_parameters()
            if "layers.1" in name and "lora" in name
        }
        assert places == {"vgpu:1"}
        assert close(logits(spread), logits(alone))
        assert not close(logits(alone), logits(small_model()))


def adapted(rank: int = 2) -> nn.Module:
    model = small_model()
    training = Training(lora_rank=rank, lora_alpha=4, lora_targets=("o_proj", "down_proj"))
    make_trainable(model, training, torch.float32)
    initialize_adapters(model, seed=0)
    return model


def test_training_starts_from_an_adapter() -> None:
    first = adapted()
    for name, parameter in first.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    adapter = adapter_of(first, dict(first.named_parameters()))
    assert adapter.common == (2, 2.0)
    assert adapter.training_settings == {
        "lora_rank": 2,
        "lora_alpha": 4,
        "lora_targets": ("down_proj", "o_proj"),
    }
    second = adapted()
    assert not close(logits(second), logits(first))
    elsewhere = second.model.layers[1].to("meta")
    fill_adapter(second, adapter)  # as far as this process has the model
    assert all(parameter.is_meta for parameter in elsewhere.parameters())
    third = adapted()
    fill_adapter(third, adapter)
    assert close(logits(third), logits(first))
    assert all(value.requires_grad for name, value in third.named_parameters() if "lora" in name)


def test_an_adapter_that_does_not_fit_the_run_is_refused() -> None:
    adapter = adapter_of(adapted(), dict(adapted().named_parameters()))
    with pytest.raises(LoadError, match=r"rank 4 on .*, and the one to start from has rank 2"):
        fill_adapter(adapted(rank=4), adapter)
    fewer = replace(adapter, layers=dict(list(adapter.layers.items())[1:]))
    with pytest.raises(
        LoadError, match=r"on 4 modules, and .* on 3; the difference includes"
    ) as raised:
        fill_adapter(adapted(), fewer)
    assert "targets: down_proj, o_proj" in str(raised.value.hint)


def test_missing_tensors_are_told_of() -> None:
    tensors = dict(adapted().named_parameters())
    del tensors[f"{LAYER}.mlp.down_proj.lora_B.default.weight"]
    with pytest.raises(LoadError, match=r"has no .*lora_B.default.weight"):
        adapter_of(adapted(), tensors)
