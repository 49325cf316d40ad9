"""Questions: what a request's prompt becomes in the engine's process, and what reads its answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from duoka.engine.grammar import Grammar
from duoka.errors import UsageError
from duoka.models.text.answer_format import AnswerFormat
from duoka.models.text.answer_parts import CallArguments, CallStart, Content, Part, ReasoningPart
from duoka.models.text.answer_reader import AnswerReader
from duoka.models.text.call_grammars import ForcedCall
from duoka.models.text.chat_requests import MOST_IMAGES, ChatMessages
from duoka.models.text.image_prompts import images_of
from duoka.models.text.messages import Tool
from duoka.models.text.tool_choice import ToolChoice
from duoka.runtime.prompt_reader import PromptReader

from .messages import Kind, Prompt


class PartReader:
    """Reads the parts of an answer as they are told: kind, number of the call, text."""

    def __init__(self, reader: AnswerReader | None, *, is_parallel: bool = True) -> None:
        self._reader = reader
        self._is_parallel = is_parallel

    @property
    def num_calls(self) -> int:
        """How many calls are whole."""
        return 0 if self._reader is None else self._reader.num_calls

    def feed(self, text: str) -> list[tuple[Kind, int, str]]:
        """What more of an answer's text comes to."""
        return [("content", 0, text)] if self._reader is None else self._of(self._reader.feed(text))

    def finish(self, *, is_cut: bool = False) -> list[tuple[Kind, int, str]]:
        """What was held back until the end, which may be a limit's."""
        return [] if self._reader is None else self._of(self._reader.finish(is_cut=is_cut))

    def _of(self, parts: Sequence[Part]) -> list[tuple[Kind, int, str]]:
        return [
            known
            for part in parts
            if (known := _known(part)) is not None and (self._is_parallel or not known[1])
        ]


def _known(part: Part) -> tuple[Kind, int, str] | None:
    if isinstance(part, Content):
        return "content", 0, part.text
    if isinstance(part, ReasoningPart):
        return "reasoning", 0, part.text
    if isinstance(part, CallStart):
        return "tool_name", part.index, part.name
    return ("tool_arguments", part.index, part.text) if isinstance(part, CallArguments) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt's tokens, what its answer has to fit, and how that is read."""

    tokens: list[int]
    grammar: Grammar | None = None
    answers: AnswerFormat | None = None
    tools: Sequence[Tool] = ()
    forced: ForcedCall | None = None
    is_parallel: bool = True
    kept_ids: Sequence[int] = ()

    def reader(self) -> PartReader:
        """What reads one answer."""
        if self.answers is None:
            return PartReader(None)
        reader = self.answers.reader(self.tools, self.tokens, forced=self.forced)
        return PartReader(reader, is_parallel=self.is_parallel)


class QuestionReader:
    """Makes questions of prompts, with a model's tokenizer and chat format."""

    def __init__(self, reader: PromptReader) -> None:
        self._reader = reader
        self._answers = reader.chat.answers
        self._kept_ids = self._answers.kept_ids

    def read(self, prompt: Prompt, grammar: Grammar | None = None) -> Question:
        """A prompt, whose answer has to fit a grammar.

        Raises
        ------
        UsageError
            For what a prompt can't have.
        """
        if prompt.tokens is not None:
            return Question(tokens=list(prompt.tokens), grammar=grammar)
        if prompt.text is not None:
            return Question(tokens=self._reader.plain(prompt.text), grammar=grammar)
        chat = self._reader.chat
        choice = ToolChoice.openai(prompt.tool_choice, prompt.parallel_tool_calls)
        tools = choice.offered(prompt.tools)
        request = ChatMessages(
            reasoning=self._answers.reasoning,
            takes_images=chat.images is not None,
            most_images=min(MOST_IMAGES, self._reader.workload.images),
        )
        messages = request.openai(list(prompt.messages or ()))
        self._reader.check_images(images_of(messages))
        tokens = chat.prompt(messages, tools or None)
        forced = None
        if choice.mode == "required":
            if grammar is not None:
                raise UsageError(
                    "an answer can't be a call and have a response_format",
                    hint="leave one of them out",
                )
            forced = self._answers.forced_call(tools, tokens, parallel=choice.is_parallel)
            tokens.extend(forced.prompt_ids)
            grammar = Grammar.lark(forced.grammar)
        elif grammar is not None:
            tokens.extend(chat.content_start)
        more: dict[str, Any] = {"tools": tools, "forced": forced, "is_parallel": choice.is_parallel}
        return Question(
            tokens=tokens, grammar=grammar, answers=self._answers, kept_ids=self._kept_ids, **more
        )
