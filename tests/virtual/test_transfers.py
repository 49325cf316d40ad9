"""Copies between devices copy."""

from __future__ import annotations

import pytest
import torch

from duoka import virtual


def test_copies_do_not_share_memory(world: virtual.World) -> None:
    source = torch.arange(4.0)
    first = source.to("vgpu:0")
    second = first.to("vgpu:1", non_blocking=True)
    third = second.cpu()
    source.zero_()
    first.add_(10)
    assert first.tolist() == [10, 11, 12, 13]
    assert second.tolist() == third.tolist() == [0, 1, 2, 3]
    assert world.memory_allocated(0) == world.memory_allocated(1) == 512
    second.fill_(5)
    assert third.tolist() == [0, 1, 2, 3]


def test_moving_to_where_it_is_copies_nothing(world: virtual.World) -> None:
    x = torch.ones(3, device="vgpu:1")
    assert x.to("vgpu:1") is x
    assert x.to("vgpu:1", copy=True) is not x


def test_copy_into_another_device_and_dtype(world: virtual.World) -> None:
    x = torch.arange(4.0, device="vgpu:0")
    target = torch.zeros(2, 4, dtype=torch.float16, device="vgpu:1")
    target.copy_(x)
    assert target.tolist() == [[0, 1, 2, 3]] * 2
    host = torch.zeros(4, dtype=torch.int64)
    host.copy_(x)
    assert host.tolist() == [0, 1, 2, 3]
    assert x.to("vgpu:2", torch.bfloat16).dtype == torch.bfloat16
    assert x.to(torch.float64).device == torch.device("vgpu:0")
    assert x.double().cpu().dtype == torch.float64


def test_like_and_new_functions_choose_the_device(world: virtual.World) -> None:
    x = torch.ones(2, 3, device="vgpu:0")
    assert torch.zeros_like(x, device="vgpu:1").device == torch.device("vgpu:1")
    assert torch.zeros_like(x, device="cpu").device == torch.device("cpu")
    assert type(torch.zeros_like(x, device="cpu")) is torch.Tensor
    assert x.new_full((2,), 3.0, device="vgpu:2").tolist() == [3, 3]
    assert x.new_zeros(2, dtype=torch.int32).device == torch.device("vgpu:0")
    assert torch.rand_like(x).device == torch.device("vgpu:0")


def test_a_tensor_moves_within_its_own_world(world: virtual.World) -> None:
    x = torch.ones(3, device="vgpu:0")
    with virtual.gpus([None, None]) as other:
        y = x.to("vgpu:1")
        assert y.gpu is world.gpus[1]  # type: ignore[attr-defined]
        assert other.memory_allocated(1) == 0


def test_there_is_no_copy_out_of_meta(world: virtual.World) -> None:
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        torch.ones(3, device="meta").to("vgpu:0")
