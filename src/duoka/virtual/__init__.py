"""Virtual GPUs: devices ``vgpu:0``, ``vgpu:1``, … that fail where GPUs fail and count their memory.

Nothing happens on import: the backend is registered with torch on the first `set_gpus` or `gpus`.
"""

from .backend import gpus, register, set_gpus
from .faults import MixedDevicesError
from .state import Gpu, Listener, World, active_world, carry_over, observe, settled_by
from .tensor import VirtualTensor
from .values import UnknownValueError

__all__ = [
    "Gpu",
    "Listener",
    "MixedDevicesError",
    "UnknownValueError",
    "VirtualTensor",
    "World",
    "active_world",
    "carry_over",
    "gpus",
    "observe",
    "register",
    "set_gpus",
    "settled_by",
]
