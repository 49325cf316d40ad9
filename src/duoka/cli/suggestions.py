"""Suggestions as text, with commands to paste, and as JSON."""

from __future__ import annotations

import json as json_format
import shlex
import textwrap
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from duoka.base.units import format_bytes, format_count
from duoka.errors import InfeasibleError, WayOut

_FLAGS = frozenset({"--offload", "--checkpointing", "--master-weights"})
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
    """Format suggestions as lines of text; None without any for the command."""
    ways = [way for way in ways_out if {*_names(way.options), *way.without} <= {*known}]
    if not ways:
        return None
    lines = ["suggestions that fit, smallest quality loss first:"]
    for number, way in enumerate(ways, 1):
        lines += _wrapped(f"{number:3}. {way.text}", columns)
        lines += _wrapped(_INDENT + _numbers(way), columns)
        lines.append(_INDENT + command_line(arguments, way))
    return "\n".join(lines)


def command_line(arguments: Sequence[str], way: WayOut) -> str:
    """Return the given command with the changes of a suggestion."""
    names = [*_names(way.options), *way.without]
    if "--plan" in arguments or any(word.startswith("--plan=") for word in arguments):
        # A saved plan has decided the rest: it takes a new one, made with these.
        return " ".join(["duoka plan …", shlex.join(way.options)])
    return shlex.join(["duoka", *_drop_options(arguments, names), *way.options])


def _drop_options(arguments: Sequence[str], names: Collection[str]) -> Iterator[str]:
    """Yield the arguments without some options and their values."""
    skip = False
    for argument in arguments:
        name, sign, _ = argument.partition("=")
        if skip:
            skip = False
        elif name in names:
            skip = not sign and name not in _FLAGS
        else:
            yield argument


def _names(options: Sequence[str]) -> list[str]:
    return [option for option in options if option.startswith("--")]


def _numbers(way: WayOut) -> str:
    place = "on it" if way.num_gpus == 1 else "on the fullest GPU"
    text = f"{format_count(way.num_gpus, 'GPU')}, {format_bytes(way.free_bytes)} free {place}"
    return f"{text}; cost: {way.loses}" if way.loses else text


def _wrapped(text: str, columns: int) -> list[str]:
    return textwrap.wrap(
        text, min(columns, _WIDEST), subsequent_indent=_INDENT, drop_whitespace=True
    )


def options_of(program: Any, arguments: Sequence[str]) -> set[str]:
    """Return the options of the called command; none for unknown commands."""
    commands: dict[str, Any] = getattr(program, "commands", {})
    for argument in arguments:
        if argument in commands:
            return {name for parameter in commands[argument].params for name in parameter.opts}
    return set()
