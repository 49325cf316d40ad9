"""Caches of several devices' layers that model code moves onto one: it works, and costs memory."""

from __future__ import annotations

import re
import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from duoka.base.model_code import Spot
from duoka.base.units import format_bytes
from duoka.report.check_report import Fault, Operand

from .report_names import ReportNames
from .source_map import assigned_to, place_of

_FOREIGN = "_duoka_foreign"
_JOINS = frozenset({torch.cat, torch.concat, torch.concatenate, torch.stack})
_CACHE = re.compile(r"cache|past|present|kv", re.IGNORECASE)
# A loop's variable holds the last copy while the next one is made.
_TRANSIENT = 2


@dataclass(slots=True, eq=False)
class _ForeignParts:
    """A tensor with parts from other devices."""

    tensor: weakref.ref[torch.Tensor]
    op: str
    target: torch.device
    foreign: Counter[torch.device]


class GatheredCaches:
    """Remembers tensors that model code moved, or joined with such, as long as they live."""

    def __init__(self, names: ReportNames) -> None:
        self._names = names
        self._copies: dict[Spot, list[_ForeignParts]] = {}
        self._worst: dict[Spot, tuple[str, torch.device, Counter[torch.device]]] = {}

    def observe(self, func: Any, args: tuple[Any, ...], result: torch.Tensor, spot: Spot) -> None:
        """Hear of a call of model code; those count that move a tensor, or join moved ones."""
        foreign: Counter[torch.device] = Counter()
        source = args[0] if args else None
        if isinstance(source, torch.Tensor) and source.device != result.device:
            if source.device.type != "cpu" and result.device.type != "cpu":
                foreign[source.device] = result.numel() * result.element_size()
        elif func in _JOINS and isinstance(source, (list, tuple)):
            for part in source:
                foreign.update(vars(part).get(_FOREIGN, ()))
        if not foreign:
            return
        vars(result)[_FOREIGN] = foreign
        if not _CACHE.search(f"{place_of(spot).text} {assigned_to(spot)}"):
            return
        op = getattr(func, "__name__", str(func))
        copies = [copy for copy in self._copies.get(spot, []) if copy.tensor() is not None]
        copies.append(_ForeignParts(weakref.ref(result), op, result.device, foreign))
        self._copies[spot] = copies
        if len(copies) > _TRANSIENT:
            self._note(spot, copies)

    def step_ended(self) -> None:
        """What lives on after a step is kept: the caller holds the step's results now."""
        for spot, copies in self._copies.items():
            alive = [copy for copy in copies if copy.tensor() is not None]
            if alive:
                self._note(spot, alive)
        self._copies.clear()

    def _note(self, spot: Spot, copies: list[_ForeignParts]) -> None:
        total = sum((copy.foreign for copy in copies), Counter[torch.device]())
        _, _, worst = self._worst.get(spot, ("", None, Counter()))
        if total.total() >= worst.total():
            self._worst[spot] = (copies[0].op, copies[0].target, total)

    def warnings(self) -> Iterable[Fault]:
        """One warning for each place."""
        for spot, (op, device, foreign) in self._worst.items():
            target = self._names.device(device)
            yield Fault(
                kind="gathered-cache",
                effect="copies",
                op=op,
                operands=tuple(
                    Operand(
                        argument="tensors",
                        device=self._names.device(source),
                        num_bytes=num_bytes,
                        moved=True,
                    )
                    for source, num_bytes in foreign.items()
                ),
                target=target,
                place=place_of(spot),
                message=f"{format_bytes(foreign.total())} of other devices' layers are kept on "
                f"{target}",
            )
