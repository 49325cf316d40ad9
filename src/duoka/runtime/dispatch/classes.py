"""The classes that dispatch gives modules: a subclass of the module's class, swapped in place.

This is the only way in which the runtime steps between a model's code and its blocks: movers,
streamed weights (`offload`) and pipeline stages (`stages.interceptor`) all use it.

- A block gets a subclass that moves its arguments (`MOVER`) and decides how the call runs
  (`AROUND`), as PyTorch's own parametrizations and FSDP do. Hooks aren't used, since PyTorch calls
  modules with registered hooks on a slow path, which alone would cost 2 % of a small model's decode
  step. Hooks that users register see moved arguments.
- A module that contains blocks remembers copies during its call (`FRAMES`).
- The model gets a subclass whose `forward` brings the outputs back, even for callers that bypass
  the model's `__call__`, as peft.

All these classes refuse `to`, `cuda` and `cpu`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn

from duoka.errors import PlacementError

MOVER = "_duoka_mover"
ROOT = "_duoka_root"
AROUND = "_duoka_around"
FRAMES = "_duoka_frames"


class _Dispatched:
    """Base of the classes that are put in front of a module's own class."""

    def __init_subclass__(cls) -> None:
        """Skip a hook of the module's class that would register its subclasses."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        # pickle looks classes up by name, and this class has the name of the module's own class.
        *kinds, base = type(self).__bases__
        return _revive, (base, tuple(kinds)), self.__getstate__()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Refuse to move tensors to another device: `to`, `cuda` and `cpu` all call this method."""
        module: Any = self
        for device in {tensor.device for tensor in module.parameters()}:
            target = fn(torch.empty(0, device=device)).device
            if target != device:
                raise PlacementError(
                    f"the model is dispatched to several devices and can't be moved to {target}",
                    hint="remove .to(…), .cuda() and .cpu(): inputs may be on any device. "
                    f'duoka.dispatch(model, {{"": "{target}"}}) places the whole model there',
                )
        inherited: Any = super()  # the module's own class
        return inherited._apply(fn, recurse)

    def __setattr__(self, name: str, value: Any) -> None:
        """Hand the mover of a replaced block on to the new module, such as a layer of peft.

        The new module computes on the block's device, but wouldn't bring arguments there itself.
        """
        replaced = self.__dict__["_modules"].get(name)
        mover = None if replaced is None else replaced.__dict__.get(MOVER)
        if mover is not None and isinstance(value, nn.Module):
            value.__dict__.setdefault(MOVER, mover)
            update_class(value)
        super().__setattr__(name, value)


class _Moving(_Dispatched):
    """A block or a container of blocks: its mover brings a call's arguments to its device.

    The function at `AROUND` decides how the call runs: with streamed weights, or in a stage.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        mover = self.__dict__.get(MOVER)
        if mover is not None:
            args, kwargs = mover.bring(args, kwargs)
        inherited: Any = super()  # the module's own class
        call, frames = inherited.__call__, self.__dict__.get(FRAMES)
        if frames is not None:
            call = partial(frames.run, call)
        around = self.__dict__.get(AROUND)
        return call(*args, **kwargs) if around is None else around(call, args, kwargs)


class _Spread(_Dispatched):
    """A dispatched model, whose `forward` goes through its `Root`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inherited: Any = super()  # the module's own class
        call = inherited.__call__
        if "forward" in self.__dict__:  # set by a user; it may bypass the class's `forward`
            return self.__dict__[ROOT].run(call, args, kwargs)
        return call(*args, **kwargs)


def _through_root(base: type[Any], name: str, run: str) -> Callable[..., Any]:
    """Wrap the method `name` of a model's class, to go through the method `run` of its `Root`.

    The signature stays, since libraries read it. In `generate` the model reports the device of the
    inputs as its own, where outputs are brought, and the candidates of assisted decoding.
    """

    @wraps(getattr(base, name))
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        root = self.__dict__.get(ROOT)
        plain = partial(getattr(base, name), self)
        return plain(*args, **kwargs) if root is None else getattr(root, run)(plain, args, kwargs)

    return method


def _device_of(inherited: Any) -> property:
    """Override the `device` of a transformers model: the device of its first block.

    Transformers returns the device of the first registered parameter, which may belong to a tower
    that runs after the embeddings.
    """

    def device(self: nn.Module) -> Any:
        root = self.__dict__.get(ROOT)
        reported: torch.device | None = None if root is None else root.device
        return inherited.fget(self) if reported is None else reported

    return property(device)


def plain_class(module: nn.Module) -> type[nn.Module]:
    """Return a module's own class, as before dispatch."""
    kind = type(module)
    return kind.__bases__[-1] if issubclass(kind, _Dispatched) else kind


def update_class(module: nn.Module) -> None:
    """Set a module's class to suit its attributes `ROOT`, `MOVER`, `AROUND` and `FRAMES`."""
    attributes = module.__dict__
    kinds: list[type[_Dispatched]] = [_Spread] if ROOT in attributes else []
    if not attributes.keys().isdisjoint((MOVER, AROUND, FRAMES)):
        kinds.append(_Moving)
    module.__class__ = _class_of(plain_class(module), tuple(kinds))


# A layer's class becomes a new one with the bases (_Moving, LlamaDecoderLayer): `__call__` is found
# in `_Moving` first, while `isinstance` and the class's name are as before.
def _class_of(base: type[nn.Module], kinds: tuple[type[_Dispatched], ...]) -> type[nn.Module]:
    """Return the class with the given dispatch classes in front of a module's own class."""
    if not kinds:
        return base
    if (base, kinds) not in _classes:
        # transformers reads the class's name, so the name stays the same.
        names: dict[str, Any] = {"__module__": base.__module__, "__qualname__": base.__qualname__}
        if _Spread in kinds:
            names["forward"] = _through_root(base, "forward", "run")
            if isinstance(device := getattr(base, "device", None), property):
                names["device"] = _device_of(device)
            if hasattr(base, "generate"):
                names["generate"] = _through_root(base, "generate", "generate")
        _classes[base, kinds] = type(base.__name__, (*kinds, base), names)
    return _classes[base, kinds]


# Each is made once, so that blocks of the same class keep sharing a class.
_classes: dict[tuple[type[nn.Module], tuple[type[_Dispatched], ...]], type[nn.Module]] = {}


def _revive(base: type[nn.Module], kinds: tuple[type[_Dispatched], ...]) -> nn.Module:
    """Make an empty dispatched module, whose state pickle or copy fills in."""
    copied = _class_of(base, kinds)
    return copied.__new__(copied)
