"""Names of modules and tensors, and of devices, that a person gives one by one."""

from __future__ import annotations

from duoka.errors import UsageError
from duoka.forecast.tensor_names import Outline
from duoka.hardware.fleet import Fleet

from .read import Devices, NoDevice
from .spelling import Spelling, is_within
from .suggest import Finder


class Names:
    """The names of an outline, its own and its checkpoint's, and the blocks that they mean."""

    def __init__(self, outline: Outline) -> None:
        self._outline = outline
        self._spelling = Spelling(outline)

    def is_known(self, name: str) -> bool:
        """Whether a name is a module's or tensor's."""
        return bool(name) and self._spelling.is_known(name)

    def blocks_of(self, name: str) -> list[int]:
        """The blocks that hold something of a module or tensor, in execution order."""
        if not self.is_known(name):
            return []
        return [
            index
            for index, block in enumerate(self._outline.blocks)
            if any(self._is_of(tensor.name, name) for tensor in block.tensors)
        ]

    def holds(self, name: str, module: str) -> bool:
        """Whether a name means a native module, or one around it."""
        held = [
            tensor.name
            for block in self._outline.blocks
            for tensor in block.tensors
            if is_within(tensor.name, module)
        ]
        return bool(held) and all(self._is_of(tensor, name) for tensor in held)

    def nearest(self, name: str) -> tuple[str, ...]:
        """Real names like one that isn't real."""
        return Finder([*self._spelling.native, *self._spelling.published]).find(name).names

    def _is_of(self, tensor: str, name: str) -> bool:
        if name in self._spelling.native:
            return is_within(tensor, name)
        return tensor in self._spelling.published[name]


def find_device(told: str, fleet: Fleet) -> str:
    """The name of the fleet's device that a person means: "cuda:1", or "1" alone."""
    try:
        return Devices(fleet).find(told)
    except NoDevice:
        raise UsageError(
            f"{told[:60]!r} is no device of these GPUs",
            hint=f"the devices are {', '.join(fleet.names)}",
        ) from None
