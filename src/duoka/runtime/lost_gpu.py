"""Lost GPUs: CUDA errors after which this process can't compute on its GPUs any more."""

from __future__ import annotations

import re

import torch

from duoka.errors import GpuLostError

_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation, the only CUDA error after which work goes on
# PyTorch raises errors of CUDA's libraries as RuntimeError, recognizable by the text alone.
_OF_LIBRARIES = re.compile(r"\b(CUDA|NCCL) error|\bCU[A-Z]+_STATUS_")


def find_lost_gpu(error: BaseException | None, device: str = "") -> GpuLostError | None:
    """Return a GpuLostError if an error, or an error in its chain of causes, lost a GPU; else None.

    CUDA errors other than out of memory are sticky: every later call returns the same error.
    `device` is named in the message: the GPU of this process, if the process has a single one.
    """
    while error is not None:
        if isinstance(error, GpuLostError):
            return error
        if _is_sticky(error):
            reason = str(error).partition("\n")[0]
            return GpuLostError(
                f"{device or 'a GPU'} has failed: {reason}",
                hint="check the GPU with `nvidia-smi`, and `dmesg` for Xid errors; then start "
                "again",
            )
        error = error.__cause__ or error.__context__
    return None


def _is_sticky(error: BaseException) -> bool:
    """Return True for a CUDA error that every later call repeats."""
    if isinstance(error, torch.OutOfMemoryError) or not isinstance(error, RuntimeError):
        return False
    if getattr(error, "error_code", None) == _OUT_OF_MEMORY:
        return False
    return isinstance(error, torch.AcceleratorError) or bool(_OF_LIBRARIES.search(str(error)))
