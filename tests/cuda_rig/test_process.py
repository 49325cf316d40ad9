"""What duoka leaves behind in a process that goes on with CUDA: nothing."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import duoka
from duoka import virtual
from duoka.checker.prove import prove
from duoka.errors import ModelError, VirtualDeviceError
from duoka.forecast.workload import Training
from duoka.models.from_checkpoint import build_model
from duoka.models.trainable import make_trainable

pytestmark = pytest.mark.cuda_rig(gpus="1GiB,1GiB")

FLEET = duoka.Fleet.parse("64MiB,64MiB")
PROMPT = duoka.Workload(prompt_tokens=64, new_tokens=8, dtype="float32")
TRAINING = duoka.Workload(
    prompt_tokens=64, new_tokens=0, dtype="float32", training=Training(method="full")
)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=97,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path


def assert_fresh() -> None:
    """CUDA's backward, pinned memory and this thread are as in a process without duoka."""
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    assert torch._C._is_multithreading_enabled()
    assert not torch._C._only_lift_cpu_tensors()
    first, second = nn.Linear(4, 4, device="cuda:0"), nn.Linear(4, 4, device="cuda:1")
    second(first(torch.ones(1, 4, device="cuda:0")).to("cuda:1")).sum().backward()
    assert first.weight.grad is not None
    assert torch.ones(3).pin_memory().is_pinned()
    assert next(iter(DataLoader([torch.ones(2)], pin_memory=True))).is_pinned()


def test_planning_and_proving(llama: Path) -> None:
    plan = duoka.plan(llama, FLEET, PROMPT, use_all=True)
    prove(plan, build_model(duoka.Checkpoint.open(llama), plan.workload))
    assert not torch.cuda.is_initialized()
    assert_fresh()


def test_planning_and_proving_a_training(llama: Path) -> None:
    plan = duoka.plan(llama, FLEET, TRAINING, use_all=True)
    prove(plan, build_model(duoka.Checkpoint.open(llama), plan.workload))
    assert not torch.cuda.is_initialized()
    assert_fresh()


@pytest.mark.parametrize("train", [False, True])
def test_checking(llama: Path, train: bool) -> None:
    plan = duoka.plan(llama, FLEET, PROMPT, use_all=True)
    report = duoka.check(llama, dict(plan.placement.entries), workload=PROMPT, train=train)
    assert report.ok, report.stop
    assert report.memory
    assert not torch.cuda.is_initialized()
    assert_fresh()


def test_loading(llama: Path) -> None:
    model = duoka.load(duoka.plan(llama, FLEET, PROMPT, use_all=True))
    assert {str(parameter.device) for parameter in model.parameters()} == {"cuda:0", "cuda:1"}
    assert_fresh()


def test_a_fault_is_found_in_a_fork() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            moved: torch.Tensor = self.second(self.first(x).to(self.second.weight.device))
            return moved + self.first.bias

    report = duoka.check(Mixed(), {"first": 0, "second": 1}, inputs=(torch.ones(1, 4),))
    (fault,) = report.faults
    assert {operand.device for operand in fault.operands} == {"cuda:0", "cuda:1"}
    assert_fresh()


class Captioner(nn.Module):
    """Its loss fails on two GPUs: the labels are where the inputs are."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.embed(ids).to(self.head.weight.device)
        logits = self.head(hidden)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def test_a_repair_is_proved_in_a_fork() -> None:
    ids = torch.zeros(2, 4, dtype=torch.long)
    places = {"embed": 0, "head": 1}
    report = duoka.check(Captioner(), places, inputs={"ids": ids, "labels": ids}, train=True)
    assert len(report.faults) == 1
    (patch,) = duoka.repair(report)
    assert patch.proved
    assert_fresh()


def test_what_a_fork_raises_is_raised() -> None:
    def fail() -> None:
        raise ModelError("it can't be traced", hint="try another")

    with pytest.raises(ModelError, match="it can't be traced") as caught:
        virtual.apart(fail)
    assert caught.value.hint == "try another"


def test_a_fork_that_dies_is_told() -> None:
    with pytest.raises(VirtualDeviceError, match="exit code -9"):
        virtual.apart(lambda: os.kill(os.getpid(), signal.SIGKILL))


def test_backward_comes_too_late_after_that_of_cuda(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DUOKA_CACHE", str(tmp_path / "cache"))
    assert_fresh()
    duoka.plan(llama, FLEET, PROMPT)  # needs none
    with pytest.raises(VirtualDeviceError, match="a backward on CUDA in") as caught:
        duoka.plan(llama, FLEET, TRAINING)
    assert caught.value.hint is not None
    assert "before training" in caught.value.hint


@pytest.mark.parametrize(
    ("package", "workload"),
    [
        ("torchao", duoka.Workload(prompt_tokens=64, new_tokens=8, quantize="int8")),
        ("bitsandbytes", duoka.Workload(prompt_tokens=64, new_tokens=8, quantize="nf4")),
    ],
)
def test_a_package_for_quantization_does_not_start_cuda(
    llama: Path, package: str, workload: duoka.Workload
) -> None:
    plan = duoka.plan(llama, FLEET, workload)
    assert package in sys.modules
    assert not torch.cuda.is_initialized()
    model = duoka.load(plan)
    assert {str(parameter.device) for parameter in model.parameters()} == {"cuda:0"}


def test_adapters_do_not_start_cuda(llama: Path) -> None:
    lora = Training(method="lora")
    workload = duoka.Workload(prompt_tokens=64, new_tokens=0, dtype="float32", training=lora)
    duoka.plan(llama, FLEET, workload)
    model = build_model(duoka.Checkpoint.open(llama), PROMPT)
    make_trainable(model, lora, torch.float32)
    assert "bitsandbytes" in sys.modules
    assert not torch.cuda.is_initialized()
