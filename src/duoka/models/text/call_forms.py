"""Parsers for the forms of tool calls, by family of models.

A form parses calls with a script (a generator) on a `CallReader`; see `answer_reader`. The grammars
of forced calls are in `call_grammars`.

    TaggedForm     <tool_call>{"name": "get", "arguments": {"a": 1}}</tool_call>
    ObjectForm     {"name": "get", "parameters": {"a": 1}}
    MistralForm    [TOOL_CALLS] [{"name": "get", "arguments": {"a": 1}}]
                   [TOOL_CALLS]get[ARGS]{"a": 1}
    LineForm       get⏎{"a": 1}
    PairForm       <tool_call>get<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>
    ParameterForm  <tool_call><function=get><parameter=a>1</parameter></function></tool_call>
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from .answer_reader import CallForm, CallReader, is_json_object
from .characters import Characters, Script
from .messages import parse_python_call

_MOST_NAME = 128
_NAMES = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")
_KEYS = {"name", "arguments", "id", "type"}
_FENCE = "```"


def _read_object(calls: CallReader) -> Script:
    """Parse a JSON object with a tool's name and arguments, after its opening brace."""
    # Keys may come in any order. If the name comes first, arguments are streamed while they are
    # read. If the arguments come first, the call is added when the name has been read.
    name, arguments, keys = "", "", set[str]()
    char = yield from calls.after_space()
    while char != "}":
        key = yield from _read_key(calls, char, keys)
        char = yield from calls.after_space()
        if key == "arguments" and name and char == "{":
            calls.start(name)
            yield from calls.json_value(char, calls.add_arguments)
        else:
            value = yield from calls.json_value(char)
            if key == "name":
                name = json.loads(value) if value.startswith('"') else calls.stop()
            elif key == "arguments":
                arguments = json.loads(value) if value.startswith('"') else value
                if not is_json_object(arguments):
                    calls.stop()
            if keys >= {"name", "arguments"} and not calls.is_open:
                calls.start(name)
                calls.add_arguments(arguments)
        char = yield from calls.after_space()
        if char == ",":
            char = yield from calls.after_space()
            if char != '"':
                calls.stop(char)
    if not calls.is_open:
        calls.stop()
    calls.end()


def _read_key(calls: CallReader, char: str, keys: set[str]) -> Characters:
    """Parse a key, whose first character is `char`, and the colon after it; return the key.

    "parameters" is returned as "arguments". NoCall for an unknown or repeated key.
    """
    if char != '"':
        calls.stop(char)
    key = str(json.loads((yield from calls.json_value(char))))
    key = "arguments" if key == "parameters" else key
    if key in keys or key not in _KEYS:
        calls.stop()
    keys.add(key)
    yield from calls.expect(":")
    return key


def _read_name(calls: CallReader, char: str) -> Characters:
    """Parse a tool's name, whose first character is `char`; give back the character after it."""
    name = ""
    while char and char in _NAMES and len(name) < _MOST_NAME:
        name += char
        char = yield from calls.take()
    calls.give_back(char)
    return name


def _read_arguments(calls: CallReader, name: str) -> Script:
    """Parse the arguments of a call, a JSON object after white space, and end the call."""
    char = yield from calls.expect("{")
    calls.start(name)
    yield from calls.json_value(char, calls.add_arguments)
    calls.end()


def _read_optional(calls: CallReader, text: str) -> Script:
    """Parse a fixed text, or the end of the answer: grammars of forced calls may omit the text."""
    char = yield from calls.after_space()
    if char:
        calls.give_back(char)
        yield from calls.expect(text)


@dataclass(frozen=True)
class TaggedForm(CallForm):
    """The form of Hermes and Qwen: each call is a JSON object between tags."""

    markers: tuple[str, ...] = ("<tool_call>",)
    inner_marks: tuple[str, ...] = ("</tool_call>",)

    def read(self, calls: CallReader, marker: str) -> Script:
        """See `CallForm.read`."""
        yield from calls.expect("{")
        yield from _read_object(calls)
        yield from _read_optional(calls, "</tool_call>")


@dataclass(frozen=True)
class ObjectForm(CallForm):
    """The form of Llama 3, and of forced calls of models without a form: the answer is an object.

    Llama writes a token before the object if the prompt mentions a Python interpreter, and
    semicolons between several objects.
    """

    markers: tuple[str, ...] = ("<|python_tag|>",)
    is_at_start: bool = True

    def alternatives(self, names: Iterable[str]) -> list[str]:
        """See `CallForm.alternatives`."""
        keys = {"name": {"enum": [*names]}, "parameters": {"type": "object"}}
        schema = {"type": "object", "properties": keys, "required": [*keys]}
        return [f"%json {json.dumps({**schema, 'additionalProperties': False})}"]

    def read(self, calls: CallReader, marker: str) -> Script:
        """See `CallForm.read`."""
        char = yield from calls.after_space()
        while True:
            if char != "{":
                calls.stop(char)
            yield from _read_object(calls)
            char = yield from calls.after_space()
            if char == ";":
                char = yield from calls.after_space()
            elif not char:
                return


@dataclass(frozen=True)
class MistralForm(CallForm):
    """The form of Mistral: a token and a list of objects, or for each call a token and a name.

    Source: the chat templates of Mistral 7B v0.3 (lists), and of Mistral Small 3.2 (names).
    """

    markers: tuple[str, ...] = ("[TOOL_CALLS]",)
    inner_marks: tuple[str, ...] = ("[ARGS]", "[CALL_ID]")
    has_names: bool = False

    def read(self, calls: CallReader, marker: str) -> Script:
        """See `CallForm.read`."""
        char = yield from calls.after_space()
        if char != "[":
            yield from self._read_named(calls, char)
            return
        char = ","
        while char == ",":
            yield from calls.expect("{")
            yield from _read_object(calls)
            char = yield from calls.after_space()
        if char != "]":
            calls.stop(char)

    def _read_named(self, calls: CallReader, char: str) -> Script:
        """Parse a name, an optional call id and the arguments, after [TOOL_CALLS]."""
        name = yield from _read_name(calls, char)
        char = yield from calls.take()
        if char == "[":
            mark = yield from calls.until("]")
            if mark == "CALL_ID":
                yield from calls.until("[ARGS]")
            elif mark != "ARGS":
                calls.stop()
        else:
            calls.give_back(char)
            if char != "{":
                calls.stop()
        yield from _read_arguments(calls, name)


@dataclass(frozen=True, kw_only=True)
class LineForm(CallForm):
    """The form of ChatGLM: the name in the first line of a message, and the arguments below.

    ChatGLM3 writes arguments as a call in Python, GLM-4 as JSON.
    """

    arguments: Literal["python", "json"] = field(kw_only=False)
    turn: str = "<|assistant|>"
    is_at_start: bool = True

    def alternatives(self, names: Iterable[str]) -> list[str]:
        """See `CallForm.alternatives`."""
        return [json.dumps(f"{name}\n") + " rest" for name in names]

    def read(self, calls: CallReader, marker: str) -> Script:
        """See `CallForm.read`."""
        # Any text can begin like a name. It is read as long as the name of a tool begins with it.
        char = yield from calls.after_space()
        name = ""
        while char != "\n":
            name += char
            stem = name.rstrip(" ")
            is_known = any(known.startswith(stem) for known in calls.schemas)
            if not char or not is_known or len(name) > _MOST_NAME:
                calls.stop(char)
            char = yield from calls.take()
        name = name.strip()
        if name not in calls.schemas:
            calls.stop()
        if self.arguments == "python":
            yield from self._read_python(calls, name)
        else:
            yield from _read_arguments(calls, name)

    def _read_python(self, calls: CallReader, name: str) -> Script:
        """Parse a fenced call up to the end of the message; fences in strings don't count."""
        message = yield from calls.expect(_FENCE)
        while not message.endswith(self.turn) and (char := (yield from calls.take())):
            message += char
        turn = self.turn if message.endswith(self.turn) else ""
        call = parse_python_call(name, message.removesuffix(turn))
        if call is None:
            calls.stop(turn)
        calls.add_call(name, json.dumps(call.arguments, ensure_ascii=False))
        calls.take_again(turn)


@dataclass(frozen=True)
class PairForm(CallForm):
    """The form of GLM-4.5: the tool's name, then the key and value of each argument in tags."""

    markers: tuple[str, ...] = ("<tool_call>",)
    inner_marks: tuple[str, ...] = (
        *("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    )

    def read(self, calls: CallReader, marker: str) -> Script:
        """See `CallForm.read`."""
        name = yield from _read_name(calls, (yield from calls.after_space()))
        arguments = _Arguments(calls, name)
        while (yield from calls.expect("<arg_key>", "</tool_call>")) == "<arg_key>":
            key = yield from calls.until("</arg_key>")
            yield from calls.expect("<arg_value>")
            arguments.add(key.strip(), (yield from calls.until("</arg_value>")))
        arguments.end()


@dataclass(frozen=True)
class ParameterForm(CallForm):
    """The form of Qwen3-Coder: ``<function=name>``, and ``<parameter=name>`` per argument."""

    markers: tuple[str, ...] = ("<tool_call>",)
    inner_marks: tuple[str, ...] = ("</tool_call>",)

    def read(self, calls: CallReader, marker: str) -> Script:
        """See `CallForm.read`."""
        yield from calls.expect("<function=")
        arguments = _Arguments(calls, (yield from calls.until(">")))
        while (yield from calls.expect("<parameter=", "</function>")) == "<parameter=":
            key = yield from calls.until(">")
            value = yield from calls.until("</parameter>")
            arguments.add(key, value.removeprefix("\n").removesuffix("\n"))
        arguments.end()
        yield from _read_optional(calls, "</tool_call>")


class _Arguments:
    """Collects the arguments of a call, written as separate keys and values with unquoted texts."""

    def __init__(self, calls: CallReader, name: str) -> None:
        if name not in calls.schemas:
            calls.stop()
        properties = calls.schemas[name].get("properties")
        self._properties = properties if isinstance(properties, dict) else {}
        self._calls, self._name = calls, name
        self._keys: set[str] = set()

    def add(self, key: str, written: str) -> None:
        """Add an argument, starting the call with the first argument; NoCall for a repeated key."""
        if key in self._keys:
            self._calls.stop()
        if not self._keys:
            self._calls.start(self._name)
        text = json.dumps(key, ensure_ascii=False) + ": " + self._to_json(key, written)
        self._calls.add_arguments((", " if self._keys else "{") + text)
        self._keys.add(key)

    def end(self) -> None:
        """End the call."""
        if not self._keys:
            self._calls.add_call(self._name, "{}")
        else:
            self._calls.add_arguments("}")
            self._calls.end()

    def _to_json(self, key: str, written: str) -> str:
        """Convert a written value to JSON: to a string by the schema, or if not JSON already."""
        schema = self._properties.get(key)
        kind = schema.get("type") if isinstance(schema, dict) else None
        kinds = kind if isinstance(kind, list) else [kind]
        is_null = written.strip() == "null" and "null" in kinds
        is_text = "string" in kinds and not is_null
        if is_text or not is_json_object('{"": ' + written + "}"):
            return json.dumps(written, ensure_ascii=False)
        return written.strip()
