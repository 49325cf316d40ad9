from collections.abc import Callable

from . import memory

Memory: Callable[[int | None], memory.Memory]
