from __future__ import annotations

import pytest
import torch

from duoka import virtual
from duoka.checker.hardcoded import is_asked_device, present_as_cuda, virtual_cuda


@pytest.fixture(autouse=True)
def world() -> virtual.World:
    return virtual.set_gpus([2**30, None])


def test_peoples_own_code_finds_the_virtual_gpus() -> None:
    real = torch.cuda.is_available
    with virtual_cuda(2) as current:
        assert torch.cuda.is_available()
        assert torch.cuda.device_count() == 2
        assert torch.cuda.current_device() == 0
        with torch.cuda.device("cuda:1"):
            assert torch.cuda.current_device() == current.index == 1
        torch.cuda.set_device(1)
        assert current.number() == 1
        held = torch.ones(256, device="vgpu:1")
        assert torch.cuda.memory_allocated() == torch.cuda.memory_allocated("cuda:1") == 1024
        torch.cuda.synchronize(torch.device("cuda", 0))
        del held
    assert torch.cuda.is_available is real


def test_libraries_hear_what_is_true_of_this_machine() -> None:
    with virtual_cuda(2):
        code = compile("torch.cuda.is_available()", "/x/site-packages/lib.py", "eval")
        heard = eval(code, {"torch": torch})
    assert heard == torch.cuda.is_available()


def test_a_device_that_is_not_there_is_cudas_error() -> None:
    with virtual_cuda(2), pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.cuda.set_device(2)


def test_autocast_of_cuda_is_the_virtual_gpus() -> None:
    x = torch.ones(2, 2, device="vgpu:0")
    with virtual_cuda(2), torch.autocast("cuda", dtype=torch.bfloat16):
        assert (x @ x).dtype is torch.bfloat16


def test_a_device_that_was_asked_for_is_no_named_one() -> None:
    device = present_as_cuda(torch.device("vgpu", 1))
    assert device == torch.device("cuda", 1)
    assert is_asked_device(device)
    assert not is_asked_device(torch.device("cuda", 1))
    assert present_as_cuda(torch.device("cpu")) == torch.device("cpu")
