"""Suggestions for an infeasible run, in options of `duoka tune`.

The planner's suggestions are for a single replica. Each is planned again as a run, and omitted if
the run doesn't fit.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from duoka.errors import DuokaError, InfeasibleError, WayOut
from duoka.planner.plan import Plan

from .settings import TuneSettings

Attempt = Callable[[TuneSettings, str | None], Plan]
"""Plans a run with changed settings, on the given GPUs or, if None, its own."""

# By option of `duoka plan`: the setting of a run, and the function that parses its value.
_SETTINGS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "--context": ("seq_length", int),
    "--micro-batch": ("micro_batch", int),
    "--optimizer": ("optimizer", str),
    "--lora-rank": ("lora_rank", int),
    "--train": ("method", str),
    "--quantize": ("quantize", str),
}


def with_suggestions(
    error: InfeasibleError, settings: TuneSettings, attempt: Attempt
) -> InfeasibleError:
    """Return the error with its suggestions converted to options of `duoka tune`."""
    plain = InfeasibleError(
        str(error),
        hint="use more or larger GPUs, or a smaller model",
        shortfall_bytes=error.shortfall_bytes,
    )
    ways = (_as_run(way, settings, attempt) for way in error.ways_out)
    return plain.with_ways_out(way for way in ways if way is not None)


def _as_run(way: WayOut, settings: TuneSettings, attempt: Attempt) -> WayOut | None:
    """Convert a suggestion to options of `duoka tune`.

    Returns None if an option has no equivalent for runs, or the changed run doesn't fit.
    """
    changes: dict[str, Any] = {}
    gpus = None
    arguments = iter(way.options)
    for option in arguments:
        if option == "--checkpointing":
            changes["checkpointing"] = True
        elif option == "--gpus":
            gpus = next(arguments)
        elif option in _SETTINGS:
            name, read = _SETTINGS[option]
            changes[name] = read(next(arguments))
        else:
            return None
    with suppress(DuokaError):
        plan = attempt(replace(settings, **changes), gpus)
        return replace(
            way,
            without=(),
            num_gpus=len(plan.devices),
            free_bytes=min(stage.free_bytes for stage in plan.forecast.devices),
        )
    return None
