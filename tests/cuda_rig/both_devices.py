"""One program on virtual GPUs and on CUDA, each in a fork: torch does backward on one of them."""

from __future__ import annotations

import multiprocessing
import os
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch

from duoka import virtual
from duoka.hardware.gpu_generation import GpuGeneration

_FORK: Any = multiprocessing.get_context("fork")
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
    reader, writer = _FORK.Pipe(duplex=False)
    child = _FORK.Process(target=_answer, args=(writer, half, run))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child.start()
    writer.close()
    try:
        found, failure = reader.recv()
    finally:
        child.join()
    assert not failure, failure
    return found  # type: ignore[no-any-return]


def _answer(writer: Connection, half: Callable[..., Any], run: Callable[..., Any]) -> None:
    os.environ |= {"CUBLAS_WORKSPACE_CONFIG": ":0:0", "CUBLASLT_WORKSPACE_SIZE": "0"}
    # Made anew here, before the threads of backward would each try to, and break it for others.
    torch.set_num_threads(1)
    try:
        writer.send((half(run), ""))
    except BaseException:
        writer.send((None, traceback.format_exc()))
