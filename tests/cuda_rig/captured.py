"""What operations compute when a captured graph is replayed within `values()`.

A graph keeps addresses, not tensors, and so do the operations recorded here: each replay computes
over what the addresses hold then. Work that is no operation of PyTorch's, and operations that
compute nothing on the CPU, are nodes that the rig executes by itself, each in its turn.
"""

from __future__ import annotations

import ctypes
import functools
from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
from torch.utils._python_dispatch import _pop_mode_temporarily

Computation = Callable[[], None]

# By the number of a capture: computations, each with the number of nodes that come before it.
_recorded: defaultdict[int, list[tuple[int, Computation]]] = defaultdict(list)


def capture_id(devices: Iterable[torch.device]) -> int:
    """Return the number of the capture in a current stream of these devices; 0 for none."""
    return max((_capture(device)[0] for device in set(devices)), default=0)


def record(device: torch.device, computation: Computation) -> None:
    """Let each replay of the graph that is being captured on a device do a computation."""
    number, num_nodes = _capture(device)
    _recorded[number].append((num_nodes, computation))


def replay(launch: Callable[[], None]) -> None:
    """Launch a graph once, and execute its nodes with the computations between them."""
    rig, num_nodes = _rig(), ctypes.c_size_t()
    rig.rig_defer(1)
    try:
        launch()
    finally:
        rig.rig_defer(0)
    number, done = rig.rig_deferred(ctypes.byref(num_nodes)), 0
    if not number:
        raise NotImplementedError("values() doesn't compute a graph that is part of another")
    with _pop_mode_temporarily(), torch.inference_mode():
        for position, computation in (*_recorded[number], (num_nodes.value, lambda: None)):
            if error := rig.rig_run_nodes(done, position):
                raise RuntimeError(f"CUDA error {error} in a replayed graph")
            computation()
            done = position


def poison(host: torch.Tensor) -> None:
    """Fill memory with what no kernel has written: NaN, or integers too large for an index."""
    if host.dtype.is_floating_point or host.dtype.is_complex:
        byte = 0xFF
    else:
        byte = 0x01 if host.dtype == torch.bool else 0x7F
    length = 1 + sum(
        (size - 1) * stride for size, stride in zip(host.shape, host.stride(), strict=True)
    )
    ctypes.memset(host.data_ptr(), byte, length * host.itemsize)


def _capture(device: torch.device) -> tuple[int, int]:
    """Return the number of the capture in a device's current stream, 0 for none, and its nodes."""
    num_nodes = ctypes.c_size_t()
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    return _rig().rig_capture(stream, ctypes.byref(num_nodes)), num_nodes.value


@functools.cache
def _rig() -> ctypes.CDLL:
    rig = ctypes.CDLL(None)
    rig.rig_capture.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t)]
    rig.rig_capture.restype = rig.rig_deferred.restype = ctypes.c_uint64
    rig.rig_deferred.argtypes = [ctypes.POINTER(ctypes.c_size_t)]
    rig.rig_run_nodes.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
    return rig
