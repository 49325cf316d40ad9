r"""Parse the text of an answer into content, reasoning and tool calls during generation.

The parser is a generator that receives one character at a time, so the result doesn't depend on how
the text is cut into chunks. Characters that may begin a marker are held back until that is decided.
Text that begins like a call but is none becomes content. The work is linear in the length of the
text. `call_forms` has the forms of calls of each family.

    feed("Sure. <tool")                          [content "Sure."]
    feed('_call>{"name": "g')                    []
    feed('et", "arguments": {}}</tool_call>')    [tool_name "get", tool_arguments "{}"]
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from duoka.base.answer_parts import AnswerPart, PartKind
from duoka.base.serialization import parse_json_object
from duoka.errors import FormatError

from .characters import CharacterReader, Characters, NoCall, Script

MOST_CALLS = 128


class Tags(NamedTuple):
    """The texts around a model's reasoning."""

    begin: str
    end: str


@dataclass(frozen=True, kw_only=True)
class CallForm(ABC):
    """The form of tool calls of a family of models.

    Parameters
    ----------
    markers : tuple of str
        Texts that begin calls anywhere in an answer.
    inner_marks : tuple of str
        Other texts of calls that may be special tokens.
    turn : str
        The text between the messages of one answer; empty if an answer is one message.
    is_at_start : bool
        True if a message can be a call from its first character on, without a marker.
    """

    markers: tuple[str, ...] = ()
    inner_marks: tuple[str, ...] = ()
    turn: str = ""
    is_at_start: bool = False

    def alternatives(self, names: Iterable[str]) -> list[str]:
        """Return grammars of calls of these tools, in Lark's form, in which `rest` is any text."""
        return [f'"\\n"? {json.dumps(marker)} rest' for marker in self.markers]

    @abstractmethod
    def read(self, calls: CallReader, marker: str) -> Script:
        """Parse calls after a marker, or from the start of a message if the marker is empty.

        Raises NoCall where the text turns out not to be a call; characters that aren't in a part
        yet then become content.
        """


class CallReader(CharacterReader):
    """Passes characters to the parsers of calls, and collects the resulting parts.

    Parameters
    ----------
    schemas : mapping
        JSON schemas of the parameters of each tool that may be called, by the tool's name.
    """

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__()
        self.schemas = schemas
        self.num_started_calls = 0
        self.num_calls = 0
        self.is_open = False
        self._arguments: list[str] = []
        # Parts since the last `_pop_parts`: kind, index of the call, texts. Consecutive texts of
        # one kind and call are one entry, and joined only once, in linear time.
        self._parts: list[tuple[PartKind, int, list[str]]] = []

    # ── for forms ──

    def start(self, name: str) -> None:
        """Start a call; NoCall if there is no tool of the name, or there are too many calls."""
        if name not in self.schemas or self.num_started_calls == MOST_CALLS:
            self.stop()
        self.is_open, self._arguments = True, []
        self.num_started_calls += 1
        self.add("tool_name", name)

    def add_arguments(self, text: str) -> None:
        """Add text to the arguments of the call."""
        self._arguments.append(text)
        self.add("tool_arguments", text)

    def end(self) -> None:
        """End the call; NoCall unless its arguments are one JSON object."""
        if not is_json_object("".join(self._arguments)):
            self.stop()
        self.is_open = False
        self.forget()
        self.num_calls += 1

    def add_call(self, name: str, arguments: str) -> None:
        """Add a complete call."""
        self.start(name)
        self.add_arguments(arguments)
        self.end()

    # ── for the reader of the answer ──

    def add(self, kind: PartKind, text: str) -> None:
        """Add text to the last part if kind and call are the same, otherwise start a new part."""
        call = self.num_started_calls - 1 if kind.startswith("tool") else 0
        if kind == "tool_name" or not self._parts or self._parts[-1][:2] != (kind, call):
            self._parts.append((kind, call, []))
        self._parts[-1][2].append(text)
        self._taken.clear()

    def attempt(self, script: Script, marker: str) -> Characters:
        """Run the script of a call form; return "", or the remaining text after NoCall."""
        # `_taken` has the characters that aren't in a part yet. `add` clears it: arguments that
        # were returned can't be taken back, and only the text after them becomes content.
        self._taken, self._size = [marker], 0
        try:
            yield from script
        except NoCall:
            text, self._size = "".join(self._taken), 0
        else:
            return ""
        self.is_open = False
        return text

    def forget(self) -> None:
        """Forget the characters taken so far."""
        self._taken.clear()
        self._size = 0


class AnswerReader(CallReader):
    """Parses an answer; see `AnswerFormat.reader`.

    Parameters
    ----------
    form : CallForm, optional
    schemas : mapping
        The parameters of each tool that may be called; if empty, nothing is parsed as a call.
    reasoning : Tags, optional
    is_reasoning : bool
        True if the answer begins within reasoning.
    is_forced : bool
        True if the answer can only be calls; content is dropped then.
    is_parallel : bool
        Return all calls, not only the first one.
    keeps_space : bool
        Keep white space at both ends of content and reasoning.
    """

    def __init__(
        self,
        form: CallForm | None,
        schemas: Mapping[str, Mapping[str, Any]],
        reasoning: Tags | None,
        *,
        is_reasoning: bool = False,
        is_forced: bool = False,
        is_parallel: bool = True,
        keeps_space: bool = False,
    ) -> None:
        super().__init__(schemas)
        self._form = form if schemas else None
        self._turn = form.turn if form else ""
        self._reasoning = reasoning
        self._is_reasoning = is_reasoning
        self._is_forced, self._is_parallel, self._is_cut = is_forced, is_parallel, False
        self.keeps_space = keeps_space
        self._space: list[str] = []
        self._has_text = False
        self._first_characters = _match_first(())
        self._add_plain: Callable[[str], None] | None = None
        self._script = self._read()
        next(self._script)

    def feed(self, text: str) -> list[AnswerPart]:
        """Parse the next text of the answer; return the new parts."""
        position = 0
        while position < len(text):
            # If no marker has begun, all text up to a marker's first character is added at once.
            if self._add_plain is not None:
                match = self._first_characters.search(text, position)
                end = match.start() if match else len(text)
                self._add_plain(text[position:end])
                position = end
            if position < len(text):
                self._script.send(text[position])
                position += 1
        return self._pop_parts()

    def finish(self, *, is_cut: bool = False) -> list[AnswerPart]:
        """End the answer; return the remaining parts.

        If the answer `is_cut` by a token limit, the text of an unfinished call is dropped.
        """
        self._is_cut = is_cut
        if not self.has_ended:
            self.has_ended = True
            with suppress(StopIteration):  # a script ends when the answer does
                self._script.send("")
        return self._pop_parts()

    def _pop_parts(self) -> list[AnswerPart]:
        """Return the parts since the last call of this method, and forget them."""
        parts = [
            AnswerPart(kind, "".join(texts), call)
            for kind, call, texts in self._parts
            if self._is_parallel or not call
        ]
        self._parts.clear()
        return parts

    # The states, and the texts that lead from one state to another:
    #
    #   reasoning ── end tag ──▶ start of a message ── a call without marker? ──▶ content
    #   content ── marker ──▶ a call? ──▶ content
    #   content ── turn ──▶ start of a message
    #   content without text so far ── begin tag ──▶ reasoning
    #
    # "A call?": if the text turns out not to be a call, it becomes content.
    def _read(self) -> Script:
        """Parse an answer: optional reasoning, then content and calls."""
        if self._is_reasoning:
            yield from self._reason()
        is_start = True
        while True:
            if is_start and self._form is not None and self._form.is_at_start:
                yield from self._attempt("")
            is_start = False
            marker = yield from self._scan(self._markers, self._emit)
            if not marker:
                return
            if self._reasoning is not None and marker == self._reasoning.begin:
                is_start = not self._has_text
                if self._has_text:
                    self._emit(marker)
                else:
                    yield from self._reason()
            elif marker == self._turn:
                is_start = True
                self._emit(" ")
            else:
                yield from self._attempt(marker)

    @property
    def _markers(self) -> tuple[str, ...]:
        """The texts at which content may end: begin of reasoning, turn, markers of calls."""
        reasoning = (self._reasoning.begin,) if self._reasoning else ()
        turn = (self._turn,) if self._turn else ()
        return (*reasoning, *turn, *(self._form.markers if self._form else ()))

    def _attempt(self, marker: str) -> Script:
        """Parse a call after a marker; text without a call becomes content, unless cut."""
        assert self._form is not None, "markers are a form's"
        script, num_started = self._form.read(self, marker), self.num_started_calls
        text = yield from self.attempt(script, marker)
        if self._is_cut and (marker or self.num_started_calls > num_started):
            self._again.clear()
        else:
            self._emit(text)

    def _scan(self, markers: tuple[str, ...], emit: Callable[[str], None]) -> Characters:
        """Pass text up to the next marker to `emit`; return the marker, or "" at the end."""
        # `text` is a proper prefix of a marker, and held back; with "<tool_call>" and "<think>":
        #     "a"    is passed on at once        "<t"  is held back until "o" or "h" follows
        #     "<tx"  begins no marker, so "<" is passed on; then "t", then "x"
        text = ""
        self._first_characters = _match_first(markers)
        while True:
            self._add_plain = None if text or self._again else emit
            char = yield from self.take()
            self._add_plain = None
            self.forget()
            if not char:
                break
            text += char
            while text and not any(marker.startswith(text) for marker in markers):
                emit(text[0])
                text = text[1:]
            if text in markers:
                return text
        emit(text)
        return ""

    def _reason(self) -> Script:
        """Parse reasoning up to its end tag."""
        assert self._reasoning is not None, "without tags nothing is read as reasoning"
        self._has_text, self._space = False, []
        yield from self._scan((self._reasoning.end,), lambda text: self._emit(text, "reasoning"))
        self._has_text, self._space = False, []

    def _emit(self, text: str, kind: PartKind = "content") -> None:
        """Add text, without white space at both ends of the whole content or reasoning."""
        if self.keeps_space:
            if text:
                self.add(kind, text)
            return
        # White space is held back in `_space` until text follows; at the end it is dropped. The
        # texts "\n Sure.", " I" and " \n" give the parts "Sure." and " I".
        solid = text.rstrip() if self._has_text else text.strip()
        if self._is_forced and kind == "content":
            return  # text around calls
        if solid:
            self.add(kind, "".join(self._space) + solid)
            self._space, self._has_text = [], True
        if self._has_text:
            trailing = text[len(text.rstrip()) :]
            self._space += [trailing] if trailing else []


def _match_first(markers: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern for the first character of any marker."""
    return re.compile("|".join(re.escape(marker[0]) for marker in markers) or "(?!)")


def is_json_object(text: str) -> bool:
    """Return True if `parse_json_object` accepts a text."""
    try:
        parse_json_object(text, "the call")
    except FormatError:
        return False
    return True
