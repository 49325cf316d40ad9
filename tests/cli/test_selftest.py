"""``duoka selftest`` where there is no GPU, and where there are some."""

from __future__ import annotations

import json

import pytest
import torch
from doctoring import machine

from .conftest import Program


def test_without_a_gpu_it_refuses(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, "no-driver")
    done = program("selftest")
    assert done.returncode == 3
    assert done.stdout == ""
    assert "hint: " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("gpus", ["virtual:2x8GiB", "2xRTX4090", "24GiB"])
def test_other_gpus_are_refused(gpus: str, program: Program) -> None:
    done = program("selftest", "--gpus", gpus)
    assert done.returncode == 3
    assert "the self-test needs GPUs of this machine, not virtual or declared ones" in done.stderr
    assert "--gpus 0,1" in done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_real_gpus(program: Program) -> None:
    done = program("selftest", "--json")
    assert done.returncode == 0, done.stdout
    assert json.loads(done.stdout)["severity"] != "error"
