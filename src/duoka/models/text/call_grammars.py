"""Grammars of forced calls, in llguidance's variant of Lark.

A special token is no text, and fits no grammar: the beginning of a call goes into the prompt.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from duoka.errors import UsageError

from .answer_reader import CallForm
from .call_forms import LineForm, MistralForm, ObjectForm, TaggedForm
from .messages import Tool, tool_function

JSON_OPTIONS = {"whitespace_pattern": r" |\n[ \t]{0,20}"}
"""How llguidance matches JSON: between two tokens of it a space, or a new line and an indent. By
its own default a model can write white space without end."""
_HINT = "use tool_choice auto"


@dataclass(frozen=True, slots=True)
class ForcedCall:
    """A call that an answer is forced to be.

    Parameters
    ----------
    prompt_ids : tuple of int
        Tokens after the prompt.
    text : str
        Their part that belongs to the call, for its reader.
    grammar : str
        The grammar of the rest, in Lark's form.
    """

    prompt_ids: tuple[int, ...]
    text: str
    grammar: str


@dataclass(frozen=True, slots=True)
class _Written:
    """The texts around a call, and its beginning in the prompt; `mark` stands between calls."""

    prompt: str
    write: Callable[[str, str], str]
    before: str = ""
    mark: str = ""
    after: str = ""


def force_call(
    form: CallForm | None,
    tools: Sequence[Tool],
    tokenizer: PreTrainedTokenizerBase,
    *,
    before: str,
    parallel: bool,
) -> ForcedCall:
    """See `AnswerFormat.forced_call`; `before` ends the reasoning that the prompt has begun."""
    functions = [tool_function(tool) for tool in tools]
    if not functions:
        raise UsageError("tool_choice requires a call, but tools is empty", hint="add a tool")
    # start: "[" call (", " call)* "]"
    # call: call_0 | call_1
    # call_0: "{\"name\": \"get\", \"arguments\": " %json {…} "}"
    written = _written(form, functions)
    prompt = before + written.prompt
    ids = tokenizer.encode(prompt, add_special_tokens=False, split_special_tokens=False)
    if written.mark and parallel:
        start = f"start: {_text(written.before)} call ({_text(written.mark)} call)* "
    else:
        start = f"start: {_text(written.before)} call "
    calls = [f"call_{number}" for number in range(len(functions))]
    rules = [f"{start}{_text(written.after)}", f"call: {' | '.join(calls)}"]
    for name, function in zip(calls, functions, strict=True):
        rules.append(f"{name}: {written.write(function['name'], f'%json {_schema(function)}')}")
    return ForcedCall(tuple(ids), written.prompt, "\n".join(rules))


def _written(form: CallForm | None, functions: Sequence[Mapping[str, Any]]) -> _Written:
    """Return the texts of a form; UsageError if no grammar can be written."""
    if form is None or isinstance(form, ObjectForm):
        key = "arguments" if form is None else "parameters"
        return _Written("", lambda name, schema: _object(name, key, schema))
    if isinstance(form, TaggedForm):
        # The tag after it is one token for llguidance and the tokenizer, so there is one call.
        return _Written("<tool_call>\n", lambda name, schema: _object(name, "arguments", schema))
    if isinstance(form, LineForm) and form.arguments == "json":
        return _Written("", lambda name, schema: _text(name + "\n") + f" {schema}")
    if isinstance(form, MistralForm) and not form.has_names:
        return _Written(
            "[TOOL_CALLS]",
            lambda name, schema: _object(name, "arguments", schema),
            *("[", ", ", "]"),
        )
    if isinstance(form, MistralForm) and len(functions) == 1:
        return _Written(f"[TOOL_CALLS]{functions[0]['name']}[ARGS]", lambda _, schema: schema)
    reason = (
        "the tool name precedes a special token"
        if isinstance(form, MistralForm)
        else "its arguments are not JSON"
    )
    raise UsageError(
        f"a tool call can't be forced on this model: {reason}",
        hint=f"select one tool by name, or {_HINT}" if isinstance(form, MistralForm) else _HINT,
    )


def _object(name: str, key: str, schema: str) -> str:
    start = '{"name": ' + json.dumps(name) + f', "{key}": '
    return f"{_text(start)} {schema} {_text('}')}"


def _text(text: str) -> str:
    """Write a text in a grammar."""
    return json.dumps(text) if text else ""


def _schema(function: Mapping[str, Any]) -> str:
    """Write the schema of a tool's arguments; unknown keywords are refused for strict tools."""
    options = {**JSON_OPTIONS, "lenient": not function.get("strict")}
    schema = {**(function.get("parameters") or {}), "type": "object", "x-guidance": options}
    try:
        return json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"a tool's parameters are not JSON: {error}") from error
