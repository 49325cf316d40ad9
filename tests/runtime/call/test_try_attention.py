"""The test of attention over pages, before it is relied on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from duoka.runtime.call import try_attention
from duoka.runtime.call.try_attention import find_fault, reason_to_gather

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def _forget() -> None:
    find_fault.cache_clear()


@pytest.mark.parametrize("head_dim", [64, 128])
def test_equal_results_are_no_fault(head_dim: int) -> None:
    assert not find_fault(CPU, head_dim)


def wrong(name: str) -> Any:
    """What a faulty kernel returns on the second device."""
    attend, number = try_attention._attend, iter(range(9))

    def result(device: Any, head_dim: int, window: int) -> torch.Tensor:
        right = attend("cpu", head_dim, window)
        if next(number) % 2 == 0:
            return right
        if name == "raises":
            raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.\nand a trace")
        if name == "nan":
            right[50] = torch.nan
        if name == "zero":
            right.zero_()
        if name == "one sequence":
            right[111] = right[110]
        return right

    return result


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("raises", "FlashAttention only supports Ampere GPUs or newer."),
        ("nan", "its results differ from the CPU's by nan%"),
        ("zero", "its results differ from the CPU's by 100.0%"),
        ("one sequence", "its results differ from the CPU's by "),
    ],
)
def test_a_fault_is_told_and_pages_are_gathered(
    name: str, fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("DUOKA_ATTENTION", raising=False)
    monkeypatch.setattr(try_attention, "_attend", wrong(name))
    assert reason_to_gather(CUDA, 64).startswith(fault)
    (record,) = caplog.records
    assert f"FlashAttention over pages can't be used ({fault}" in record.getMessage()


def test_the_numbers_of_the_test_tell_masks_and_pages_apart() -> None:
    """A kernel without the window, or with another page, is far beyond the tolerance."""
    right = try_attention._attend("cpu", 64, 0)
    for other in (try_attention._attend("cpu", 64, 100), right.roll(1, 0)):
        assert (other - right).norm() / right.norm() > 10 * try_attention.TOLERANCE
    assert right.isfinite().all()


@pytest.mark.parametrize(
    ("choice", "expected"), [("gather", "DUOKA_ATTENTION=gather"), ("flash", "")]
)
def test_a_choice_is_not_tested(
    choice: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DUOKA_ATTENTION", choice)
    monkeypatch.setattr(try_attention, "find_fault", None)
    assert reason_to_gather(CUDA, 64) == expected
