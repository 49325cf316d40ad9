"""One program on virtual GPUs and on CUDA, each in a fork: torch does backward on one of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch

from duoka import virtual
from duoka.hardware.gpu_generation import GpuGeneration
from duoka.virtual.apart import in_fork

_Result = TypeVar("_Result")


def on_both(
    run: Callable[[str, Any], _Result], generation: GpuGeneration | None = None
) -> tuple[_Result, _Result]:
    """What `run` returns on virtual GPUs, of a generation, and on CUDA.

    It is given the type of device and who counts memory there: a world, or `torch.cuda`. Products
    take no workspaces of cuBLAS.
    """
    return _apart(partial(_virtual, generation), run), _apart(_cuda, run)


def _virtual(generation: GpuGeneration | None, run: Callable[[str, Any], _Result]) -> _Result:
    with virtual.gpus([None, None], data="meta", generation=generation) as world:
        return run("vgpu", world)


def _cuda(run: Callable[[str, Any], _Result]) -> _Result:
    torch.cuda.init()
    return run("cuda", torch.cuda)


def _apart(half: Callable[..., _Result], run: Callable[[str, Any], _Result]) -> _Result:
    def answer() -> _Result:
        os.environ |= {"CUBLAS_WORKSPACE_CONFIG": ":0:0", "CUBLASLT_WORKSPACE_SIZE": "0"}
        return half(run)

    return in_fork(answer)
