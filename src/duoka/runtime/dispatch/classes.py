"""The classes that dispatch gives modules: their own, with something before it.

A block with a mover has a subclass of its class that does nothing but move, as PyTorch's own
parametrizations and FSDP have: PyTorch calls a module with a registered hook on a slow path, which
alone would cost 2 % of a small model's decoding step. Hooks that others register see arguments that
are moved already.

The model itself has one whose `forward` brings its outputs back, whoever calls that (peft doesn't
call the model). All of them refuse to be moved.
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


class _Dispatched:
    """Put before the class of a module by dispatch."""

    def __init_subclass__(cls) -> None:
        """Leave out what the module's class does to its own subclasses: this is none to it."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        # pickle looks classes up by name, and this one has the name of another
        *kinds, base = type(self).__bases__
        return _revive, (base, tuple(kinds)), self.__getstate__()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Refuse what moves tensors: `to`, `cuda` and `cpu` come here, those of wrappers too."""
        module: Any = self
        for device in {tensor.device for tensor in module.parameters()}:
            target = fn(torch.empty(0, device=device)).device
            if target != device:
                raise PlacementError(
                    "the model is dispatched to its devices: neither it nor a part of it can be "
                    f"moved to {target}",
                    hint="leave .to(…), .cuda() and .cpu() out: inputs come to it from any device. "
                    f'duoka.dispatch(model, {{"": "{target}"}}) puts all of it on that one',
                )
        inherited: Any = super()  # the module's own class
        return inherited._apply(fn, recurse)

    def __setattr__(self, name: str, value: Any) -> None:
        """Give what takes the place of a block the block's mover: peft's layers around one.

        They compute on the block's device, with arguments that they don't bring there.
        """
        replaced = self.__dict__["_modules"].get(name)
        mover = None if replaced is None else replaced.__dict__.get(MOVER)
        if mover is not None and isinstance(value, nn.Module):
            value.__dict__.setdefault(MOVER, mover)
            update_class(value)
        super().__setattr__(name, value)


class _Moving(_Dispatched):
    """Put before the class of a block: brings the arguments of a call to the block's device.

    What goes `AROUND` a call decides how it runs: streamed weights, or a stage that isn't here.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        mover = self.__dict__.get(MOVER)
        if mover is not None:
            args, kwargs = mover.bring(args, kwargs)
        inherited: Any = super()  # the module's own class
        around = self.__dict__.get(AROUND)
        if around is not None:
            return around(inherited.__call__, args, kwargs)
        return inherited.__call__(*args, **kwargs)


class _Spread(_Dispatched):
    """Put before the class of a model that is spread."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inherited: Any = super()  # the module's own class
        call = inherited.__call__
        if "forward" in self.__dict__:  # somebody's own, which needn't come by the class's
            return self.__dict__[ROOT].run(call, args, kwargs)
        return call(*args, **kwargs)


def _forward_of(base: type[nn.Module]) -> Callable[..., Any]:
    """The `forward` of a model that is spread; others read its signature."""

    @wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        root = self.__dict__.get(ROOT)
        plain = partial(base.forward, self)
        return plain(*args, **kwargs) if root is None else root.run(plain, args, kwargs)

    return forward


def _generate_of(base: type[Any]) -> Callable[..., Any]:
    """The `generate` of a model that is spread: in it the model is where the inputs are.

    Outputs come there, and assisted decoding brings what it guesses to the model's device.
    """

    @wraps(base.generate)
    def generate(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        root = self.__dict__.get(ROOT)
        plain = partial(base.generate, self)
        return plain(*args, **kwargs) if root is None else root.generate(plain, args, kwargs)

    return generate


def _device_of(inherited: Any) -> property:
    """The `device` of a transformers model that is spread: where its first block computes.

    Transformers says the first registered parameter's, which may be that of a tower that runs
    behind the embeddings.
    """

    def device(self: nn.Module) -> Any:
        root = self.__dict__.get(ROOT)
        first: torch.device | None = None if root is None else root.device
        return inherited.fget(self) if first is None else first

    return property(device)


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The class that a module has by itself."""
    kind = type(module)
    return kind.__bases__[-1] if issubclass(kind, _Dispatched) else kind


def update_class(module: nn.Module) -> None:
    """Give a module the class for what dispatch has put on it: its own where that is nothing."""
    attributes = module.__dict__
    kinds: list[type[_Dispatched]] = [_Spread] if ROOT in attributes else []
    if MOVER in attributes or AROUND in attributes:
        kinds.append(_Moving)
    module.__class__ = _class_of(plain_class(module), tuple(kinds))


def _class_of(base: type[nn.Module], kinds: tuple[type[_Dispatched], ...]) -> type[nn.Module]:
    if not kinds:
        return base
    if (base, kinds) not in _classes:
        # transformers looks at the name, so it is the same.
        names: dict[str, Any] = {"__module__": base.__module__, "__qualname__": base.__qualname__}
        if _Spread in kinds:
            names["forward"] = _forward_of(base)
            if isinstance(device := getattr(base, "device", None), property):
                names["device"] = _device_of(device)
            if hasattr(base, "generate"):
                names["generate"] = _generate_of(base)
        _classes[base, kinds] = type(base.__name__, (*kinds, base), names)
    return _classes[base, kinds]


# One for each class, so that blocks of one kind stay of one kind.
_classes: dict[tuple[type[nn.Module], tuple[type[_Dispatched], ...]], type[nn.Module]] = {}


def _revive(base: type[nn.Module], kinds: tuple[type[_Dispatched], ...]) -> nn.Module:
    """Begin a copy of a module that is dispatched."""
    copied = _class_of(base, kinds)
    return copied.__new__(copied)
