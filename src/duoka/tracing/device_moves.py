"""Devices that model code names by itself: ``x.to(y.device)``, ``arange(n, device=y.device)``.

On one device such a move does nothing, so that no listener hears of it, and what is made lies with
all the rest. On several it lies where `y` lies. Devices that were read from a tensor say which one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch.overrides import TorchFunctionMode

Place = TypeVar("Place")


class Moves(TorchFunctionMode, Generic[Place]):
    """Tells of explicit moves, and of what is made where a tensor lies, for the time of a ``with``.

    `place_of` says where a tensor belongs, as the listener tells places apart, or None. `moved`
    is given what ``x.to(…)`` made, `x` itself and the place that was named; what it returns is
    what the model gets. `created` is given what was made from no tensor, and the place.
    """

    def __init__(
        self,
        place_of: Callable[[torch.Tensor], Place | None],
        moved: Callable[[torch.Tensor, torch.Tensor, Place], torch.Tensor],
        created: Callable[[Any, Place], None] = lambda result, place: None,
    ) -> None:
        super().__init__()
        self._place_of = place_of
        self._moved = moved
        self._created = created
        # Every read makes a new object. It is kept, so that no other one gets its identity.
        self._read: dict[int, tuple[torch.device, Place]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if getattr(func, "__self__", None) is torch.Tensor.device:
            place = self._place_of(args[0])
            if place is not None:
                self._read[id(result)] = (result, place)
        elif func is torch.Tensor.to:
            place = self._named((*args[1:], *kwargs.values()))
            if place is not None:
                return self._moved(result, args[0], place)
        elif id(kwargs.get("device")) in self._read:
            self._created(result, self._read[id(kwargs["device"])][1])
        return result

    def _named(self, values: tuple[Any, ...]) -> Place | None:
        for value in values:
            if isinstance(value, torch.Tensor):
                return self._place_of(value)
            if id(value) in self._read:
                return self._read[id(value)][1]
        return None
