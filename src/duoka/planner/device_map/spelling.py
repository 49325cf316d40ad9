"""How a model's blocks are called: by the model's own names or by those of its checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from duoka.forecast.tensor_names import NamedTensor, Outline


def prefixes(name: str) -> Iterator[str]:
    """A name and all that contains it, the longest first; "" is the whole model."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def is_within(name: str, prefix: str) -> bool:
    """Whether a name is a prefix's, or lies below it."""
    return prefix in ("", name) or name.startswith(prefix + ".")


class Spelling:
    """All names of an outline, and what each convention calls its modules.

    A name that both know means the model's own.
    """

    def __init__(self, outline: Outline) -> None:
        self.outline = outline
        self.tensors = [tensor for block in outline.blocks for tensor in block.tensors]
        self.native = {""}
        for tensor in self.tensors:
            self.native.update(prefixes(tensor.name))

    @cached_property
    def renamed(self) -> set[str]:
        """The native names of what the checkpoint calls otherwise."""
        return {n for t in self.tensors if t.published for n in prefixes(t.name)} - {""}

    @cached_property
    def published(self) -> dict[str, set[str]]:
        """For each name that only the checkpoint knows, the native names of what it holds."""
        found: dict[str, set[str]] = {}
        for tensor in self.tensors:
            for source in tensor.published:
                for prefix in prefixes(source):
                    if prefix not in self.native:
                        found.setdefault(prefix, set()).add(tensor.name)
        return found

    def is_known(self, name: str) -> bool:
        """Whether a name is a module's or tensor's."""
        return name in self.native or name in self.published

    def module(self, name: str, tensors: tuple[NamedTensor, ...], *, published: bool) -> str:
        """What a module of a block is called; natively where the checkpoint has no name for it."""
        held = {tensor.name: tensor for tensor in tensors if is_within(tensor.name, name)}
        if not published or not all(tensor.published for tensor in held.values()):
            return name
        sources = [source for tensor in held.values() for source in tensor.published]
        common = _common(sources) if sources else ""
        if common in sources and name not in held:
            common = common.rpartition(".")[0] if self._is_whole(common, set(held)) else common
        # It must hold the same tensors as the module and no others.
        return common if self.published.get(common) == set(held) else name

    def _is_whole(self, tensor: str, held: set[str]) -> bool:
        """Whether the module around a published tensor holds nothing else."""
        return self.published.get(tensor.rpartition(".")[0]) == held


def _common(names: list[str]) -> str:
    """The longest prefix of all names."""
    shared = []
    for parts in zip(*(name.split(".") for name in names), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)
