"""Registration, `torch.vgpu`, and what virtual GPUs can't do."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch

from duoka import virtual
from duoka.errors import VirtualDeviceError

pytestmark = pytest.mark.process


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_registers_nothing() -> None:
    code = """
    import torch, duoka.virtual
    print(torch._C._get_privateuse1_backend_name(), hasattr(torch, "vgpu"))
    """
    assert run_python(code) == "privateuseone False"


@pytest.mark.slow
def test_another_backend_in_the_place_is_named() -> None:
    code = """
    import torch, duoka.virtual
    from duoka.errors import VirtualDeviceError
    torch.utils.rename_privateuse1_backend("npu")
    try:
        duoka.virtual.set_gpus([None])
    except VirtualDeviceError as error:
        print(error)
    """
    assert "'npu'" in run_python(code)


def test_the_queries_of_torch_vgpu(world: virtual.World) -> None:
    x = torch.empty(300, device="vgpu:1")
    vgpu = torch.vgpu  # type: ignore[attr-defined]
    assert vgpu.is_available()
    assert vgpu.device_count() == 3
    for device in (1, "vgpu:1", torch.device("vgpu:1"), torch.device("vgpu", 1)):
        assert vgpu.memory_allocated(device) == 1536
        assert vgpu.max_memory_allocated(device) == 1536
        assert vgpu.memory_reserved(device) == vgpu.max_memory_reserved(device) == 2**21
    assert vgpu.memory_allocated() == 0
    del x
    vgpu.empty_cache()
    vgpu.reset_peak_memory_stats(1)
    assert vgpu.max_memory_reserved(1) == 0
    assert vgpu.mem_get_info(1)[0] > 0
    vgpu.synchronize()
    with pytest.raises(ValueError, match="cpu"):
        vgpu.memory_allocated("cpu")


def test_the_current_device(world: virtual.World) -> None:
    vgpu = torch.vgpu  # type: ignore[attr-defined]
    with vgpu.device(2):
        assert vgpu.current_device() == 2
        assert torch.empty(1, device="vgpu").device == torch.device("vgpu:2")
    assert vgpu.current_device() == 0
    vgpu.set_device("vgpu:1")
    try:
        assert vgpu.current_device() == 1
        assert torch.ones(1, device="vgpu").device == torch.device("vgpu:1")
    finally:
        vgpu.set_device(0)


def test_random_state(world: virtual.World) -> None:
    vgpu = torch.vgpu  # type: ignore[attr-defined]
    state = vgpu.get_rng_state()
    first = torch.rand(3, device="vgpu:0").tolist()
    vgpu.set_rng_state(state)
    assert torch.rand(3, device="vgpu:0").tolist() == first


def test_there_is_no_generator_on_a_virtual_gpu(world: virtual.World) -> None:
    with pytest.raises((VirtualDeviceError, RuntimeError, NotImplementedError)):
        torch.Generator(device="vgpu:0")


def test_pinning_is_refused(world: virtual.World) -> None:
    with pytest.raises((VirtualDeviceError, RuntimeError)):
        torch.ones(2, device="vgpu:0").pin_memory()
    assert not torch.ones(2, device="vgpu:0").is_pinned()


def test_a_data_loader_feeds_a_virtual_gpu(world: virtual.World) -> None:
    data = torch.utils.data.TensorDataset(torch.arange(6.0))
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    moved = [batch.to("vgpu:1", non_blocking=True) for (batch,) in loader]
    assert torch.cat(moved).tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compile_is_refused(world: virtual.World) -> None:
    compiled = torch.compile(lambda x: x.sin() + 1)
    with pytest.raises(Exception, match=r"(?i)vgpu|virtual"):
        compiled(torch.ones(2, device="vgpu:0"))


def test_pinned_is_ordinary_memory(world: virtual.World) -> None:
    """Trainer's loaders pin what they load; a virtual GPU takes it from ordinary memory."""
    pinned = torch.arange(3.0).pin_memory()
    assert pinned.to("vgpu:1", non_blocking=True).tolist() == [0.0, 1.0, 2.0]
    for workers in (0, 1):
        loader = torch.utils.data.DataLoader(
            [{"ids": torch.ones(2)}] * 2, batch_size=2, pin_memory=True, num_workers=workers
        )
        (batch,) = loader
        assert batch["ids"].tolist() == [[1.0, 1.0]] * 2
