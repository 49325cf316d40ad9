"""Layers: the lists of modules that a model repeats, known by their numbered names alone."""

from __future__ import annotations

import re
from collections.abc import Sequence

_NUMBERED = re.compile(r"(.*?\.|)(\d+)(?:\..*)?", re.DOTALL)


def layer_of(module: str) -> tuple[str, int] | None:
    """The list that a module is in, and its number there; None where it is in no list.

    Examples
    --------
    >>> layer_of("model.layers.12.mlp")
    ('model.layers', 12)
    >>> layer_of("lm_head") is None
    True
    """
    found = _NUMBERED.fullmatch(module)
    return None if found is None else (found[1].rstrip("."), int(found[2]))


def main_list(modules: Sequence[str]) -> str | None:
    """The list of layers that the others serve: of those with most layers after the first the last.

    A vision tower has its list too, and runs before the text's layers; what runs last is the
    model's own.

    Examples
    --------
    >>> main_list(["vision.blocks.0", "vision.blocks.1", "layers.0", "layers.1", "head"])
    'layers'
    """
    sizes: dict[str, set[int]] = {}
    for module in modules:
        if (found := layer_of(module)) is not None:
            sizes.setdefault(found[0], set()).add(found[1])
    lists = [name for name, numbers in sizes.items() if len(numbers) > 1]
    return lists[-1] if lists else None
