from collections.abc import Callable

from . import device_memory

Memory: Callable[..., device_memory.PlainMemory]
