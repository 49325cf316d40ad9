"""Ways between GPUs that are tested before they are used; tests/cuda_rig has them on CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from duoka.base.progress import heard_by
from duoka.runtime.dispatch import copies, place_tensors
from duoka.runtime.dispatch.copies import arrives, carry, copy_fault, try_copies

GPUS = [torch.device("cuda", index) for index in range(3)]


@pytest.fixture(autouse=True)
def own_memory() -> Iterator[None]:
    copies._arrives.cache_clear()
    yield
    copies._arrives.cache_clear()


@pytest.fixture
def tested(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The pairs that are tested, on GPUs that reach each other; from 0 to 1 zeros arrive."""
    pairs: list[tuple[str, str]] = []

    def fault(source: str, target: str) -> str:
        pairs.append((source, target))
        if source == "cuda:2":
            raise torch.OutOfMemoryError("full")
        return "zeros arrive" if target == "cuda:1" else ""

    monkeypatch.setattr(copies, "copy_fault", fault)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: True)
    return pairs


def test_neighbours_are_tested_once(tested: list[tuple[str, str]]) -> None:
    said: list[str] = []
    with heard_by(said.append):
        for _ in range(2):
            try_copies([GPUS[0], torch.device("cpu"), GPUS[0], GPUS[1]])
    assert tested == [("cuda:0", "cuda:1"), ("cuda:1", "cuda:0")]
    assert len(said) == 1
    assert said[0].startswith("cuda:0 → cuda:1: zeros arrive")
    try_copies(GPUS)
    assert len(tested) == 6
    assert not arrives(2, 1)  # it couldn't be tested, and is again
    assert len(tested) == 7


@pytest.mark.usefixtures("tested")
@pytest.mark.parametrize(("target", "steps"), [(1, ["cpu", "cuda:1"]), (2, ["cuda:2"])])
def test_tensors_go_around(target: int, steps: list[str]) -> None:
    gone: list[str] = []

    def to(device: torch.device, **_: Any) -> SimpleNamespace:
        gone.append(str(device))
        return tensor

    tensor = SimpleNamespace(device=GPUS[0], to=to, cpu=lambda: to(torch.device("cpu")))
    carry(tensor, GPUS[target])  # type: ignore[arg-type]
    assert gone == steps


@pytest.mark.usefixtures("tested")
def test_weights_and_gradients_go_around(monkeypatch: pytest.MonkeyPatch) -> None:
    gone: list[torch.Size] = []
    monkeypatch.setattr(
        place_tensors, "carry", lambda t, device: gone.append(t.shape) or t.to(device)
    )
    weight = torch.nn.Parameter(torch.ones(2, 3))
    weight.grad = torch.ones(2, 3)
    place_tensors._place_tensor(weight, torch.device("meta"))
    assert gone == [weight.shape] * 2


def test_one_gpu_or_none_is_not_tested(tested: list[tuple[str, str]]) -> None:
    try_copies([GPUS[0], GPUS[0], torch.device("cpu")])
    assert carry(torch.ones(2), torch.device("cpu"), dtype=torch.float64).dtype == torch.float64
    assert tested == []


def test_what_does_not_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.Tensor.copy_
    for spoil, fault in (
        (lambda to, source: to.zero_(), "zeros arrive"),
        (lambda to, source: to, "nothing arrives"),
        (lambda to, source: real(to, source.roll(1)), "65536 of 65536 numbers are corrupted"),
        (real, ""),
    ):
        monkeypatch.setattr(torch.Tensor, "copy_", spoil)
        assert copy_fault("cpu", "cpu") == fault
