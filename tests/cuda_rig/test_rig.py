"""The rig itself: what PyTorch finds on it is what it would find on GPUs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.cuda_rig(gpus="24GiB,12GiB")
MIB = 2**20


def test_the_gpus_are_as_the_settings_say() -> None:
    assert torch.cuda.device_count() == 2
    first, second = map(torch.cuda.get_device_properties, range(2))
    assert (first.total_memory, second.total_memory) == (24 * 2**30, 12 * 2**30)
    assert (first.major, first.minor) == (8, 6)


def test_memory_is_counted_and_gives_out() -> None:
    kept = [torch.empty(2**30, dtype=torch.uint8, device="cuda:1") for _ in range(12)]
    with pytest.raises(torch.OutOfMemoryError, match=r"GPU 1 has a total capacity of 12.00 GiB"):
        torch.empty(1, device="cuda:1")
    assert torch.cuda.memory_allocated(1) == len(kept) * 2**30
    assert torch.cuda.mem_get_info(0)[0] == 24 * 2**30


def test_copies_carry_bytes_and_fresh_memory_is_zero() -> None:
    first = torch.tensor([1.5, 2.5], device="cuda:0")
    assert first.to("cuda:1").cpu().tolist() == [1.5, 2.5]
    del first
    assert torch.empty(2, device="cuda:0").cpu().tolist() == [0.0, 0.0]


def test_tensors_on_two_gpus_do_not_mix() -> None:
    with pytest.raises(RuntimeError, match="at least two devices, cuda:0 and cuda:1"):
        torch.ones(2, device="cuda:0") + torch.ones(2, device="cuda:1")


def test_backward_runs_over_two_gpus() -> None:
    first, second = nn.Linear(4, 4, device="cuda:0"), nn.Linear(4, 4, device="cuda:1")
    second(first(torch.ones(1, 4, device="cuda:0")).to("cuda:1")).sum().backward()
    assert first.weight.grad is not None
    assert first.weight.grad.device == torch.device("cuda:0")


@pytest.mark.cuda_rig(gpus="8GiB", capability="7.5")
def test_attention_is_chosen_by_capability() -> None:
    torch.cuda.reset_peak_memory_stats()
    query = torch.empty(1, 8, 1024, 64, device="cuda:0", dtype=torch.bfloat16)
    before = torch.cuda.memory_allocated()
    nn.functional.scaled_dot_product_attention(query, query, query)
    # The scores as they are and after the softmax: there is no flash attention for it on 7.5.
    assert torch.cuda.max_memory_allocated() - before > 2 * 8 * 1024 * 1024 * 2


@pytest.mark.cuda_rig(gpus="8GiB", context="400MiB")
def test_a_context_takes_memory() -> None:
    torch.cuda.init()
    free, total = torch.cuda.mem_get_info()
    assert total - free == 400 * MIB


@pytest.mark.cuda_rig(gpus="8GiB", lag=100)
def test_an_event_is_over_when_its_launches_are() -> None:
    torch.ones(1, device="cuda:0")
    event = torch.cuda.current_stream().record_event()
    assert not event.query()
    event.synchronize()
    assert event.query()


@pytest.mark.cuda_rig(gpus="8GiB,8GiB")
def test_a_page_of_the_host_is_pinned_once() -> None:
    driver, whole = torch.cuda.cudart(), torch.ones(4096)
    torch.cuda.init()
    assert int(driver.cudaHostRegister(whole.data_ptr(), 64, 1)) == 0
    assert int(driver.cudaHostRegister(whole.data_ptr() + 64, 64, 1)) != 0
    # The error stays until the next launch, as on CUDA.
    with pytest.raises(RuntimeError, match="already mapped"):
        torch.ones(1, device="cuda:0")
    assert int(driver.cudaHostUnregister(whole.data_ptr())) == 0


@pytest.mark.cuda_rig(gpus="8GiB")
def test_expandable_segments_follow_what_is_asked() -> None:
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    first = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda:0")
    assert torch.cuda.memory_reserved() == 40 * MIB  # in steps of 20 MiB
    del first
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] == 8 * 2**30


def test_values_are_computed_where_they_are_asked_for() -> None:
    from cuda_rig.values import values

    with values(most=None):
        first = torch.arange(6, device="cuda:0", dtype=torch.float32).reshape(2, 3)
        product = (first @ first.T).softmax(-1)
    expected = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    torch.testing.assert_close(product.cpu(), (expected @ expected.T).softmax(-1))
    with values():
        assert first[:, 1].tolist() == [1.0, 4.0]  # a kernel gathers it before it is copied
