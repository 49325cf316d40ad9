"""Tensor names of a model's parameters and buffers, block by block.

Every tensor has a *native* name, as in the model (`model.layers.3.mlp.up_proj.weight`), and
*published* names, as in its checkpoint, if these differ
(`transformer.encoder.layers.3.mlp.dense_h_to_4h.weight`). With an outline, a device map written by
hand is checked without the model and without torch. This module knows nothing of devices.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_NUMBERED = re.compile(r"(.*?\.|)(\d+)(?:\..*)?", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTensor:
    """A name of a parameter or buffer.

    `name` is the native name. A tensor with several names has its `num_bytes` under its first name;
    under every other name `num_bytes` is 0, and `tied_to` is the first name. `published` are the
    names of its source tensors in the checkpoint, if they differ from `name`. `is_saved` is False
    for a buffer that checkpoints don't hold: device maps of other tools omit it.
    """

    name: str
    num_bytes: int
    published: tuple[str, ...] = ()
    tied_to: str = ""
    is_buffer: bool = False
    is_saved: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class OutlineBlock:
    """A block: its modules, its tensors, and an earlier block that must share its device."""

    modules: tuple[str, ...]
    tensors: tuple[NamedTensor, ...]
    tied_to: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """The names of all tensors of a model, by block in execution order.

    `model` is the class name, for display; `fingerprint` is empty if unknown.
    `empty_modules` are the names of modules that hold no tensor, such as dropout and activations.
    """

    blocks: tuple[OutlineBlock, ...]
    model: str = "the model"
    fingerprint: str = ""
    empty_modules: tuple[str, ...] = ()

    @property
    def joined_layers(self) -> str | None:
        """The name of the model's list of layers if all layers are one block, otherwise None.

        Layers are one block if model code combines their outputs. Such code often fails on several
        devices, so the model is placed on one device.
        """
        layers = main_list([tensor.name for block in self.blocks for tensor in block.tensors])
        blocks = [
            block
            for block in self.blocks
            if layers and any(tensor.name.startswith(f"{layers}.") for tensor in block.tensors)
        ]
        return layers if len(blocks) == 1 else None

    @classmethod
    def of_names(cls, names: Iterable[str], empty_modules: Sequence[str] = ()) -> Outline:
        """Build the outline of a model from tensor names only.

        Every module that holds tensors becomes a block. Ties between tensors, and blocks of several
        modules, can't be derived from names.
        """
        owners: dict[str, list[NamedTensor]] = {}
        for name in dict.fromkeys(names):
            owner = name.rpartition(".")[0]
            owners.setdefault(owner, []).append(NamedTensor(name=name, num_bytes=1))
        blocks = []
        for owner, tensors in owners.items():
            inner = not owner or any(name.startswith(owner + ".") for name in owners)
            modules = [tensor.name for tensor in tensors] if inner else [owner]
            blocks.append(OutlineBlock(modules=tuple(modules), tensors=tuple(tensors)))
        return cls(blocks=tuple(blocks), empty_modules=tuple(empty_modules))


def layer_of(module: str) -> tuple[str, int] | None:
    """Return a module's list and its index in the list; None for a module outside of lists."""
    match = _NUMBERED.fullmatch(module)
    return None if match is None else (match[1].rstrip("."), int(match[2]))


def main_list(modules: Sequence[str]) -> str | None:
    """Return the name of the model's main list of layers, or None without a list.

    The last list of several layers in `modules` is the main one: the layers of a vision tower are
    in a list too, but run before the text layers.
    """
    sizes: dict[str, set[int]] = {}
    for module in modules:
        if (layer := layer_of(module)) is not None:
            sizes.setdefault(layer[0], set()).add(layer[1])
    lists = [name for name, numbers in sizes.items() if len(numbers) > 1]
    return lists[-1] if lists else None
