"""Responses of OpenAI's chats and completions, built from the events of generations.

Every class for an API's responses receives the same events. For a stream, it returns the JSON
objects to send after each event; otherwise `to_dict` returns the whole response. The other two APIs
are in `response_answer` and `message_answer`.
"""

from __future__ import annotations

import copy
import time
import uuid
from abc import ABC, abstractmethod
from codecs import getincrementaldecoder
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from .errors import HttpError
from .messages import Begun, Delta, Ended, Event, Token

Piece = dict[str, Any]
"""A JSON object of a stream (a chunk or an event)."""


@dataclass(slots=True)
class Usage:
    """The token counts of a request."""

    prompt_tokens: int = 0
    new_tokens: int = 0
    shared_tokens: int = 0
    reasoning_tokens: int = 0
    streamed_tokens: int = 0

    def add(self, event: Event) -> None:
        """Add the token counts of an event."""
        if isinstance(event, Begun):
            self.prompt_tokens += event.prompt_tokens
        elif isinstance(event, Delta):
            self.streamed_tokens += event.num_tokens
            self.reasoning_tokens += event.num_tokens if event.kind == "reasoning" else 0
        elif isinstance(event, Ended):
            self.new_tokens += event.new_tokens
            self.shared_tokens = max(self.shared_tokens, event.shared_tokens)

    def to_dict(self) -> dict[str, Any]:
        """Return the counts as OpenAI's `usage` object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.new_tokens,
            "total_tokens": self.prompt_tokens + self.new_tokens,
            "prompt_tokens_details": {"cached_tokens": self.shared_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }


class Answer(ABC):
    """The response to a request in the format of an API, while it is generated."""

    has_names = False
    """True if a stream consists of named events; False if it ends with ``[DONE]``."""
    ping = ": ping\n\n"
    """The lines of a stream that only keep it open: a comment."""

    def __init__(self) -> None:
        self.usage = Usage()
        self.head: dict[str, Any] = {}
        """The fields of every piece of chats and completions, such as the id."""

    def begin(self, source: int) -> Iterator[Piece]:
        """Yield the pieces before the generations of the prompt with number `source`."""
        yield from ()

    @abstractmethod
    def take(self, event: Event, source: int = 0) -> Iterator[Piece]:
        """Add an event of the prompt with number `source`; yield the pieces to send."""

    def finish(self) -> Iterator[Piece]:
        """Yield the pieces after all generations."""
        yield from ()

    def fail(self, error: HttpError) -> Iterator[Piece]:
        """Yield the pieces that report an error within a stream."""
        yield error.body

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return the whole response, after the last event."""


class OpenAIAnswer(Answer):
    """The common parts of responses of chats and completions, with several choices.

    Parameters
    ----------
    head : dict
        The fields of every piece, such as the id.
    choices : sequence of ChatChoice or CompletionChoice
    has_logprobs : bool
        Include log-probabilities.
    has_usage : bool
        End a stream with the token counts.
    """

    # Fields of the whole response that replace those of `head`.
    _fields: ClassVar[dict[str, Any]] = {}

    def __init__(
        self, head: dict[str, Any], choices: Sequence[Any], *, has_logprobs: bool, has_usage: bool
    ) -> None:
        super().__init__()
        self.head = head
        self._choices = choices
        self._has_logprobs, self._has_usage = has_logprobs, has_usage

    def finish(self) -> Iterator[Piece]:
        """See `Answer`."""
        if self._has_usage:
            yield {**self.head, "choices": [], "usage": self.usage.to_dict()}

    def to_dict(self) -> dict[str, Any]:
        """See `Answer`."""
        choices = [
            _choice(number, choice.content, self._has_logprobs and choice.logprobs, choice.finish)
            for number, choice in enumerate(self._choices)
        ]
        return {**self.head, **self._fields, "choices": choices, "usage": self.usage.to_dict()}

    def _to_piece(self, number: int, content: dict[str, Any], logprobs: Any, finish: Any) -> Piece:
        """Return a piece of the choice with this number."""
        return {**self.head, "choices": [_choice(number, content, logprobs, finish)]}


def _choice(number: int, content: dict[str, Any], logprobs: Any, finish: Any) -> dict[str, Any]:
    """Return a `choices` item; `finish` is None while the choice isn't finished."""
    end = {"logprobs": logprobs or None, "finish_reason": finish}
    return {"index": number, **content, **end}


@dataclass(slots=True)
class ChatChoice:
    """One of the answers to a chat."""

    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    finish: str = "stop"

    def add(self, delta: Delta) -> dict[str, Any]:
        """Add a part of the answer; return the `delta` object of its piece."""
        self.tokens += delta.tokens
        if delta.kind == "content":
            self.texts.append(delta.text)
            return {"content": delta.text}
        if delta.kind == "reasoning":
            self.thoughts.append(delta.text)
            return {"reasoning_content": delta.text}
        if delta.kind == "tool_name":
            function = {"name": delta.text, "arguments": ""}
            call = {"id": make_id("call_"), "type": "function", "function": function}
            self.calls.append(call)
            return {"tool_calls": [{"index": delta.call, **call, "function": {**function}}]}
        self.calls[delta.call]["function"]["arguments"] += delta.text
        return {"tool_calls": [{"index": delta.call, "function": {"arguments": delta.text}}]}

    @property
    def logprobs(self) -> dict[str, Any]:
        """The log-probabilities of all tokens."""
        return write_chat_logprobs(self.tokens)

    @property
    def content(self) -> dict[str, Any]:
        """The whole message."""
        content: str | None = "".join(self.texts)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if any(self.thoughts):
            message["reasoning_content"] = "".join(self.thoughts)
        if self.calls:
            message |= {"content": content or None, "tool_calls": self.calls}
        return {"message": message}


class ChatAnswer(OpenAIAnswer):
    """The response of a chat with n choices; for `options` see `OpenAIAnswer`."""

    _fields: ClassVar = {"object": "chat.completion"}

    def __init__(self, model: str, n: int, **options: bool) -> None:
        head = {"id": make_id("chatcmpl-"), "created": int(time.time()), "model": model}
        choices = [ChatChoice() for _ in range(n)]
        super().__init__({**head, "object": "chat.completion.chunk"}, choices, **options)

    def begin(self, source: int) -> Iterator[Piece]:
        """See `Answer`."""
        for number in range(len(self._choices)):
            delta = {"role": "assistant", "content": ""}
            yield self._to_piece(number, {"delta": delta}, None, None)

    def take(self, event: Event, source: int = 0) -> Iterator[Piece]:
        """See `Answer`."""
        self.usage.add(event)
        if isinstance(event, Ended):
            finish = self._choices[event.choice].finish = name_finish(event)
            yield self._to_piece(event.choice, {"delta": {}}, None, finish)
        elif isinstance(event, Delta):
            logprobs = write_chat_logprobs(event.tokens) if self._has_logprobs else None
            delta = self._choices[event.choice].add(event)
            yield self._to_piece(event.choice, {"delta": delta}, logprobs, None)


class CompletionChoice:
    """One of the completions of a text.

    `prefix` is the echoed text, or empty; with `has_logprobs`, that of the prompt's first token,
    which has no log-probability.
    """

    def __init__(self, prefix: str, has_logprobs: bool) -> None:
        self.texts = [prefix]
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        self.logprobs: dict[str, list[Any]] = {name: [] for name in names}
        self.finish = "stop"
        # The number of characters so far, and a decoder that holds back an incomplete character.
        self._offset = len(prefix)
        if has_logprobs and prefix:
            for name, value in zip(names, (prefix, None, None, 0), strict=True):
                self.logprobs[name].append(value)
        self._decoder = getincrementaldecoder("utf-8")("replace")

    @property
    def content(self) -> dict[str, Any]:
        """The whole text, with the prefix."""
        return {"text": "".join(self.texts)}

    def add_tokens(self, tokens: Sequence[Token]) -> dict[str, list[Any]]:
        """Add tokens; return their log-probabilities as the `logprobs` object of a piece."""
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(token.data))
        entries: dict[str, list[Any]] = {
            "tokens": [_spell_token(token.text, token.data) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [
                {_spell_token(text, data): logprob for text, data, logprob in token.likeliest}
                for token in tokens
            ],
            "text_offset": offsets,
        }
        for name, values in entries.items():
            self.logprobs[name] += values
        return entries


class CompletionAnswer(OpenAIAnswer):
    """The response of a completion request: n completions of each prompt.

    Parameters
    ----------
    prefixes : sequence of str
        For each prompt, the text to echo before its completions; empty for none. With
        log-probabilities, the text of the prompt's first token.
    n : int
        The number of completions of each prompt.
    options
        See `OpenAIAnswer`.
    """

    def __init__(self, model: str, prefixes: Sequence[str], n: int, **options: bool) -> None:
        head = {"id": make_id("cmpl-"), "object": "text_completion", "created": int(time.time())}
        prefixes = [prefix for prefix in prefixes for _ in range(n)]
        choices = [CompletionChoice(prefix, options["has_logprobs"]) for prefix in prefixes]
        super().__init__({**head, "model": model}, choices, **options)
        self._n = n

    def begin(self, source: int) -> Iterator[Piece]:
        """See `Answer`."""
        for number in range(source * self._n, (source + 1) * self._n):
            choice = self._choices[number]
            logprobs = choice.logprobs if choice.logprobs["tokens"] else None
            if logprobs or choice.texts[0]:
                logprobs = copy.deepcopy(logprobs)  # more tokens are added to it
                yield self._to_piece(number, {"text": choice.texts[0]}, logprobs, None)

    def take(self, event: Event, source: int = 0) -> Iterator[Piece]:
        """See `Answer`."""
        self.usage.add(event)
        if not isinstance(event, Delta | Ended):
            return
        number = source * self._n + event.choice
        choice = self._choices[number]
        if isinstance(event, Ended):
            choice.finish = name_finish(event)
            yield self._to_piece(number, {"text": ""}, None, choice.finish)
        else:
            if event.kind == "content":
                choice.texts.append(event.text)
            has_logprobs = self._has_logprobs and event.tokens
            logprobs = choice.add_tokens(event.tokens) if has_logprobs else None
            yield self._to_piece(number, {"text": event.text}, logprobs, None)


def name_finish(event: Ended) -> str:
    """Return OpenAI's `finish_reason` of a generation."""
    return "stop" if event.finish == "cancelled" else event.finish


def make_id(prefix: str) -> str:
    """Return a random, unique id with a prefix."""
    return f"{prefix}{uuid.uuid4().hex}"


def _spell_token(text: str, data: bytes) -> str:
    """Return a token's text for completions; bytes that are no UTF-8 are written in hexadecimal."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
    return text


def write_chat_logprobs(tokens: Sequence[Token]) -> dict[str, Any]:
    """Return the log-probabilities of tokens as the `logprobs` object of chats."""
    content = [
        {
            "token": token.text,
            "logprob": token.logprob,
            "bytes": list(token.data),
            "top_logprobs": [
                {"token": text, "logprob": logprob, "bytes": list(data)}
                for text, data, logprob in token.likeliest
            ],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}
