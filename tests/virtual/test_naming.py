"""What virtual GPUs do to a process: they take torch's one place for such devices, unnamed."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from duoka import virtual
from duoka.virtual import naming
from duoka.virtual.world import armed, thread


def test_a_device_is_the_same_under_both_names(world: virtual.World) -> None:
    assert virtual.virtual_device(1) == torch.device("vgpu:1") == torch.device("privateuseone:1")
    assert virtual.is_virtual(torch.device("vgpu:0"))
    assert not virtual.is_virtual(torch.device("cpu"))
    assert virtual.device_type() == "vgpu"
    assert naming.spoken("no room on privateuseone:1") == "no room on vgpu:1"


@pytest.mark.slow
@pytest.mark.process
def test_without_a_name_they_are_no_accelerator() -> None:
    # A process of its own: a name is given for good.
    code = """
    import torch
    from duoka import virtual

    with virtual.unnamed_gpus([None, None], data="meta") as world:
        first = torch.ones(300, device=virtual.virtual_device(0))
        second = (first @ first).to(virtual.virtual_device(1))
        assert world.memory_allocated(0) >= 1200
        try:
            first + second.expand(300)
        except RuntimeError as error:
            print(error)
    print(torch._C._get_privateuse1_backend_name())
    with virtual.unnamed_gpus([None], data="meta"):
        first.requires_grad_()
        first.sum().backward()  # takes it, where no GPU is the accelerator
        print(first.grad.device)
    print(torch.accelerator.current_accelerator())
    with virtual.gpus([None]):
        print(torch.ones(2, device="vgpu:0").device)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    mixed, *rest = done.stdout.splitlines()
    assert "at least two devices" in mixed
    assert rest == ["privateuseone", "vgpu:0", "vgpu", "vgpu:0"]


def test_switches_of_the_thread_are_put_back() -> None:
    before = torch._C._is_multithreading_enabled(), torch._C._only_lift_cpu_tensors(), thread.armed
    torch._C._set_multithreading_enabled(True)
    torch._C._set_only_lift_cpu_tensors(False)
    try:
        with armed():
            assert not torch._C._is_multithreading_enabled()
            assert torch._C._only_lift_cpu_tensors()
        assert torch._C._is_multithreading_enabled()
        assert not torch._C._only_lift_cpu_tensors()
    finally:
        torch._C._set_multithreading_enabled(before[0])
        torch._C._set_only_lift_cpu_tensors(before[1])
        thread.armed = before[2]


@pytest.mark.slow
@pytest.mark.process
def test_planning_gives_no_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code = """
    import torch, duoka, transformers
    from duoka import models

    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "vocab_size": 97,
              "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = models.build(config, dtype=torch.bfloat16)
    plan = duoka.plan(model, "1GiB,1GiB", duoka.Workload(prompt_tokens=32, new_tokens=4))
    print(len(plan.devices), torch._C._get_privateuse1_backend_name())
    """
    monkeypatch.setenv("DUOKA_CACHE", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["1", "privateuseone"]
