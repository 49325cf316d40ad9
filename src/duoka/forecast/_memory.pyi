from collections.abc import Callable

from . import device_memory

Memory: Callable[[int | None], device_memory.PlainMemory]
