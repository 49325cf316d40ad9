"""Requests in OpenAI's form: chats and completions, as pydantic models that refuse what is unknown.

Source: https://platform.openai.com/docs/api-reference, and its official Python client's types.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from .errors import HttpError
from .messages import Prompt

_MOST_STOPS, _MOST_STOP_CHARACTERS = 16, 256
_MOST_CHOICES = 16
_MOST_BIASES = 1024
MOST_TOP_LOGPROBS = 20
# What is called the same here and by the engine.
_SAMPLING = {"temperature", "top_p", "min_p", "logit_bias"}
_SAMPLING |= {"presence_penalty", "frequency_penalty", "repetition_penalty"}

StopText = Annotated[str, Field(min_length=1, max_length=_MOST_STOP_CHARACTERS)]
StopTexts = Annotated[list[StopText], Field(max_length=_MOST_STOPS)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Share = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


def without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    """What is said."""
    return {name: value for name, value in values.items() if value is not None}


class Form(BaseModel):
    """An object of a request: a field that is null is absent, and one that is unknown refused."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, values: Any) -> Any:
        return without_none(values) if isinstance(values, Mapping) else values


class StreamOptions(Form):
    """What a stream has beside its pieces; they are never padded."""

    include_usage: bool = False
    include_obfuscation: bool = False


class Unheeded(Form):
    """Fields of OpenAI's that change no answer here."""

    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None
    user: str | None = None


class Function(Form):
    """A function that may be called."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatTool(Form):
    """A tool of a chat; functions alone are known."""

    type: Literal["function"] = "function"
    function: Function


def refuse_missing_tool(
    choice: str | Mapping[str, Any], tools: Sequence[Mapping[str, Any]]
) -> None:
    """Refuse to have a tool called that isn't there."""
    names = [tool["function"]["name"] for tool in tools]
    if isinstance(choice, str):
        is_there = bool(names) or choice in ("none", "auto")
    else:
        is_there = choice["function"]["name"] in names
    if not is_there:
        text = f"tool_choice needs tools that have it; there are {', '.join(names) or 'none'}"
        raise HttpError(400, text, param="tool_choice")


class ResponseFormat(Form):
    """What an answer has to fit; the types "regex" and "lark" are ours."""

    type: Literal["text", "json_object", "json_schema", "regex", "lark"]
    json_schema: dict[str, Any] | None = None
    regex: str | None = None
    lark: str | None = None


class Sampled(Form):
    """What all kinds of requests say of how tokens are chosen."""

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=_MOST_CHOICES)] | None = None
    stop: StopText | StopTexts | None = None
    seed: Seed | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=1e-3, le=1e3)] | None = None
    logit_bias: Annotated[dict[TokenId, Bias], Field(max_length=_MOST_BIASES)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    ignore_eos: bool = False  # load generators want answers of a length
    response_format: ResponseFormat | None = None
    user: str | None = None

    @property
    def most_new_tokens(self) -> int | None:
        """How long an answer may be, where that is said."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def least_new_tokens(self) -> int | None:
        """How long an answer has to be, where that is said."""
        if self.ignore_eos and self.most_new_tokens is None:
            raise HttpError(400, "ignore_eos needs max_tokens", param="ignore_eos")
        return self.most_new_tokens if self.ignore_eos else self.min_tokens

    @property
    def top(self) -> int | None:
        """Of how many of the likeliest tokens log-probabilities are told."""
        return None

    def params(self) -> dict[str, Any]:
        """Sampling parameters in duoka's names; those that aren't said are left out."""
        values = self.model_dump(include=_SAMPLING)
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        form = self.response_format
        values |= {
            "top_k": 0 if self.top_k == -1 else self.top_k,
            "seed": None if self.seed is None else self.seed % 2**63,
            "stop": None if stop is None else tuple(stop),
            "max_new_tokens": self.most_new_tokens,
            "min_new_tokens": self.least_new_tokens,
            "logprobs": self.top,
            "response_format": form and form.model_dump(exclude_none=True),
        }
        return without_none(values)


class ChatCompletionRequest(Sampled, Unheeded):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)] | None = None
    tools: list[ChatTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChatTool | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None
    prediction: dict[str, Any] | None = None  # what an answer might be, for more speed
    reasoning_effort: str | None = None  # how much there is, the model alone decides
    verbosity: Literal["medium"] | None = None

    @property
    def top(self) -> int | None:
        """See `Sampled`."""
        if self.top_logprobs is not None and not self.logprobs:
            raise HttpError(400, "top_logprobs needs logprobs", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def prompt(self) -> Prompt:
        """What is asked."""
        chosen = self.tool_choice or "auto"
        choice = chosen if isinstance(chosen, str) else chosen.model_dump(exclude_none=True)
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools or ()]
        refuse_missing_tool(choice, tools)
        return Prompt(
            messages=self.messages,
            tools=tools,
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls is not False,
        )


class CompletionRequest(Sampled):
    """``POST /v1/completions``."""

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)] | None = None
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None

    @property
    def top(self) -> int | None:
        """See `Sampled`."""
        if self.echo and self.logprobs is not None:
            raise HttpError(
                400,
                "log-probabilities of a prompt's tokens aren't told: leave out echo or logprobs",
                param="logprobs",
            )
        return self.logprobs

    @property
    def prompts(self) -> list[Prompt]:
        """What is asked."""
        value: Any = self.prompt
        is_one = isinstance(value, str) or (value and isinstance(value[0], int))
        several = [value] if is_one else value
        if not all(several) or not 0 < len(several) <= _MOST_CHOICES:
            raise HttpError(
                400, f"1 to {_MOST_CHOICES} prompts can be given, none empty", param="prompt"
            )
        return [
            Prompt(text=prompt, field="prompt")
            if isinstance(prompt, str)
            else Prompt(tokens=prompt, field="prompt")
            for prompt in several
        ]


class TokenizeRequest(Form):
    """``POST /tokenize``: a text, or a chat as it is asked."""

    model: str = ""
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[ChatTool] | None = None

    @property
    def question(self) -> Prompt:
        """What is to be made tokens of."""
        if (self.prompt is None) == (self.messages is None):
            raise HttpError(400, "either prompt or messages is needed", param="prompt")
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools or ()]
        field = "messages" if self.prompt is None else "prompt"
        return Prompt(text=self.prompt, messages=self.messages, tools=tools, field=field)


class DetokenizeRequest(Form):
    """``POST /detokenize``."""

    model: str = ""
    tokens: list[TokenId]
