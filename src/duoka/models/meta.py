"""Construct a module whose parameters have no storage and whose buffers are real.

PyTorch's own ``torch.device("meta")`` puts buffers on meta as well, and they cannot be computed
afterwards: only the constructor knows the values of a rotary frequency or a mask.
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

# Parameters of this many elements are worth no allocation, even briefly (64 MiB in 16 bit).
_LARGE = 1 << 25
# More than any model's masks and positions take. A hostile configuration asks for all memory.
_MOST_BYTES = 1 << 33
_EMPTY = frozenset({torch.empty, torch.empty_strided})
_FILLED = frozenset({torch.zeros, torch.ones, torch.full, torch.rand, torch.randn})
_WRITTEN = _FILLED | {torch.arange, torch.eye, torch.linspace}


class _Bounded(TorchFunctionMode):
    """Refuses tensors too large for any model's buffers.

    `lazily` puts tensors on meta that only hold weights: uninitialised, or large and floating.
    """

    def __init__(self, *, lazily: bool) -> None:
        super().__init__()
        self._lazily = lazily

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
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
    """Replace parameters by parameters on meta at registration, in this thread only."""
    thread = threading.get_ident()

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> object:
        if threading.get_ident() != thread or parameter is None or parameter.is_meta:
            return None
        return nn.Parameter(parameter.data.to("meta"), requires_grad=parameter.requires_grad)

    # By torch's annotation a hook returns nothing; by its documentation it may replace.
    hook = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]
    try:
        yield
    finally:
        hook.remove()


# Two attempts. The first allocates nothing for weights: parameters are moved to meta when they are
# registered, and uninitialised or very large floating-point tensors are made there. It fails where
# a constructor computes with such a tensor, and leaves a stray meta tensor where a buffer is made
# by `torch.empty` and filled in place. Both are seen afterwards; the second attempt then keeps all
# tensors but parameters on the CPU, and `_init_weights` fills what the constructor left undefined.
def construct(make: Callable[[], _Module]) -> _Module:
    """Call `make` and return its module: parameters on meta, everything else as constructed.

    Weights are not initialised. Buffers, persistent or not, and tensors that modules keep as plain
    attributes are on the CPU with the values that the constructor gives them.
    """
    stray: list[str] = []
    with _parameters_on_meta(), no_init_weights():
        try:
            with _Bounded(lazily=True):
                module = make()
            stray = list(_stray(module))
            if not stray:
                return module
        except Exception:
            # The code computes with an uninitialised tensor, or it is wrong in any case: running it
            # without meta tells, and has the error to report.
            pass
        with _Bounded(lazily=False):
            module = make()
    _initialize_owners(module, stray)
    return module


def _stray(module: nn.Module) -> Iterator[str]:
    """Yield the owners of tensors on meta other than parameters."""
    for name, child in module.named_modules():
        values = [*child._buffers.values(), *vars(child).values()]
        if any(isinstance(value, Tensor) and value.is_meta for value in values):
            yield name


def _initialize_owners(module: nn.Module, names: list[str]) -> None:
    """Let transformers' models fill buffers left uninitialised by the constructor."""
    for name in names:
        path = name.split(".") if name else []
        for length in range(len(path), -1, -1):
            ancestor = module.get_submodule(".".join(path[:length]))
            initialize = getattr(ancestor, "_init_weights", None)
            if callable(initialize):
                with torch.no_grad():
                    initialize(module.get_submodule(name))
                break
