"""Format the suggestions of an error: as text with commands to paste, and as JSON."""

from __future__ import annotations

import json as json_format
import shlex
import textwrap
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from duoka.base.units import format_bytes, format_count
from duoka.errors import InfeasibleError, WayOut

_FLAGS = frozenset({"--offload", "--checkpointing"})
_INDENT = "     "
_WIDEST = 100


def as_json(error: InfeasibleError) -> str:
    """Write the shortfall and the suggestions as JSON."""
    content = {
        "error": str(error),
        "shortfall_bytes": error.shortfall_bytes,
        "ways_out": [asdict(way) for way in error.ways_out],
    }
    return json_format.dumps(content, ensure_ascii=False, indent=1)


def format_suggestions(
    ways_out: Sequence[WayOut], arguments: Sequence[str], known: Collection[str], columns: int
) -> str | None:
    """Format suggestions as numbered text with commands.

    `known` are the options of the called command; suggestions with other options are left out.
    Returns None if none remains.
    """
    ways = [way for way in ways_out if {*_option_names(way.options), *way.without} <= {*known}]
    if not ways:
        return None
    lines = ["suggestions that fit, smallest quality loss first:"]
    for number, way in enumerate(ways, 1):
        lines += _wrap(f"{number:3}. {way.text}", columns)
        lines += _wrap(_INDENT + _describe_fit(way), columns)
        lines.append(_INDENT + command_line(arguments, way))
    return "\n".join(lines)


def command_line(arguments: Sequence[str], way: WayOut) -> str:
    """Return the called command, changed as a suggestion says."""
    names = [*_option_names(way.options), *way.without]
    if "--plan" in arguments or any(word.startswith("--plan=") for word in arguments):
        # A saved plan can't be changed by options: a new plan with these options is needed.
        return " ".join(["duoka plan …", shlex.join(way.options)])
    return shlex.join(["duoka", *_without_options(arguments, names), *way.options])


def _without_options(arguments: Sequence[str], names: Collection[str]) -> Iterator[str]:
    """Yield the arguments except the named options and their values."""
    skip = False
    for argument in arguments:
        name, sign, _ = argument.partition("=")
        if skip:
            skip = False
        elif name in names:
            skip = not sign and name not in _FLAGS
        else:
            yield argument


def _option_names(options: Sequence[str]) -> list[str]:
    return [option for option in options if option.startswith("--")]


def _describe_fit(way: WayOut) -> str:
    """Describe the GPUs and free memory of a suggestion, and its cost in quality."""
    place = "on it" if way.num_gpus == 1 else "on the fullest GPU"
    text = f"{format_count(way.num_gpus, 'GPU')}, {format_bytes(way.free_bytes)} free {place}"
    return f"{text}; cost: {way.loses}" if way.loses else text


def _wrap(text: str, columns: int) -> list[str]:
    return textwrap.wrap(
        text, min(columns, _WIDEST), subsequent_indent=_INDENT, drop_whitespace=True
    )


def options_of(program: Any, arguments: Sequence[str]) -> set[str]:
    """Return the option names of the called command; an empty set for an unknown command."""
    commands: dict[str, Any] = getattr(program, "commands", {})
    for argument in arguments:
        if argument in commands:
            return {name for parameter in commands[argument].params for name in parameter.opts}
    return set()
