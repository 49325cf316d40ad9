"""Experts that are fetched from the host: which are sent, and how they are unpacked."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from models.quantization.test_host_experts import EXPERTS, inputs, make_hosted
from torch import Tensor
from torch.nn import functional as F

from duoka import virtual
from duoka.models.quantization import fetched_experts
from duoka.models.quantization.stacked import Int4Rows

ROWS, COLUMNS = 112, 256


@pytest.fixture(autouse=True)
def _gpus() -> None:
    virtual.set_gpus([None])


@pytest.mark.parametrize("tokens", [2, 3, 40])
def test_a_step_of_many_tokens_fetches_its_experts_once(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many are more pairs of token and expert than experts."""
    sent: list[int] = []
    tensors_of = fetched_experts._tensors_of

    def record(module: Any, number: int) -> list[Tensor]:
        sent.append(number)
        return tensors_of(module, number)

    monkeypatch.setattr(fetched_experts, "_tensors_of", record)
    monkeypatch.setattr(fetched_experts, "fetched_bytes", lambda *_: [])
    hidden, index, weights = inputs(tokens, "vgpu:0")
    with torch.no_grad():
        make_hosted("qwen3_moe", "int4", "vgpu:0")[0](hidden, index, weights)
    used = sorted(set(index.flatten().tolist()))
    assert sent == (used if index.numel() > EXPERTS else [])


def check_unpacking() -> None:
    """The kernel multiplies by what is unpacked, up to rounding."""
    generator = torch.manual_seed(0)
    for rows in (64, 96, ROWS):
        weight = Int4Rows.of(torch.randn(rows, COLUMNS, generator=generator).bfloat16())
        expected = F.linear(torch.eye(COLUMNS).bfloat16(), weight).t().float()
        assert torch.allclose(weight.unpacked(torch.float32), expected, atol=0.02)  # type: ignore[attr-defined]


def test_int4_is_unpacked() -> None:
    check_unpacking()


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_int4_is_unpacked_as_other_processors_pack_it(capability: str) -> None:
    code = "from models.quantization.test_fetched_experts import check_unpacking as c; c()"
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability, "PYTHONPATH": paths}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
