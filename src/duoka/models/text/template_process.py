"""Chat templates rendered in a process of their own, within limits of time, memory and length.

A template is a program that came with the checkpoint. The process finds no secrets in its
environment, because it has none; it can write no file, and is ended when it takes too long.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from duoka.base.units import format_bytes
from duoka.errors import CheckpointError, MachineError, UsageError

from . import template_sandbox

MOST_TEMPLATE_CHARACTERS = 1 << 18  # the longest published ones have some ten thousand
MOST_CHARACTERS = 1 << 24  # a million tokens of text are a quarter of it
_MOST_BYTES = 1 << 30
_CPU_SECONDS = 5
# On a busy machine a process waits; on an idle one the first limit ends it.
_WALL_SECONDS = 60

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")

Chat = Sequence[Mapping[str, Any]]


def render(template: str, conversations: Sequence[Chat], variables: Mapping[str, Any]) -> list[str]:
    """Render a chat template once for each conversation."""
    if len(template) > MOST_TEMPLATE_CHARACTERS:
        raise CheckpointError(
            f"the model's chat template has {len(template)} characters; "
            f"at most {MOST_TEMPLATE_CHARACTERS} are read"
        )
    request: dict[str, Any] = {
        "path": _import_path(),
        "template": template,
        "conversations": conversations,
        "variables": variables,
        "most_characters": MOST_CHARACTERS,
        "most_bytes": _MOST_BYTES,
        "most_seconds": _CPU_SECONDS,
    }
    try:
        text = json.dumps(request, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"a tool's description is no JSON: {error}") from error
    answer = _ask(text.encode())
    if "damaged" in answer:
        raise CheckpointError(f"the model's chat template is damaged: {answer['damaged']}")
    if "refused" in answer:
        raise UsageError(f"the model's chat template refuses the messages: {answer['refused']}")
    texts: list[str] = answer["texts"]
    if any(_LONE_SURROGATE.search(text) for text in texts):
        raise CheckpointError("the model's chat template is damaged: it is no valid text")
    return texts


def _ask(request: bytes) -> dict[str, Any]:
    # Isolated and without site packages: nothing of the user's or the directory's is imported.
    command = [sys.executable, "-I", "-S", "-B", template_sandbox.__file__]
    try:
        done = subprocess.run(
            command,
            input=request,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={},
            timeout=_WALL_SECONDS,
            check=False,
            start_new_session=True,
        )
        answer = json.loads(done.stdout)
        assert isinstance(answer, dict)
    except subprocess.TimeoutExpired:
        raise _endless() from None
    except OSError as error:
        raise MachineError(
            f"no process could be started to render the chat template: {error.strerror}",
            hint="end other programs: the limit of processes or of memory is reached",
        ) from error
    except ValueError as error:  # it was ended, by a limit or by a fault of its own
        raise _endless() from error
    return answer


def _endless() -> CheckpointError:
    return CheckpointError(
        f"the model's chat template takes more than {_CPU_SECONDS} s or "
        f"{format_bytes(_MOST_BYTES)}; rendering was stopped",
        hint="a template needs milliseconds; don't trust this checkpoint",
    )


@cache
def _import_path() -> tuple[str, ...]:
    """Where jinja2 and what it needs lie."""
    specs = [importlib.util.find_spec(name) for name in ("jinja2", "markupsafe")]
    origins = [spec.origin for spec in specs if spec is not None and spec.origin is not None]
    if len(origins) < len(specs):
        raise MachineError("jinja2 is not installed", hint="pip install jinja2")
    return tuple(dict.fromkeys(str(Path(origin).parents[1]) for origin in origins))
