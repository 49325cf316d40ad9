"""The names that a module of such code has: what its imports give, and the builtins it sees."""

from __future__ import annotations

import builtins
from contextlib import AbstractContextManager
from types import GenericAlias, ModuleType
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import nn
from transformers import LogitsProcessor

from duoka import virtual

from .cache import LegacyCache
from .config import LegacyConfig
from .model import LegacyModel

T = TypeVar("T")


def namespace() -> dict[str, Any]:
    """What a module of such code has before its first line runs."""
    return {"__builtins__": {**vars(builtins), "__import__": _import, "type": _Type}}


def importing() -> AbstractContextManager[Any]:
    """Import such code inside: functions are compiled by nobody.

    TorchScript's fuser knows no virtual GPU, and its memory isn't forecast.
    """
    return mock.patch.object(torch.jit, "script", _uncompiled)


def _uncompiled(function: T, *_: Any, **__: Any) -> T:
    """A function as it is written."""
    return function


def _initialised(module_cls: type[nn.Module], *args: Any, **kwargs: Any) -> Any:
    """A module whose buffers have values, too: `torch.nn.utils.skip_init` leaves them undefined.

    Parameters are on meta in any case when a model is built here, and take no time.
    """
    kwargs.pop("device", None)
    return module_cls(*args, **kwargs)


def _never() -> bool:
    return False


_NAMES: dict[str, Any] = {
    "PretrainedConfig": LegacyConfig,
    "PreTrainedConfig": LegacyConfig,
    "PreTrainedModel": LegacyModel,
    "DynamicCache": LegacyCache,
    "LogitsWarper": LogitsProcessor,  # gone since 5.0
    "is_torch_fx_available": _never,  # gone since 5.0
    "skip_init": _initialised,
}
_PACKAGES = ("transformers", "torch")


def _import(
    name: str, names: Any = None, scope: Any = None, fromlist: Any = (), level: int = 0
) -> ModuleType:
    """``from transformers import …``, with the names that are other ones now."""
    module: ModuleType = builtins.__import__(name, names, scope, fromlist, level)
    if level or name.partition(".")[0] not in _PACKAGES or _NAMES.keys().isdisjoint(fromlist or ()):
        return module
    overlay = ModuleType(name)
    overlay.__file__ = module.__file__
    for item in fromlist:
        if item in _NAMES:
            setattr(overlay, item, _NAMES[item])
        elif hasattr(module, item):
            setattr(overlay, item, getattr(module, item))
    return overlay


class _TypeOfType(type):
    """Called with one value, tells of a virtual tensor what CUDA's would be: a plain tensor."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is not _Type:  # a metaclass of such code's own
            return super().__call__(*args, **kwargs)
        if len(args) != 1:
            return type(*args, **kwargs)
        kind = type(args[0])
        if kind is not virtual.VirtualTensor:
            return kind
        return nn.Parameter if isinstance(args[0], nn.Parameter) else torch.Tensor

    def __getitem__(cls, item: Any) -> GenericAlias:
        return GenericAlias(type, item)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, type)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, type)


class _Type(type, metaclass=_TypeOfType):
    """The builtin `type`, but for virtual tensors: code asks ``type(x) is torch.Tensor``."""
