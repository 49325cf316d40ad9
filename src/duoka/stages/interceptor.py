"""Intercepting the calls of a model's blocks, and of modules that contain blocks.

Blocks get a subclass by `runtime.dispatch.classes`, as for movers and streamed weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from duoka.base.text import containing
from duoka.planner.placement import Placement
from duoka.runtime.dispatch.arguments import caches_of
from duoka.runtime.dispatch.classes import AROUND, update_class
from duoka.runtime.dispatch.install_movers import moving_modules
from duoka.runtime.dispatch.place_tensors import devices_by_name


class PlacedBlock(NamedTuple):
    """A block, or a container of blocks with the device of its first block.

    `caches` are the positions and names of a container's arguments that take a cache.
    """

    name: str
    device: str
    is_container: bool
    caches: frozenset[int | str]


Decider = Callable[[PlacedBlock, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Gets a block's call and its arguments, runs the call or not, and returns the outputs."""


class BlockInterceptor:
    """Hands the calls of a model's blocks to a decider, inside the scope of `deciding`.

    Outside the scope, as in checkpointed regions that backward recomputes, blocks run unchanged.
    """

    def __init__(self, model: nn.Module, placement: Placement) -> None:
        self._decider: Decider | None = None
        devices = devices_by_name(model, placement)
        containers = {owner for entry, _ in placement.entries for owner in containing(entry)}
        names = {module: name for name, module in model.named_modules()}
        for module, device in moving_modules(model, placement, devices).items():
            name = names[module]
            is_container = name in containers
            caches = caches_of(module) if is_container else frozenset[int | str]()
            block = PlacedBlock(name, str(device), is_container, caches)
            module.__dict__[AROUND] = partial(self._intercept, block)
            update_class(module)

    @contextmanager
    def deciding(self, decider: Decider) -> Iterator[None]:
        """Hand the calls to a decider, inside the scope."""
        assert self._decider is None, "one pass at a time"
        self._decider = decider
        try:
            yield
        finally:
            self._decider = None

    def _intercept(
        self, block: PlacedBlock, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Run a call by the decider, if there is one; calls inside a block aren't intercepted."""
        decider = self._decider
        if decider is None:
            return forward(*args, **kwargs)
        if block.is_container:
            return decider(block, forward, args, kwargs)

        def run(*args: Any, **kwargs: Any) -> Any:
            self._decider = None
            try:
                return forward(*args, **kwargs)
            finally:
                self._decider = decider

        return decider(block, run, args, kwargs)
