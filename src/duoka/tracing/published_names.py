"""The names of a model's tensors: its own, and the checkpoint's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from torch import Tensor, nn

from duoka.base.text import longest_prefix
from duoka.forecast.tensor_names import NamedTensor
from duoka.models.conversion import Recipe, plan_tensors, published_tensors
from duoka.models.quantization import num_bytes
from duoka.runtime.dispatch.place_tensors import tensor_names


def name_tensors(model: nn.Module, published: Collection[str] | None) -> list[NamedTensor]:
    """Name every parameter and buffer, under each of its names."""
    sources = _sources(model, published)
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
    """Sort tensors into blocks, given by the names of their modules."""
    block_of = {module: number for number, modules in enumerate(blocks) for module in modules}
    numbers: dict[str, int] = {}
    tensors: list[list[NamedTensor]] = [[] for _ in blocks]
    for tensor in named_tensors:
        # A module that stands under two names is in a block under its first one only.
        number = _block(tensor.name, block_of)
        numbers[tensor.name] = numbers[tensor.tied_to] if number is None else number
        tensors[numbers[tensor.name]].append(tensor)
    return tuple(map(tuple, tensors))


def _block(name: str, block_of: Mapping[str, int]) -> int | None:
    owner = longest_prefix(name, block_of)
    return None if owner is None else block_of[owner]


def _sources(model: nn.Module, published: Collection[str] | None) -> dict[str, list[str]]:
    """Return for each tensor of the model the checkpoint's names of its sources."""
    try:
        names = published_tensors(model) if published is None else published
        recipe = plan_tensors(model, {*names, *getattr(model, "published_buffers", ())})
    except Exception:
        # Loading will say what is wrong with these names. The model's own are known in any case.
        return {}
    sources: dict[str, list[str]] = {}
    for piece in (*recipe.pieces, *recipe.duplicates):
        sources.setdefault(piece.target, []).append(piece.source)
    for custom in recipe.customs:
        for target in custom.targets:
            sources.setdefault(target, []).extend(custom.sources)
    for name, source in _computed(dict(model.named_buffers()), recipe):
        sources.setdefault(name, []).append(source)
    return sources


def _computed(buffers: Mapping[str, Tensor], recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Match buffers computed by the model with their copies in files, by their last name.

    Only where that is clear: one in the files and one in the model.
    """
    for leaf, count in Counter(map(_leaf, recipe.ignored)).items():
        owners = {name.rpartition(".")[0] for name in buffers if _leaf(name) == leaf}
        if count == len(owners) == 1:
            (source,) = (name for name in recipe.ignored if _leaf(name) == leaf)
            owner = owners.pop()
            yield from ((name, source) for name in buffers if name.rpartition(".")[0] == owner)


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]
