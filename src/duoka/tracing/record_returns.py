"""Recording where model code moves what a block made back to an earlier block's device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from duoka import virtual

from .blocks import ModuleGroup, Moves
from .record import RecordedPass, Recorder, Skipper


class ReturningRecorder(Recorder):
    """A recorder that hears explicit moves.

    What is moved back to an earlier block, and what is done with it there, goes on the tape of
    the group that `returns_to` that block.
    """

    def __init__(self, model: nn.Module, groups: Sequence[ModuleGroup], *, skip: bool) -> None:
        super().__init__(model, groups, skip=skip)
        self._skipper = _TextSkipper(model, groups) if skip else None

    def record(self, step: Callable[[], None], *, alone: bool = False) -> RecordedPass:
        """Run one step and return what it did; `alone` if that is one token of one sequence."""
        with Moves(self._made_by, self._moved_back):
            return super().record(step, alone=alone)

    def _made_by(self, tensor: torch.Tensor) -> int | None:
        """The block that made a tensor in this step."""
        if not isinstance(tensor, virtual.VirtualTensor):
            return None
        home = self.home_of(tensor)
        return home[1] if home is not None and home[0] == self._number else None

    def _moved_back(self, result: torch.Tensor, source: torch.Tensor, block: int) -> torch.Tensor:
        made_by = self._made_by(source)
        group = self._return_to(block)
        if made_by is not None and block == self._current and made_by not in self._places(block):
            # On to the device of the block that runs, as a mover would bring it.
            self._read(block, [*self._arguments([source])])
        if made_by is None or made_by <= block or group is None:
            return result
        self._begin(group)
        # On another device it is a copy, and what it was made from ends when nobody has it.
        return result.clone() if result is source else result

    def _return_to(self, block: int) -> int | None:
        """Which of the groups behind the block that runs stands for a return to an earlier one."""
        for index, group in enumerate(self._groups[self._current :], self._current):
            if group.returns_to == block:
                return index
            if index > self._current and self._is_called[index]:
                return None
        return None


class _TextSkipper(Skipper):
    """Runs all of a tower: what keeps its layers' results says for each when it ends."""

    def __init__(self, model: nn.Module, groups: Sequence[ModuleGroup]) -> None:
        super().__init__(model, groups)
        self._begin = max(i for i, group in enumerate(groups) if group.returns_to is not None)

    def call(
        self,
        recorder: Recorder,
        place: tuple[int, Any],
        forward: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> Any:
        """Run a block, or make its outputs only where one that is like it has run."""
        if place[0] < self._begin:
            return forward(*args, **kwargs)
        return super().call(recorder, place, forward, args, kwargs)
