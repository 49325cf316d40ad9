"""The namespace of modules of legacy code: replaced imports and builtins."""

from __future__ import annotations

import builtins
import functools
import importlib
import re
import sys
from collections.abc import Callable, Iterator
from types import CodeType, GenericAlias, ModuleType
from typing import Any, TypeVar

import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import LogitsProcessor
from transformers.utils import generic

from duoka import virtual
from duoka.models import flash_attention

from .cache import LegacyCache
from .config import LegacyConfig
from .model import LegacyModel
from .tokenizer import LegacyTokenizer

T = TypeVar("T")


def _script(function: T, *_: Any, **__: Any) -> T:
    """Return a function uncompiled, because TorchScript doesn't support virtual GPUs."""
    return function


def _initialize(module_cls: type[nn.Module], *args: Any, **kwargs: Any) -> Any:
    """Construct a module with initialized buffers, unlike `torch.nn.utils.skip_init`.

    Parameters take no time, because they are on the meta device while a model is built.
    """
    kwargs.pop("device", None)
    return module_cls(*args, **kwargs)


_TRANSFORMERS: dict[str, Any] = {
    "PretrainedConfig": LegacyConfig,
    "PreTrainedConfig": LegacyConfig,
    "PreTrainedModel": LegacyModel,
    "PreTrainedTokenizer": LegacyTokenizer,
    "DynamicCache": LegacyCache,
    "LogitsWarper": LogitsProcessor,
    "LossKwargs": generic.TransformersKwargs,
    "is_torch_fx_available": lambda: False,
}
_TORCH: dict[str, dict[str, Any]] = {
    "torch": {},
    "torch.jit": {"script": _script},
    "torch.nn": {},
    "torch.nn.utils": {"skip_init": _initialize},
    "torch.utils": {},
    # Reentrant autograd, torch's default, stops gradients if no argument requires one, as in layers
    # whose only trained parameters are adapters.
    "torch.utils.checkpoint": {"checkpoint": functools.partial(checkpoint, use_reentrant=False)},
}
# Modules of transformers to which most names of 4.x have moved.
_PLACES = ("", ".utils", ".pytorch_utils", ".generation", ".integrations")
_NO_NAME = re.compile(r"cannot import name '(\w+)'")


# A module runs again after each failed import, with one more name in `gone`. Code that handles a
# failed import by `try` never gets here, so only imports that the module needs get a stand-in.
#
#   from transformers.onnx import OnnxConfig   → ImportError: transformers.onnx   → gone, run again
#                                              → _Gone("OnnxConfig"), can be inherited from
def execute(run: Callable[[], None], names: dict[str, Any]) -> None:
    """Run a module of legacy code with the globals `names`; failed imports get stand-ins."""
    gone: set[str] = set()
    while True:
        names["__builtins__"] = vars(builtins) | {
            "__import__": functools.partial(_import, gone),
            "type": _Type,
        }
        try:
            return run()
        except ImportError as error:
            name = _NO_NAME.match(str(error))
            path = f"{error.name}.{name[1]}" if name else str(error.name)
            if path in gone or not (path == "flash_attn" or path.startswith("transformers.")):
                raise
            gone.add(path)


def _import(
    gone: set[str],
    name: str,
    names: Any = None,
    scope: Any = None,
    fromlist: Any = (),
    level: int = 0,
) -> Any:
    """Replace ``__import__`` in legacy code: wrap modules, return stand-ins for `gone` names."""
    if not level and "flash_attn" in gone and name.partition(".")[0] == "flash_attn":
        return flash_attention
    if not level and any(f"{name}.".startswith(f"{path}.") for path in gone):
        return _stand_in(name) if fromlist else _wrap(transformers, gone)
    if not level and name.partition(".")[0] == "transformers" and fromlist == ("*",):
        # Importing thousands of names would take many seconds: list the names that are used.
        module = _WrappedModule(importlib.import_module(name), gone)
        used = set(_names_in(sys._getframe(1).f_code))
        module.__all__ = [name for name in used if hasattr(module, name)]
        return module
    return _wrap(builtins.__import__(name, names, scope, fromlist, level), gone)


def _names_in(code: CodeType) -> Iterator[str]:
    """Yield the names used by code and its nested functions."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


class _WrappedModule(ModuleType):
    """A module of transformers or torch with replaced names, and stand-ins for removed names."""

    __all__: list[str]

    def __init__(self, module: ModuleType, gone: set[str]) -> None:
        super().__init__(module.__name__)
        self._module, self._gone = module, gone

    def __getattr__(self, name: str) -> Any:
        replaced = _TORCH.get(self.__name__, _TRANSFORMERS)
        if name in replaced:
            return replaced[name]
        if (path := f"{self.__name__}.{name}") in self._gone:
            return _stand_in(path)
        value = _wrap(getattr(self._module, name), self._gone)
        if isinstance(value, _WrappedModule):
            vars(self)[name] = value  # the same object each time: torch.compile checks identity
        return value


def _wrap(value: T, gone: set[str]) -> T | _WrappedModule:
    """Wrap modules of transformers, or with replaced names; return other values unchanged."""
    if isinstance(value, ModuleType):
        name = value.__name__
        if name in _TORCH or name.partition(".")[0] == "transformers":
            return _WrappedModule(value, gone)
    return value


def _stand_in(path: str) -> Any:
    """Return an object of transformers 4 from its new module, or else a placeholder class."""
    name = path.rpartition(".")[2]
    for place in _PLACES:
        value = getattr(importlib.import_module(f"transformers{place}"), name, None)
        if value is not None and not isinstance(value, ModuleType):
            return value
    return _Gone(name, (), {"path": path})


class _Gone(type):
    """The metaclass of placeholders for removed classes of transformers 4.

    A placeholder can be inherited from and has any attribute, but no instances. That suffices for
    most imports of legacy code, which never calls them.
    """

    path: str

    def __call__(cls, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(
            f"{cls.path} of transformers 4 doesn't exist in transformers {transformers.__version__}"
        )

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _stand_in(f"{cls.path}.{name}")


class _TypeOfType(type):
    """Makes `type(x)` return `Tensor` or `Parameter` for virtual tensors, as for CUDA tensors."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is not _Type:  # a metaclass defined in legacy code
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
    """The builtin `type` in legacy code, which tests ``type(x) is torch.Tensor``."""
