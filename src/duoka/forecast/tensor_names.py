"""Tensor names: those of a model's parameters and buffers, block by block, and of its layers.

Every tensor is known by its *native* name, the model's own (`model.layers.3.mlp.up_proj.weight`),
and by the *published* names under which its checkpoint holds it, where those are others
(`transformer.encoder.layers.3.mlp.dense_h_to_4h.weight`). With an outline a map written by hand is
judged without the model and without torch. It knows nothing of devices.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

_ANY = "*"  # stands for a block's number, in names that several blocks share
_NUMBERED = re.compile(r"(.*?\.|)(\d+)(?:\..*)?", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTensor:
    """One name of a parameter or buffer.

    `name` is native. `num_bytes` is the tensor's, and 0 under every name but its first, which is
    `tied_to` there. `published` are the checkpoint's names of what it is made of, where they
    differ from the native one.
    """

    name: str
    num_bytes: int
    published: tuple[str, ...] = ()
    tied_to: str = ""
    is_buffer: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """Names of tensors in the compact form in which a profile keeps them.

    A group holds the tensors of blocks that are alike: a part "*" of a name stands for the block's
    number. For each block of the profile, `blocks` has its group and its number, if it has one.
    """

    groups: tuple[tuple[NamedTensor, ...], ...]
    blocks: tuple[tuple[int, str], ...]

    @classmethod
    def of(cls, blocks: Iterable[tuple[Sequence[str], Sequence[NamedTensor]]]) -> TensorNames:
        """Build from each block's modules and tensors."""
        groups: dict[tuple[NamedTensor, ...], int] = {}
        numbered = []
        for modules, tensors in blocks:
            number = _number(modules, tensors)
            group = tuple(_renumbered(tensor, number, _ANY) for tensor in tensors)
            numbered.append((groups.setdefault(group, len(groups)), number))
        return cls(groups=tuple(groups), blocks=tuple(numbered))

    def tensors(self) -> Iterator[list[NamedTensor]]:
        """Yield each block's tensors."""
        for group, number in self.blocks:
            yield [_renumbered(tensor, _ANY, number) for tensor in self.groups[group]]


def _number(modules: Sequence[str], tensors: Sequence[NamedTensor]) -> str:
    """The number in a block's first module, if "*" may stand for it."""
    numbers = [part for part in (modules[0] if modules else "").split(".") if part.isdecimal()]
    names = (name for tensor in tensors for name in (tensor.name, *tensor.published))
    if not numbers or any(_ANY in name.split(".") for name in names):
        return ""
    return numbers[0]


def _renumbered(tensor: NamedTensor, old: str, new: str) -> NamedTensor:
    if not old or not new:
        return tensor
    return replace(
        tensor,
        name=_swapped(tensor.name, old, new),
        published=tuple(_swapped(name, old, new) for name in tensor.published),
        tied_to=_swapped(tensor.tied_to, old, new),
    )


def _swapped(name: str, old: str, new: str) -> str:
    """The name with its first part `old` replaced: the later ones number other things."""
    parts = name.split(".")
    if old in parts:
        parts[parts.index(old)] = new
    return ".".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutlineBlock:
    """What stays whole: its modules, its tensors, and the earlier block that it is tied to."""

    modules: tuple[str, ...]
    tensors: tuple[NamedTensor, ...]
    tied_to: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """All tensors of one model by name, in its blocks, in execution order.

    `model` is the class's name, for people; the `fingerprint` is empty when it is unknown.
    """

    blocks: tuple[OutlineBlock, ...]
    model: str = "the model"
    fingerprint: str = ""

    @property
    def joined_layers(self) -> str | None:
        """The list of the model's layers, if they lie in one block: its code joins what they make.

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
    def of_names(cls, names: Iterable[str]) -> Outline:
        """The outline of tensors of which only the names are known.

        Every module that holds some is taken for a block; what must stay whole beyond that, and
        which tensors are tied, nobody can tell from names.
        """
        owners: dict[str, list[NamedTensor]] = {}
        for name in dict.fromkeys(names):
            owner = name.rpartition(".")[0]
            owners.setdefault(owner, []).append(NamedTensor(name=name, num_bytes=1))
        blocks = []
        for owner, tensors in owners.items():
            inner = not owner or any(other.startswith(owner + ".") for other in owners)
            modules = [tensor.name for tensor in tensors] if inner else [owner]
            blocks.append(OutlineBlock(modules=tuple(modules), tensors=tuple(tensors)))
        return cls(blocks=tuple(blocks))


def layer_of(module: str) -> tuple[str, int] | None:
    """The list that a module is in, and its number there; None where it is in no list."""
    match = _NUMBERED.fullmatch(module)
    return None if match is None else (match[1].rstrip("."), int(match[2]))


def main_list(modules: Sequence[str]) -> str | None:
    """The list of layers that the others serve: of those with most layers after the first the last.

    A vision tower has its list too, and runs before the text's layers; what runs last is the
    model's own.
    """
    sizes: dict[str, set[int]] = {}
    for module in modules:
        if (layer := layer_of(module)) is not None:
            sizes.setdefault(layer[0], set()).add(layer[1])
    lists = [name for name, numbers in sizes.items() if len(numbers) > 1]
    return lists[-1] if lists else None
