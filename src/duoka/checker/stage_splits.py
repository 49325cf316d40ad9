"""Split a model into stages by its modules, without running it.

For models that cannot be planned, and for trying several splits. Blocks are guessed from the module
structure, not measured as by the planner.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from duoka.runtime.dispatch.install_movers import is_callable
from duoka.runtime.dispatch.place_tensors import tensor_names

Split = dict[str, int]


def iter_splits(model: nn.Module, num_stages: int) -> list[Split]:
    """Return splits of a model into stages: by bytes, and by number of parts if that differs.

    Empty if the model has fewer parts than stages.

    Parts are the model's children in registration order; lists, dicts and `nn.Sequential` count as
    their elements. While the largest part exceeds its share of bytes, its children replace it,
    except for elements of lists such as decoder layers. Parts that share a tensor stay together.
    """
    parts = _parts(model, num_stages)
    if len(parts) < num_stages:
        return []
    sizes = [part.num_bytes for part in parts]
    by_bytes, by_number = (
        _split_parts(model, parts, _assign(weights, num_stages))
        for weights in (sizes, [1] * len(parts))
    )
    return [by_bytes] if by_bytes == by_number else [by_bytes, by_number]


class _Part:
    """A module kept in a single stage; `is_element` marks an element of a list."""

    def __init__(self, name: str, module: nn.Module | None, *, is_element: bool = False) -> None:
        self.name = name
        self.module = module
        self.is_element = is_element
        tensors = [] if module is None else [tensor for _, tensor in tensor_names(module)]
        self.num_bytes = sum({id(tensor): tensor.nbytes for tensor in tensors}.values())
        self.tensors = {id(tensor) for tensor in tensors}

    def children(self) -> list[_Part]:
        """Split the part into its children."""
        assert self.module is not None
        prefix = f"{self.name}." if self.name else ""
        elements = _is_container(self.module)
        return [
            _Part(prefix + name, child, is_element=elements and is_callable(child))
            for name, child in self.module.named_children()
        ]


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) or not is_callable(module)


def _parts(model: nn.Module, num_stages: int) -> list[_Part]:
    """Return the parts of a model that hold tensors (see `iter_splits`)."""
    parts = list(_expand(_Part("", model)))
    total = sum(part.num_bytes for part in parts)
    while True:
        large = [
            part
            for part in parts
            if part.num_bytes * num_stages > total and not part.is_element and part.children()
        ]
        if not large:
            return [part for part in parts if part.tensors]
        largest = max(large, key=lambda part: part.num_bytes)
        index = parts.index(largest)
        parts[index : index + 1] = _expand(largest)


def _expand(part: _Part) -> Iterator[_Part]:
    """Yield the children of a part, and the elements of children that are containers."""
    for child in part.children():
        assert child.module is not None
        if _is_container(child.module) and not child.is_element and child.children():
            yield from _expand(child)
        else:
            yield child


def _assign(weights: Sequence[int], num_stages: int) -> list[int]:
    """Return the stage of each part: stages are contiguous, not empty, and of similar weight."""
    # Greedy: a part begins the next stage when its middle lies beyond that stage's share of the
    # total, or when as few parts as stages are left. Weights 1 1 1 5 on two stages: the middle of
    # the last part, 3 + 2.5, is the first beyond 4, so that the stages are 0 0 0 1.
    total, done, stage = sum(weights), 0, 0
    stages: list[int] = []
    for index, weight in enumerate(weights):
        remaining = len(weights) - index
        is_due = (done + weight / 2) * num_stages >= total * (stage + 1)
        if stages and stage + 1 < num_stages and (is_due or remaining < num_stages - stage):
            stage += 1
        stages.append(stage)
        done += weight
    return stages


def _split_parts(model: nn.Module, parts: Sequence[_Part], stages: Sequence[int]) -> Split:
    """Return the stage by module name; tied parts share a stage, other tensors are in stage 0."""
    stage_of: dict[int, int] = {}
    split: Split = {}
    for part, stage in zip(parts, stages, strict=True):
        tied = [stage_of[tensor] for tensor in part.tensors if tensor in stage_of]
        split[part.name] = tied[0] if tied else stage
        stage_of |= dict.fromkeys(part.tensors, split[part.name])
    for name, tensor in tensor_names(model):  # tensors outside of all parts
        if id(tensor) not in stage_of:
            split[name] = 0
    return split
