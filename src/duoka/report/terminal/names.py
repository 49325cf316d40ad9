"""Modules by short names, and the layers among them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from duoka.forecast.tensor_names import layer_of, main_list


def name_modules(names: Sequence[str]) -> str:
    """Shorten the modules of a stage: a run of numbered ones becomes its ends.

    Examples
    --------
    >>> name_modules(["model.embed_tokens", "model.layers.0", "model.layers.1", "model.layers.2"])
    'embed_tokens, layers.0-2'
    """
    short = [without_prefix(name) for name in names]
    return ", ".join(_runs(short))


def count_layers(parts: Sequence[Sequence[str]]) -> list[int] | None:
    """How many of the model's layers each part has; None where the model has no list of them.

    Examples
    --------
    >>> count_layers([["embed", "layers.0", "layers.1"], ["layers.2", "norm"]])
    [2, 1]
    """
    main = main_list([name for part in parts for name in part])
    if main is None:
        return None
    return [
        len({at[1] for name in part if (at := layer_of(name)) and at[0] == main}) for part in parts
    ]


def without_prefix(name: str) -> str:
    """A module's name without what most names begin with."""
    for prefix in ("model.", "transformer.", "language_model."):
        name = name.removeprefix(prefix)
    return name or "everything"


def _runs(names: Iterable[str]) -> Iterator[str]:
    """Join neighbours that differ only in a last number that counts on."""
    stem, first, last = "", 0, -1
    for name in names:
        head, _, tail = name.rpartition(".")
        if tail.isdecimal() and head == stem and int(tail) == last + 1:
            last += 1
            continue
        yield from _run(stem, first, last)
        stem, first, last = (head, int(tail), int(tail)) if tail.isdecimal() else ("", 0, -1)
        if not tail.isdecimal():
            yield name
    yield from _run(stem, first, last)


def _run(stem: str, first: int, last: int) -> Iterator[str]:
    if last >= first:
        numbers = str(first) if first == last else f"{first}-{last}"
        yield f"{stem}.{numbers}" if stem else numbers
