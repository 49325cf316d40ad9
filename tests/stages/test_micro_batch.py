"""Loss and every gradient of models in stages; those of all families are in `matrix.stages`."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from families import Family
from matrix import stages
from matrix.stages import batches_of
from safetensors.torch import load_file
from staging import differences, learn_in_stages, learn_whole, placement_of, route_of
from tiers import only
from torch import nn

import duoka
from duoka import Placement
from duoka.errors import ModelError
from duoka.forecast.workload import Training
from duoka.models import initialize_adapters, make_trainable
from duoka.stages.channels import LocalChannel
from duoka.stages.interceptor import BlockInterceptor
from duoka.stages.micro_batch import StageMicroBatch

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("schedule", ["sequential", "gpipe", "1f1b"])
@pytest.mark.parametrize("name", ["llama", "gemma", "mixtral", "bart"])
def test_three_devices_and_every_schedule(name: str, schedule: str) -> None:
    stages.check(Family(name), 3, schedule)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_adapters(checkpointing: bool) -> None:
    model = families.build("llama")
    training = Training(method="lora", lora_rank=2, gradient_checkpointing=checkpointing)
    make_trainable(model, training, torch.float32)
    initialize_adapters(model, 5)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    batches = batches_of(model)
    base = families.build("llama")
    placement = placement_of(base, batches[0], 2)
    expected = learn_whole(model, batches)
    assert differences(expected, learn_in_stages(model, placement, batches, "1f1b")) == []
    assert sum(gradient is not None for gradient in expected.gradients.values()) == 28


@pytest.mark.parametrize("schedule", only(["1f1b"], ["gpipe", "1f1b"]))
@pytest.mark.parametrize("name", only(["glm-4-9b-tiny"], ["chatglm3-6b-tiny", "glm-4-9b-tiny"]))
def test_reference(name: str, schedule: str, published_data: Path) -> None:
    directory = published_data / "reference" / name
    workload = duoka.Workload(prompt_tokens=64, new_tokens=1, dtype="float32")
    plan = duoka.plan(directory, "virtual:3x1GiB", workload, use_all=True)
    model: Any = duoka.load(plan)
    duoka.dispatch(model, {"": "cpu"})
    expected = load_file(directory / "reference.safetensors")
    numbers = json.loads((directory / "reference.json").read_text())
    batch = {"input_ids": expected["input_ids"], "labels": expected["train.labels"]}
    learnt = learn_in_stages(model, plan.placement, [batch, batch], schedule)
    assert differences(learn_whole(model, [batch, batch]), learnt) == []
    for loss in learnt.losses:
        assert loss.item() == pytest.approx(numbers["train.loss"], rel=1e-5)


class Residual(nn.Module):
    """Adds its first layer's output to its second one's, in code around both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        once = self.first(values)
        return (once + self.second(once)).sum()


class Reads(nn.Module):
    """Its code around the layers reads what the first one made."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        once = self.first(values)
        return self.second(once if once.sum() > 1e9 else -once).sum()


TWO = Placement(entries=(("first", "cuda:0"), ("second", "cuda:1")))


def test_code_that_combines_two_stages_is_refused() -> None:
    with pytest.raises(ModelError, match="combines tensors of the stages 0 and 1") as refused:
        route_of(Residual(), TWO, {"values": torch.ones(1, 2)})
    assert "one GPU" in str(refused.value.hint)


def test_code_that_reads_values_of_another_stage_is_refused() -> None:
    model, batch = Reads(), {"values": torch.ones(1, 2)}
    route = route_of(model, TWO, batch)
    channel, device = LocalChannel([torch.device("cpu")] * 2), torch.device("cpu")
    interceptor = BlockInterceptor(model, TWO)
    StageMicroBatch(route, 0, 0, channel, device).forward(interceptor, lambda: model(**batch))
    with pytest.raises(ModelError, match="reads values of another stage"):
        StageMicroBatch(route, 1, 0, channel, device).forward(interceptor, lambda: model(**batch))
    assert model(**batch).requires_grad  # and runs as ever when no pass is on


class Chain(nn.Module):
    """Two layers, as often as it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, values: torch.Tensor, times: int = 1) -> torch.Tensor:
        for _ in range(times):
            values = self.second(self.first(values).relu_())
        return values.sum()


def test_another_course_than_the_planned_one_is_refused() -> None:
    model, batch = Chain(), {"values": torch.ones(1, 2)}
    route = route_of(model, TWO, batch)
    micro_batch = StageMicroBatch(route, 0, 0, LocalChannel([]), torch.device("cpu"))
    with pytest.raises(ModelError, match="differently"):
        micro_batch.forward(BlockInterceptor(model, TWO), lambda: model.second(batch["values"]))


def test_a_device_that_comes_back_has_several_stages() -> None:
    model = Chain()
    values = torch.ones(1, 2)
    route = route_of(model, TWO, {"values": values, "times": 3})
    assert route.devices == ("cuda:0", "cuda:1") * 3
    assert [(t.source, t.target) for t in route.transfers] == [(n, n + 1) for n in range(5)]


def test_nothing_but_its_place_in_the_graph_is_kept_of_what_was_sent() -> None:
    model, batch = Chain(), {"values": torch.ones(1, 2)}
    sent: list[weakref.ref[torch.Tensor]] = []

    class Noting(LocalChannel):
        def send(self, message: Any, tensor: torch.Tensor) -> None:
            sent.append(weakref.ref(tensor))
            super().send(message, tensor)

    device = torch.device("cpu")
    micro_batch = StageMicroBatch(route_of(model, TWO, batch), 0, 0, Noting([device] * 2), device)
    assert micro_batch.forward(BlockInterceptor(model, TWO), lambda: model(**batch)) is None
    assert [reference() for reference in sent] == [None]
