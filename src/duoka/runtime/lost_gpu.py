"""Lost GPUs: errors of CUDA after which this process can compute nothing on its GPUs any more."""

from __future__ import annotations

import re

import torch

from duoka.errors import GpuLostError

_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation, the one error of CUDA that passes
# PyTorch raises what CUDA's libraries return as a RuntimeError; only its text tells.
_OF_LIBRARIES = re.compile(r"\b(CUDA|NCCL) error|\bCU[A-Z]+_STATUS_")


def find_lost_gpu(error: BaseException | None, device: str = "") -> GpuLostError | None:
    """Return the error of a lost GPU that is behind an error, or None.

    Errors of CUDA are sticky, but for out of memory: each later call returns the same error.
    `device` is the GPU of this process, where the process has a single one.
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
    if isinstance(error, torch.OutOfMemoryError) or not isinstance(error, RuntimeError):
        return False
    if getattr(error, "error_code", None) == _OUT_OF_MEMORY:
        return False
    return isinstance(error, torch.AcceleratorError) or bool(_OF_LIBRARIES.search(str(error)))
