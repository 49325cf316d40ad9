"""Exports read back: command lines as a shell reads them, programs as Python does."""

from __future__ import annotations

import shlex
from typing import Any


def parsed(text: str) -> tuple[dict[str, str], list[str], dict[str, str]]:
    """Environment, words and options of a command line, as a shell reads them."""
    words = shlex.split(text.replace("\\\n", " "))
    environment = {}
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    start = next(place for place, word in enumerate(words) if word.startswith("--"))
    command, rest = words[:start], words[start:]
    if command[0] == "python":
        command, rest = words[: start + 2], words[start + 2 :]
    if rest and rest[0] == "--trust-remote-code":
        command.append(rest.pop(0))
    return environment, command, dict(zip(rest[::2], rest[1::2], strict=True))


def assigned(text: str) -> dict[str, Any]:
    """What the assignments at the top of a program give."""
    names: dict[str, Any] = {}
    exec(text.split("\n\nimport torch")[0], names)
    return names
