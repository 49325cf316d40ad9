"""Memory of virtual GPUs: capacity, what is counted, what is freed, who listens."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch

from duoka import virtual
from duoka.errors import VirtualDeviceError
from duoka.hardware.gpu_generation import GpuGeneration

MIB = 2**20


def test_a_gpu_refuses_what_exceeds_its_capacity() -> None:
    with virtual.gpus([64 * MIB, None]) as world:
        kept = torch.empty(40 * MIB, dtype=torch.uint8, device="vgpu:0")
        with pytest.raises(torch.OutOfMemoryError) as error:
            torch.empty(30 * MIB, dtype=torch.uint8, device="vgpu:0")
        text = str(error.value)
        for part in (
            "out of memory. Tried to allocate 30.00 MiB. GPU 0 has a total capacity of 64.00 MiB",
            "of which 24.00 MiB is free",
            "40.00 MiB is allocated by PyTorch",
            "0 B is reserved by PyTorch but unallocated",
        ):
            assert part in text
        assert world.memory_allocated(0) == kept.storage_bytes  # type: ignore[attr-defined]
        torch.empty(30 * MIB, dtype=torch.uint8, device="vgpu:1")


def test_operations_are_refused_too() -> None:
    with virtual.gpus([20 * MIB]):
        x = torch.ones(4 * MIB, device="vgpu:0")
        with pytest.raises(torch.OutOfMemoryError):
            x + x
        x.add_(x)
        assert x[0].item() == 2


def test_memory_is_counted_in_512_bytes_and_segments(world: virtual.World) -> None:
    x = torch.empty(3, device="vgpu:1")
    y = torch.empty(2 * MIB, device="vgpu:1")
    assert world.memory_allocated(1) == 512 + 8 * MIB
    assert world.memory_reserved(1) == 2 * MIB + 20 * MIB
    assert world.memory_allocated(0) == 0
    del x, y
    assert world.memory_allocated(1) == 0
    assert world.memory_reserved(1) == 22 * MIB
    world.empty_cache()
    assert world.memory_reserved(1) == 0
    assert world.max_memory_allocated(1) == 512 + 8 * MIB
    assert world.max_memory_reserved(1) == 22 * MIB
    world.reset_peak_memory_stats(1)
    assert world.max_memory_reserved(1) == 0


def test_an_empty_tensor_costs_nothing(world: virtual.World) -> None:
    x = torch.empty(0, device="vgpu:0")
    assert world.memory_reserved(0) == 0
    assert x.numel() == 0


def test_views_share_storage_and_are_counted_once(world: virtual.World) -> None:
    x = torch.zeros(4, 64, device="vgpu:0")
    used = world.memory_allocated(0)
    views = [
        x[1], x.T, x.view(-1), x.reshape(2, 128), x.expand(2, 4, 64), x.detach(), x[..., ::2],
        *x.unbind(), *x.split(2), *x.chunk(2), x.unsqueeze(0), x.data, x.flatten(), x.diagonal(),
        x.view(torch.int32), x.narrow(0, 1, 2), x.unfold(0, 2, 1), torch.as_strided(x, (2,), (1,)),
    ]  # fmt: skip
    assert world.memory_allocated(0) == used
    assert {view.storage_id for view in views} == {x.storage_id}  # type: ignore[attr-defined]
    assert {view.storage_bytes for view in views} == {1024}  # type: ignore[attr-defined]
    views[0].fill_(7.0)
    assert x[1, 3].item() == 7
    del x
    assert world.memory_allocated(0) == used
    del views
    assert world.memory_allocated(0) == 0


def test_a_copy_that_looks_like_a_view_is_counted(world: virtual.World) -> None:
    x = torch.zeros(4, 64, device="vgpu:0")
    assert x.T.contiguous().storage_id != x.storage_id  # type: ignore[attr-defined]
    assert x.contiguous().storage_id == x.storage_id  # type: ignore[attr-defined]
    assert x.clone().storage_id != x.storage_id  # type: ignore[attr-defined]


def test_in_place_operations_allocate_nothing(world: virtual.World) -> None:
    x = torch.zeros(256, device="vgpu:0")
    world.reset_peak_memory_stats(0)
    x.add_(1).mul_(2)[3:].zero_()
    torch.add(x, x, out=x)
    assert world.max_memory_allocated(0) == 1024


def test_resizing_takes_new_memory(world: virtual.World) -> None:
    x = torch.arange(4.0, device="vgpu:0")
    x.resize_(1000)
    assert x.shape == (1000,)
    assert x[:4].tolist() == [0, 1, 2, 3]
    assert world.memory_allocated(0) == 4096


def test_set_shares_storage(world: virtual.World) -> None:
    x, y = torch.zeros(4, device="vgpu:0"), torch.ones(2, 3, device="vgpu:0")
    x.set_(y)
    assert x.shape == (2, 3)
    x.fill_(5)
    assert y[1, 2].item() == 5
    assert world.memory_allocated(0) == 512
    with pytest.raises((VirtualDeviceError, RuntimeError, TypeError)):
        x.set_(torch.zeros(3).untyped_storage())


def test_backward_frees_what_it_saved(world: virtual.World) -> None:
    x = torch.ones(1024, device="vgpu:0", requires_grad=True)
    y = x
    for _ in range(4):
        y = y.sin()
    assert world.memory_allocated(0) == 5 * 4096
    y.sum().backward()
    del y
    assert world.memory_allocated(0) == 2 * 4096


def test_mem_get_info() -> None:
    with virtual.gpus([64 * MIB, None]) as world:
        kept = torch.empty(10 * MIB, dtype=torch.uint8, device="vgpu:0")
        assert world.mem_get_info(0) == (54 * MIB, 64 * MIB)
        del kept
        assert world.mem_get_info(0) == (54 * MIB, 64 * MIB)
        free, total = world.mem_get_info(1)
        assert free == total


class Recorder:
    """Writes down what it hears."""

    def __init__(self) -> None:
        self.live: dict[int, int] = {}
        self.ids: list[int] = []
        self.operations: list[str] = []

    def allocated(self, gpu: virtual.VirtualGpu, storage_id: int, num_bytes: int) -> None:
        self.live[storage_id] = num_bytes
        self.ids.append(storage_id)

    def freed(self, gpu: virtual.VirtualGpu, storage_id: int) -> None:
        self.live.pop(storage_id, None)

    def operation(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        self.operations.append(str(func))


def test_a_listener_hears_everything(world: virtual.World) -> None:
    recorder = Recorder()
    with virtual.observe(recorder):
        x = torch.ones(3, 4, device="vgpu:0")
        y = x @ x.permute(1, 0)
        del x
    assert recorder.operations == ["aten.permute.default", "aten.mm.default"]
    assert recorder.live == {y.storage_id: 36}  # type: ignore[attr-defined]
    assert recorder.ids == sorted(set(recorder.ids))
    count = len(recorder.ids)
    y + y
    assert len(recorder.ids) == count


def test_a_scope_has_one_listener_in_one_thread(world: virtual.World) -> None:
    outer, inner = Recorder(), Recorder()
    virtual.set_gpus([None])
    with virtual.observe(outer):
        with virtual.observe(inner):
            torch.empty(3, device="vgpu:0")
        torch.empty(3, device="vgpu:0")
        thread = threading.Thread(target=lambda: torch.empty(3, device="vgpu:0"))
        thread.start()
        thread.join()
    assert len(outer.ids) == 1
    assert len(inner.ids) == 1


def test_a_scope_leaves_the_process_world_alone() -> None:
    process = virtual.set_gpus([None])
    with virtual.gpus([None, None], data="meta") as scoped:
        assert virtual.active_world() is scoped
        seen = []
        thread = threading.Thread(target=lambda: seen.append(virtual.active_world()))
        thread.start()
        thread.join()
        assert seen == [process]
    assert virtual.active_world() is process


def test_unusable_worlds_are_refused() -> None:
    with pytest.raises(VirtualDeviceError, match="-1 bytes"):
        virtual.set_gpus([-1])
    with pytest.raises(VirtualDeviceError, match="xpu"):
        virtual.set_gpus([None], data="xpu:0")


def test_a_wrong_index_is_refused(world: virtual.World) -> None:
    with pytest.raises(RuntimeError, match="invalid device ordinal 7"):
        torch.empty(1, device="vgpu:7")
    with pytest.raises(RuntimeError, match="invalid device ordinal 7"):
        torch.empty(1, device="vgpu:0").to("vgpu:7")


def test_threads_share_one_allocator() -> None:
    world = virtual.set_gpus([None])

    def churn() -> None:
        for size in range(1, 400):
            x = torch.empty(size * 1000, dtype=torch.uint8, device="vgpu:0")
            x.view(-1)

    threads = [threading.Thread(target=churn) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert world.memory_allocated(0) == 0


@pytest.mark.slow
def test_garbage_cycles_are_freed_safely() -> None:
    with virtual.gpus([None]) as world:
        for _ in range(300):
            cycle: dict[str, Any] = {"x": torch.empty(1000, device="vgpu:0")}
            cycle["self"] = cycle
        gc.collect()
        del cycle
        gc.collect()
        assert world.memory_allocated(0) == 0


def test_the_capability_is_that_of_the_generation() -> None:
    module = torch.get_device_module("vgpu")
    with virtual.gpus([None], generation=GpuGeneration(before_ampere=True)):
        assert module.get_device_capability(0) == (7, 5)
        assert module.is_bf16_supported()
        assert not module.is_bf16_supported(including_emulation=False)
    with virtual.gpus([None]):
        assert module.get_device_capability(0) == (8, 0)
        assert module.is_bf16_supported(including_emulation=False)
