"""The name of the KV cache in calls and outputs, which transformers 5.24 changed.

`generate`, the models of transformers and their outputs use `past_key_values` up to 5.23, and
`cache` from 5.24 on. duoka's own classes and remote code have either name; `takes_cache` makes them
accept both.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from transformers.generation.utils import ALL_CACHE_NAMES

CACHE: str = ALL_CACHE_NAMES[0]
"""The name that the installed transformers uses."""
_EITHER = ("cache", "past_key_values")
CACHE_NAMES = (*ALL_CACHE_NAMES, *_EITHER, "cache_params", "presents", "kv_caches", "kv_cache")
"""All names of caches in arguments and outputs of models, in transformers and in older code."""
# Matches names of arguments that change attention or its inputs.
_CHANGES = re.compile(r"past|cache|att|mask|bias|alibi|causal|window|cap$|sink|aux$|^(state|mems)$")
_CHANGES_NOTHING = {"use_cache", "cache_position", "output_attentions", "return_legacy_cache"}


def cache_name(model: Any) -> str:
    """Return the name of the cache argument of a model's `forward`; by default transformers'."""
    accepted = inspect.signature(model.forward).parameters
    return next((name for name in (CACHE, "cache_params", "state") if name in accepted), CACHE)


def cache_in(outputs: Mapping[str, Any]) -> Any:
    """Return the cache among a model's outputs, by any of its names; None if there is no cache."""
    return next((cache for name in CACHE_NAMES if (cache := outputs.get(name)) is not None), None)


def takes_cache(function: Callable[..., Any], *, strict: bool = True) -> Any:
    """Wrap a function to accept its cache by either name; its signature shows transformers' name.

    A strict wrapper raises TypeError for unknown arguments that look like caches, masks or biases,
    which `**kwargs` of the function would silently ignore.
    """
    signature = inspect.signature(function)
    accepted = next((name for name in _EITHER if name in signature.parameters), None)
    if accepted is None or (accepted == CACHE and not strict):
        return function
    # `accepted` is the function's own name of the cache, and `alias` the other name. Example: a
    # function with `past_key_values` under transformers 5.24. The wrapper accepts both names, calls
    # the function with `past_key_values`, and shows `cache` in its signature, because transformers
    # inspects signatures for the arguments that a model takes.
    alias = _EITHER[accepted == _EITHER[0]]

    @functools.wraps(function)
    def renamed(*args: Any, **kwargs: Any) -> Any:
        if (cache := kwargs.pop(alias, None)) is not None:
            if kwargs.get(accepted) is not None:
                raise TypeError(f"{function.__qualname__} got both {accepted!r} and {alias!r}")
            kwargs[accepted] = cache
        unknown = kwargs.keys() - signature.parameters.keys() - _CHANGES_NOTHING
        for name in unknown if strict else ():
            if kwargs[name] is not None and _CHANGES.search(name):
                raise TypeError(f"{function.__qualname__} got an unknown argument {name!r}")
        return function(*args, **kwargs)

    parameters = [
        part.replace(name=CACHE) if part.name == accepted else part
        for part in signature.parameters.values()
    ]
    vars(renamed)["__signature__"] = signature.replace(parameters=parameters)
    return renamed
