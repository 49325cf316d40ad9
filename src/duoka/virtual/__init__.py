"""Virtual GPUs: devices ``vgpu:0``, ``vgpu:1``, … that fail where GPUs fail and count their memory.

Nothing happens on import: the backend is registered with torch on the first `set_gpus` or `gpus`.

- `backend`, `naming`, `device_module`: the device as torch knows it
- `apart`: backward on virtual GPUs in a process that has CUDA as well
- `world`: the GPUs of a world, their memory and out-of-memory errors
- `tensor`, `factories`, `transfers`: virtual tensors, how they are made and copied
- `operators`, `op_call`, `autocast`: how an operator runs: arguments, results, charged memory
- `known_values`: which values are computed on a GPU whose tensors are on the meta device
- `attention`, `attention_numbers`, `cuda_only`: kernels that CUDA has and the CPU lacks
- `temporaries`: temporary buffers of CUDA's kernels
- `faults`: mixes of devices that CUDA refuses, with its errors
"""

from .apart import apart
from .backend import gpus, register, set_gpus, unnamed_gpus
from .cuda_only import multiply_int4
from .faults import MixedDevicesError
from .known_values import REAL_BYTES, UnknownValueError, unknown_numbers_as, with_values
from .naming import device_type, is_virtual, spoken, virtual_device
from .operators import add_operator, is_product, is_view
from .tensor import VirtualTensor
from .world import Listener, VirtualGpu, World, active_world, observe, settled_by

__all__ = [
    "REAL_BYTES",
    "Listener",
    "MixedDevicesError",
    "UnknownValueError",
    "VirtualGpu",
    "VirtualTensor",
    "World",
    "active_world",
    "add_operator",
    "apart",
    "device_type",
    "gpus",
    "is_product",
    "is_view",
    "is_virtual",
    "multiply_int4",
    "observe",
    "register",
    "set_gpus",
    "settled_by",
    "spoken",
    "unknown_numbers_as",
    "unnamed_gpus",
    "virtual_device",
    "with_values",
]
