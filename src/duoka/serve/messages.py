"""The messages between the server's process and the process of an engine.

This module imports neither torch nor transformers, which the server's process doesn't load.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from duoka.base.answer_parts import PartKind
from duoka.base.prompt_settings import PromptSettings
from duoka.planner.plan import Plan
from duoka.report.measured import Fallback


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """The plan and the options of an engine: the first message to its process.

    `is_thinking` is the choice for requests that make none; None leaves it to the chat template.
    """

    plan: Plan
    max_new_tokens: int | None = None
    trust_remote_code: bool = False
    adapter: str | None = None
    is_thinking: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A message of a chat, independent of the API of its request.

    `images` are data URLs, or http(s) URLs to download; images come before the text. Each of
    `calls` has an "id" and a "function". For a tool's result, `call_id` is the id of its call.
    """

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    images: tuple[str, ...] = ()
    reasoning: str = ""
    calls: tuple[Mapping[str, Any], ...] = ()
    call_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt: either the messages of a chat, a text to continue, or token ids.

    The model may call `tools`, and must call one of them with `must_call`. With `is_scored`, the
    generation begins with all but the first of the `tokens`, so that they have log-probabilities.
    `field` is the name of the prompt's field in the request, for error messages.
    """

    messages: Sequence[Turn] | None = None
    text: str | None = None
    tokens: Sequence[int] | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    must_call: bool = False
    parallel_tool_calls: bool = True
    is_scored: bool = False
    settings: PromptSettings = field(default_factory=PromptSettings)
    field: str = "messages"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """A message of the server to an engine.

    - ``generate``: run `n` generations. The engine sends `Begun`, and `Delta`s and an `Ended` for
      each generation. `params` are named as in `SamplingParams`, plus "response_format"; `adapter`
      as in `Engine.submit`.
    - ``tokenize``, ``detokenize``: the engine sends `Counted`, with the token ids or the text.
    - ``end``: cancel what is left of the request with this `number`.
    - ``status``: the engine sends its `Status`.

    The first three may end with `Failed`.
    """

    task: Literal["generate", "tokenize", "detokenize", "end", "status"] = "generate"
    number: int = -1
    prompt: Prompt = Prompt()
    params: Mapping[str, Any] = field(default_factory=dict)
    n: int = 1
    adapter: str | None = None


@dataclass(frozen=True, slots=True)
class Token:
    """A generated token with its log-probability, and the likeliest tokens at its position.

    `likeliest` are tuples of text, bytes and log-probability.
    """

    text: str
    data: bytes
    logprob: float
    likeliest: tuple[tuple[str, bytes, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """A part of a generation, as in `AnswerPart`, with its number of tokens.

    `number` is that of the request, `choice` counts its generations. `tokens` is empty unless
    log-probabilities were requested.
    """

    number: int
    choice: int
    text: str
    kind: PartKind = "content"
    call: int = 0
    num_tokens: int = 0
    tokens: tuple[Token, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """The engine has accepted all generations of a request.

    `params` are the used values of parameters, under their names in the Responses API.
    """

    number: int
    prompt_tokens: int
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The end of a generation."""

    number: int
    choice: int
    finish: Literal["stop", "length", "cancelled", "tool_calls"]
    new_tokens: int
    shared_tokens: int
    stop_text: str | None = None
    """The stop text that ended the generation; None if no stop text did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The failure of a request, with the fields of `HttpError`."""

    number: int
    status: int
    text: str
    code: str | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """The token ids of a prompt, or the text of token ids."""

    number: int
    tokens: Sequence[int] = ()
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The load of an engine; its fallbacks; by device reserved bytes, busy seconds, busy share.

    `switches_thinking` is True if requests can switch the model's thinking.
    """

    running: int
    waiting: int
    pages: int
    free_pages: int
    preemptions: int = 0
    reserved_bytes: Mapping[str, int] = field(default_factory=dict)
    busy_seconds: Mapping[str, float] = field(default_factory=dict)
    busy_shares: Mapping[str, float] = field(default_factory=dict)
    fallbacks: Sequence[Fallback] = ()
    switches_thinking: bool = False


@dataclass(frozen=True, slots=True)
class Broken:
    """The end of an engine, or the failure to open one; `code` is the exit code for the server."""

    text: str
    code: int = 1


Event = Delta | Begun | Ended | Failed | Counted
Events = AsyncGenerator[Event, None]
