"""Construct a module with parameters on the meta device and buffers with values.

PyTorch's own ``torch.device("meta")`` puts buffers on the meta device, too. Their values are lost
then: only the constructor can compute a rotary frequency or a mask.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from transformers.initialization import no_init_weights

_Module = TypeVar("_Module", bound=nn.Module)

# Floating-point tensors of this many elements are never allocated, even briefly (64 MiB in 16 bit).
_LARGE = 1 << 25
# More than the masks and positions of any model need; a hostile configuration may request more.
_MOST_BYTES = 1 << 33
_EMPTY = frozenset({torch.empty, torch.empty_strided})
_FILLED = frozenset({torch.zeros, torch.ones, torch.full, torch.rand, torch.randn})
_WRITTEN = _FILLED | {torch.arange, torch.eye, torch.linspace}


class _Bounded(TorchFunctionMode):
    """Raises ValueError for tensors too large for the buffers of any model.

    With `lazily`, tensors that presumably become weights are created on the meta device:
    uninitialized tensors, and large floating-point tensors.
    """

    def __init__(self, *, lazily: bool) -> None:
        super().__init__()
        self._lazily = lazily

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") is None:
            if self._lazily and func in _EMPTY:
                return func(*args, **{**kwargs, "device": "meta"})
            if func in _WRITTEN:
                sketch = func(*args, **{**kwargs, "device": "meta"})
                is_large = sketch.is_floating_point() and sketch.numel() >= _LARGE
                if self._lazily and func in _FILLED and is_large:
                    return sketch
                if sketch.nbytes > _MOST_BYTES:
                    raise ValueError(
                        f"a tensor of {sketch.nbytes} bytes was requested, more than any model "
                        "needs"
                    )
        return func(*args, **kwargs)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Move parameters to the meta device when they are registered, in this thread only."""
    thread = threading.get_ident()

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> object:
        if threading.get_ident() != thread or parameter is None or parameter.is_meta:
            return None
        return nn.Parameter(parameter.data.to("meta"), requires_grad=parameter.requires_grad)

    # torch's annotation says that a hook returns None; its documentation allows a replacement.
    hook = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]
    try:
        yield
    finally:
        hook.remove()


# There are up to two attempts. The first one allocates no memory for weights: parameters move to
# the meta device when they are registered, and uninitialized or very large floating-point tensors
# are created there. This fails if a constructor computes with the values of such a tensor. If a
# constructor creates a buffer by `torch.empty` and fills it in place, the buffer stays on the meta
# device ("stray"). In both cases the second attempt keeps all tensors except parameters on the CPU,
# and `_init_weights` then fills the formerly stray buffers.
def construct(make: Callable[[], _Module]) -> _Module:
    """Call `make` and return its module, with parameters on the meta device.

    Weights are not initialized. Buffers, persistent or not, and tensors that modules keep as plain
    attributes are on the CPU, with the values of the constructor.
    """
    stray: list[str] = []
    with _parameters_on_meta(), no_init_weights():
        try:
            with _Bounded(lazily=True):
                module = make()
            stray = list(_find_stray_owners(module))
            if not stray:
                return module
        except Exception:
            # Either the code computes with a tensor on the meta device, or it fails in any case:
            # then the second attempt raises the error to report.
            pass
        with _Bounded(lazily=False):
            module = make()
    _initialize_owners(module, stray)
    return module


def _find_stray_owners(module: nn.Module) -> Iterator[str]:
    """Yield the names of modules with tensors on the meta device other than parameters."""
    for name, child in module.named_modules():
        values = [*child._buffers.values(), *vars(child).values()]
        if any(isinstance(value, Tensor) and value.is_meta for value in values):
            yield name


def _initialize_owners(module: nn.Module, names: list[str]) -> None:
    """Fill the uninitialized buffers of the named modules.

    Calls `_init_weights` of the nearest transformers model around each module.
    """
    for name in names:
        path = name.split(".") if name else []
        for length in range(len(path), -1, -1):
            ancestor = module.get_submodule(".".join(path[:length]))
            initialize = getattr(ancestor, "_init_weights", None)
            if callable(initialize):
                with torch.no_grad():
                    initialize(module.get_submodule(name))
                break
