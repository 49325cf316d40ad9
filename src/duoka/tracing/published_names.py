"""The names of a model's tensors: the model's own, and those in the checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from torch import Tensor, nn

from duoka.base.text import value_of
from duoka.forecast.tensor_names import NamedTensor
from duoka.models.conversion import Recipe, plan_tensors, published_tensors
from duoka.models.quantization import num_bytes
from duoka.runtime.dispatch.place_tensors import tensor_names


def name_tensors(model: nn.Module, published: Collection[str] | None) -> list[NamedTensor]:
    """Return a `NamedTensor` for each name of every parameter and buffer.

    `published` are the tensor names in the checkpoint; None if unknown.
    """
    sources = _find_sources(model, published)
    saved = {*model.state_dict(), *sources}
    first_names: dict[int, str] = {}
    named_tensors = []
    for name, tensor in tensor_names(model):
        canonical = first_names.setdefault(id(tensor), name)
        repeated = canonical != name
        named_tensors.append(
            NamedTensor(
                name=name,
                num_bytes=0 if repeated else num_bytes(tensor),
                published=tuple(n for n in dict.fromkeys(sources.get(name, ())) if n != name),
                tied_to=canonical if repeated else "",
                is_buffer=not isinstance(tensor, nn.Parameter),
                is_saved=name in saved,
            )
        )
    return named_tensors


def by_block(
    named_tensors: Sequence[NamedTensor], blocks: Sequence[Sequence[str]]
) -> tuple[tuple[NamedTensor, ...], ...]:
    """Return the tensors of each block; `blocks` has the module names of each."""
    block_of = {module: number for number, modules in enumerate(blocks) for module in modules}
    numbers: dict[str, int] = {}
    tensors: list[list[NamedTensor]] = [[] for _ in blocks]
    for tensor in named_tensors:
        # A module registered under two names is in a block under its first name only; a tensor of
        # its second name goes with the tensor that it is tied to.
        number = value_of(tensor.name, block_of)
        numbers[tensor.name] = numbers[tensor.tied_to] if number is None else number
        tensors[numbers[tensor.name]].append(tensor)
    return tuple(map(tuple, tensors))


def _find_sources(model: nn.Module, published: Collection[str] | None) -> dict[str, list[str]]:
    """Return for each tensor of the model the names of its source tensors in the checkpoint."""
    try:
        names = published_tensors(model) if published is None else published
        recipe = plan_tensors(model, {*names, *getattr(model, "published_buffers", ())})
    except Exception:
        # Loading will report the error in these names. Without sources, only native names count.
        return {}
    sources: dict[str, list[str]] = {}
    for piece in (*recipe.pieces, *recipe.duplicates):
        sources.setdefault(piece.target, []).append(piece.source)
    for custom in recipe.customs:
        for target in custom.targets:
            sources.setdefault(target, []).extend(custom.sources)
    for name, source in _match_computed(dict(model.named_buffers()), recipe):
        sources.setdefault(name, []).append(source)
    return sources


def _match_computed(buffers: Mapping[str, Tensor], recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Match buffers computed by the model with copies in files, by the last part of the name.

    Only unambiguous names are matched: one tensor in the files, one module in the model.
    """
    for leaf, count in Counter(map(_leaf, recipe.ignored)).items():
        owners = {name.rpartition(".")[0] for name in buffers if _leaf(name) == leaf}
        if count == len(owners) == 1:
            (source,) = (name for name in recipe.ignored if _leaf(name) == leaf)
            owner = owners.pop()
            yield from ((name, source) for name in buffers if name.rpartition(".")[0] == owner)


def _leaf(name: str) -> str:
    """Return the last part of a dotted name."""
    return name.rpartition(".")[2]
