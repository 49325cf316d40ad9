"""The forms in which families of models write calls of tools.

Each is read by a script that takes characters; see `answer_reader`. What a call is to look like,
its grammar, is in `call_grammars`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

from duoka.base.serialization import parse_json_object
from duoka.errors import FormatError

from .answer_reader import CallReader, Characters, Script
from .messages import parse_python_call

_MOST_NAME = 128
_NAMES = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")
_OTHER_KEYS = {"id", "type"}
_FENCE = "```"
_PAIR_MARKS = ("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")


def _read_object(calls: CallReader) -> Script:
    """Read an object with a name and arguments, of which "{" has been taken."""
    name, arguments, keys = "", "", set[str]()
    char = yield from calls.after_space()
    while char != "}":
        key = yield from _next_key(calls, char, keys)
        char = yield from calls.after_space()
        is_streamed = key == "arguments" and name != "" and char == "{"
        if is_streamed:
            calls.start(name)
        value = yield from calls.json_value(char, calls.tell_arguments if is_streamed else None)
        if key == "name":
            name = _text(value, calls)
        elif key == "arguments":
            arguments = value if is_streamed else _object_text(value, calls)
        if keys >= {"name", "arguments"} and not calls.is_open:
            calls.start(name)
            calls.tell_arguments(arguments)
        char = yield from _after_comma(calls)
    if not calls.is_open:
        calls.stop()
    calls.end()


def _next_key(calls: CallReader, char: str, keys: set[str]) -> Characters:
    """Take a key, of which the first character has been taken, and the colon behind it."""
    if char != '"':
        calls.stop(char)
    key = str(json.loads((yield from calls.json_value(char))))
    key = "arguments" if key == "parameters" else key
    if key in keys or key not in {"name", "arguments"} | _OTHER_KEYS:
        calls.stop()
    keys.add(key)
    yield from calls.expect(":")
    return key


def _after_comma(calls: CallReader) -> Characters:
    """Take a comma and the next key's first character, or the end of the object."""
    char = yield from calls.after_space()
    if char == "}":
        return char
    if char == ",":
        char = yield from calls.after_space()
    if char != '"':
        calls.stop(char)
    return char


def _text(value: str, calls: CallReader) -> str:
    text = json.loads(value)
    if not isinstance(text, str):
        calls.stop()
    return text


def _object_text(value: str, calls: CallReader) -> str:
    """Arguments, or a text that holds them."""
    if value.startswith('"'):
        value = json.loads(value)
    try:
        parse_json_object(value, "the call")
    except FormatError:
        calls.stop()
    return value


@dataclass(frozen=True)
class TaggedForm:
    """Hermes' and Qwen's: an object between tags. Several follow one another."""

    markers: tuple[str, ...] = ("<tool_call>",)
    inner_marks: tuple[str, ...] = ("</tool_call>",)
    turn: str = ""
    is_at_start: bool = False

    def read(self, calls: CallReader, marker: str) -> Script:
        """See `CallForm.read`."""
        yield from calls.expect("{")
        yield from _read_object(calls)
        char = yield from calls.after_space()
        if char:  # a grammar may leave the last tag out
            calls.give_back(char)
            yield from calls.expect("</tool_call>")


@dataclass(frozen=True)
class ObjectForm:
    """Llama 3's, and that of models without a form: the answer is an object.

    Llama has a token before it where it was told of a Python interpreter, and between several a
    semicolon.
    """

    markers: tuple[str, ...] = ("<|python_tag|>",)
    inner_marks: tuple[str, ...] = ()
    turn: str = ""
    is_at_start: bool = True

    def read(self, calls: CallReader, marker: str) -> Script:
        """See `CallForm.read`."""
        yield from calls.expect("{")
        yield from _read_object(calls)
        while char := (yield from calls.after_space()):
            if char == ";":
                char = yield from calls.after_space()
            if char != "{":
                calls.stop(char)
            yield from _read_object(calls)


@dataclass(frozen=True)
class MistralForm:
    """Mistral's: a token, and a list of objects; later a name and its arguments after each token.

    The sources are the templates of Mistral 7B v0.3 and Mistral Small 3.2.
    """

    markers: tuple[str, ...] = ("[TOOL_CALLS]",)
    inner_marks: tuple[str, ...] = ("[ARGS]", "[CALL_ID]")
    turn: str = ""
    is_at_start: bool = False
    has_names: bool = False

    def read(self, calls: CallReader, marker: str) -> Script:
        """See `CallForm.read`."""
        char = yield from calls.after_space()
        if char == "[":
            yield from self._read_list(calls)
        else:
            yield from self._read_named(calls, char)

    def _read_list(self, calls: CallReader) -> Script:
        char = ","
        while char == ",":
            yield from calls.expect("{")
            yield from _read_object(calls)
            char = yield from calls.after_space()
        if char != "]":
            calls.stop(char)

    def _read_named(self, calls: CallReader, char: str) -> Script:
        name = ""
        while char and char in _NAMES and len(name) < _MOST_NAME:
            name += char
            char = yield from calls.take()
        if char == "[":
            mark = yield from calls.until("]")
            if mark == "CALL_ID":
                yield from calls.until("[ARGS]")
            elif mark != "ARGS":
                calls.stop()
            char = yield from calls.after_space()
        if char != "{":
            calls.stop(char)
        calls.start(name)
        yield from calls.json_value(char, calls.tell_arguments)
        calls.end()


@dataclass(frozen=True)
class LineForm:
    """The ChatGLM family's: a name in the first line of a message, and arguments below it.

    ChatGLM3's are a line of Python, GLM-4's JSON.
    """

    arguments: Literal["python", "json"]
    markers: tuple[str, ...] = ()
    inner_marks: tuple[str, ...] = ()
    turn: str = "<|assistant|>"
    is_at_start: bool = True

    def read(self, calls: CallReader, marker: str) -> Script:
        """See `CallForm.read`."""
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
            return
        char = yield from calls.after_space()
        if char != "{":
            calls.stop(char)
        calls.start(name)
        yield from calls.json_value(char, calls.tell_arguments)
        calls.end()

    def _read_python(self, calls: CallReader, name: str) -> Script:
        yield from calls.expect(_FENCE)
        chars, tail = [_FENCE], ""
        # A fence within a text of the call doesn't end it: all of the message is the call.
        while char := (yield from calls.take()):
            chars.append(char)
            tail = (tail + char)[-len(self.turn) :]
            if tail == self.turn:
                break
        message = "".join(chars).removesuffix(self.turn)
        call = parse_python_call(name, message)
        if call is None:
            calls.stop(self.turn if tail == self.turn else "")
        try:
            arguments = json.dumps(call.arguments, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError):  # bytes, sets
            calls.stop(self.turn if tail == self.turn else "")
        calls.start(name)
        calls.tell_arguments(arguments)
        calls.end()
        if tail == self.turn:
            calls.take_again(self.turn)


@dataclass(frozen=True)
class PairForm:
    """GLM-4.5's: a name, then each argument's name and value between tags."""

    markers: tuple[str, ...] = ("<tool_call>",)
    inner_marks: tuple[str, ...] = _PAIR_MARKS
    turn: str = ""
    is_at_start: bool = False

    def read(self, calls: CallReader, marker: str) -> Script:
        """See `CallForm.read`."""
        char = yield from calls.after_space()
        name = ""
        while char and char in _NAMES and len(name) < _MOST_NAME:
            name += char
            char = yield from calls.take()
        calls.give_back(char)
        arguments = Arguments(calls, name)
        while (tag := (yield from self._next_tag(calls))) == "arg_key":
            key = yield from calls.until("</arg_key>")
            yield from calls.expect("<arg_value>")
            arguments.add(key.strip(), (yield from calls.until("</arg_value>")))
        if tag != "/tool_call":
            calls.stop(f"<{tag}>")
        arguments.end()

    def _next_tag(self, calls: CallReader) -> Characters:
        yield from calls.expect("<")
        tag = ""
        while (char := (yield from calls.take())) != ">":
            tag += char
            if not char or len(tag) > len("/tool_call"):
                calls.stop(f"<{tag}")
        return tag


@dataclass(frozen=True)
class ParameterForm:
    """Qwen3-Coder's: ``<function=name>`` with a ``<parameter=name>`` for each argument."""

    markers: tuple[str, ...] = ("<tool_call>",)
    inner_marks: tuple[str, ...] = ("</tool_call>",)
    turn: str = ""
    is_at_start: bool = False

    def read(self, calls: CallReader, marker: str) -> Script:
        """See `CallForm.read`."""
        yield from calls.expect("<function=")
        arguments = Arguments(calls, (yield from calls.until(">")))
        while True:
            yield from calls.expect("<")
            char = yield from calls.take()
            if char != "p":
                break
            yield from calls.expect("arameter=")
            key = yield from calls.until(">")
            value = yield from calls.until("</parameter>")
            arguments.add(key, value.removeprefix("\n").removesuffix("\n"))
        calls.give_back(char)
        calls.give_back("<")
        yield from calls.expect("</function>")
        arguments.end()
        char = yield from calls.after_space()
        if char:
            calls.give_back(char)
            yield from calls.expect("</tool_call>")


class Arguments:
    """The arguments of a call that are written one by one, with texts as they are."""

    def __init__(self, calls: CallReader, name: str) -> None:
        if name not in calls.schemas:
            calls.stop()
        properties = calls.schemas[name].get("properties")
        self._properties = properties if isinstance(properties, dict) else {}
        self._calls, self._name = calls, name
        self._keys: set[str] = set()

    def add(self, key: str, written: str) -> None:
        """Tell of an argument; NoCall if it was there before."""
        if key in self._keys:
            self._calls.stop()
        if not self._keys:
            self._calls.start(self._name)
        text = json.dumps(key, ensure_ascii=False) + ": " + self._value(key, written)
        self._calls.tell_arguments((", " if self._keys else "{") + text)
        self._keys.add(key)

    def end(self) -> None:
        """Tell that there are no more."""
        if not self._keys:
            self._calls.start(self._name)
        self._calls.tell_arguments("}" if self._keys else "{}")
        self._calls.end()

    def _value(self, key: str, written: str) -> str:
        """A value as JSON: a text where the schema has one, or where it is nothing else."""
        schema = self._properties.get(key)
        kind = schema.get("type") if isinstance(schema, dict) else None
        kinds = kind if isinstance(kind, list) else [kind]
        is_null = written.strip() == "null" and "null" in kinds
        if "string" not in kinds or is_null:
            try:
                parse_json_object('{"": ' + written + "}", "an argument")
            except FormatError:
                pass
            else:
                return written.strip()
        return json.dumps(written, ensure_ascii=False)
