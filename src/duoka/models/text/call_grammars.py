"""Grammars for forced tool calls, in llguidance's variant of Lark.

Grammars can't match special tokens. So if a call begins with a special token, the beginning of the
call is put into the prompt.
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
from .tokenizer import encode

JSON_OPTIONS = {"whitespace_pattern": r" |\n[ \t]{0,20}"}
"""Options of llguidance for JSON: between two JSON tokens a model may write a space, or a newline
and an indent. By default a model could write white space without end."""
_HINT = "use tool_choice auto"


@dataclass(frozen=True, slots=True)
class ForcedCall:
    """A tool call that the model is forced to write.

    Parameters
    ----------
    prompt_ids : tuple of int
        Tokens to append to the prompt: the end of reasoning, if it has begun, and the beginning of
        the call.
    text : str
        The beginning of the call within them, which the answer's reader must be fed.
    grammar : str
        The grammar of the answer, in Lark's form.
    """

    prompt_ids: tuple[int, ...]
    text: str
    grammar: str


@dataclass(frozen=True, slots=True)
class _CallTexts:
    """The texts of a form of calls, to build a grammar from.

    `prompt` is the beginning of a call in the prompt; `write` returns the grammar of a call from a
    tool's name and the grammar of its arguments. `before`, `mark` and `after` are the texts before,
    between and after calls; without `mark` there is one call.
    """

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
    """Build a forced call; see `AnswerFormat.forced_call`.

    `before` is the text that ends reasoning if the prompt has begun reasoning, otherwise empty.
    """
    functions = [tool_function(tool) for tool in tools]
    if not functions:
        raise UsageError("tool_choice requires a call, but tools is empty", hint="add a tool")
    # The grammar of two tools in Mistral's form, for example:
    #
    # start: "[" call (", " call)* "]"
    # call: call_0 | call_1
    # call_0: "{\"name\": \"get\", \"arguments\": " %json {…} "}"
    written = _find_texts(form, functions)
    prompt = before + written.prompt
    ids = encode(tokenizer, prompt, splits=False)
    if written.mark and parallel:
        start = f"start: {_text(written.before)} call ({_text(written.mark)} call)* "
    else:
        start = f"start: {_text(written.before)} call "
    calls = [f"call_{number}" for number in range(len(functions))]
    rules = [f"{start}{_text(written.after)}", f"call: {' | '.join(calls)}"]
    for name, function in zip(calls, functions, strict=True):
        rules.append(f"{name}: {written.write(function['name'], f'%json {_schema(function)}')}")
    return ForcedCall(tuple(ids), written.prompt, "\n".join(rules))


def _find_texts(form: CallForm | None, functions: Sequence[Mapping[str, Any]]) -> _CallTexts:
    """Return the texts of a form of calls; raise UsageError if no grammar can express the form."""
    if form is None or isinstance(form, ObjectForm):
        key = "arguments" if form is None else "parameters"
        return _CallTexts("", lambda name, schema: _object(name, key, schema))
    if isinstance(form, TaggedForm):
        # The end tag may be a special token, which a grammar can't match: only one call.
        return _CallTexts("<tool_call>\n", lambda name, schema: _object(name, "arguments", schema))
    if isinstance(form, LineForm) and form.arguments == "json":
        return _CallTexts("", lambda name, schema: _text(name + "\n") + f" {schema}")
    if isinstance(form, MistralForm) and not form.has_names:
        return _CallTexts(
            "[TOOL_CALLS]",
            lambda name, schema: _object(name, "arguments", schema),
            *("[", ", ", "]"),
        )
    if isinstance(form, MistralForm) and len(functions) == 1:
        return _CallTexts(f"[TOOL_CALLS]{functions[0]['name']}[ARGS]", lambda _, schema: schema)
    reason, hint = "its arguments are not JSON", _HINT
    if isinstance(form, MistralForm):
        reason = "the tool name precedes a special token"
        hint = f"select one tool by name, or {_HINT}"
    raise UsageError(f"a tool call can't be forced on this model: {reason}", hint=hint)


def _object(name: str, key: str, schema: str) -> str:
    """Write the grammar of a JSON object with a tool's name and its arguments under a key."""
    start = '{"name": ' + json.dumps(name) + f', "{key}": '
    return f"{_text(start)} {schema} {_text('}')}"


def _text(text: str) -> str:
    """Write a fixed text as a string literal of the grammar; nothing for an empty text."""
    return json.dumps(text) if text else ""


def _schema(function: Mapping[str, Any]) -> str:
    """Write the JSON schema of a tool's arguments; with "strict", unknown keywords are errors."""
    options = {**JSON_OPTIONS, "lenient": not function.get("strict")}
    schema = {**(function.get("parameters") or {}), "type": "object", "x-guidance": options}
    try:
        return json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"a tool's parameters are not JSON: {error}") from error
