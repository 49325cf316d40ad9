"""The module ``torch.vgpu``: the functions that torch expects of a device's module.

Devices are given as an index, a string, a `torch.device`, or None for the current one.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import backend_registration

from .naming import NAME, device_type, is_virtual
from .world import active_world, num_gpus, thread

_lock = threading.Lock()
_library = torch.library.Library("aten", "IMPL")


def give_name() -> None:
    """Name virtual GPUs ``vgpu``, which makes them torch's accelerator: see `naming`."""
    with _lock:
        if device_type() != NAME:
            backend_registration.rename_privateuse1_backend(NAME)
            backend_registration.generate_methods_for_privateuse1_backend()
            torch._register_device_module(NAME, sys.modules[__name__])
            # PyTorch asks the accelerator for pinned memory, and virtual GPUs have none: code that
            # pins a tensor, as every DataLoader does, gets a copy in ordinary memory.
            _library.impl("_pin_memory", lambda tensor, device=None: tensor.clone(), "CPU")


def can_do_backward() -> bool:
    """Return True if virtual GPUs are this process's accelerator, or may become so."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or is_virtual(accelerator):
        return True
    # A CUDA build of PyTorch names cuda even on a machine without a GPU.
    return accelerator.type == "cuda" and torch.cuda.device_count() == 0


def _index(device: Any = None) -> int:
    """Return the index of a device; raise ValueError for other devices than virtual GPUs."""
    if device is None:
        return thread.current_index
    if isinstance(device, int):
        return device
    device = torch.device(device)
    if not is_virtual(device):
        raise ValueError(f"expected a vgpu device, but got: {device}")
    return thread.current_index if device.index is None else int(device.index)


def is_available() -> bool:
    """Return True if this thread's world has virtual GPUs."""
    return num_gpus() > 0


def is_initialized() -> bool:
    """Return True: virtual GPUs need no initialization."""
    return True


def init() -> None:
    """Do nothing: virtual GPUs need no initialization."""


_lazy_init = init


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    """Count the GPUs of this thread's world."""
    return num_gpus()


def current_device() -> int:
    """Return the index of this thread's current device."""
    return thread.current_index


def set_device(device: Any) -> None:
    """Make a device this thread's current one."""
    index = _index(device)
    active_world().gpu(index)
    thread.current_index = index


class device:  # noqa: N801  (torch's own name for it)
    """A scope in which another device is this thread's current one."""

    def __init__(self, device: Any) -> None:
        self._index = _index(device)

    def __enter__(self) -> None:
        self._previous = _exchange_device(self._index)

    def __exit__(self, *_: object) -> None:
        thread.current_index = self._previous


def _exchange_device(index: int) -> int:
    """Set the current device, unless the index is negative; return the previous one."""
    previous = thread.current_index
    if index >= 0:
        thread.current_index = index
    return previous


_maybe_exchange_device = _exchange_device


def synchronize(device: Any = None) -> None:
    """Check that the device exists; no wait is needed, since operations are synchronous."""
    active_world().gpu(_index(device))


def get_device_name(device: Any = None) -> str:
    """Return the name of a device, with where its data is."""
    gpu = active_world().gpu(_index(device))
    return f"duoka virtual GPU ({gpu.data} data)"


def get_device_capability(device: Any = None) -> tuple[int, int]:
    """Return 7.5 (Turing) for GPUs before Ampere, else 8.0."""
    return (7, 5) if active_world().generation.before_ampere else (8, 0)


def _expose_method(name: str) -> Callable[..., Any]:
    """Wrap a method of `World` as a function that takes torch's device arguments."""

    def answer(device: Any = None) -> Any:
        return getattr(active_world(), name)(_index(device))

    return answer


memory_allocated = _expose_method("memory_allocated")
max_memory_allocated = _expose_method("max_memory_allocated")
memory_reserved = _expose_method("memory_reserved")
max_memory_reserved = _expose_method("max_memory_reserved")
reset_peak_memory_stats = _expose_method("reset_peak_memory_stats")
mem_get_info = _expose_method("mem_get_info")


def empty_cache() -> None:
    """Release the segments that are wholly free."""
    active_world().empty_cache()


# Random numbers come from the CPU's generator, so that a seed gives the CPU's numbers.
def manual_seed(seed: int) -> None:
    """Seed the generator."""
    torch.manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Do nothing: `torch.manual_seed`, which calls this, seeds the CPU's generator."""


def get_rng_state(device: Any = None) -> torch.Tensor:
    """Return the generator's state."""
    return torch.get_rng_state()


def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    """Set the generator's state."""
    torch.set_rng_state(new_state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return the lower-precision dtypes of ``torch.autocast("vgpu")``."""
    return [torch.float16, torch.bfloat16]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Return True, except for GPUs before Ampere if emulation doesn't count."""
    return including_emulation or not active_world().generation.before_ampere
