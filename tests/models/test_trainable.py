from __future__ import annotations

import families
import torch

from duoka.forecast.workload import Training
from duoka.models import initialize_adapters, make_trainable


def adapted(seed: int) -> torch.nn.Module:
    model = families.build("llama")
    make_trainable(model, Training(method="lora", lora_rank=2), torch.float32)
    initialize_adapters(model, seed)
    return model


def test_adapters_begin_with_the_seed_wherever_their_layer_is() -> None:
    one, other, third = adapted(1), adapted(1), families.build("llama")
    third.model.layers[0].to("meta")
    make_trainable(third, Training(method="lora", lora_rank=2), torch.float32)
    initialize_adapters(third, 1)
    adapters = {name: p for name, p in one.named_parameters() if "lora_" in name}
    assert all(p.any() == ("lora_A" in name) for name, p in adapters.items())
    assert all(p.equal(dict(other.named_parameters())[name]) for name, p in adapters.items())
    for name, parameter in third.named_parameters():
        if "lora_" in name:
            assert parameter.is_meta == ("layers.0" in name)
            assert parameter.is_meta or parameter.equal(adapters[name])
    assert not all(p.equal(dict(adapted(2).named_parameters())[n]) for n, p in adapters.items())
