"""Module boundaries: calls of named modules are observed, or replaced, for the time of a ``with``.

Observers are hooks of PyTorch's. A replacement takes the place of ``module.forward``, inside of all
hooks, because it decides whether the module runs at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

from torch import nn

Enter = Callable[[nn.Module, Any, Any], tuple[Any, Any] | None]
"""Called with a module and the arguments of its call; returns those that the module is given."""
Replacement = Callable[[Callable[..., Any], Any, Any], Any]
"""Called with a module's forward and the arguments of its call, in place of it."""


@contextmanager
def observe_calls(
    model: nn.Module,
    enter: Mapping[str, Enter],
    leave: Mapping[str, Callable[[nn.Module, Any, Any], None]],
) -> Iterator[None]:
    """Call an observer by the name of its module, before and after (failed) calls of that module."""
    with ExitStack() as handles:
        for name, module in model.named_modules():
            if name in enter:
                handle = module.register_forward_pre_hook(enter[name], with_kwargs=True)
                handles.callback(handle.remove)
            if name in leave:
                handle = module.register_forward_hook(leave[name], always_call=True)
                handles.callback(handle.remove)
        yield


@contextmanager
def replace_calls(model: nn.Module, replacements: Mapping[str, Replacement]) -> Iterator[None]:
    """Give the calls of named modules to replacements; names of parameters are left out."""
    with ExitStack() as patches:
        for name, replacement in replacements.items():
            module = find_submodule(model, name)
            if module is not None:
                _patch(module, replacement, patches)
        yield


def _patch(module: nn.Module, replacement: Replacement, patches: ExitStack) -> None:
    own, forward = vars(module).get("forward"), module.forward

    @wraps(forward)  # whose signature says what it takes
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return replacement(forward, args, kwargs)

    def restore() -> None:
        if own is None:
            del module.forward
        else:
            module.forward = own

    patches.callback(restore)
    module.forward = replaced


def find_submodule(model: nn.Module, name: str) -> nn.Module | None:
    """Return the module of a name, or None where the name is a parameter's."""
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None
