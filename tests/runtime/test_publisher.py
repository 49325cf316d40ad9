"""A process says what its model takes, by kind; whatever goes wrong with that, its work goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from staged import forecast, staged

from duoka import virtual
from duoka.errors import MachineError
from duoka.forecast.serving import Capacity
from duoka.planner.plan import Plan
from duoka.report import live
from duoka.report.live import LiveDevice
from duoka.runtime import publisher as module
from duoka.runtime.call.paged_cache import PagedCache
from duoka.runtime.publisher import BusyShares, Publisher

MIB = 2**20
SIZE = 128 * 1024  # of a square matrix of 32-bit numbers that fills blocks of 512 bytes


def plan_on(*names: str) -> Plan:
    plan = staged([1] * len(names), "virtual:" + ",".join(["64MiB"] * len(names)))
    stages = tuple(forecast(name, 1, 64 * MIB) for name in names)
    return replace(plan, forecast=replace(plan.forecast, devices=stages))


@pytest.fixture(autouse=True)
def world() -> None:
    virtual.set_gpus([64 * MIB, 64 * MIB])


@pytest.fixture
def linear() -> torch.nn.Module:
    return torch.nn.Linear(128, 256, bias=False, device="vgpu:0")


def published(publisher: Publisher) -> LiveDevice:
    (device,) = publisher.look()
    return device


class Model(torch.nn.Module):
    """Takes whatever caches models are called with."""

    def forward(self, **kwargs: Any) -> None:
        pass


def test_weights_and_the_rest(linear: torch.nn.Module) -> None:
    plan = plan_on("vgpu:0")
    publisher = Publisher(plan, linear, ["vgpu:0"])
    before = published(publisher)
    assert (before.measured.weight_bytes, before.measured.activation_bytes) == (SIZE, 0)
    with torch.no_grad():
        output = linear(torch.zeros(4, 128, device="vgpu:0"))
    now = published(publisher)
    assert now.measured.activation_bytes == 4 * 256 * 4 == output.nbytes
    assert sum(now.measured.parts) == now.measured.allocated_bytes == SIZE + output.nbytes
    assert now.measured.reserved_bytes == 2 * MIB
    assert now.forecast is plan.forecast.devices[0]
    assert (now.model, now.uuid, now.busy_share) == ("LlamaForCausalLM", "", None)


def test_a_part_has_its_own_devices(linear: torch.nn.Module) -> None:
    plan = plan_on("vgpu:0", "vgpu:1")
    assert [d.measured.device for d in Publisher(plan, linear, plan.devices).look()] == [
        "vgpu:0",
        "vgpu:1",
    ]
    assert published(Publisher(plan, linear, ["vgpu:1"])).measured.allocated_bytes == 0
    assert Publisher(plan, linear, ["cpu"]).look() == []


def test_caches_are_known_while_they_live() -> None:
    model = Model()
    publisher = Publisher(plan_on("vgpu:0"), model, ["vgpu:0"])

    class Layer:
        keys = values = None

    class Cache:
        def __init__(self) -> None:
            layer: Any = Layer()
            layer.keys = torch.empty(1000, 16, device="vgpu:0")
            layer.elsewhere = torch.empty(10, device="vgpu:1")
            self.layers = [layer]

    cache = Cache()
    model(past_key_values=cache)
    model(past_key_values=cache)
    model(past_key_values=None)
    model(past_key_values=((torch.empty(1), torch.empty(1)),))
    measured = published(publisher).measured
    assert (measured.kv_cache_bytes, measured.activation_bytes) == (64000, 0)
    del cache
    assert published(publisher).measured.kv_cache_bytes == 0
    publisher.close()
    model(past_key_values=Cache())
    assert published(publisher).measured.kv_cache_bytes == 0


@pytest.mark.parametrize("is_int8", [False, True])
def test_pages_are_a_cache(is_int8: bool) -> None:
    capacity = Capacity(
        sequences=2, context_tokens=32, pages=4, page_tokens=16, step_tokens=32, is_int8=is_int8
    )
    model, cache = Model(), PagedCache(capacity)
    publisher = Publisher(plan_on("vgpu:0"), model, ["vgpu:0"])
    states = torch.zeros(1, 2, 3, 8, device="vgpu:0")
    pages = [page for layer in range(2) for page in cache.layer(layer, states, states)]
    model(step=SimpleNamespace(cache=cache))
    expected = sum(tensor.nbytes for page in pages for tensor in page if tensor is not None)
    assert published(publisher).measured.kv_cache_bytes == expected > 0


def test_what_learning_takes(linear: torch.nn.Module) -> None:
    optimizer = torch.optim.AdamW(linear.parameters())
    publisher = Publisher(plan_on("vgpu:0"), linear, ["vgpu:0"], optimizer=optimizer)
    linear(torch.zeros(4, 128, device="vgpu:0")).sum().backward()
    optimizer.step()
    measured = published(publisher).measured
    assert measured.gradient_bytes == SIZE
    assert measured.optimizer_bytes == 2 * SIZE
    assert measured.weight_bytes == SIZE
    optimizer.zero_grad(set_to_none=True)
    assert published(publisher).measured.gradient_bytes == 0


def test_busy_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    times, totals = iter(range(100)), iter([0.0, 0.5, 0.5, 3.5, 3.5, 3.5, 3.5, 3.5, 3.5])
    monkeypatch.setattr(module.time, "monotonic", lambda: float(next(times)))
    shares = BusyShares(lambda: {"vgpu:0": next(totals)})
    expected = [None, 0.5, 0.25, 1.0, 3.5 / 4, 3.5 / 5, 3.0 / 5, 3.0 / 5, 0.0]
    assert [shares().get("vgpu:0") for _ in expected] == expected


# ── the thread ──


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SECONDS", 0.01)


def until(condition: Any) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def mine() -> Iterator[LiveDevice]:
    return (device for device in live.read_memory() if device.measured.device == "vgpu:0")


def test_it_is_said_again_and_again_until_the_end(quick: None, linear: torch.nn.Module) -> None:
    with closing(Publisher(plan_on("vgpu:0"), linear, ["vgpu:0"]).start()):
        until(lambda: any(device.measured.activation_bytes == 0 for device in mine()))
        kept = torch.empty(MIB, dtype=torch.uint8, device="vgpu:0")
        until(lambda: any(device.measured.activation_bytes == kept.nbytes for device in mine()))
    assert list(mine()) == []
    assert not [thread for thread in threading.enumerate() if thread.name == "duoka-publisher"]


def test_what_goes_wrong_disturbs_nobody(
    quick: None, linear: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def fail(*args: Any) -> None:
        calls.append(args)
        raise MachineError("no room") if len(calls) % 2 else RuntimeError("changed meanwhile")

    monkeypatch.setattr(live, "publish_memory", fail)
    monkeypatch.setattr(live, "read_memory", fail)
    with closing(Publisher(plan_on("vgpu:0"), linear, ["vgpu:0"]).start()):
        until(lambda: len(calls) > 3)
        assert linear(torch.zeros(1, 128, device="vgpu:0")).shape == (1, 256)
