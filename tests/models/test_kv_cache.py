"""KV caches by their kind: where they lie, what they hold, how near 8 bit comes."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

from duoka import virtual
from duoka.errors import UsageError
from duoka.forecast.workload import Cache
from duoka.models.cache_argument import CACHE, cache_name
from duoka.models.kv_cache import (
    Int8Layer,
    lengthen,
    longer,
    new_cache,
)
from duoka.planner.placement import Placement
from duoka.runtime.dispatch.dispatch import dispatch


def built(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(**{**tiny.CONFIGS[name], "num_hidden_layers": 2})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.eval()


def ids(batch: int, tokens: int) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randint(3, 900, (batch, tokens))


def generate(model: Any, prompt: torch.Tensor, cache: Any, chunk: int | None = None) -> Any:
    mask = torch.ones_like(prompt)
    mask[:-1, :1] = 0
    return model.generate(
        prompt,
        attention_mask=mask,
        max_new_tokens=6,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
        prefill_chunk_size=chunk,
        disable_compile=True,
        output_logits=True,
        return_dict_in_generate=True,
        **{cache_name(model): cache},
    )


@pytest.mark.parametrize("chunk", [None, 100])
def test_a_cache_in_8_bit_is_close(chunk: int | None) -> None:
    model, prompt = built("llama"), ids(2, 600)
    expected, cache = generate(model, prompt, new_cache(model)), new_cache(model, "int8")
    found = generate(model, prompt, cache, chunk)
    assert found.sequences[:, 600].tolist() == expected.sequences[:, 600].tolist()
    logits, wanted = found.logits[1], expected.logits[1]
    assert not torch.equal(logits, wanted)
    assert (logits - wanted).norm() < 0.01 * wanted.norm()
    held = [layer.keys for layer in cache.layers]
    assert all(keys.dtype == torch.int8 for keys in held)
    assert {keys.shape[2] for keys in held} == {605}


def test_every_layer_keeps_its_cache_on_its_own_gpu() -> None:
    model = built("llama")
    names = ["model.embed_tokens", "model.rotary_emb", "model.layers.0"]
    entries = [(name, "vgpu:0") for name in names]
    entries += [(name, "vgpu:1") for name in ("model.layers.1", "model.norm", "lm_head")]
    with virtual.gpus([None, None]):
        expected = generate(model, ids(1, 30), new_cache(model)).sequences.tolist()
        dispatch(model, Placement(entries=tuple(entries)))
        cache = new_cache(model, "int8")
        found = generate(model, ids(1, 30).to("vgpu:0"), cache)
        assert found.sequences.tolist() == expected
        assert [layer.keys.device.index for layer in cache.layers] == [0, 1]
        assert [layer.values.device.index for layer in cache.layers] == [0, 1]


def states(batch: int, tokens: int) -> torch.Tensor:
    return torch.randn(batch, 3, tokens, 16)


def held(layer: Int8Layer) -> torch.Tensor:
    assert layer.keys is not None
    assert layer.key_scales is not None
    return layer.keys * layer.key_scales


def test_8_bit_layers_round_each_token_once_and_hold_it() -> None:
    layer, keys = Int8Layer(), states(2, 9)
    keys[0, 0, 0] = 0
    first, _ = layer.update(keys[..., :4, :], keys[..., :4, :])
    assert torch.equal(first, keys[..., :4, :])
    before = held(layer)
    for token in range(4, 9):
        one = keys[..., token : token + 1, :]
        found, _ = layer.update(one, one)
    assert torch.equal(found, held(layer))
    assert torch.equal(found[..., :4, :], before)
    # Half a step of the largest number of each token and head.
    assert ((found - keys).abs() <= keys.abs().amax(-1, keepdim=True) / 253).all()
    assert layer.get_seq_length() == 9
    bytes_held = sum(t.nbytes for t in (layer.keys, layer.key_scales) if t is not None)
    assert bytes_held == 2 * 3 * 9 * (16 + 4)


def test_8_bit_layers_take_part_in_beams_and_crops() -> None:
    layer, keys = Int8Layer(), states(2, 5)
    layer.update(keys, keys)
    plain = held(layer)
    layer.reorder_cache(torch.tensor([1, 0]))  # type: ignore[arg-type]
    assert torch.equal(held(layer), plain.flip(0))
    layer.batch_repeat_interleave(2)
    layer.batch_select_indices(torch.tensor([0, 2]))
    assert torch.equal(held(layer), plain.flip(0))
    layer.crop(-2)
    assert torch.equal(held(layer), plain.flip(0)[..., :3, :])
    layer.reset()
    assert layer.get_seq_length() == 0
    assert layer.keys is None


@pytest.mark.parametrize("kind", ["dynamic", "int8"])
def test_caches_are_lengthened_without_computing(kind: Cache) -> None:
    model = built("llama")
    cache = new_cache(model, kind)
    with torch.no_grad():
        model(ids(1, 12), **{CACHE: cache})
    assert lengthen(cache, 20)
    assert int(cache.get_seq_length()) == 32
    assert not lengthen(new_cache(built("window")), 1)


def test_a_cache_of_its_own_kind_stays() -> None:
    class Own:
        config = None

        def _supports_default_dynamic_cache(self) -> bool:
            return False

    assert new_cache(Own()) is None
    with pytest.raises(UsageError, match=r"int8.*its own kind"):
        new_cache(Own(), "int8")


@pytest.mark.parametrize(
    ("name", "argument"),
    [("mamba2", "cache" if CACHE == "cache" else "cache_params"), ("window", CACHE)],
)
def test_nothing_to_keep_in_8_bit(name: str, argument: str) -> None:
    model = built(name)
    assert cache_name(model) == argument
    with pytest.raises(UsageError, match="none of its layers stores the keys and values of all"):
        new_cache(model, "int8")


def test_an_encoder_and_a_decoder() -> None:
    config = AutoConfig.for_model(**tiny.CONFIGS["pair"])

    class Pair:
        pass

    model: Any = Pair()
    model.config = config
    cache = new_cache(model, "int8")
    assert {type(layer) for layer in cache.self_attention_cache.layers} == {Int8Layer}
    # What is filled once is read by the models themselves.
    assert type(cache.cross_attention_cache) is DynamicCache
    assert all(type(layer) is DynamicLayer for layer in cache.cross_attention_cache.layers)


def test_caches_in_tuples_are_made_longer_along_their_tokens() -> None:
    cache = ((torch.ones(1, 2, 5, 4), torch.ones(5, 1, 2, 4)),)
    [[keys, values]] = longer(cache, 5, 3)
    assert (keys.shape, values.shape) == ((1, 2, 8, 4), (8, 1, 2, 4))
    assert torch.equal(values[:5], cache[0][1])
    assert longer(cache, 6, 3) is None
    assert longer(((torch.ones(1, 5, 5),),), 5, 3) is None, "either dimension may be the tokens'"
    assert longer([torch.ones(5, 1)], 5, 3) is None


def test_a_layer_of_8_bit_refuses_what_it_does_not_know() -> None:
    states = torch.ones(1, 1, 2, 4)
    with pytest.raises(TypeError, match="sliding_window"):
        Int8Layer(sliding_window=4)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="cache_position"):
        Int8Layer().update(states, states, cache_position=torch.arange(2))  # type: ignore[call-arg]
    keys, _ = Int8Layer().update(states, states, kwargs={"use_cache": True})
    assert torch.equal(keys, states)
