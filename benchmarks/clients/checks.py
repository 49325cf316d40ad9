"""Named checks of one client; each prints a line of JSON.

The addresses of the servers are in the environment: `LLAMA`, `THINKER` and `VISION` are those of
`duoka serve` with small random models, `AGENT` answers as `run.py` says. All have the model `tiny`
and the key `KEY`.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from pydantic import BaseModel, ConfigDict

KEY, MODEL = "secret-key", "tiny"
LLAMA, THINKER, VISION, AGENT, IMAGE = (
    os.environ.get(name, "") for name in ("LLAMA", "THINKER", "VISION", "AGENT", "IMAGE")
)
HI = [{"role": "user", "content": "hi"}]
_CHECKS: list[Callable[[], Any]] = []


class Answer(BaseModel):
    """The structured output of all checks; the random models would add properties without end."""

    model_config = ConfigDict(extra="forbid")
    is_it: bool
    other: bool


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def check(function: Callable[[], Any]) -> Callable[[], Any]:
    """Add a check, which may be a coroutine; it fails if it raises."""
    _CHECKS.append(function)
    return function


def refused(call: Callable[[], Any], *parts: str) -> None:
    """Require that a call raises an error whose text contains all parts."""

    async def wait() -> Any:
        return call()

    asyncio.run(refused_later(wait(), *parts))


async def refused_later(answer: Awaitable[Any], *parts: str) -> None:
    """Require that an awaitable raises an error whose text contains all parts."""
    text: str | None = None
    try:
        await answer
    except (Exception, asyncio.CancelledError) as error:
        text = f"{type(error).__name__}: {error}"
    assert text is not None, "not refused"
    missing = [part for part in parts if part not in text]
    assert not missing, f"without {missing}: {text}"


def main() -> None:
    """Run all checks, or those named on the command line."""
    for function in _CHECKS:
        name, error = function.__name__, ""
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        try:
            result = function()
            if inspect.iscoroutine(result):
                asyncio.run(result)
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"[:1500]
        print(json.dumps({"check": name, "error": error}), flush=True)
