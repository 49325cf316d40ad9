"""Caches of several devices' layers that model code moves onto one: it works, and costs memory."""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from ..report import Fault, Operand, Origin
from .names import Names
from .sources import Spot, assigned_to, place_of

MOVED_FROM = "_duoka_moved_from"
"""The attribute of a tensor that model code itself moved: where from."""

_JOINS = frozenset({torch.cat, torch.concat, torch.concatenate, torch.stack})
_CACHE = re.compile(r"cache|past|present|kv", re.IGNORECASE)


class Gathering:
    """Remembers joined tensors with parts from other devices, as long as they live."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._joined: list[tuple[weakref.ref[torch.Tensor], Spot, dict[torch.device, int]]] = []
        self._found: dict[Spot, tuple[torch.device, dict[torch.device, int], int]] = {}

    def joined(self, func: Any, args: tuple[Any, ...], result: Any, spot: Spot) -> None:
        """Hear of a call; only those that join tensors matter."""
        if func not in _JOINS or not args or not isinstance(args[0], (list, tuple)):
            return
        foreign: dict[torch.device, int] = {}
        for part in args[0]:
            source = vars(part).get(MOVED_FROM) if isinstance(part, torch.Tensor) else None
            if source is not None and source.type != "cpu":
                foreign[source] = foreign.get(source, 0) + part.numel() * part.element_size()
            for known, _, parts in self._joined:
                if known() is part:
                    for device, num_bytes in parts.items():
                        foreign[device] = foreign.get(device, 0) + num_bytes
        if foreign and _CACHE.search(f"{place_of(spot).text} {assigned_to(spot)}"):
            self._joined.append((weakref.ref(result), spot, foreign))

    def step_ended(self) -> None:
        """What lives on after a step is kept: the caller holds its results now."""
        for known, spot, foreign in self._joined:
            tensor = known()
            if tensor is not None:
                _, before, count = self._found.get(spot, (tensor.device, {}, 0))
                if sum(foreign.values()) >= sum(before.values()):
                    before = foreign
                self._found[spot] = (tensor.device, before, count + 1)
        self._joined = [each for each in self._joined if each[0]() is not None]

    def warnings(self) -> Iterable[Fault]:
        """One warning for each place."""
        for spot, (device, foreign, count) in self._found.items():
            place, target = place_of(spot), self._names.device(device)
            operands = tuple(
                Operand(
                    argument="tensors",
                    device=self._names.device(source),
                    num_bytes=num_bytes,
                    moved=True,
                    origin=Origin(kind="operation", place=place),
                )
                for source, num_bytes in foreign.items()
            )
            total = sum(foreign.values())
            yield Fault(
                kind="gathered-cache",
                effect="copies",
                op="torch.cat",
                operands=operands,
                target=target,
                place=place,
                message=f"{total} bytes of other devices' layers are kept on {target}",
                count=count,
            )
