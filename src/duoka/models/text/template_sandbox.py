"""A program of its own that renders a chat template, which anybody may have written.

`template_process` runs this file in a fresh process and bounds it; jinja2's sandbox alone keeps a
template from Python's insides, not from running for ever or filling the memory. It imports
nothing of duoka, and is given neither environment variables nor arguments.

Standard input: a JSON object with `path` (where jinja2 lies), `template`, `conversations`,
`variables`, `most_characters`, `most_bytes` and `most_seconds`. Standard output: one of
``{"texts": […]}``, ``{"refused": why}`` and ``{"damaged": why}``.
"""

from __future__ import annotations

import json
import resource
import sys
from datetime import datetime
from typing import Any

_MOST_WHY_CHARACTERS = 500


def render(request: dict[str, Any]) -> dict[str, Any]:
    """Render a template once for each conversation."""
    from jinja2 import TemplateSyntaxError

    try:
        template = _environment().from_string(request["template"])
    except TemplateSyntaxError as error:
        return {"damaged": _why(f"line {error.lineno}: {error.message}")}
    except (SyntaxError, ValueError, RecursionError, AssertionError, TypeError) as error:
        return {"damaged": _why(f"{type(error).__name__}: {error}")}
    texts, most = [], request["most_characters"]
    for messages in request["conversations"]:
        pieces, left = [], most
        try:
            for piece in template.generate(messages=messages, **request["variables"]):
                left -= len(piece)
                if left < 0:
                    return {"refused": f"it gives more than {most} characters"}
                pieces.append(piece)
        except MemoryError:
            raise
        except Exception as error:
            return {"refused": _why(str(error) or type(error).__name__)}
        texts.append("".join(pieces))
    return {"texts": texts}


def _environment() -> Any:
    """What chat templates are written for: blocks leave no line, loops can be left."""
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _generation_tag()]
    )
    environment.globals.pop("lipsum", None)
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.filters["tojson"] = _to_json
    return environment


def _generation_tag() -> Any:
    """``{% generation %}…{% endgeneration %}`` marks what to learn from; here it's only a scope."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    return Generation


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own writes for HTML: < becomes \u003c.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(why: object = "") -> None:
    from jinja2 import TemplateError

    raise TemplateError(str(why))


def _why(text: str) -> str:
    return text[:_MOST_WHY_CHARACTERS]


def _limit(most_bytes: int, most_seconds: int) -> None:
    for kind, most in (
        (resource.RLIMIT_AS, most_bytes),
        (resource.RLIMIT_CPU, most_seconds),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        lowest = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (lowest, lowest))


def main() -> None:
    """Answer one request."""
    request = json.load(sys.stdin)
    sys.path += request["path"]
    _limit(request["most_bytes"], request["most_seconds"])
    try:
        answer = render(request)
    except MemoryError:
        answer = {"refused": "it needs too much memory"}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
