"""Which device a map gives to every tensor: the longest name that contains it decides."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from duoka.forecast.tensor_names import NamedTensor

from .spelling import Spelling, is_within, prefixes


@dataclass(frozen=True, slots=True)
class Match:
    """What a map says of one tensor.

    Parameters
    ----------
    devices : tuple of str
        Those that it gives: none, one, or several that contradict each other.
    missing : tuple of str
        What of it has no entry: its own name, or those of the published tensors that make it.
    clash : tuple of str
        Entries, by its native and by published names, that say different things of it.
    """

    devices: tuple[str, ...]
    missing: tuple[str, ...]
    clash: tuple[str, ...] = ()


class Matcher:
    """A map's entries by convention; the device of an entry is None where it has none.

    An entry that one convention's longest name gives and one that the other's does may both speak
    of a tensor. If one of the two names contains the other, the longer decides, as everywhere.
    """

    def __init__(self, spelling: Spelling, entries: Mapping[str, str | None]) -> None:
        self._entries = entries
        self._native = {key for key in entries if key in spelling.native}
        self._published = {key for key in entries if key in spelling.published}

    def match(self, tensor: NamedTensor) -> Match:
        """Find what the map says of a tensor under one of its names."""
        own = _longest(tensor.name, self._native)
        used: dict[str, None] = {}
        missing: list[str] = []
        clash: tuple[str, ...] = ()
        for source, other in self._by_source(tensor):
            keys = _stronger(own, other)
            said = {device for key in keys if (device := self._entries[key]) is not None}
            clash += keys if len(said) > 1 else ()
            if not keys:
                missing.append(source)
            used.update(dict.fromkeys(keys))
        devices = dict.fromkeys(self._entries[key] for key in used)
        return Match(tuple(d for d in devices if d is not None), tuple(missing), clash)

    def _by_source(self, tensor: NamedTensor) -> Iterator[tuple[str, str | None]]:
        """Each published tensor that makes this one, with the longest entry that contains it."""
        for source in tensor.published:
            yield source, _longest(source, self._published)
        if not tensor.published:
            yield tensor.name, None


def _longest(name: str, keys: Collection[str]) -> str | None:
    return next((prefix for prefix in prefixes(name) if prefix in keys), None)


def _stronger(own: str | None, other: str | None) -> tuple[str, ...]:
    """Which of two entries decide: one where one name contains the other."""
    if own is None or other is None:
        return tuple(key for key in (own, other) if key is not None)
    # The other way round can't be: what contains a native name is one.
    return (other,) if is_within(other, own) else (own, other)
