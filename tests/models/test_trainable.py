"""Models that are made ready for training."""

from __future__ import annotations

import families
import pytest
import rehearsing
import tiny
import torch

from duoka import Placement, models, virtual
from duoka.forecast.workload import Training
from duoka.models import initialize_adapters, make_trainable
from duoka.runtime.call.learner import Learner
from duoka.runtime.dispatch.dispatch import dispatch


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


@pytest.mark.parametrize("method", ["lora", "full"])
def test_gradient_checkpointing_keeps_less_for_the_backward_pass(method: str) -> None:
    kept = []
    for checkpoints in (False, True):
        workload = rehearsing.load(200, method=method, gradient_checkpointing=checkpoints)
        assert workload.training is not None
        config = {**tiny.CONFIGS["glm"], "model_type": "chatglm", "vocab_size": 128}
        model = models.build(config, dtype=torch.bfloat16)
        models.make_trainable(model, workload.training, torch.bfloat16)
        with virtual.gpus([None], data="meta") as world:
            dispatch(model, Placement(entries=(("", "vgpu:0"),)), empty=True)
            learner = Learner(model, workload, torch.device("vgpu:0"))
            weights = world.memory_allocated(0)
            loss = learner.forward()
            kept.append(world.memory_allocated(0) - weights)
            loss.backward()
    assert kept[1] < 0.25 * kept[0]
