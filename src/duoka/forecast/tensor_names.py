"""Tensor names of a model's parameters and buffers, block by block.

Every tensor is known by its *native* name, the model's own (`model.layers.3.mlp.up_proj.weight`),
and by the *published* names under which its checkpoint holds it, where those are others
(`transformer.encoder.layers.3.mlp.dense_h_to_4h.weight`). With an outline a map written by hand is
judged without the model and without torch. It knows nothing of devices.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_NUMBERED = re.compile(r"(.*?\.|)(\d+)(?:\..*)?", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTensor:
    """A name of a parameter or buffer.

    `name` is native. `num_bytes` is the tensor's, and 0 under every name but its first, which is
    `tied_to` there. `published` are the checkpoint's names of what it is made of, where they
    differ from the native one. A buffer that no checkpoint holds is not `is_saved`: maps that
    other tools write leave it out.
    """

    name: str
    num_bytes: int
    published: tuple[str, ...] = ()
    tied_to: str = ""
    is_buffer: bool = False
    is_saved: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class OutlineBlock:
    """A block: its modules, its tensors, and the earlier block of shared tensors."""

    modules: tuple[str, ...]
    tensors: tuple[NamedTensor, ...]
    tied_to: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """All tensors of a model by name, in its blocks, in execution order.

    `model` is the class's name, for people; the `fingerprint` is empty when it is unknown.
    `empty_modules` are the names of modules that hold no tensor, such as dropout and activations.
    """

    blocks: tuple[OutlineBlock, ...]
    model: str = "the model"
    fingerprint: str = ""
    empty_modules: tuple[str, ...] = ()

    @property
    def joined_layers(self) -> str | None:
        """The list of the model's layers, if these are a single block: code joins their outputs.

        Such code often fails on several devices; a model of that code goes on one.
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
        """Build the outline of tensors known by their names only.

        Every module that holds some is taken for a block; what must stay whole beyond that, and
        which tensors are tied, nobody can tell from names.
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
    """Return the list of a module and its number there; None for a module outside of lists."""
    match = _NUMBERED.fullmatch(module)
    return None if match is None else (match[1].rstrip("."), int(match[2]))


def main_list(modules: Sequence[str]) -> str | None:
    """Return the model's own list of layers: of the lists in `modules` the last.

    A vision tower has its list too, and runs before the text's layers; what runs last is the
    model's own.
    """
    sizes: dict[str, set[int]] = {}
    for module in modules:
        if (layer := layer_of(module)) is not None:
            sizes.setdefault(layer[0], set()).add(layer[1])
    lists = [name for name, numbers in sizes.items() if len(numbers) > 1]
    return lists[-1] if lists else None
